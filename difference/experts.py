"""Experts: what is wrong about the sum of the experts' rows that each token gets."""

import torch
import torch.nn.functional as F
from torch import Tensor

from difference.algebra import same
from difference.compare import Compared, Comparison
from difference.places import take
from difference.taps import Key


def _rows(key: Key, both: Comparison, num_experts: int) -> Tensor:
    """What every expert makes of every token, not weighted: [B, S, X, E]."""
    x = both.whole[key._replace(name=key.name.replace("mlp", "post_attention_layernorm"))]
    rows = []
    for e in range(num_experts):
        names = (f"{key.name}.experts.{e}.{of}_proj.weight" for of in ("gate", "up", "down"))
        gate, up, down = (both.weight(name, key.step).T for name in names)
        rows.append(F.silu(x @ gate) * (x @ up) @ down)
    return torch.stack(rows, 2)


def experts_of_tokens(one: Compared, both: Comparison) -> str:
    """Weights c of all experts' rows that give each token's sum, or tokens that are mixed up."""
    key, X = one.key, both.trial.model_config.num_local_experts
    of = {x: key._replace(name=f"{key.name}.gate.{x}") for x in ("weights", "experts")}
    if key.phase != "forward" or of["weights"] not in both.whole or not one.indices:
        return ""
    rows, weights = _rows(key, both, X), both.whole[of["weights"]]
    weights = weights.new_zeros(rows.shape[:3]).scatter_(2, both.whole[of["experts"]], weights)
    # A token may have more than the sum, such as what shared experts add.
    rest = both.whole[key] - (weights[..., None] * rows).sum(2)
    got = (one.got - take(rest, one.indices)).flatten(0, 1)
    rows, weights = (take(t, one.indices[:2]).flatten(0, 1) for t in (rows, weights))
    c = torch.linalg.lstsq(rows.mT, got[..., None]).solution[..., 0]  # [tokens, X]
    if rows.shape[2] > X and same((c[..., None] * rows).sum(1), got):
        chosen, used = weights != 0, c.abs() > 1e-6
        found = {
            "tokens have experts that they have not chosen": used & ~chosen,
            "tokens lack an expert that they have chosen": chosen & ~used,
            "tokens have their experts' rows weighted twice": chosen & same(c, weights**2),
            "tokens have other weights for their experts": (c - weights).abs() > 1e-6,
        }
        counts = ((int(wrong.any(1).sum()), what) for what, wrong in found.items())
        return next((f"{n} of its {len(got)} {what}" for n, what in counts if n), "")
    ranks = [o for o in both.all if o.key._replace(dp=key.dp) == key]
    got, right = (sum(getattr(o, of).sum((0, 1)) for o in ranks) for of in ("got", "right"))
    return "tokens have the experts' rows of other tokens, whose sum is right" * same(got, right)
