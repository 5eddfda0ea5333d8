"""How many bytes a layer keeps of each token, as formulas over the model's shape.

    forward until backward       the inputs of linears, of norms, and of attention
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
) -> float:
    """Bytes that the forward of a layer keeps for backward, per token.

    `rows` of the experts of a rank, to those if tokens use all experts alike.

    recompute   wide (float32, or float64)          in the compute dtype
    none        4 E: of 2 norms each the input,     2 E norms' outputs + 2 Q D q, attention's output
                plain and normalised (GPU: 2 E)     + 2 K D k, v + 4 M gate, up, silu, product
                2 (Q + K) D: of norms of q and k
    selective   4 E                                 2 E + 4 M
    full        1 E: the layer's input              nothing

    A prediction layer keeps 6 E and 2 E more: its input [2E] plain, normalised, and as eh_proj's
    input, and twice the input of the norm behind it; 3 E of these also where it is recomputed.

    Linears in FP8 keep their inputs in one byte a number: norms' outputs, the product, and
    attention's output, which attention itself keeps in the compute dtype, too.
    """
    c, D, E, tp = model_config, model_config.head_dim, model_config.hidden_size, layout.tp
    _refuse_unknown(c)
    wide, narrow = WIDE[dtype], BYTES[dtype]
    split = tp if layout.sequence_parallel else 1  # ranks that share what is wide
    is_further = layer >= c.num_hidden_layers
    if recompute == "full":
        return wide * E * (4 if is_further else 1) / split
    # Norms' outputs are whole: a projection keeps its input as the all-gather has made it. What is
    # recomputed begins before that, and before anything is rounded to 8 bits.
    attention = narrow * E / split
    if recompute == "none":
        heads = narrow * 2 * D * (c.num_attention_heads + c.num_key_value_heads)
        in_8_bits = D * c.num_attention_heads if fp8 else 0
        normed = 2 * wide * sum(family.normed(c) for family in FAMILIES.values())
        attention = _factor(dtype, fp8) * E + (heads + in_8_bits + normed) / tp
    if c.has_experts(layer):
        mlp = _saved_by_experts(c, dtype, layout, fp8, rows)
    else:
        mlp = _saved_by_mlp(E, c.intermediate_size / tp, dtype, fp8)
    further = is_further * (6 * wide + 2 * narrow) * E / split
    return wide * 4 * E / split + attention + mlp + further


KNOWN = {*HIDDEN, "input_layernorm", "post_attention_layernorm"}
KNOWN |= {module for family in FAMILIES.values() for module in family.modules}


@lru_cache(maxsize=64)
def _refuse_unknown(c: ModelConfig) -> None:
    """ValueError for a parameter of a layer whose activations would not be counted."""
    kinds = {c.has_experts(layer): layer for layer in range(c.num_layers)}
    for name in chain(c.attention_shapes(), *map(c.mlp_shapes, kinds.values())):
        if name.split(".")[-1] not in KNOWN:
            why = f"what {name} keeps for backward is not planned"
            raise ValueError(f"{why}: add {name} to the modules of its Family, with what it keeps")


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
    """
    c, D, E, tp = model_config, model_config.head_dim, model_config.hidden_size, layout.tp
    heads = 2 * D * (c.num_attention_heads + c.num_key_value_heads)
    inner, experts = c.intermediate_size, 0
    if c.has_experts(layer):  # a row for each of a token's k, as in _saved_by_experts
        experts = c.num_experts_per_tok * (2 * layout.etp * E + 3 * c.moe_intermediate_size) / tp
        inner = c.n_shared_experts * c.moe_intermediate_size
    mlp = 2 * E + 3 * inner / tp if inner else 0
    return _factor(dtype, fp8) * (2 * E + heads / tp + mlp) + BYTES[dtype] * experts


def factors_of_depth(c: ModelConfig, dtype: str, layout: Layout) -> float:
    """Bytes that a prediction layer adds to factors_per_token: eh_proj's input and gradient."""
    return BYTES[dtype] * 3 * c.hidden_size / (layout.tp if layout.sequence_parallel else 1)


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
