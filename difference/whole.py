"""Whole: the right run: a plain Llama in one process, autograd, torch's own optimizers.

It uses no parallelism, pipeline, gradient bucket, boundary, striped loss or train_step: so what is
wrong with one rank, too, is seen. Micro-batches run one by one, since the tensors of each are
compared. Experts, norms of queries and keys, prediction layers and their loss, Muon, and extensions
that you add, are the course's own in one process: what they do wrong there, too, is not seen.
"""

import os
import sys
import traceback
from dataclasses import replace
from datetime import timedelta
from functools import cache
from itertools import pairwise, product
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from difference.taps import RAN, Key, Notes, Profile, attach, is_yours, name_of
from difference.tiny import Text, Trial, text_of
from difference.watch import Watch
from picotron_min.collectives import Axis
from picotron_min.extension import Extension
from picotron_min.extensions.build import extensions_of
from picotron_min.extensions.documents.rectangles import Documents
from picotron_min.extensions.optimizers.muon import Matrices, Muon
from picotron_min.extensions.optimizers.whole_matrices import Batch
from picotron_min.extensions.settings import Recipe
from picotron_min.initialise import initial_std, initial_weight
from picotron_min.loss import IGNORE_INDEX
from picotron_min.mesh import Axes
from picotron_min.model import Head, Llama
from picotron_min.placement import Table, placements

Whole = dict[Key, Tensor]
MOST_SUMMANDS = 20_000_000  # numbers: of a larger model, no gradients of micro-batches are kept


def batch_of(trial: Trial, text: Text, step: int, micro_batch: int, dp: int) -> tuple:
    """tokens [B, S], positions, targets [B, S] of a micro-batch, and its documents, if any.

    With D further tokens to predict, targets [1 + D, B, S].
    """
    B, S, D = trial.workload.micro_batch_size, trial.workload.seq_length, trial.depths
    first = (micro_batch * trial.layout.dp + dp) * B
    starts = text.rows[step][first : first + B]
    stream = np.pad(text.tokens.astype(int), (0, D), constant_values=IGNORE_INDEX)
    rows = torch.from_numpy(np.stack([stream[i : i + S + D + 1] for i in starts]))
    tokens, targets = rows[:, :S], torch.stack([rows[:, j : j + S] for j in range(1, D + 2)])
    lengths, positions = [], torch.zeros(B, S)
    for row, start in enumerate(starts if trial.workload.document_mask else ()):
        ends = [int(end) - start for end in text.ends if start < end <= start + S + D]
        for end, j in product(ends, range(D + 1)):  # no token of its document follows so far on
            targets[j, row, max(0, end - 1 - j) : end] = IGNORE_INDEX
        inner = [end for end in ends if end < S]
        lengths.append(tuple(b - a for a, b in pairwise([0, *inner, S])))
        positions[row] = torch.cat([torch.arange(length) for length in lengths[-1]])
    targets = targets if D else targets[0]
    if not trial.workload.document_mask:
        return tokens, torch.arange(S), targets
    return tokens, positions, targets, Documents(tuple(lengths))


# One process has no parallelism, and all other settings of the layout.
ALONE = {"pp": 1, "dp": 1, "cp": 1, "tp": 1, "ep": 1, "etp": 1, "pp_layers": None}
ALONE |= {"pp_engine": "1f1b", "pp_chunks": 1, "sharding": "none"}
ALONE |= {"sequence_parallel": False, "tp_overlap": False}


def group_of_one() -> dist.ProcessGroup:
    """This process alone, without a world: collectives of extensions run, and change nothing."""
    return _group_of(os.getpid())


@cache  # a forked process needs its own, and must not free its parent's, whose threads it lacks
def _group_of(pid: int) -> dist.ProcessGroup:
    group = dist.ProcessGroup(store := dist.HashStore(), 0, 1)
    gloo = dist.ProcessGroupGloo(store, 0, 1, timedelta(seconds=60))
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    return group


def plain_model(trial: Trial) -> tuple[Llama, list[Extension], Table]:
    """A Llama in float64, its extensions, which have changed it as in a build, and a table."""
    config, cpu = trial.model_config, torch.device("cpu")
    group = group_of_one()
    names = {name for grid in trial.layout.grids for name in grid.axes} | {"ends"}
    axes = Axes(**{name: Axis(name, group, cpu) for name in names})  # all of size 1
    layout = replace(trial.layout, **ALONE)
    sizes = {"num_micro_batches": len(trial.micro_batches), "recompute": "none", "offload": 0}
    shapes = config.parameter_shapes() | config.buffer_shapes()
    table = placements(shapes, layout, config.tie_word_embeddings, [config.num_layers])
    extensions = extensions_of(config, layout, replace(trial.workload, **sizes), axes, cpu)
    with torch.device("meta"):
        model = Llama(config).double()
    model.boundary = SimpleNamespace(queue=None)  # experts ask for it, and in float64 use none
    for extension in extensions:
        extension.swap(model)
    for extension in extensions:
        extension.connect(model, table)
    model.to_empty(device=cpu)
    model.tie_weights()
    for extension in extensions:
        extension.wrap(model)
    head, options = model.lm_head, {"ignore_index": IGNORE_INDEX, "reduction": "none"}

    def losses(x: Tensor, targets: Tensor) -> Tensor:  # of each token
        logits = head(x).flatten(0, 1)
        return F.cross_entropy(logits, targets.flatten(), **options).view_as(targets)

    if type(head) is Head and vars(head).keys().isdisjoint(("loss", "stripe_loss")):
        head.loss = losses  # else an extension's
    return model, extensions, table


