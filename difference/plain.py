"""Plain: the right run, a Llama in one process with autograd, sequence by sequence.

It is built with axes of size 1, and runs no pipeline, gradient bucket, boundary, striped loss or
train_step: so what is wrong with one rank, too, is seen. Batches, experts, prediction layers and
their loss, optimizers, and extensions that are added, are the course's own in one process: what
they do wrong there, too, is not seen.
"""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor

from difference.taps import Key, Notes, attach
from difference.tiny import Text, Trial, open_text
from picotron_min.extensions.build import extensions_of, optimizer_of
from picotron_min.extensions.settings import Layout
from picotron_min.initialise import initial_std, initial_weight
from picotron_min.loss import IGNORE_INDEX
from picotron_min.mesh import Axes, build_axes
from picotron_min.model import FlashAttention, Head, Llama
from picotron_min.parallelize import ParallelModel, Parts, parallelize


def train_plainly(notes: Notes, trial: Trial, text: Text) -> None:
    model = plain_model(trial)
    parameters, clip = model.parameters, trial.recipe.grad_clip
    for name, parameter in parameters.items():
        std = initial_std(name, trial.model_config.num_hidden_layers)
        parameter.data.copy_(initial_weight(name, tuple(parameter.shape), trial.seed, std))
        parameter.arrived = lambda: None  # no bucket is told of its gradients
    model.weights_changed()
    notes.note("initial weight", parameters)
    module = model.pipeline.chunks[0].model
    attach(module, notes)
    optimizer = optimizer_of(model, trial.recipe)
    for step in range(trial.steps):
        for extension in model.extensions:
            extension.begin()
        loss, num_targets = _forward_backward(notes, trial, text, model, step)
        notes.at = Key(step, "", "")
        notes.note_gradients("summed gradient", parameters)
        norm = sum(p.grad.square().sum() for p in parameters.values()).sqrt() / num_targets
        notes.note("loss", {"the step": loss / num_targets})
        notes.note("gradient norm", {"the step": norm})
        factor = (min(1.0, clip / (norm.item() + 1e-6)) if clip else 1.0) / num_targets
        for parameter in parameters.values():
            parameter.grad *= factor  # from a sum over tokens to the clipped mean
        notes.note_gradients("scaled gradient", parameters)
        totals = model.counts()  # of all ranks: of this one
        optimizer.step()
        model.weights_changed()
        for extension, of in zip(model.extensions, totals, strict=True):
            extension.updated(of)
        notes.note_weights(parameters, [module])


def _forward_backward(
    notes: Notes, trial: Trial, text: Text, model: ParallelModel, step: int
) -> tuple[Tensor, int]:
    """Of a step: the summed loss and the number of its targets."""
    B, parameters = trial.workload.micro_batch_size, model.parameters
    module = model.pipeline.chunks[0].model
    # Sequences run alone, which shows where experts, that are the course's own, mix them. A balance
    # loss of a micro-batch needs all of it.
    at_once = B if trial.workload.routing.moe_aux_loss_coeff else 1
    batches = open_text(trial, text, at_once, model.axes)
    loss = num_targets = 0
    for parameter in parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    for i in range(batches.num_micro_batches):
        notes.at = Key(step, "", "", *trial.micro_batches[i * at_once // B])
        batch = batches.batch(step, i)
        total = module(batch.tokens, batch.positions, batch.targets, *batch.extra).sum()
        total.backward()
        loss = loss + total.detach()
        # Of the next token alone, where further ones are predicted: [1 + D, B, S].
        next_token = batch.targets.view(-1, *batch.tokens.shape)[0]
        num_targets += int((next_token != IGNORE_INDEX).sum())
        if (i + 1) * at_once % B == 0:
            notes.note_gradients("sum so far", parameters)
    return loss, num_targets


def plain_model(trial: Trial) -> ParallelModel:
    """On an axis of size 1 nothing is cut, and nothing is put around modules."""
    config, layout, cpu = trial.model_config, Layout(), torch.device("cpu")
    workload, axes = replace(trial.workload, recompute="none"), build_axes(cpu, layout)
    extensions = extensions_of(config, layout, workload, axes, cpu)
    parts = Parts(_no_tensor_parallel, FlashAttention)
    model = parallelize(config, layout, workload, axes, cpu, parts, extensions)
    head = model.pipeline.chunks[0].model.lm_head
    if type(head) is Head and vars(head).keys().isdisjoint(("loss", "stripe_loss")):
        losses = partial(F.cross_entropy, ignore_index=IGNORE_INDEX, reduction="none")
        head.loss = lambda x, targets: losses(head(x).mT, targets)  # [B, S]; else an extension's
    return model


def _no_tensor_parallel(model: Llama, _: Axes) -> None:
    model.boundary = SimpleNamespace(queue=None)  # experts ask for it, and use none in float64
