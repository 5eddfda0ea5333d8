"""Ours: the train step of picotron-min in the ways that a row of compare.py has it.

A contender is a function of a Place that builds its model and returns its step.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import get_total_norm

from picotron_min.collectives import Axis
from picotron_min.extensions.build import build_model
from picotron_min.extensions.documents.attention import inside_documents
from picotron_min.extensions.documents.rectangles import Documents
from picotron_min.extensions.experts.moe import mixtures
from picotron_min.initialise import initialise
from picotron_min.mesh import Axes
from picotron_min.model import FlashAttention
from picotron_min.runtime.config_checks import resolve_model
from picotron_min.runtime.config_file import parse_config
from picotron_min.runtime.inputs import open_data
from picotron_min.runtime.token_file import TokenFile
from train import Run, build_run, train_step

CPU = torch.device("cpu")


class Place:
    """What a contender is built from on one rank; `sections` are of a config.json."""

    def __init__(self, sections: dict, axes: Axes, text: TokenFile) -> None:
        self.sections, self.axes, self.text = sections, axes, text
        self.config = parse_config(sections)
        self.model_config = resolve_model(self.config)
        self.data = open_data(self.config, text, axes.dp.rank, axes.cp.rank)

    def changed(self, section: str, **keys: Any) -> "Place":
        keys = self.sections.get(section, {}) | keys
        return Place(self.sections | {section: keys}, self.axes, self.text)


class Done(NamedTuple):
    """The result of a step, over all ranks."""

    loss: float  # mean over the tokens
    grad_norm: float  # before clipping


Step = Callable[[int], Done]
Build = Callable[[Place], Step]


def picotron_min(place: Place, **distributed: Any) -> Step:
    """Our step; `distributed` has keys of that section that differ from the row's."""
    return step_of(build(place.changed("distributed", **distributed)))


def build(place: Place) -> Run:
    config, model_config, axes = place.config, place.model_config, place.axes
    model = build_model(model_config, config.layout, config.workload, axes, CPU)
    initialise(model.parameters, model_config, config.training.seed, model.placements, axes)
    model.weights_changed()
    return build_run(model, config.recipe, place.data)


def step_of(run: Run) -> Step:
    def step(index: int) -> Done:
        result = train_step(run, index)
        return Done(result.loss, result.grad_norm)

    return step


def one_process(place: Place, on_every_rank: bool = False) -> Step:
    """The whole model on the first rank, while the others wait, or the same on all of them."""
    group = place.axes.dp.group  # has one rank in all rows that use this
    axes = Axes(**{axis.name: Axis(axis.name, group, CPU) for axis in place.axes})
    sections = place.sections | {"distributed": {"use_cpu": True}}
    alone = picotron_min(Place(sections, axes, place.text))

    def step(index: int) -> Done:
        waits = dist.get_rank() > 0 and not on_every_rank
        return Done(math.nan, math.nan) if waits else alone(index)

    return step


def experts_one_by_one(place: Place) -> Step:
    """Our own loop over the experts."""
    run = build(place)
    for chunk in run.model.pipeline.chunks:
        for moe in mixtures(chunk.model):
            del moe.run  # what is left is the method of the class
    return step_of(run)


def attention_alone(place: Place, documents: int) -> Step:
    """Forward and backward of the attention of a row of so many documents, of one size."""
    c, S = place.model_config, place.config.training.seq_length
    inside, lengths = (
        inside_documents(FlashAttention(), CPU),
        Documents(((S // documents,) * documents,)),
    )
    heads = c.num_attention_heads, c.num_key_value_heads, c.num_key_value_heads
    qkv = [torch.randn(1, n, S, c.head_dim).requires_grad_() for n in heads]

    def step(index: int) -> Done:
        out = inside(*qkv, lengths)
        torch.autograd.grad(out, qkv, torch.ones_like(out))
        return Done(0, 0)  # they do different work

    return step


def loss_alone(place: Place, loss: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Step:
    """Forward and backward of the loss of two micro-batches, with 32 times the vocabulary."""
    t, vocab_size = place.config.training, 32 * place.model_config.vocab_size
    tokens = 2 * t.micro_batch_size * t.seq_length
    torch.manual_seed(0)
    x = torch.randn(tokens, 64).requires_grad_()
    weight = (0.1 * torch.randn(vocab_size, 64)).requires_grad_()
    targets = torch.randint(vocab_size, (tokens,))

    def step(index: int) -> Done:
        x.grad = weight.grad = None
        total = loss(x, weight, targets)
        total.backward()
        return Done(total.item() / tokens, get_total_norm([x.grad, weight.grad]).item())

    return step
