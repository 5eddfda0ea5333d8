"""FP8 in layouts: in float64 they train what one process trains that scales in the same blocks.

A layout decides which part of a tensor a rank has, and so which numbers share a scale. A
data-parallel rank's micro-batch is one of one process; with tensor and context parallelism the
reference rounds in blocks, and is written apart from precision/float8.py.
"""

import functools
import math
from functools import partial
from typing import NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from picotron_min.extensions.overlap.boundary import SequenceBoundary
from picotron_min.extensions.overlap.linear import Linear, WeightGradients
from picotron_min.extensions.overlap.ring import RingBoundary
from picotron_min.extensions.precision.float8 import quantise
from picotron_min.extensions.precision.float8_linear import Float8Linear
from picotron_min.extensions.settings import Layout
from picotron_min.mesh import build_axes
from picotron_min.planner.memory import memory_per_rank
from picotron_min.planner.traffic import planned_traffic
from picotron_min.runtime.config import Config
from tests import assembled
from tests.assembled import MODELS, Run, assert_same, make_config, make_training, whole_run
from tests.extensions.test_experts import MODELS as EXPERTS
from tests.extensions.test_experts import make_expert_config
from tests.planner.test_planner_traffic import EXPERTS as EXPERT_SHAPE
from tests.planner.test_planner_traffic import MODEL as PLANNED
from tests.planner.test_planner_traffic import PADDED, SHARED, config_of, sent_in_a_step

STEPS, LAYERS = 2, 3
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


FP8 = {"layers": LAYERS, "model": {"fp8": True}}
PLAIN = {"layers": LAYERS}
MIDDLE = {"layers": 4, "model": {"fp8": True, "fp8_skip": 1}}

SAME_BLOCKS = {
    "data": {"dp": 2},
    "pipeline, the middle": {"pp": 2, "micro_batches": 2, **MIDDLE},
    "zero bubble": {"pp": 2, "micro_batches": 3, "engine": "zb_h1"},
    "selective": {"recompute": "selective"},
    "parameters, full": {"dp": 2, "recompute": "full", "sharding": "parameters"},
    "optimizer": {"dp": 2, "micro_batches": 2, "sharding": "optimizer"},
}


@pytest.mark.parametrize("name", SAME_BLOCKS)
def test_layouts_with_the_same_blocks_train_the_same_model(pool, name):
    layout = FP8 | SAME_BLOCKS[name]
    # One process needs as many micro-batches as all ranks together have.
    one = {"micro_batches": layout.get("dp", 1) * layout.get("micro_batches", 1)}
    one |= {key: layout[key] for key in FP8}
    runs = [whole_run(pool, make_config(**c), "grouped-query", STEPS) for c in (layout, one)]
    assert_same(*runs)


# The reference.


def rounded(x: Tensor, kind: torch.dtype) -> Tensor:
    """What 8 bits leave of a block."""
    amax = x.abs().max().item() or 1.0
    scale = 2.0 ** (math.frexp(torch.finfo(kind).max / amax)[1] - 1)
    return (x * scale).to(kind).double() / scale


class Reference(torch.autograd.Function):
    """y = x W^T with all factors rounded in the blocks of tp and cp ranks."""

    @staticmethod
    def forward(ctx, x, weight, is_first, tp, cp):
        parts = partial(over_ranks, tp=tp, cp=cp)
        x, weight = parts(x, E4M3, not is_first), cut(weight, E4M3, 0 if is_first else 1, tp)
        ctx.save_for_backward(x, weight)
        ctx.parts, ctx.is_first = parts, is_first
        return x @ weight.T

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        dy = ctx.parts(dy, E5M2, ctx.is_first)
        return dy @ weight, dy.flatten(0, 1).T @ x.flatten(0, 1), None, None, None


def cut(x: Tensor, kind: torch.dtype, dim: int, n: int) -> Tensor:
    return torch.cat([rounded(part, kind) for part in x.chunk(n, dim)], dim)


def over_ranks(x: Tensor, kind: torch.dtype, is_cut: bool, tp: int, cp: int) -> Tensor:
    """[B, S, E], of which cp ranks have positions, and tp ranks columns, if it is cut."""
    pieces = x.chunk(2 * cp, 1)  # rank r of a ring has pieces r and 2 cp - 1 - r
    blocks = [torch.cat([pieces[r], pieces[-1 - r]], 1) for r in range(cp)]
    blocks = [cut(block, kind, 2, tp if is_cut else 1).chunk(2, 1) for block in blocks]
    return torch.cat([first for first, _ in blocks] + [last for _, last in reversed(blocks)], 1)


