"""Linears in 8 bits over ranks: in float64, what one process trains that scales in the same blocks.

A layout decides which part of a tensor a rank has, and so which numbers share a scale. The
reference rounds in blocks, and is written apart from precision/float8.py. Layouts whose blocks are
micro-batches are rows of test_layouts.py.
"""

import math
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import Tensor

from picotron_min.collectives import Ledger
from picotron_min.extensions.experts.moe import apply_moe
from picotron_min.extensions.experts.router import RoutingCounts
from picotron_min.extensions.overlap.boundary import Boundary
from picotron_min.extensions.overlap.linear import (
    Linear,
    WeightGradients,
    apply_copies,
    apply_queue,
    linears,
)
from picotron_min.extensions.precision.float8 import quantise
from picotron_min.extensions.precision.float8_linear import apply_float8
from picotron_min.extensions.settings import Layout, ModelConfig, Routing, Workload
from picotron_min.model import Llama
from picotron_min.planner.activations import factors_per_token
from picotron_min.runtime.config import Config
from tests import assembled
from tests.assembled import Run, assert_same, make_training, whole_run
from tests.rows import lines, row

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


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


def train_reference(config: Config, model: ModelConfig, steps: int, tp: int, cp: int) -> Run:
    def make(config, model_config):
        training = make_training(config, model_config)
        for layer in training.chunks[0].model.model.layers.values():
            mlp = getattr(layer.mlp, "shared_experts", layer.mlp)
            for module in (layer.self_attn, mlp):
                for name, linear in module.named_children():
                    if isinstance(linear, Linear):
                        how = name not in ("o_proj", "down_proj"), tp, cp
                        linear.forward = lambda x, w=linear.weight, how=how: Reference.apply(
                            x, w, *how
                        )
        return training

    with mock.patch.object(assembled, "make_training", make):
        return assembled.train_briefly(config, model, steps)


# Ranks of tp have parts of a tensor; a ring, a schedule and recomputation change none of them.
BLOCKS = """
precision: tp=2 pp=2 engine=zb_h1 recompute=selective fp8
precision: cp=2 tp=2 sp tp_overlap fp8
precision: tp=2 ep=2 sp fp8 model=gated
"""


@pytest.mark.parametrize("text", lines(BLOCKS))
def test_layouts_train_what_one_process_does_in_their_blocks(pool, text):
    config, model_config = row(text, layers=3)
    words = f"precision: model={'gated' if 'gated' in text else 'untied'}"
    train = partial(train_reference, tp=config.layout.tp, cp=config.layout.cp)
    theirs = whole_run(pool, *row(words, layers=3), 2, train)
    assert_same(whole_run(pool, config, model_config, 2), theirs)


# Linears: a model in one process.

MODEL = ModelConfig(61, 160, 96, 2, 4, 2, head_dim=48)  # no matrix has the shape of an activation
MIXTURE = ModelConfig(
    *(61, 160, 96, 2, 4, 2),
    head_dim=48,
    num_local_experts=4,
    moe_intermediate_size=112,
    n_shared_experts=1,
    moe_shared_expert_gate=True,
)
TOKENS, POSITIONS = torch.arange(128).view(2, 64) % 61, torch.arange(64)


def build(
    config: ModelConfig, dtype: torch.dtype, queue: WeightGradients, fp8: bool = True
) -> Llama:
    torch.manual_seed(0)
    model = Llama(config)
    apply_moe(model, Routing(), RoutingCounts(config, torch.device("cpu")))
    alone = SimpleNamespace(size=1, share=0.0, ledger=Ledger())
    apply_queue(model, queue)
    model.boundary, name = Boundary(alone, queue), str(dtype).removeprefix("torch.")
    if fp8:
        apply_float8(model, Workload(64, dtype=name, fp8=True), "cpu")
    apply_copies(model, dtype) if dtype == torch.bfloat16 else model.to(dtype)
    for linear in linears(model).values():
        linear.weight.grad = torch.zeros_like(linear.weight)
        linear.refresh()
    return model


def run(model: Llama, dtype: torch.dtype) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        loss = model(TOKENS, POSITIONS, TOKENS)
        loss.backward()
    return loss


def test_weights_are_rounded_once_and_copied_nowhere():
    model = build(MODEL, torch.bfloat16, WeightGradients())
    with mock.patch(
        "picotron_min.extensions.precision.float8_linear.quantise", side_effect=AssertionError
    ):
        for _ in range(2):  # two micro-batches
            run(model, torch.bfloat16)
    for name, linear in linears(model).items():
        assert linear.copy is None and linear.weight.dtype == torch.float32
        rows, columns = linear.rows, linear.columns
        assert torch.equal(rows.bytes.T, columns.bytes) and columns.bytes.is_contiguous()
        assert torch.equal(rows.bytes, quantise(linear.weight.detach().bfloat16(), E4M3).bytes)
        assert linear.weight.grad.dtype == torch.float32 and linear.weight.grad.any(), name


@pytest.mark.parametrize("config", [MODEL, MIXTURE], ids=["dense", "mixture"])
@pytest.mark.parametrize("dtype,fp8", [("float32", False), ("bfloat16", False), ("bfloat16", True)])
def test_factors_that_wait_for_w_are_as_many_bytes_as_planned(config, dtype, fp8):
    left = []
    for layers in (2, 3):
        queue = WeightGradients()
        queue.split, kind = True, getattr(torch, dtype)
        run(build(config.override(num_hidden_layers=layers), kind, queue, fp8), kind)
        planned_for = [pair for of, *pair in queue if len(of.weight) > 1]  # not for a gate
        factors = [getattr(factor, "bytes", factor) for pair in planned_for for factor in pair]
        storages = {factor.untyped_storage() for factor in factors}
        left.append(sum({s.data_ptr(): s.nbytes() for s in storages}.values()))
    planned = factors_per_token(config, dtype, Layout(), 0, fp8=fp8)
    assert (left[1] - left[0]) / TOKENS.numel() == planned
