"""Experts on several ranks: dispatch, bytes, reads, the order of messages, and who sums what."""

import itertools
from collections import defaultdict
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
from picotron_min.placement import part, placements
from picotron_min.runtime.config import Config
from tests.assembled import assert_trains_as_one_rank, make_training, whole_run
from tests.extensions.test_experts import GLOBAL_BATCH, MODELS, make_expert_config
from tests.extensions.test_moe import Reads, drawn
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


# A step of a whole model: its bytes, its reads, and the order of what it does.


def observed_step(config: Config, model: str) -> dict:
    """What one rank sends over ep_etp in a step, the choices of its routers, reads by action."""
    training = make_training(config, MODELS[model])
    chosen, reads = [], defaultdict(set)
    for moe in moes_of(training):
        limit = moe.limit

        def noting(weights: Tensor, experts: Tensor, limit=limit) -> Tensor:
            if not training.experts[0].tally.is_paused:
                chosen.append(limit(weights, experts))
            return limit(weights, experts)

        moe.limit = noting

    @contextmanager
    def watch(action):
        with Reads() as during:
            yield
        reads[action.kind].add(during.count)

    axis = training.axes.ep_etp
    axis.ledger.take_bytes()
    training.step(0, watch)
    return {
        "bytes": dict(axis.ledger.bytes),
        "experts": torch.stack(chosen).numpy(),
        "reads": dict(reads),
        "rank": axis.rank,
    }


def moes_of(training: Training) -> list[MoE]:
    models = [chunk.model for chunk in training.chunks]
    return [module for model in models for module in model.modules() if isinstance(module, MoE)]


OBSERVED = [
    # dp, tp, ep, etp, model, recompute
    (2, 1, 2, 1, "softmax", "none"),
    (2, 1, 1, 2, "sigmoid", "selective"),
    (2, 2, 2, 2, "sigmoid", "full"),
    (4, 1, 2, 2, "gated", "none"),
    (4, 1, 2, 1, "softmax", "full"),
]


