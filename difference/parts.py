"""Parts: the summands that a right tensor consists of, each with where it comes from.

an embedding, a row-parallel product    a part for each tp rank
the gradient of a norm's output         for each linear that reads it
a parameter's gradient, the loss        for each micro-batch and dp rank
the square of the gradient's norm       for matrices, norms and embeddings
a weight                                before the update, and the update
"""

import torch
from torch import Tensor

from difference.compare import Compared, Comparison
from difference.places import chunk, take
from difference.taps import Key

Parts = dict[tuple, Tensor]  # by (axis, place on it), of each axis
SUMS = ("embed_tokens", ".self_attn", ".mlp")
READERS = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}


def products(key: Key, both: Comparison, step: int) -> Parts:
    """What each tp rank adds to an embedding or a row-parallel product, with a step's weights."""
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
    elif key.phase in ("loss", "summed gradient"):
        before = torch.zeros(())
        for m, d in both.trial.micro_batches:
            of = key._replace(phase="forward", micro_batch=m, dp=d)
            so_far = whole.get(of._replace(phase="sum so far"))
            if key.phase == "loss":
                so_far = before + whole[of].sum() / both.num_targets(key.step)
            if so_far is not None:
                parts[("micro-batch", m), ("dp", d)], before = so_far - before, so_far
    elif key.phase == "gradient norm":
        for of, gradient in whole.items():
            if of[:2] == (key.step, "summed gradient"):
                is_end = "embed_tokens" in of.name or "lm_head" in of.name
                kind = "the embeddings" if is_end else "matrices"
                kind = (("", "the weights of norms" if "norm" in of.name else kind),)
                square = gradient.square().sum() / both.num_targets(key.step) ** 2
                parts[kind] = parts.get(kind, 0) + square
    elif key.phase == "weights":
        before = both.weight(key.name, key.step)
        parts = {(("", "itself before the update"),): before}
        parts[("", "its update"),] = whole[key] - before
    return {label: take(part, one.indices) for label, part in parts.items()}
