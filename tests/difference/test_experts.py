"""What a token gets of its experts: each mistake gives its sentence, and with noise it does not."""

from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor

from difference.compare import Compared, Comparison
from difference.places import here, indices_of, take
from difference.taps import Key
from difference.tiny import trial_of
from difference.whole import right_whole
from difference.why import explain
from tests.assembled import make_config

MLP = "model.layers.1.mlp"
Pairs = Callable[[Tensor, Tensor], Tensor]  # weights and ids [B, S, k] -> [B, S, E]


@cache
def both() -> Comparison:
    shared = {"n_shared_experts": 1, "moe_shared_expert_gate": True}
    config = make_config(dp=2, tp=2, ep=2, num_local_experts=4, model=shared)
    trial = trial_of(config, 1, own_sizes=False)
    return Comparison(trial, right_whole(trial))


def whole(name: str) -> Tensor:
    return both().whole[Key(0, "forward", name)]


def of_pairs(weights: Tensor, ids: Tensor) -> Tensor:
    """[k, B, S, E]: what each pair of a token and an expert gives, token by token."""
    x = whole(f"{MLP.removesuffix('mlp')}post_attention_layernorm")
    rows = torch.zeros(weights.shape[-1], *x.shape, dtype=x.dtype)
    for b, t, k in torch.cartesian_prod(*map(torch.arange, weights.shape)).tolist():
        gate, up, down = (
            both().whole[Key(0, "initial", f"{MLP}.experts.{ids[b, t, k]}.{of}_proj.weight")]
            for of in ("gate", "up", "down")
        )
        inner = torch.nn.functional.silu(gate @ x[b, t]) * (up @ x[b, t])
        rows[k, b, t] = weights[b, t, k] * (down @ inner)
    return rows


def summed(weights: Tensor, ids: Tensor) -> Tensor:
    return of_pairs(weights, ids).sum(0)


def exchanged(weights: Tensor, ids: Tensor) -> Tensor:
    """The second rows of all tokens go to the tokens behind them."""
    first, second = of_pairs(weights, ids)
    return first + second.flatten(0, 1).roll(1, 0).view_as(first)


MISTAKES: list[tuple[Pairs, str]] = [
    (
        lambda w, ids: summed(w**2, ids),
        "64 of its 64 tokens have their experts' rows weighted twice",
    ),
    (lambda w, ids: summed(w.flip(2), ids), "64 of its 64 tokens have other weights for their ex"),
    (lambda w, ids: summed(w, (ids + 1) % 4), "64 of its 64 tokens have experts that they have no"),
    (lambda w, ids: summed(w * torch.tensor([1, 0]), ids), "64 of its 64 tokens lack an expert t"),
    (exchanged, "tokens have the experts' rows of other tokens, whose sum is right"),
]


@pytest.mark.parametrize(("pairs", "said"), MISTAKES)
def test_what_is_wrong_about_experts_is_told_and_noise_is_not(pairs, said):
    key, at = Key(0, "forward", MLP), here(0, both().trial.layout)
    right, weights = both().whole[key], whole(f"{MLP}.gate.weights")
    ids = whole(f"{MLP}.gate.experts")
    error = pairs(weights, ids) - summed(weights, ids)
    indices = indices_of(key, right.shape, at, both().trial.layout)
    one = Compared(key, at, take(right, indices), take(right, indices), indices, 0.0, [], [])
    for size in (0, 1e-6):
        noise = size * torch.rand(error.shape, dtype=error.dtype)
        wrong = one._replace(got=one.right + take(error + noise, indices))
        both().all = [wrong]
        assert (said in explain(wrong, both())) == (not size)