def train_reference(config: Config, model: str, steps: int, tp: int, cp: int) -> Run:
    def make(config, model_config):
        training = make_training(config, model_config)
        for layer in training.chunks[0].model.model.layers.values():
            mlp = getattr(layer.mlp, "shared_experts", layer.mlp)
            for module in (layer.self_attn, mlp):
                for name, linear in module.named_children():
                    if isinstance(linear, Linear):
                        is_first = name not in ("o_proj", "down_proj")
                        product = partial(product_of, linear, is_first, tp, cp)
                        linear.forward = product
        return training

    with mock.patch.object(assembled, "make_training", make):
        return assembled.train_briefly(config, model, steps)


def product_of(linear: Linear, is_first: bool, tp: int, cp: int, x: Tensor) -> Tensor:
    return Reference.apply(x, linear.weight, is_first, tp, cp)


SEQUENCE = {"tp": 2, "sequence_parallel": True}
RING = SEQUENCE | {"tp_overlap": True}
BLOCKS = {
    "one": {},
    "tensor": {"tp": 2},
    "sequence": SEQUENCE,
    "sequence, pipeline": SEQUENCE | {"pp": 2, "engine": "zb_h1", "recompute": "selective"},
    "context, ring": RING | {"cp": 2},
    "ring, full": RING | {"tp": 4, "recompute": "full"},
}


@pytest.mark.parametrize("name", BLOCKS)
def test_layouts_train_what_one_process_does_in_their_blocks(pool, name):
    layout, model = BLOCKS[name], "untied"
    ours = whole_run(pool, make_config(**FP8, **layout), model, STEPS)
    assert_same(ours, reference(pool, layout.get("tp", 1), layout.get("cp", 1)))


@functools.cache
def reference(pool, tp: int, cp: int) -> Run:
    train = partial(train_reference, tp=tp, cp=cp)
    return whole_run(pool, make_config(**PLAIN), "untied", STEPS, train)


def test_shared_experts_train_what_one_process_does_in_their_blocks(pool):
    model = EXPERTS["gated"]
    ours = make_expert_config(tp=2, ep=2, sequence_parallel=True, **FP8)
    theirs = make_expert_config(**PLAIN)
    train = partial(train_reference, tp=2, cp=1)
    assert_same(whole_run(pool, ours, model, STEPS), whole_run(pool, theirs, model, STEPS, train))


# Messages.

BATCH, SEQUENCE, HIDDEN = 2, 16, 32


class Gathered(NamedTuple):
    bytes: Tensor
    inverse: Tensor
    calls: dict[str, int]
    num_bytes: int
    with_nan: list[float]  # the inverse where a rank has a NaN: the first, the last


def whole_tensor() -> Tensor:
    x = torch.randn(BATCH, SEQUENCE, HIDDEN, generator=torch.Generator().manual_seed(3))
    x[1, -1, 5] = 1e4  # of the last rank: all the others' amax is about 4
    return x


def gather(kind: type[SequenceBoundary], format: torch.dtype) -> Gathered:
    axis = build_axes(torch.device("cpu"), Layout(tp=dist.get_world_size())).tp
    boundary = kind(axis, WeightGradients())
    part = whole_tensor().chunk(axis.size, dim=1)[axis.rank]
    x8 = quantise(part, format, boundary.maximum)
    whole, _ = boundary.gather_multiply(x8.bytes, [])
    calls, num_bytes = dict(axis.ledger.calls), axis.ledger.take_bytes()
    with_nan = []
    for rank in (0, axis.size - 1):
        bad = part.clone()
        bad[0, 0, 0] = math.nan if axis.rank == rank else 1.0
        with_nan.append(quantise(bad, format, boundary.maximum).inverse.item())
    return Gathered(whole, x8.inverse, calls, num_bytes, with_nan)


@pytest.mark.parametrize("kind", [SequenceBoundary, RingBoundary])
@pytest.mark.parametrize("n,format", [(2, E5M2), (4, E4M3)], ids=str)
def test_ranks_gather_the_bytes_of_one_device(pool, n, format, kind):
    expected = quantise(whole_tensor(), format)
    gathers = {"all_gather": 1} if kind is SequenceBoundary else {"shift": n - 1}
    for of_rank in pool.run(n, gather, kind, format):
        assert torch.equal(of_rank.bytes, expected.bytes)
        assert of_rank.inverse == expected.inverse
        assert of_rank.calls == gathers | {"all_reduce": 1}
        share = (n - 1) / n
        assert of_rank.num_bytes == share * (BATCH * SEQUENCE * HIDDEN + 2 * 4)
        assert of_rank.with_nan == [math.inf] * 2, "all ranks skip the step"


