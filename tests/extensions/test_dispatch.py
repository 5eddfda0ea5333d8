"""Experts on several ranks: what is sent and summed, the order of messages, and biases."""

from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from picotron_min.extensions.experts.dispatch import apply_expert_parallel, keep_experts
from picotron_min.extensions.experts.moe import MoE
from picotron_min.extensions.experts.router import RoutingCounts
from picotron_min.extensions.settings import Layout, ModelConfig, Routing
from picotron_min.mesh import build_axes
from picotron_min.pipeline_schedule import Kind
from picotron_min.runtime.config import Config
from tests.assembled import make_training, whole_run
from tests.extensions.test_moe import drawn
from tests.rows import row
from tests.training import Training

CPU = torch.device("cpu")
SMALL = ModelConfig(
    61, 6, 8, 2, 1, 1, num_local_experts=8, num_experts_per_tok=2, moe_intermediate_size=8
)
TOKENS = 12  # of each rank


# Dispatch: what ranks compute together is what one rank computes with all their tokens.


def choices(ranks: int, ep: int) -> dict[str, Tensor]:
    """The experts of each rank's tokens [ranks, n, k]; 8 is none, since there are 8: dropped."""
    uneven = (drawn(ranks, TOKENS, 8, seed=5) - torch.linspace(0, 2, 8)).topk(2).indices
    silent, last = uneven.clone(), 8 - 8 // ep  # the first expert of the last rank
    silent[-1] = 8
    return {
        "even": torch.arange(uneven.numel()).view_as(uneven) % 8,
        "an expert without tokens": uneven.where(uneven != 3, 8),
        "a rank that sends nothing": silent,
        "a rank that gets nothing": uneven.where(uneven < last, uneven - last),
        "nothing at all": torch.full_like(uneven, 8),
    }


def make_moe() -> MoE:
    moe = MoE(SMALL, Routing(), RoutingCounts(SMALL, CPU), 0).double()
    for seed, parameter in enumerate(moe.parameters()):
        parameter.data.copy_(drawn(*parameter.shape, seed=seed))
    return moe


def run_moe(moe: MoE, x: Tensor, weights: Tensor, experts: Tensor) -> dict[str, Tensor]:
    """Its output for given choices, and all gradients; x [n, E], weights and experts [n, k]."""
    x, weights = (t.clone()[None].requires_grad_() for t in (x, weights))
    moe.gate.forward = lambda tokens: (weights, experts[None])
    out = moe(x)
    upstream = torch.sin(7 * x.detach())  # any function of the token
    (out * upstream).sum().backward()
    results = {"out": out[0].detach(), "x": x.grad[0], "weights": weights.grad[0]}
    for name, parameter in moe.experts.named_parameters():
        assert parameter.grad is not None, f"{name} has no gradient"
        results[name] = parameter.grad
    return results


def dispatch_together(ep: int, etp: int, engine: str) -> None:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    axes = build_axes(CPU, Layout(dp=ranks, ep=ep, etp=etp))
    x, weights = drawn(ranks, TOKENS, 6, seed=1), drawn(ranks, TOKENS, 2, seed=2)
    for kind, experts in choices(ranks, ep).items():
        whole = run_moe(make_moe(), *(t.flatten(0, 1) for t in (x, weights, experts)))
        moe = make_moe()
        keep_experts(moe, axes.ep)
        for name, parameter in moe.experts.named_parameters():
            dim = 1 if "down_proj" in name else 0
            parameter.data = parameter.data.chunk(etp, dim)[rank % etp].clone()
        apply_expert_parallel(moe, axes, engine, sequence_parallel=True)
        ours = run_moe(moe, x[rank], weights[rank], experts[rank])
        assert len(moe.experts) == 8 // ep
        for name, result in ours.items():
            expected = whole[name]
            if name in ("out", "x", "weights"):
                expected = expected.chunk(ranks)[rank]
            elif name.endswith("weight"):
                expected = expected.chunk(etp, 1 if "down_proj" in name else 0)[rank % etp]
            message = f"{kind}: {name}"
            torch.testing.assert_close(result, expected, rtol=0, atol=1e-12, msg=message)


@pytest.mark.parametrize("engine", ["alltoall", "allgather"])
@pytest.mark.parametrize("ep,etp", [(2, 1), (1, 2), (4, 1), (2, 2), (1, 4)])
def test_ranks_compute_what_one_rank_does_with_all_tokens(pool, ep, etp, engine):
    pool.run(ep * etp, dispatch_together, ep, etp, engine)


