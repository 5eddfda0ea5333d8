"""How many bytes a layer has of each token, as formulas over the model's shape.

    forward until backward       the inputs of linears, of norms, and of attention
    in its backward              gradients, at the fullest moment
    B until W                    the factors of weight gradients, where backward is cut in two

E hidden size, Q query heads, K key-value heads, D head dimension, M MLP size; X experts of size F,
k of them for each token. Standard library only, so that a run can be planned anywhere.
"""

from functools import lru_cache
from itertools import chain

from picotron_min.extensions.settings import FAMILIES, Layout, ModelConfig
from picotron_min.placement import HIDDEN

BYTES = {"float64": 8, "float32": 4, "bfloat16": 2}  # of a number in the compute dtype
WIDE = {"float64": 8, "float32": 4, "bfloat16": 4}  # of a parameter, and of the residual stream


def saved_per_token(
    model_config: ModelConfig,
    dtype: str,
    recompute: str,
    layout: Layout,
    layer: int,
    fp8: bool = False,
    rows: float = 1.0,
    device: str = "cpu",
) -> float:
    """Bytes that the forward of a layer keeps for backward, per token.

    `rows`: rows that a rank's experts get, divided by those of an even share.

    recompute   wide (float32, or float64)          in the compute dtype
    none        2 n E: of 2 norms                   2 E norms' outputs + 2 Q D q, attention's output
                n (Q + K) D: of norms of q and k    + 2 K D k, v + 4 M gate, up, silu, product
    selective   2 n E                               2 E + 4 M
    full        1 E: the layer's input              nothing

    n is 1 on GPUs, whose norms keep their input, and 2 on CPUs, which also keep it normalised. A
    prediction layer keeps 3 n E + 2 E more, for eh_proj and its norms; recomputed, (1 + n) E more.

    Linears in FP8 keep their inputs in one byte a number: norms' outputs, the product, and
    attention's output, which attention itself keeps in the compute dtype, too. In float32 a GPU's
    attention repeats K and V for all query heads: see kernels/attention.py.
    """
    c, D, E, tp = model_config, model_config.head_dim, model_config.hidden_size, layout.tp
    _refuse_unknown(c)
    wide, narrow, n = WIDE[dtype], BYTES[dtype], norms_keep(device)
    split = tp if layout.sequence_parallel else 1  # ranks that share what is wide
    is_further = layer >= c.num_hidden_layers
    if recompute == "full":
        return wide * E * (1 + is_further * (1 + n)) / split
    # Norms' outputs are whole: a projection keeps its input as the all-gather has made it. What is
    # recomputed begins before that, and before anything is rounded to 8 bits.
    attention = narrow * E / split
    if recompute == "none":
        heads, kv_heads = c.num_attention_heads, c.num_key_value_heads
        repeats = device != "cpu" and dtype == "float32" and layout.cp == 1
        kept = narrow * 2 * D * (heads + (heads if repeats else kv_heads))
        normed = "self_attn.q_norm" in c.attention_shapes()
        kept += fp8 * D * heads + normed * n * wide * D * (heads + kv_heads)
        attention = _factor(dtype, fp8) * E + kept / tp
    if c.has_experts(layer):
        mlp = _saved_by_experts(c, dtype, layout, fp8, rows)
    else:
        mlp = _saved_by_mlp(E, c.intermediate_size / tp, dtype, fp8)
    further = is_further * (3 * n * wide + 2 * narrow) * E / split
    return wide * 2 * n * E / split + attention + mlp + further


def made_by_backward(
    model_config: ModelConfig,
    dtype: str,
    layout: Layout,
    layer: int,
    fp8: bool = False,
    rows: float = 1.0,
) -> float:
    """Bytes of gradients beside what forward has kept, at the fullest, per token.

    That is in the MLP, where backward makes the gradients of silu's output and of up, or of the
    experts' weighting, from their product's. What the last linear has kept is freed by then, unless
    weight gradients wait: for a message of tensor parallelism, or for W.

                wide                                in the compute dtype
    dense       E: came from the layer behind       3 M, less M that are freed
    experts     E; 3 F in each row                  less F that are freed
    if they wait                                    E, down's gradient, and nothing is freed
    """
    c, E, tp = model_config, model_config.hidden_size, layout.tp
    wide, narrow = WIDE[dtype], BYTES[dtype]
    waits = tp > 1 or layout.schedule.splits_backward
    made = wide * E / (tp if layout.sequence_parallel else 1) + waits * narrow * E
    if c.has_experts(layer):
        each = 3 * wide - (not waits) * narrow
        return made + rows * c.num_experts_per_tok * c.moe_intermediate_size * each / tp
    return made + c.intermediate_size / tp * (3 * narrow - (not waits) * _factor(dtype, fp8))


