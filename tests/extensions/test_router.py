"""Routers: balance losses and counts, against a version that is written out.

Their choices are tested with the mixture, in test_moe.py.
"""

import itertools
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn.functional import one_hot
from torch.utils.checkpoint import checkpoint

from picotron_min.extensions.experts.router import (
    LOSSES,
    Router,
    RoutingCounts,
    force_routing,
    route,
)
from picotron_min.extensions.settings import ModelConfig, Routing
from tests.extensions.test_moe import drawn

SHAPE = ModelConfig(61, 8, 8, 2, 2, 2, num_local_experts=8, num_experts_per_tok=3)
SIGMOID = SHAPE.override(scoring_func="sigmoid")
MODELS = {
    "softmax": SHAPE,
    "softmax-unnormalised": SHAPE.override(norm_topk_prob=False),
    "sigmoid-groups": SIGMOID.override(n_group=4, topk_group=2, routed_scaling_factor=2.5),
}
CPU = torch.device("cpu")


def test_scores_that_vanish_leave_the_weights_finite():
    logits = torch.full((1, 8), -200.0, requires_grad=True)  # sigmoid: 0 in float32
    weights, _, shares = route(logits, SIGMOID)
    (weights.sum() + shares.sum()).backward()
    assert all(x.isfinite().all() for x in (weights, shares, logits.grad))


# The losses: a grid of ranks (dp 2, and 2 halves of each sequence) against the whole, in autograd.

EACH = {"moe_seq_aux_loss_coeff": 0.3, "moe_aux_loss_coeff": 0.2, "moe_global_aux_loss_coeff": 0.5}
COEFFICIENTS = {
    "sequence": {"moe_seq_aux_loss_coeff": 0.3},
    "micro-batch": {"moe_seq_aux_loss_coeff": 0.0, "moe_aux_loss_coeff": 0.2},
    "global": {"moe_seq_aux_loss_coeff": 0.0, "moe_global_aux_loss_coeff": 0.5},
    "z": {"moe_seq_aux_loss_coeff": 0.0, "moe_z_loss_coeff": 0.1},
    "all": EACH | {"moe_z_loss_coeff": 0.1},
    "none": {"moe_seq_aux_loss_coeff": 0.0},
}
DP, M, B, S, E = 2, 3, 4, 4, 8  # as many rows as places: dims taken for each other show in values


def make_router(config: ModelConfig, routing: Routing, weight: Tensor, bias: Tensor | None):
    tally = RoutingCounts(config, CPU)
    router = Router(config, routing, tally, layer=1).double()
    router.weight.data.copy_(weight)
    if bias is not None:
        router.e_score_correction_bias.data.copy_(bias)
    return router, tally


def scores_of(logits: Tensor, config: ModelConfig) -> Tensor:
    if config.scoring_func == "softmax":
        return logits.exp() / logits.exp().sum(-1, keepdim=True)
    return 1 / (1 + (-logits).exp())


def shares_of(logits: Tensor, config: ModelConfig) -> Tensor:
    scores = scores_of(logits, config)
    return scores / scores.sum(-1, keepdim=True)


def users(shares: Tensor, k: int) -> Tensor:
    """Which experts each token would use: 1 or 0, [..., X]."""
    return one_hot(shares.topk(k).indices, shares.shape[-1]).sum(-2).double()


def aux(shares: Tensor, counts: Tensor, num_tokens: int, k: int) -> Tensor:
    """Megatron-LM's loss of tokens [T, X]: X / (k T T') sum_i c_i sum_x s_xi, times T."""
    return shares.shape[-1] / (k * num_tokens) * (counts * shares.sum(0)).sum()


def objective(x: Tensor, weight: Tensor, upstream: Tensor, config, bias, routing: Routing):
    """All that a step minimises, and its parts: x [M, DP, B, S, E], upstream [M, DP, B, S, k]."""
    k = config.num_experts_per_tok
    logits = x @ weight.T
    _, experts, _ = route(logits, config, bias)  # only the choices
    scores, shares = scores_of(logits, config).gather(-1, experts), shares_of(logits, config)
    if config.norm_topk_prob:
        scores = scores / scores.sum(-1, keepdim=True)
    counts = users(shares.detach(), k)
    total = {"task": (scores * config.routed_scaling_factor * upstream).sum()}
    total |= dict.fromkeys(LOSSES, 0.0)
    for j, d in itertools.product(range(M), range(DP)):
        for b in range(B):
            of_sequence = counts[j, d, b].sum(0)
            total["seq_load_balancing_loss"] += aux(shares[j, d, b], of_sequence, S, k)
        of_batch = shares[j, d].flatten(0, 1)
        of_rank, so_far = counts[j, d].sum((0, 1)), counts[: j + 1].sum((0, 1, 2, 3))
        total["load_balancing_loss"] += aux(of_batch, of_rank, B * S, k)
        seen = (j + 1) * DP * B * S
        total["global_load_balancing_loss"] += aux(of_batch, so_far, seen, k)
    total["z_loss"] = logits.logsumexp(-1).square().sum()
    weighted = (getattr(routing, coefficient) * total[n] for n, coefficient in LOSSES.items())
    return total["task"] + sum(weighted), total