@pytest.mark.parametrize("engine", ["alltoall", "allgather"])
@pytest.mark.parametrize("dp,tp,ep,etp,model,recompute", OBSERVED)
def test_bytes_and_reads_of_a_step_are_as_documented(
    pool, dp, tp, ep, etp, model, recompute, engine
):
    layout = {"dp": dp, "tp": tp, "recompute": recompute, "micro_batches": 2}
    config = make_expert_config("sequence", ep, etp, engine, **layout)
    R, X, k = ep * etp, 8, MODELS[model].num_experts_per_tok
    b, w = MODELS[model].hidden_size * 8, 8
    layers = 2 - len(MODELS[model].mlp_only_layers)
    n, full = GLOBAL_BATCH // (dp * 2) * 16 // tp, recompute == "full"  # tokens of a rank
    ranks = pool.run(dp * tp, observed_step, config, model)
    rows = np.zeros((dp * tp, R), int)  # that each rank sends to each of its group
    for rank, seen in enumerate(ranks):
        assert seen["experts"].shape == (2 * layers, n, k)  # of each micro-batch and layer
        rows[rank] = np.bincount(seen["experts"].flatten() // (X // ep), minlength=ep).repeat(etp)
    for rank, seen in enumerate(ranks):
        assert seen["rank"] == rank % R
        if engine == "alltoall":
            group = rows[rank - rank % R :][:R]
            leaving = rows[rank].sum() - rows[rank, rank % R]
            arriving = group[:, rank % R].sum() - rows[rank, rank % R]
            # A row that leaves comes back; its gradient leaves, too; and comes back.
            expected = {"exchange": (leaving + arriving) * (2 * b + w) + full * leaving * (b + w)}
            expected["all_to_all"] = 2 * layers * (1 + full) * (R - 1) * X // ep * 8
        else:
            sent = 2 * layers * (R - 1) * n  # rows, once to each other rank
            numbers = w * k + 8 * k  # weights and experts of a token
            expected = {"all_gather": sent * (2 * b + numbers + full * (b + numbers))}
            expected["reduce_scatter"] = sent * (2 * b + w * k)
        assert seen["bytes"] == expected
        assert seen["reads"] == {Kind.FORWARD: {layers}, Kind.BACKWARD: {layers * full}}


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


def order_of_messages(config: Config) -> dict:
    """What happens in each forward and backward of the only layer with experts."""
    training = make_training(config, MODELS["sigmoid"])
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


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("layout", [{"dp": 2}, {"tp": 2}], ids=["dp2", "tp2"])
def test_shared_experts_compute_while_rows_travel(pool, layout, recompute):
    """Rows and weights travel to the experts in two messages, results back in one."""
    sequence = {"sequence_parallel": "tp" in layout and recompute == "full"}
    config = make_expert_config("sequence", 2, 1, recompute=recompute, **layout, **sequence)
    there, back = "start start ( ) wait wait", "start wait"
    # Recomputation begins where backward first needs something, and does not repeat the way back.
    again = f"{there} " if recompute == "full" else ""
    expected = {Kind.FORWARD: f"{there} {back}", Kind.BACKWARD: f"{back} {again}{there}"}
    assert pool.run(2, order_of_messages, config) == [expected] * 2


# Hybrid models: stages without any experts.

HYBRIDS = [
    # layers of the stages, engine, chunks, layers without experts
    ((1, 2, 1), "1f1b", 1, (1, 2)),
    ((1, 2, 1), "afab", 1, (0, 3)),
    ((1, 1, 1, 1), "interleaved", 2, (0, 2)),  # the first of two ranks has no expert
]


@pytest.mark.parametrize("stages,engine,chunks,dense", HYBRIDS)
def test_pipelines_with_stages_without_experts_train_as_one_rank(
    pool, stages, engine, chunks, dense
):
    model = MODELS["softmax"].override(mlp_only_layers=dense)
    pp = len(stages) // chunks
    layout = {"dp": 2, "pp": pp, "engine": engine, "chunks": chunks, "micro_batches": 3}
    layout |= {"layers": sum(stages), "pp_layers": list(stages)}
    config = make_expert_config("sequence", 2, **layout)
    assert_trains_as_one_rank(pool, config, model, steps=3)


# Counts and biases.


def test_biases_of_four_ranks_are_those_of_one_and_of_numpy(pool):
    """Bit for bit: signs of exact counts, whatever was summed where."""
    one = whole_run(pool, make_expert_config("sequence"), MODELS["sigmoid"])
    grid = make_expert_config("sequence", 2, 2, dp=2, tp=2)
    four = whole_run(pool, grid, MODELS["sigmoid"])
    assert (
        one.biases.keys()
        == four.biases.keys()
        == MODELS["sigmoid"].override(num_hidden_layers=2).buffer_shapes().keys()
    )
    for name, bias in one.biases.items():
        layer, expected = int(name.split(".")[2]), np.zeros(8)
        for routed in one.routed:
            counts = routed[layer, :8]
            expected += 0.01 * np.sign(counts.mean() - counts)
        assert np.array_equal(bias, expected) and np.array_equal(four.biases[name], expected)
        assert expected.any()


def biases_in_bfloat16() -> list[Tensor]:
    config = make_expert_config("sequence", 2, dp=2, dtype="bfloat16")
    training = make_training(config, MODELS["sigmoid"])
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
    config = make_expert_config("sequence", 2, dp=2)
    training = make_training(config, MODELS["sigmoid"])
    training.step(0)
    (bias,) = training.model.buffers.values()
    before = bias.clone()
    norm = training.parameters["model.norm.weight"]
    hook = norm.register_hook(lambda gradient: gradient * torch.nan)
    assert training.step(1).skipped and torch.equal(bias, before)
    hook.remove()
    assert not training.step(2).skipped and not torch.equal(bias, before)


def test_a_skipped_step_leaves_the_biases_as_they_were(pool):
    pool.run(2, biases_of_a_skipped_step)


# Who holds what, and whose gradients are summed.


def ranks_of_a_stage(layout: Layout) -> list[dict[str, int]]:
    """The place of each rank on every axis, by arithmetic: (dp, cp, tp) and (edp, ep, etp)."""
    places = itertools.product(*map(range, (layout.dp, layout.cp, layout.tp)))
    ranks, each = [], layout.ep * layout.etp
    for number, (dp, cp, tp) in enumerate(places):
        of_experts = {"edp": number // each, "ep": number % each // layout.etp}
        place = {"dp_cp": dp * layout.cp + cp, "dp_cp_tp": number, "tp": tp, "ends": 0}
        ranks.append(place | of_experts | {"etp": number % layout.etp})
    return ranks


GRIDS = [
    (pp, dp, cp, tp, ep, etp)
    for pp, dp, cp, tp in itertools.product((1, 2), (1, 2, 3), (1, 2), (1, 2, 4))
    for ep, etp in itertools.product((1, 2, 4), (1, 2, 4))
    if dp * cp * tp <= 8 and dp * cp * tp % (ep * etp) == 0
]


@pytest.mark.parametrize("sharding", ["none", "optimizer", "layerwise"])
def test_every_number_counts_at_one_rank_of_a_stage(sharding):
    """Cut axes x copies are the ranks of a stage, each once: so says a count of elements."""
    small = SMALL.override(
        num_local_experts=4, n_shared_experts=1, moe_shared_expert_gate=True, mlp_only_layers=(1,)
    )
    for (pp, dp, cp, tp, ep, etp), tied in zip(GRIDS, itertools.cycle((False, True))):
        shapes = small.override(tie_word_embeddings=tied).parameter_shapes()
        layout = Layout(pp, dp, cp, tp, sharding=sharding, ep=ep, etp=etp)
        sizes, ranks = layout.axis_sizes, ranks_of_a_stage(layout)
        for name, placement in placements(shapes, layout, tied, [2 // pp] * pp).items():
            holders = np.zeros(shapes[name], int)
            for rank in ranks:
                if all(rank[axis] == 0 for axis in placement.copies):
                    holders[part(shapes[name], placement.owned, rank, sizes)] += 1
            assert (holders == 1).all(), (name, layout, placement)
