"""Experts: what is wrong about the sum of the experts' rows that each token gets."""

import torch
import torch.nn.functional as F

from difference.algebra import same
from difference.compare import Compared, Comparison
from difference.places import take

MOST = 50_000_000  # numbers of all experts' rows for this rank's tokens


def experts_of_tokens(one: Compared, both: Comparison) -> str:
    """The weights of all experts' rows that give each token's sum; else, whether rows moved."""
    key, names = one.key, ("gate.weights", "gate.experts")
    of = [key._replace(name=f"{key.name}.{name}") for name in names]
    if key.phase != "forward" or of[0] not in both.whole or not one.indices:
        return ""
    of.append(key._replace(name=key.name.replace("mlp", "post_attention_layernorm")))
    weights, ids, x = (take(both.whole[k], one.indices[:2]).flatten(0, 1) for k in of)
    X, tokens = both.trial.model_config.num_local_experts, len(x)
    if x.numel() * X > MOST:
        return ""
    rows = []
    for e in range(X):
        linears = (f"{key.name}.experts.{e}.{name}_proj.weight" for name in ("gate", "up", "down"))
        gate, up, down = (both.weight(linear, key.step).T for linear in linears)
        rows.append(F.silu(x @ gate) * (x @ up) @ down)
    rows = torch.stack(rows, 1)  # [tokens, X, E], not weighted
    weights = weights.new_zeros(rows.shape[:2]).scatter_(1, ids, weights)
    # A token may have more than the sum, such as what shared experts add.
    got = (one.got - one.right).flatten(0, 1) + (weights[..., None] * rows).sum(1)
    c = torch.linalg.lstsq(rows.mT, got[..., None]).solution[..., 0]  # [tokens, X]
    if rows.shape[2] > X and same((c[..., None] * rows).sum(1), got):
        chosen, used, other = weights != 0, c.abs() > 1e-6, (c - weights).abs() > 1e-6
        found = (
            (used & ~chosen, "have experts that they have not chosen"),
            (chosen & ~used, "lack an expert that they have chosen"),
            (other & ((c - weights**2).abs() < 1e-6), "have an expert's row weighted twice"),
            (other, "have other weights for their experts"),
        )
        counts = ((int(wrong.any(1).sum()), what) for wrong, what in found)
        return next((f"{n} of {tokens} tokens {what}" for n, what in counts if n), "")
    ranks = [o for o in both.all if o.key._replace(dp=key.dp) == key]
    sums = [sum(getattr(o, name).sum((0, 1)) for o in ranks) for name in ("got", "right")]
    return "summed over all tokens it is right: rows have moved to other tokens" * same(*sums)