def ranks_gradients(
    x: Tensor, weight: Tensor, upstream: Tensor, config, bias, routing: Routing, recompute: bool
):
    """What the routers of four ranks compute; sums over ranks are of counts known beforehand."""
    counts = users(shares_of(x @ weight.T, config), config.num_experts_per_tok)
    dw, dx, table = torch.zeros_like(weight), torch.zeros_like(x), 0.0
    for d, part in itertools.product(range(DP), (slice(0, S // 2), slice(S // 2, S))):
        router, tally = make_router(config, routing, weight, bias)
        losses, inputs = [], []
        for j in range(M):
            others = counts[j, d].sum(1) - counts[j, d, :, part].sum(1)
            router.sum_over_sequences = partial(torch.add, others)
            router.sum_over_batch = partial(torch.add, counts[j, 1 - d].sum((0, 1)))
            inputs.append(x[j, d, :, part].clone().requires_grad_())
            options = {"use_reentrant": False}
            options["context_fn"] = lambda tally=tally: (torch.enable_grad(), tally.paused())

            def task(x: Tensor, router=router, factor=upstream[j, d, :, part]) -> Tensor:
                return (router(x)[0] * factor).sum()  # a repeat runs up to what the product saves

            run = partial(checkpoint, task, **options) if recompute else task
            losses.append(run(inputs[-1]))
            if recompute:  # F0 B0 F1 B1 ...: what a backward repeats must not count for F1
                losses.pop().backward()
        for loss in losses:  # F0 F1 ... B0 B1 ...: later counts must not change earlier gradients
            loss.backward()
        for j in range(M):
            dx[j, d, :, part] = inputs[j].grad
        dw += router.weight.grad
        table = table + tally.table
    return dw, dx, table


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("scopes", COEFFICIENTS)
@pytest.mark.parametrize("model", MODELS)
def test_gradients_are_those_of_the_objective_written_out(model, scopes, recompute):
    config, routing = MODELS[model], Routing(**COEFFICIENTS[scopes])
    k, bias = config.num_experts_per_tok, None
    if config.scoring_func == "sigmoid":
        bias = 0.2 * drawn(8, seed=3)
    x, weight = drawn(M, DP, B, S, E), drawn(8, E, seed=1).requires_grad_()
    upstream = drawn(M, DP, B, S, k, seed=2)
    x.requires_grad_()
    loss, totals = objective(x, weight, upstream, config, bias, routing)
    expected_dw, expected_dx = torch.autograd.grad(loss, (weight, x))

    args = x.detach(), weight.detach(), upstream, config, bias, routing, recompute
    dw, dx, table = ranks_gradients(*args)
    torch.testing.assert_close(dw, expected_dw, rtol=0, atol=1e-12)
    torch.testing.assert_close(dx, expected_dx, rtol=0, atol=1e-12)
    for name, coefficient in LOSSES.items():
        counted = table[1, 8 + RoutingCounts.COLUMNS.index(name)].item()
        expected = totals[name].item() if getattr(routing, coefficient) else 0.0
        assert counted == pytest.approx(expected, abs=1e-11), name
    assert not table[0].any(), "the other layer has no router"


def test_counts_are_summed_only_for_losses_that_are_on():
    calls = []
    for scopes in COEFFICIENTS:
        routing = Routing(**COEFFICIENTS[scopes])
        router, _ = make_router(SHAPE, routing, drawn(8, E), None)
        router.sum_over_sequences = lambda counts: calls.append("sequences") or counts
        router.sum_over_batch = lambda counts: calls.append("batch") or counts
        router(drawn(2, 4, E, seed=1))
        balances = routing.moe_seq_aux_loss_coeff + routing.moe_aux_loss_coeff
        expected = ["sequences"] if balances + routing.moe_global_aux_loss_coeff else []
        expected += ["batch"] if routing.moe_global_aux_loss_coeff else []
        assert calls == expected, scopes
        calls.clear()


def test_counts_of_the_step_before_are_gone_when_one_begins():
    router, tally = make_router(SHAPE, Routing(**COEFFICIENTS["global"]), drawn(8, E), None)
    _, experts = router(drawn(2, 4, E, seed=1))
    tally.count(1, experts.flatten(0, 1))
    assert tally.table.any() and tally.counts_of_step.any()
    tally.begin()
    assert not tally.table.any() and not tally.counts_of_step.any()


def test_a_router_chooses_by_float32_scores_under_autocast():
    tally = RoutingCounts(SHAPE, CPU)
    router = Router(SHAPE, Routing(), tally, layer=0)
    router.weight.data.copy_(0.02 * drawn(8, E))
    x = drawn(4, 64, E, seed=1).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        weights, experts = router(x)
    logits = x.float() @ router.weight.T
    assert weights.dtype == torch.float32
    assert torch.equal(experts, route(logits, SHAPE)[1])
    rounded = x @ router.weight.T.bfloat16()
    assert not torch.equal(experts, route(rounded, SHAPE)[1]), "rounding would change no choice"


def forced_logits(layer: int, **keys) -> Tensor:
    """[6, X] of six tokens, in both of two sequences."""
    router = Router(SHAPE, Routing(**keys), RoutingCounts(SHAPE, CPU), layer)
    force_routing([router], 8, torch.arange(1, 7))
    router.weight.data.copy_(drawn(8, E))
    return router.logits(drawn(2, 6, E, seed=1).float()).detach()


def test_a_forced_routing_depends_on_the_position_and_a_biased_one_on_the_layer():
    even = [forced_logits(i, moe_router_force_load_balancing=True) for i in (0, 0, 1)]
    assert torch.equal(even[0], even[1]) and not torch.equal(even[0], even[2])
    torch.testing.assert_close(even[0][0], even[0][1])  # whatever the tokens are
    assert even[0][0].std(0).min() > 0.1, "other experts at another position"
    plain, biased = (forced_logits(0, moe_router_force_biased=b) for b in (-0.0, -2.0))
    bias = (biased - plain).flatten(0, 1)
    torch.testing.assert_close(bias, bias[:1].expand_as(bias))
    assert 0.5 < bias[0].std() / 2 < 1.7
