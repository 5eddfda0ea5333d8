"""Ours: the train step of picotron-min in the ways that a row of compare.py has it.

A contender is a function of a Place that builds its model and returns its step.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import get_total_norm

from benchmarks.common import Done, Step, TrainStep, bytes_of_update
from benchmarks.products import Products
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
from train import Run, build_run

CPU = torch.device("cpu")
COPIED = 2**25  # bytes: more than a core's caches have


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


Build = Callable[[Place], Step]


def picotron_min(place: Place, **distributed: Any) -> Step:
    """Our step; `distributed` has keys of that section that differ from the row's."""
    return TrainStep(build(place.changed("distributed", **distributed)))


def build(place: Place) -> Run:
    config, model_config, axes = place.config, place.model_config, place.axes
    model = build_model(model_config, config.layout, config.workload, axes, CPU)
    initialise(model.parameters, model_config, config.training.seed, model.placements, axes)
    model.weights_changed()
    return build_run(model, config.recipe, place.data)


def one_process(place: Place) -> Step:
    """The whole model on the first rank, while the others wait."""
    group = place.axes.dp.group  # has one rank in all rows that use this
    axes = Axes(**{axis.name: Axis(axis.name, group, CPU) for axis in place.axes})
    sections = place.sections | {"distributed": {"use_cpu": True}}
    alone = picotron_min(Place(sections, axes, place.text))

    def step(index: int) -> Done:
        return Done(math.nan, math.nan) if dist.get_rank() else alone(index)

    return step


def experts_one_by_one(place: Place) -> Step:
    """Our own loop over the experts."""
    run = build(place)
    for chunk in run.model.pipeline.chunks:
        for moe in mixtures(chunk.model):
            del moe.run  # what is left is the method of the class
    return TrainStep(run)


def attention_alone(place: Place, documents: int) -> Step:
    """Forward and backward of the attention of a row of `documents` documents of one size."""
    c, S = place.model_config, place.config.training.seq_length
    inside = inside_documents(FlashAttention(), CPU)
    lengths = Documents(((S // documents,) * documents,))
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


def bound(place: Place, of: Build) -> Step:
    """A contender that does only what a step of another one cannot do without."""
    step, source = of(place), torch.ones(COPIED // 4)
    step(0)  # makes the optimizer's state
    for axis in place.axes:
        axis.ledger.take_bytes()
    with Products() as products:
        step(1)
    moved = 2 * sum(axis.ledger.take_bytes() for axis in place.axes)
    moved += bytes_of_update(step.run.optimizer) if isinstance(step, TrainStep) else 0
    whole, rest = divmod(moved // 2, COPIED)  # a copy reads and writes
    pieces, target = [source] * whole + [source[: rest // 4]], torch.empty_like(source)
    del step

    def again(index: int) -> Done:
        products.again()
        for part in pieces:
            target[: len(part)].copy_(part)
        return Done(math.nan, math.nan)

    return again
