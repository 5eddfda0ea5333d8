"""A mixture on one device: its sorted rows against pair by pair, and capacity against a loop.

That it computes what models of transformers do is in test_hugging_face_experts.py.
"""

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from picotron_min.extensions.experts.moe import Limit, MoE, TooManyRows
from picotron_min.extensions.experts.router import RoutingCounts
from picotron_min.extensions.settings import ModelConfig, Routing
from picotron_min.runtime.failures import plain_message

SHAPE = ModelConfig(
    61, 8, 16, 3, 2, 2, num_local_experts=6, num_experts_per_tok=2, moe_intermediate_size=12
)
MODELS = {
    "gated": SHAPE.override(
        n_shared_experts=1, moe_shared_expert_gate=True, norm_topk_prob=False, num_experts_per_tok=1
    ),
    "sigmoid": SHAPE.override(
        scoring_func="sigmoid",
        n_shared_experts=2,
        num_local_experts=12,
        num_experts_per_tok=3,
        n_group=3,
        topk_group=2,
        routed_scaling_factor=2.5,
    ),
}
DROPPING = {"moe_expert_capacity_factor": 0.7}
PADDED = DROPPING | {"moe_pad_expert_input_to_capacity": True}
QUIET = {"moe_seq_aux_loss_coeff": 0.0}  # no gradients but those of the output
CPU = torch.device("cpu")


def drawn(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers; no two of a row are so close that rounding changes their order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def make_moe(config: ModelConfig, layer: int = 1, **routing) -> MoE:
    moe = MoE(config, Routing(**QUIET | routing), RoutingCounts(config, CPU), layer).double()
    for seed, tensor in enumerate([*moe.parameters(), *moe.buffers()]):
        tensor.data.copy_(0.5 * drawn(*tensor.shape, seed=seed))
    return moe


def kept_by_hand(weights: Tensor, experts: Tensor, X: int, capacity: int, policy: str) -> Tensor:
    """[n, k] each -> experts, with X where it is full."""
    result = experts.clone()
    for e in range(X):
        pairs = (experts == e).nonzero().tolist()
        if policy == "probs":  # among equal weights the first ones
            pairs.sort(key=lambda pair: -weights[tuple(pair)])
        for pair in pairs[capacity:]:
            result[tuple(pair)] = X
    return result


@pytest.mark.parametrize("policy", ["probs", "position"])
@pytest.mark.parametrize("factor", [0.3, 1.7, 1e308])
def test_a_full_expert_drops_what_a_loop_drops(factor, policy):
    for seed, (n, k, X) in enumerate([(20, 2, 4), (7, 3, 5), (64, 1, 8), (1, 2, 4)]):
        popularity = drawn(n, X, seed=seed) - torch.linspace(0, 9, X)  # of the first experts most
        weights, experts = popularity.softmax(-1).topk(k)
        weights = (weights * 20).round() / 20  # with ties
        routing = {"moe_expert_capacity_factor": factor, "moe_token_drop_policy": policy}
        ours = Limit(X, k, Routing(**routing))(weights, experts)
        capacity = math.ceil(min(n, n * k / X * factor))
        assert torch.equal(ours, kept_by_hand(weights, experts, X, capacity, policy))
        if capacity < n:
            assert (ours == X).any() and torch.bincount(ours.flatten())[:X].max() == capacity


def test_too_many_rows_on_a_rank_are_an_error_with_its_own_remedy(monkeypatch):
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    limit = Limit(4, 1, Routing(moe_expert_rank_capacity_factor=1.9), layer=3)
    limit.check_rows([100, 21], 128)  # 64 are planned
    with pytest.raises(TooManyRows) as error:
        limit.check_rows([100, 22], 128)
    message = plain_message(error.value, rank=1, is_usage=False)
    assert "layer 3: the experts of rank 1 get 122 rows, above 1.9 x 64, the planned" in message
    assert message.endswith("or drop tokens by moe_expert_capacity_factor")


def pair_by_pair(moe: MoE, x: Tensor) -> Tensor:
    """x [B, S, E] -> [B, S, E]: each token's experts that do not drop it, one after the other."""
    tokens = x.flatten(0, 1)
    weights, experts = (t.flatten(0, 1) for t in moe.gate(x))
    rows = [torch.zeros_like(token) for token in tokens]
    for t, of_token in enumerate(moe.limit(weights, experts).tolist()):
        for j, e in enumerate(of_token):
            if e < len(moe.experts):
                rows[t] = rows[t] + moe.experts[str(e)](tokens[t, None], weights[t, j, None])[0]
    shared = moe.shared(x)
    out = torch.stack(rows).view_as(x)
    return out if shared is None else out + shared


@pytest.mark.quick
@pytest.mark.parametrize(
    "model,options",
    [
        ("gated", {}),
        ("gated", DROPPING | {"moe_token_drop_policy": "position"}),
        ("sigmoid", PADDED),
    ],
)
def test_a_mixture_computes_what_pairs_do_one_by_one(model, options):
    config, x = MODELS[model], drawn(2, 15, 8, seed=7)
    moe, reference = make_moe(config, **options), make_moe(config, **options)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    out, expected = moe(ours), pair_by_pair(reference, theirs)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    counts = moe.gate.tally.table[1, : config.num_local_experts + 2]
    assert counts[:-1].sum() == 30 * config.num_experts_per_tok and counts[-1] == 30
    assert (counts[-2] > 0) == bool(options), "some are dropped"
    for result in (out, expected):
        (result * drawn(*x.shape, seed=99)).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-11)
    for (name, p), q in zip(moe.named_parameters(), reference.parameters(), strict=True):
        expected = torch.zeros_like(q) if q.grad is None else q.grad  # an expert without tokens
        torch.testing.assert_close(p.grad, expected, rtol=0, atol=1e-11, msg=name)