LEDGERS = {
    "full": ({"recompute": "full"}, {}),
    "ring, selective": ({"tp_overlap": True, "recompute": "selective", "fp8_skip": 1}, {}),
    "shared experts": ({"ep": 2}, EXPERT_SHAPE | SHARED | PADDED),
}


@pytest.mark.parametrize("name", LEDGERS)
def test_the_ledger_is_exact(pool, name):
    options, shape = LEDGERS[name]
    model_options = {k: v for k, v in shape.items() if k not in PADDED}
    model = PLANNED.override(**model_options)
    training = {k: v for k, v in shape.items() if k in PADDED}
    layout = {"tp": 2, "sequence_parallel": True, "dtype": "bfloat16", "fp8": True}
    config = config_of(model, **layout, **options, **training)
    for rank, (sent, _) in enumerate(pool.run(2, sent_in_a_step, config, model)):
        assert sent == planned_traffic(model, config.layout, config.workload, rank)


# What is not finite.


def skipped_step(config: Config, rank: int) -> tuple[list[bool], bool]:
    """Whether steps are skipped: the first with an infinite weight on one rank, the second not."""
    training = make_training(config, "untied")
    weights = training.parameters["model.layers.1.mlp.up_proj.weight"].data
    before = {name: p.detach().clone() for name, p in training.parameters.items()}
    finite = weights[0, 0].item()
    if dist.get_rank() == rank:
        weights[0, 0] = math.inf
    training.model.weights_changed()
    skipped = [training.step(0).skipped]
    weights[0, 0] = finite
    same = all(torch.equal(p, before[name]) for name, p in training.parameters.items())
    training.model.weights_changed()
    return [*skipped, training.step(0).skipped], same


def test_a_weight_that_is_not_finite_skips_the_step(pool):
    config = make_config(tp=2, sequence_parallel=True, **FP8)
    assert pool.run(2, skipped_step, config, 1) == [([True, False], True)] * 2


# Memory.


def bytes_to_multiply_with(config: Config) -> int:
    """Bytes of all copies of weights, in 8 bits or not, that a step has left."""
    training = make_training(config, "untied")
    training.step(0)
    total = 0
    for linear in (m for m in training.modules if isinstance(m, Linear)):
        if isinstance(linear, Float8Linear) and linear.rows:
            total += linear.rows.bytes.nbytes + linear.columns.bytes.nbytes
        elif linear.copy is not None:
            total += linear.copy.nbytes
    return total


def planned_weights(config: Config) -> int:
    model = MODELS["untied"].override(num_hidden_layers=LAYERS)
    return memory_per_rank(model, config.layout, config.workload, "cpu").weights


@pytest.mark.parametrize(
    "dtype,dp,sharding",
    [("bfloat16", 1, "none"), ("float64", 1, "none"), ("float64", 2, "optimizer")],
)
def test_weights_in_8_bits_need_as_much_memory_as_planned(pool, dtype, dp, sharding):
    options = {"dp": dp, "dtype": dtype, "sharding": sharding, "layers": LAYERS}
    fp8 = make_config(model={"fp8": True, "fp8_skip": 1}, **options)
    plain = make_config(**options)
    held, copies = (pool.run(dp, bytes_to_multiply_with, c)[0] for c in (fp8, plain))
    assert held and planned_weights(fp8) - planned_weights(plain) == held - copies


def test_with_sharded_parameters_the_bytes_are_freed_with_the_weights(pool):
    options = {"dp": 2, "sharding": "parameters"}
    fp8, plain = make_config(**FP8, **options), make_config(**PLAIN, **options)
    assert pool.run(2, bytes_to_multiply_with, fp8) == [0, 0]
    of_one_layer = 2 * (4 * 32 * 32 + 3 * 32 * 48)
    assert planned_weights(fp8) - planned_weights(plain) == of_one_layer


def losses_and_norms(config: Config) -> tuple[list[float], list[float]]:
    training = make_training(config, "untied")
    results = [training.step(step) for step in range(STEPS)]
    return [r.loss for r in results], [r.grad_norm for r in results]


@pytest.mark.parametrize("sharding", ["optimizer", "parameters"])
def test_sharded_weights_in_bfloat16_train_as_whole_ones(pool, sharding):
    """Their gradients are float32, as those of all linears in FP8."""
    options = {"dp": 2, "dtype": "bfloat16", "micro_batches": 2, **FP8}
    configs = make_config(**options), make_config(sharding=sharding, **options)
    (losses, norms), ours = (pool.run(2, losses_and_norms, config)[0] for config in configs)
    assert ours[0] == losses and ours[1] == pytest.approx(norms, rel=1e-6)
