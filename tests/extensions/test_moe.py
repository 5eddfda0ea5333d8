"""A mixture on one device: against every expert on every token, and capacity against a loop."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from picotron_min.extensions.experts.moe import Limit, MoE
from picotron_min.extensions.experts.router import RoutingCounts
from picotron_min.extensions.settings import ModelConfig, Routing

SHAPE = ModelConfig(
    61, 8, 16, 3, 2, 2, num_local_experts=6, num_experts_per_tok=2, moe_intermediate_size=12
)
MODELS = {
    "softmax": SHAPE,
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


def mlp(weights: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    gate, up, down = (weights[f"{name}.{p}_proj.weight"] for p in ("gate", "up", "down"))
    inner = x @ gate.T
    return (inner * torch.sigmoid(inner) * (x @ up.T)) @ down.T


def every_expert_on_every_token(
    weights: dict[str, Tensor], config: ModelConfig, x: Tensor, kept: Tensor | None = None
) -> Tensor:
    """x [B, S, E] -> [B, S, E], by weights of all experts, most of them 0; `kept` [B, S, X]."""
    X = config.num_local_experts
    logits = x @ weights["gate.weight"].T
    softmax = config.scoring_func == "softmax"
    scores = logits.softmax(-1) if softmax else logits.sigmoid()
    ranked = scores.detach().clone()
    if not softmax:
        ranked += weights["gate.e_score_correction_bias"]
        groups = ranked.unflatten(-1, (config.n_group, -1)).sort(-1).values[..., -2:].sum(-1)
        worst = groups.argsort(-1)[..., : config.n_group - config.topk_group, None]
        of_group = torch.arange(X) // (X // config.n_group)
        ranked[(of_group == worst).any(-2)] = -math.inf
    least = ranked.sort(-1).values[..., -config.num_experts_per_tok, None]
    of_token = scores * (ranked >= least)
    if config.norm_topk_prob:
        of_token = of_token / of_token.sum(-1, keepdim=True)
    of_token = of_token * config.routed_scaling_factor
    if kept is not None:
        of_token = of_token * kept
    out = torch.zeros_like(x)
    for e in range(X):
        out = out + of_token[..., e, None] * mlp(weights, f"experts.{e}", x)
    if config.n_shared_experts:
        shared = mlp(weights, "shared_experts", x)
        if config.moe_shared_expert_gate:
            shared = shared * torch.sigmoid(x @ weights["shared_expert_gate.weight"].T)
        out = out + shared
    return out


def assert_equals_every_expert(moe: MoE, config: ModelConfig, x: Tensor, kept=None) -> None:
    """Output and gradients, of all weights and of x."""
    weights = dict(moe.named_parameters()) | dict(moe.named_buffers())
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    expected = every_expert_on_every_token(weights, config, theirs, kept)
    upstream = drawn(*x.shape, seed=99)
    names, tensors = zip(*moe.named_parameters(), strict=True)
    of_theirs = torch.autograd.grad((expected * upstream).sum(), (theirs, *tensors))
    out = moe(ours)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    (out * upstream).sum().backward()
    of_ours = (ours.grad, *(p.grad for p in tensors))
    for name, mine, other in zip(("x", *names), of_ours, of_theirs, strict=True):
        assert mine is not None, f"{name} has no gradient"
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-11, msg=name)


@pytest.mark.quick
@pytest.mark.parametrize("model", MODELS)
def test_a_mixture_equals_every_expert_on_every_token(model):
    assert_equals_every_expert(make_moe(MODELS[model]), MODELS[model], drawn(2, 15, 8, seed=7))


def kept_by_hand(weights: Tensor, experts: Tensor, X: int, capacity: int, policy: str) -> Tensor:
    """[n, k] each -> experts, with X where it is full."""
    result = experts.clone()
    for e in range(X):
        pairs = [(t, j) for t, j in itertools.product(*map(range, experts.shape))]
        pairs = [pair for pair in pairs if experts[pair] == e]
        if policy == "probs":  # among equal weights the first ones
            pairs.sort(key=lambda pair: -weights[pair])
        for pair in pairs[capacity:]:
            result[pair] = X
    return result


def some_choices(n: int, k: int, X: int, seed: int) -> tuple[Tensor, Tensor]:
    """Weights with ties, and experts, of which the first are chosen most."""
    popularity = drawn(n, X, seed=seed) - torch.linspace(0, 9, X)
    weights, experts = popularity.softmax(-1).topk(k)
    return (weights * 20).round() / 20, experts


@pytest.mark.parametrize("policy", ["probs", "position"])
@pytest.mark.parametrize("factor", [0.3, 1.0, 1.7, 1e308])
def test_a_full_expert_drops_what_a_loop_drops(factor, policy):
    for seed, (n, k, X) in enumerate([(20, 2, 4), (7, 3, 5), (64, 1, 8), (1, 2, 4)]):
        weights, experts = some_choices(n, k, X, seed)
        routing = {"moe_expert_capacity_factor": factor, "moe_token_drop_policy": policy}
        ours = Limit(X, k, Routing(**routing))(weights, experts)
        capacity = math.ceil(min(n, n * k / X * factor))
        assert torch.equal(ours, kept_by_hand(weights, experts, X, capacity, policy))
        if capacity < n:
            assert (ours == X).any() and torch.bincount(ours.flatten())[:X].max() == capacity


@pytest.mark.parametrize("pads", [False, True], ids=["uneven", "padded"])
@pytest.mark.parametrize("policy", ["probs", "position"])
@pytest.mark.parametrize("model", MODELS)
def test_dropped_pairs_vanish_and_the_others_keep_their_weights(model, policy, pads):
    config, x = MODELS[model], drawn(2, 15, 8, seed=7)
    options = {"moe_expert_capacity_factor": 0.7, "moe_token_drop_policy": policy}
    options["moe_pad_expert_input_to_capacity"] = pads
    moe, X, k = make_moe(config, **options), config.num_local_experts, config.num_experts_per_tok
    with torch.no_grad():
        weights, experts = (t.flatten(0, 1) for t in moe.gate(x))
    capacity = math.ceil(30 * k / X * 0.7)
    kept = kept_by_hand(weights, experts, X, capacity, policy)
    assert (kept == X).any()
    table = torch.zeros(30, X + 1, dtype=torch.float64).scatter_(1, kept, 1.0)
    assert_equals_every_expert(moe, config, x, table[:, :X].view(2, 15, X))
    dropped = (kept == X).sum().item()
    counts = torch.bincount(kept.flatten(), minlength=X + 1)
    assert moe.gate.tally.table[1, : X + 2].tolist() == [*counts.tolist(), 30]
    assert moe.gate.tally.table[1, X].item() == dropped
