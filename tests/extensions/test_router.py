"""Routers: balance losses and counts, against a version that is written out.

That they choose as models of transformers do is in test_hugging_face_experts.py.
"""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from picotron_min.extensions.experts.router import (
    LOSSES,
    Router,
    RoutingCounts,
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


def test_a_group_is_as_good_as_its_two_best_experts_with_their_biases():
    config = SIGMOID.override(num_local_experts=12, n_group=3, topk_group=1, num_experts_per_tok=2)
    # The first group has the best one, the second the best two, the third the largest sum.
    bias = torch.tensor([0.9, 0, 0, 0, 0.5, 0.5, 0, 0, 0.4, 0.4, 0.4, 0.4])
    _, experts, _ = route(torch.zeros(1, 12), config, bias)
    assert sorted(experts[0].tolist()) == [4, 5]


# The losses: one rank's micro-batches against all of a step at once, in autograd. What ranks add up
# is in test_layouts.py.

EACH = {"moe_seq_aux_loss_coeff": 0.3, "moe_aux_loss_coeff": 0.2, "moe_global_aux_loss_coeff": 0.5}
ALL = EACH | {"moe_z_loss_coeff": 0.1}
NONE = dict.fromkeys(ALL, 0.0)
M, B, S, E = 3, 4, 4, 8  # as many rows as places: dims taken for each other show in values


def make_router(config: ModelConfig, routing: Routing, weight: Tensor, bias: Tensor | None):
    tally = RoutingCounts(config, CPU)
    router = Router(config, routing, tally, layer=1).double()
    router.weight.data.copy_(weight)
    if bias is not None:
        router.e_score_correction_bias.data.copy_(bias)
    return router, tally


def aux(shares: Tensor, counts: Tensor, num_tokens: int, k: int) -> Tensor:
    """Megatron-LM's loss of tokens [T, X]: X / (k T T') sum_i c_i sum_x s_xi, times T."""
    return shares.shape[-1] / (k * num_tokens) * (counts * shares.sum(0)).sum()


def objective(x: Tensor, weight: Tensor, upstream: Tensor, config, bias, routing: Routing):
    """All that a step minimises, and its parts: x [M, B, S, E], upstream [M, B, S, k]."""
    k = config.num_experts_per_tok
    logits = x @ weight.T
    weights, _, _ = route(logits, config, bias)  # as models of transformers have them
    scores = logits.exp() if config.scoring_func == "softmax" else logits.sigmoid()
    shares = scores / scores.sum(-1, keepdim=True)
    # Which experts each token would use without bias and groups: 1 or 0, [..., X].
    counts = one_hot(shares.topk(k).indices, shares.shape[-1]).sum(-2).double()
    total = {"task": (weights * upstream).sum()}
    total |= dict.fromkeys(LOSSES, 0.0)
    for j in range(M):
        for b in range(B):
            total["seq_load_balancing_loss"] += aux(shares[j, b], counts[j, b].sum(0), S, k)
        of_batch, so_far = shares[j].flatten(0, 1), counts[: j + 1].sum((0, 1, 2))
        total["load_balancing_loss"] += aux(of_batch, counts[j].sum((0, 1)), B * S, k)
        total["global_load_balancing_loss"] += aux(of_batch, so_far, (j + 1) * B * S, k)
    total["z_loss"] = logits.logsumexp(-1).square().sum()
    weighted = (getattr(routing, coefficient) * total[n] for n, coefficient in LOSSES.items())
    return total["task"] + sum(weighted), total


def gradients(x: Tensor, upstream: Tensor, router: Router) -> list[Tensor]:
    """Of the router's weight and of x, micro-batch by micro-batch."""
    inputs = [part.clone().requires_grad_() for part in x]
    losses = [(router(x)[0] * factor).sum() for x, factor in zip(inputs, upstream, strict=True)]
    for loss in losses:  # F0 F1 ... B0 B1 ...: later counts must not change earlier gradients
        loss.backward()
    return [router.weight.grad, torch.stack([part.grad for part in inputs])]


@pytest.mark.parametrize("model", MODELS)
def test_gradients_are_those_of_the_objective_written_out(model):
    config, routing = MODELS[model], Routing(**ALL)
    bias = 0.2 * drawn(8, seed=3) if config.scoring_func == "sigmoid" else None
    x, weight = drawn(M, B, S, E).requires_grad_(), drawn(8, E, seed=1).requires_grad_()
    upstream = drawn(M, B, S, config.num_experts_per_tok, seed=2)
    loss, totals = objective(x, weight, upstream, config, bias, routing)
    expected = torch.autograd.grad(loss, (weight, x))

    router, tally = make_router(config, routing, weight.detach(), bias)
    ours = gradients(x.detach(), upstream, router)
    torch.testing.assert_close(ours, [*expected], rtol=0, atol=1e-12)
    for name in LOSSES:
        counted = tally.table[1, 8 + RoutingCounts.COLUMNS.index(name)].item()
        assert counted == pytest.approx(totals[name].item(), abs=1e-11), name
    assert not tally.table[0].any(), "the other layer has no router"
    tally.begin()  # counts of the step before are gone
    assert not tally.table.any() and not tally.counts_of_step.any()


@pytest.mark.parametrize(
    "on,expected",
    [([], ""), (["moe_z_loss_coeff"], ""), (["moe_aux_loss_coeff"], "S"), ([*EACH], "S B")],
)
def test_counts_are_summed_and_losses_noted_only_where_they_are_on(on, expected):
    """S: over ranks with other parts of the sequences, B: with other sequences."""
    router, tally = make_router(SHAPE, Routing(**NONE | dict.fromkeys(on, 0.1)), drawn(8, E), None)
    calls = []
    router.sum_over_sequences = lambda counts: calls.append("S") or counts
    router.sum_over_batch = lambda counts: calls.append("B") or counts
    router(drawn(2, 4, E, seed=1))
    assert " ".join(calls) == expected
    noted = {name for name, of in zip(RoutingCounts.COLUMNS, tally.table[1, 8:], strict=True) if of}
    assert noted == {name for name in LOSSES if LOSSES[name] in on}
