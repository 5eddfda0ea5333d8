"""Parts: the summands that a right tensor consists of, each with where it comes from.

an embedding, a row-parallel product    a part for each tp rank
the gradient of a norm's output         for each linear that reads it
the gradients of attention's q, k, v    for each cp rank, of its queries
the gradient of the last norm's output  for each tp rank, of its part of the vocabulary
a parameter's gradient, the loss        for each micro-batch and dp rank
the square of the gradient's norm       for kinds of parameters, and ranks that cut them
a weight                                before the update, the update, and what you change then

What an activation or its gradient is besides is a part of its own: what your extension adds.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from difference.algebra import same
from difference.compare import Compared, Comparison
from difference.places import IN, OUT, UNCUT, chunk, positions, take
from difference.taps import Key
from picotron_min.loss import IGNORE_INDEX

Parts = dict[tuple, Tensor]  # by (axis, place on it), of each axis
REST = (("", "what your extension adds"),)
SUMS = ("embed_tokens", ".self_attn", ".mlp")
READERS = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}


def products(key: Key, both: Comparison, step: int) -> Parts:
    """What each tp rank adds to an embedding or a row-parallel product, with a step's weights.

    Of a column-parallel product, the whole: it is no sum.
    """
    layer, *linear = key.name.rsplit(".", 2)
    norm = next((norm for norm, linears in READERS.items() if ".".join(linear) in linears), None)
    x = both.whole.get(key._replace(name=f"{layer}.{norm}"))
    if key.phase == "forward" and x is not None:
        return {
            (("", "the product with its weight"),): x @ both.weight(f"{key.name}.weight", step).T
        }
    linear = f"{key.name}.{'o_proj' if key.name.endswith('attn') else 'down_proj'}"
    is_embedding = key.name == "model.embed_tokens"
    of = key._replace(name="tokens" if is_embedding else f"{linear}.input")
    if key.phase != "forward" or of not in both.whole or not key.name.endswith(SUMS):
        return {}
    x, weight = both.whole[of], both.weight(f"{key.name if is_embedding else linear}.weight", step)
    slices, tp = range(weight.shape[not is_embedding]), both.trial.layout.tp
    slices = {(("tp", t),): [*chunk(slices, t, tp)] for t in range(tp)}
    if not is_embedding:
        return {t: x[..., columns] @ weight[:, columns].T for t, columns in slices.items()}
    return {t: weight[x] * torch.isin(x, torch.tensor(i))[..., None] for t, i in slices.items()}


def parts_of(one: Compared, both: Comparison) -> Parts:
    """The summands of a tensor, on this rank; none where they are not known."""
    key, whole, parts = one.key, both.whole, products(one.key, both, one.key.step)
    if key.phase == "backward":  # of the output of a norm, from each linear that reads it
        layer, _, norm = key.name.rpartition(".")
        for linear in READERS.get(norm, ()):
            gradient = whole.get(key._replace(name=f"{layer}.{linear}"))
            if gradient is not None:
                weight = both.weight(f"{layer}.{linear}.weight", key.step)
                parts[("linear", linear.split(".")[-1]),] = gradient @ weight
        if key.name == "model.norm":
            parts = of_logits(key, both)
        if ".core_attention." in key.name:
            parts = by_queries(one, both)
    elif key.phase in ("loss", "summed gradient"):
        before = torch.zeros(())
        for m, d in both.trial.micro_batches:
            of = key._replace(phase="forward", micro_batch=m, dp=d)
            so_far = whole.get(of._replace(phase="sum so far"))
            if key.phase == "loss":
                so_far = before + whole[of].sum() / both.num_targets(key.step)
            if so_far is not None:
                parts[("micro-batch", m), ("dp", d)], before = so_far - before, so_far
    elif key.phase == "weights":
        before, end = both.weight(key.name, key.step), whole[key]
        stepped = whole.get(key._replace(phase="stepped"), end)
        parts = {(("", "itself before the update"),): before}
        parts[("", "its update"),] = stepped - before
        if not same(stepped, end):
            parts[("", "what your extension changes after the update"),] = end - stepped
    parts = {label: take(part, one.indices) for label, part in parts.items()}
    if parts and key.phase in ("forward", "backward"):
        rest = one.right - sum(parts.values())
        parts |= {} if same(one.right - rest, one.right) else {REST: rest}
    return parts


def head_of(both: Comparison, step: int) -> Tensor:
    is_tied = both.trial.model_config.tie_word_embeddings
    return both.weight("model.embed_tokens.weight" if is_tied else "lm_head.weight", step)


def of_logits(key: Key, both: Comparison, per_slice: bool = False) -> Parts:
    """What each tp rank's slice of the vocabulary gives to the gradient of the last norm.

    `per_slice`: with a softmax over that slice alone.
    """
    of = key._replace(phase="forward")
    x, targets = both.whole[of], both.whole[of._replace(name="targets")]
    weight, tp = head_of(both, key.step), both.trial.layout.tp
    logits, counts = x @ weight.T, targets != IGNORE_INDEX
    ids = [[*chunk(range(len(weight)), t, tp)] for t in range(tp)]
    slices = ids if per_slice else [range(len(weight))]
    p = torch.cat([logits[..., i].softmax(-1) for i in slices], -1)
    gradient = (p - F.one_hot(targets * counts, len(weight))) * counts[..., None]
    return {(("tp", t),): gradient[..., i] @ weight[i] for t, i in enumerate(ids)}


def by_queries(one: Compared, both: Comparison) -> Parts:
    """What the queries of each cp rank give to the gradient of q, k or v of attention."""
    core, _, letter = one.key.name.rpartition(".")
    layout, size = both.trial.layout, both.whole[one.key].shape[2]
    if layout.cp == 1 or both.trial.workload.document_mask:
        return {}
    gradient = both.whole[one.key._replace(name=core)]
    of = one.key._replace(phase="forward")
    q, k, v = (both.whole[of._replace(name=f"{core}.{x}")].clone().requires_grad_() for x in "qkv")
    repeats, parts = q.shape[1] // k.shape[1], {}
    with torch.enable_grad():
        wide = (x.repeat_interleave(repeats, 1) for x in (k, v))
        out = F.scaled_dot_product_attention(q, *wide, is_causal=True)
    for cp in range(layout.cp):
        own = torch.zeros(size, 1, dtype=torch.float64)
        own[positions(one.at._replace(cp=cp), layout, size)] = 1
        x = {"q": q, "k": k, "v": v}[letter]
        parts[("cp", cp),] = torch.autograd.grad(out, x, gradient * own, retain_graph=True)[0]
    return parts


def with_other_lse(one: Compared, both: Comparison) -> dict[str, Tensor]:
    """The gradient of v, if backward used another log-sum-exp than all keys'.

    With more than two ranks the output is wrong before it: the next merge uses it, too.
    """
    core, _, letter = one.key.name.rpartition(".")
    layout, of = both.trial.layout, one.key._replace(phase="forward")
    is_ring = layout.cp > 1 and layout.cp_engine == "ring" and not both.trial.workload.document_mask
    if (one.key.phase, letter) != ("backward", "v") or not is_ring:
        return {}
    q, k = (both.whole[of._replace(name=f"{core}.{x}")] for x in "qk")
    size, owner = q.shape[2], torch.zeros(q.shape[2])
    for cp in range(layout.cp):
        owner[positions(one.at._replace(cp=cp), layout, size)] = cp
    k = k.repeat_interleave(repeats := q.shape[1] // k.shape[1], 1)
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    scores = scores.masked_fill(torch.ones(size, size).triu(1).bool(), -math.inf)
    of_rank = [scores.masked_fill(owner != cp, -math.inf) for cp in range(layout.cp)]
    blocks = torch.stack([x.logsumexp(-1) for x in of_rank])  # [cp, B, Q, S]; -inf: it sees none
    largest, is_merged = blocks.amax(0), blocks.isfinite().sum(0) > 1
    lses = {
        "the log-sum-exp of each rank's own keys": blocks.gather(
            0, owner.long().expand_as(largest)[None]
        )[0],
        "the largest log-sum-exp of a rank's keys": largest,
        "the sum of the log-sum-exps of ranks' keys": blocks.nan_to_num(neginf=0).sum(0),
        "a log-sum-exp less the largest of a rank's keys": scores.logsumexp(-1)
        - largest * is_merged,
    }
    gradient, found = both.whole[one.key._replace(name=core)], {}
    for name, lse in lses.items():
        dv = (scores - lse[..., None]).exp().mT @ gradient
        found[name] = take(dv.unflatten(1, (-1, repeats)).sum(2), one.indices)
    return found


def squares(one: Compared, both: Comparison, axis: str = "") -> Parts:
    """Of the norm: for each kind of parameter, of each place on an axis that has other parts of it.

    What several ranks have alike belongs to the first of them.
    """
    parts, seen = {}, set()
    for other in both.all:
        name, place = other.key.name, (other.key.name, *map(tuple, other.indices))
        if other.key[:2] != (one.key.step, "summed gradient") or place in seen:
            continue
        seen.add(place)
        module = name.removesuffix(".weight").split(".")[-1]
        kind = f"your {module}"
        if module in OUT + IN or ".experts." in name:
            kind = "matrices"
        elif module in ("embed_tokens", "lm_head"):
            kind = "the embeddings"
        elif UNCUT.fullmatch(name.removesuffix(".weight")):
            kind = "the weights of norms" if "norm" in module else "routers"
        label = (("", kind), *(((axis, getattr(other.at, axis)),) if axis else ()))
        square = other.right.square().sum() / both.num_targets(one.key.step) ** 2
        parts[label] = parts.get(label, 0) + square
    return parts