def optimizer_of(recipe: Recipe, parameters: dict[str, nn.Parameter], table: Table) -> Optimizer:
    """torch's; of Muon, which torch computes in bfloat16, the course's own for whole matrices."""
    hidden = {n: p for n, p in parameters.items() if n in table and table[n].is_hidden_matrix}
    hidden = hidden if recipe.optimizer == "muon" else {}
    decay = {False: 0.0, True: recipe.weight_decay}  # of matrices alone
    rest = [p for name, p in parameters.items() if name not in hidden]
    groups = [{"params": [p], "weight_decay": decay[p.ndim > 1]} for p in rest]
    if recipe.optimizer == "sgd":
        return torch.optim.SGD(groups, recipe.learning_rate)
    adamw = torch.optim.AdamW(groups, recipe.learning_rate, recipe.betas)
    if not hidden:
        return adamw
    batches = {name: Batch(tuple(p.shape), [name], "", []) for name, p in hidden.items()}
    return Muon([Matrices(b, [hidden[n]], None) for n, b in batches.items()], adamw, recipe)


class RightRun(Notes):
    """Everything that the right run has computed, by step, phase, name, micro-batch and dp rank."""

    def __init__(self, trial: Trial, profile: Profile, steps: int) -> None:
        self.trial, self.text, self.whole = trial, text_of(trial), {}
        self.model, self.extensions, table = plain_model(trial)
        self.parameters = dict(self.model.named_parameters())
        self.of_modules, self.gradients = [*self.parameters.values()], []
        for extension in self.extensions:
            self.parameters |= extension.parameters()
            self.gradients += extension.gradients()
        for name, parameter in self.parameters.items():
            std = initial_std(name, trial.model_config.num_hidden_layers)
            weight = initial_weight(name, tuple(parameter.shape), trial.seed, std)
            parameter.data.copy_(weight)
        for extension in self.extensions:
            extension.weights_changed()
        self.note("initial", self.parameters)
        profile.watch = Watch(self)
        self.note_kept([self.model])
        attach(self.model, self.tap)
        self.optimizer = optimizer_of(trial.recipe, self.parameters, table)
        for step in range(steps):
            self._step(step)

    def write(self, key: Key, tensor: Tensor, ran: tuple) -> None:
        self.whole[key] = tensor.clone()

    def _step(self, step: int) -> None:
        for parameter in self.of_modules:
            parameter.grad = torch.zeros_like(parameter)
        for gradients in self.gradients:
            gradients.begin(len(self.trial.micro_batches))
        for extension in self.extensions:
            extension.begin()
        loss, num_targets = 0.0, 0
        numbers = sum(p.numel() for p in self.of_modules) * len(self.trial.micro_batches)
        for micro_batch, dp in self.trial.micro_batches:
            self.at = Key(step, "", "", micro_batch, dp)
            batch = batch_of(self.trial, self.text, step, micro_batch, dp)
            out = self.model(*batch)
            out.sum().backward()
            loss += out.sum().detach()
            next_token = batch[2][0] if self.trial.depths else batch[2]
            num_targets += int((next_token != IGNORE_INDEX).sum())
            if numbers < MOST_SUMMANDS:
                self.note_gradients("sum so far", self.parameters)
        self.at = Key(step, "", "")
        for gradients in self.gradients:
            gradients.wait()
        self.note_gradients("summed gradient", self.parameters)
        norm = sum(p.grad.square().sum() for p in self.parameters.values()).sqrt() / num_targets
        self.note("loss", {"loss": loss / num_targets})
        self.note("gradient norm", {"gradient norm": norm})
        clip = self.trial.recipe.grad_clip
        factor = (min(1.0, clip / (norm.item() + 1e-6)) if clip else 1.0) / num_targets
        for parameter in self.of_modules:
            parameter.grad *= factor
        for gradients in self.gradients:
            gradients.scale(factor)
        totals = [extension.counts() for extension in self.extensions]  # of all ranks: of this one
        self.note_gradients("scaled gradient", self.parameters)
        self.optimizer.step()
        self.note("stepped", self.parameters)
        for extension in self.extensions:
            extension.weights_changed()
        for extension, of in zip(self.extensions, totals, strict=True):
            extension.updated(of)
            measures = extension.measures(of)
            self.note_measures(measures if is_yours(name_of(type(extension))) else {})
        self.note_update(self.parameters, self.optimizer, [self.model])


def right_whole(trial: Trial, steps: int | None = None) -> Whole:
    """All steps, or the first ones. ValueError, with its place, where one process cannot run it.

    A trial of fewer steps would have another text.
    """
    profile = Profile()
    sys.setprofile(profile.event)
    try:
        whole = RightRun(trial, profile, steps or trial.steps).whole
        return whole | {Key(0, RAN, name): torch.empty(0) for name in profile.called}
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        at = next((f for f in reversed(frames) if "picotron_min" in f.filename), frames[-1])
        who = "an extension fails in" if any("extensions" in f.filename for f in frames) else "in"
        what = f"{type(error).__name__}: {error}".splitlines()[0]
        where = f"{at.name} ({at.filename}:{at.lineno})"
        raise ValueError(f"{who} the one process, without parallelism: {what}, {where}") from error
    finally:
        sys.setprofile(None)
