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
from difference.why import explain, times
from tests.assembled import make_config

MLP = "model.layers.1.mlp"
Change = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # of weights and ids [B, S, k]


@cache
def both() -> Comparison:
    shared = {"n_shared_experts": 1, "moe_shared_expert_gate": True}
    layout = {"dp": 2, "tp": 2, "ep": 2, "sequence_parallel": True}
    trial = trial_of(make_config(**layout, num_local_experts=4, model=shared), 1, own_sizes=False)
    return Comparison(trial, right_whole(trial))


def whole(name: str, dp: int) -> Tensor:
    return both().whole[Key(0, "forward", name, 0, dp)]


def of_pairs(weights: Tensor, ids: Tensor, dp: int) -> Tensor:
    """[k, B, S, E]: what each pair of a token and an expert gives, token by token."""
    x = whole("model.layers.1.post_attention_layernorm", dp)
    rows = torch.zeros(weights.shape[-1], *x.shape, dtype=x.dtype)
    for b, t, k in torch.cartesian_prod(*map(torch.arange, weights.shape)).tolist():
        gate, up, down = (
            both().whole[Key(0, "initial", f"{MLP}.experts.{ids[b, t, k]}.{of}_proj.weight")]
            for of in ("gate", "up", "down")
        )
        inner = torch.nn.functional.silu(gate @ x[b, t]) * (up @ x[b, t])
        rows[k, b, t] = weights[b, t, k] * (down @ inner)
    return rows


def explained(errors: list[Tensor]) -> str:
    """The sentence for rank 0, if the outputs of both dp ranks have these errors."""
    both().all = []
    for rank in range(4):
        at = here(rank, both().trial.layout)
        key = Key(0, "forward", MLP, 0, at.dp)
        indices = indices_of(key, both().whole[key].shape, at, both().trial.layout)
        right, error = (take(x, indices) for x in (both().whole[key], errors[at.dp]))
        both().all.append(Compared(key, at, right + error, right, indices, 0.0, [], []))
    return explain(both().all[0], both())


def with_noise(errors: list[Tensor]) -> list[Tensor]:
    return [error + 1e-6 * torch.rand(error.shape, dtype=error.dtype) for error in errors]


MISTAKES: list[tuple[Change, str]] = [
    (lambda w, ids: (w**2, ids), "8 of 32 tokens have an expert's row weighted twice"),
    (lambda w, ids: (w.flip(2), ids), "8 of 32 tokens have other weights for their experts"),
    (lambda w, ids: (w, (ids + 1) % 4), "8 of 32 tokens have experts that they have not chosen"),
    (lambda w, ids: (w * torch.tensor([1, 0]), ids), "8 of 32 tokens lack an expert that they ha"),
]


@pytest.mark.parametrize(("change", "said"), MISTAKES)
def test_what_is_wrong_about_experts_is_told_and_noise_is_not(change, said):
    right = [(whole(f"{MLP}.gate.weights", d), whole(f"{MLP}.gate.experts", d)) for d in (0, 1)]
    wrong = [change(*pair) for pair in right]
    some = (torch.arange(16) % 4 == 3)[:, None]  # of the tokens
    pairs = enumerate(zip(wrong, right, strict=True))
    errors = [(of_pairs(*a, d) - of_pairs(*b, d)).sum(0) * some for d, (a, b) in pairs]
    assert said in explained(errors) and said not in explained(with_noise(errors))


def test_rows_that_have_moved_to_tokens_of_other_ranks_are_told():
    rows = [
        of_pairs(whole(f"{MLP}.gate.weights", d), whole(f"{MLP}.gate.experts", d), d)[1]
        for d in (0, 1)
    ]
    errors, said = [rows[1] - rows[0], rows[0] - rows[1]], "rows have moved to other tokens"
    assert said in explained(errors) and said not in explained(with_noise(errors))


def test_a_factor_may_be_the_size_of_the_axis_of_experts_or_almost_1():
    assert times(2.0, both()) == "2 (tp or dp or ep) times"
    assert times(1 + 1e-9, both()) == "1.000000001 times"