def moes_of(training: Training) -> list[MoE]:
    models = [chunk.model for chunk in training.chunks]
    return [module for model in models for module in model.modules() if isinstance(module, MoE)]


class Mark(torch.autograd.Function):
    """x, unchanged; notes when it is passed, and when its gradient is."""

    @staticmethod
    def forward(ctx, x, log, there, back):
        ctx.log, ctx.back = log, back
        log.append(there)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dx):
        ctx.log.append(ctx.back)
        return dx, None, None, None


def order_of_messages(text: str) -> dict:
    """What happens in each forward and backward of the only layer with experts."""
    training = make_training(*row(text))
    log, orders = [], {}
    start = dist.all_to_all_single

    def noting_start(*args, async_op=False, **options):
        work = start(*args, async_op=async_op, **options)
        if not async_op:  # counts of rows
            return work
        log.append("start")
        return SimpleNamespace(wait=lambda: log.append("wait") or work.wait())

    (moe,) = moes_of(training)
    shared = moe.shared
    moe.shared = lambda x: Mark.apply(shared(Mark.apply(x, log, "(", ")")), log, ")", "(")

    @contextmanager
    def watch(action):
        log.clear()
        yield
        orders[action.kind] = " ".join(log)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", noting_start)
        training.step(0, watch)
    return orders


@pytest.mark.parametrize("words", ["dp=2", "tp=2 recompute=full", "tp=2 sp recompute=full"])
def test_shared_experts_compute_while_rows_travel(pool, words):
    """Rows and weights travel to the experts in two messages, results back in one."""
    there, back = "start start ( ) wait wait", "start wait"
    # Recomputation begins where backward first needs something, and does not repeat the way back.
    again = f"{there} " if "full" in words else ""
    expected = {Kind.FORWARD: f"{there} {back}", Kind.BACKWARD: f"{back} {again}{there}"}
    text = f"experts: {words} ep=2 model=sigmoid num_nextn_predict_layers=0"
    assert pool.run(2, order_of_messages, text) == [expected] * 2


# Counts and biases.


def biased(words: str) -> tuple[Config, ModelConfig]:
    return row(f"experts: moe_router_bias_update_rate=0.01 model=sigmoid {words}")


def test_biases_of_four_ranks_are_those_of_numpy(pool):
    """Bit for bit: signs of exact counts, whatever was summed where."""
    run = whole_run(pool, *biased("dp=2 tp=2 ep=2 etp=2"))
    assert run.biases
    for name, bias in run.biases.items():
        layer, expected = int(name.split(".")[2]), np.zeros(8)
        for routed in run.routed:
            counts = routed[layer, :8]
            expected += 0.01 * np.sign(counts.mean() - counts)
        assert np.array_equal(bias, expected) and expected.any()


def biases_in_bfloat16() -> list[Tensor]:
    training = make_training(*biased("dp=2 ep=2 dtype=bfloat16"))
    training.step(0)
    assert all(r.weight.dtype == torch.float32 for r in training.experts[0].routers)
    assert moes_of(training)[0].experts["0" if dist.get_rank() == 0 else "4"].gate_proj.copy.dtype
    return list(training.model.buffers.values())


def test_biases_are_float32_when_the_model_computes_in_bfloat16(pool):
    first, second = pool.run(2, biases_in_bfloat16)
    for bias, other in zip(first, second, strict=True):
        assert bias.dtype == torch.float32 and torch.equal(bias, other)
        rate = torch.tensor(0.01)
        assert bias.any() and set(bias.tolist()) <= {rate.item(), -rate.item(), 0.0}


def biases_of_a_skipped_step() -> None:
    training = make_training(*biased("dp=2 ep=2"))
    training.step(0)
    bias, *_ = training.model.buffers.values()
    before = bias.clone()
    norm = training.parameters["model.norm.weight"]
    hook = norm.register_hook(lambda gradient: gradient * torch.nan)
    assert training.step(1).skipped and torch.equal(bias, before)
    hook.remove()
    assert not training.step(2).skipped and not torch.equal(bias, before)


def test_a_skipped_step_leaves_the_biases_as_they_were(pool):
    pool.run(2, biases_of_a_skipped_step)