def norms_keep(device: str) -> int:
    """Tensors of the size of its input that a norm keeps: a CPU's also keeps it normalised."""
    return 2 if device == "cpu" else 1


KNOWN = {*HIDDEN, "input_layernorm", "post_attention_layernorm"}
KNOWN |= {module for family in FAMILIES.values() for module in family.modules}


@lru_cache(maxsize=64)
def _refuse_unknown(c: ModelConfig) -> None:
    """ValueError for a parameter of a layer whose activations would not be counted."""
    kinds = {c.has_experts(layer): layer for layer in range(c.num_layers)}
    for name in chain(c.attention_shapes(), *map(c.mlp_shapes, kinds.values())):
        if (module := name.split(".")[-1]) not in KNOWN:
            why = f"what {name} keeps for backward is not planned"
            remedy = f"count it in saved_per_token, and add {module!r} to the modules of its Family"
            raise ValueError(f"{why}: {remedy}")


def _factor(dtype: str, fp8: bool) -> int:
    """Bytes of a number that a linear multiplies with."""
    return 1 if fp8 else BYTES[dtype]


def _saved_by_mlp(E: int, inner: float, dtype: str, fp8: bool) -> float:
    return _factor(dtype, fp8) * (E + inner) + BYTES[dtype] * 3 * inner


def factors_per_token(
    model_config: ModelConfig, dtype: str, layout: Layout, layer: int, fp8: bool = False
) -> float:
    """Bytes of x and dy of a layer's linears, which are kept from B until W, per token.

    attention   2 E its input, o's gradient       2 Q D + 2 K D gradients of q, k, v; o's input
    MLP         2 E its input, down's gradient    3 M gradients of gate, up; down's input
    further     3 E eh_proj's input and gradient, of a prediction layer
    """
    c, D, E, tp = model_config, model_config.head_dim, model_config.hidden_size, layout.tp
    heads = 2 * D * (c.num_attention_heads + c.num_key_value_heads)
    inner, experts = c.intermediate_size, 0
    if c.has_experts(layer):  # a row for each of a token's k, as in _saved_by_experts
        experts = c.num_experts_per_tok * (2 * layout.etp * E + 3 * c.moe_intermediate_size) / tp
        inner = c.n_shared_experts * c.moe_intermediate_size
    mlp = 2 * E + 3 * inner / tp if inner else 0
    further = (layer >= c.num_hidden_layers) * 3 * E / (tp if layout.sequence_parallel else 1)
    return _factor(dtype, fp8) * (2 * E + heads / tp + mlp) + BYTES[dtype] * (experts + further)


def _saved_by_experts(c: ModelConfig, dtype: str, layout: Layout, fp8: bool, rows: float) -> float:
    """Bytes that a mixture's forward keeps, its input too, per token.

    router    E its input, in wide; X scores, in wide
    experts   a row for each of a token's k, on every etp rank: E its input, 4 F as in an MLP, and
              the product once more, weighted; the weighting is in wide
    shared    E their input, 4 F each as in an MLP; E their output, if it is gated
    """
    E, F, tp = c.hidden_size, c.moe_intermediate_size, layout.tp
    wide, narrow = WIDE[dtype], BYTES[dtype]
    # Each tp rank routes its own part of a sequence; shared experts have the whole, as MLPs do.
    saved = wide * (E + c.num_local_experts) / tp
    saved += rows * c.num_experts_per_tok * (narrow * (layout.etp * E + 4 * F) + wide * F) / tp
    if c.n_shared_experts:
        saved += _saved_by_mlp(E, c.n_shared_experts * F / tp, dtype, fp8)
        if narrow == wide and tp == 1 and not fp8:
            saved -= narrow * E  # their input is the router's
    if c.moe_shared_expert_gate:  # which multiplies in `dtype`
        has_input = narrow == wide or not fp8  # the router's, or the shared experts'
        saved += (1 + (not has_input)) * narrow * E / (tp if layout.sequence_parallel else 1)
    return saved
