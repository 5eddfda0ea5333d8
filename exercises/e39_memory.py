"""39 memory: what is kept until the weights' gradients are computed

target: planner.activations:factors_per_token
no training: the planner calls the function; no step of training does

Return how many bytes a layer keeps per token from B until W: x and dy of each of its linears, where
linears with the same input keep it once. Norms and routers are not among them. Attention has q, k,
v and o. An MLP has gate, up and down; in a layer with experts, instead, each of a token's k experts
has them for a row of this token, and shared experts are one MLP of n_shared_experts times
moe_intermediate_size. With tp, what is between the first and the last linear of a sublayer is
divided, and what is around them is whole. The rows of experts: each tp rank has only some tokens,
E / tp a token, but etp ranks get copies, and F is divided by tp in all.
A factor has BYTES[dtype] bytes, or 1 with fp8; routed experts do not multiply in 8 bits.
Read: planner/activations.py, extensions/overlap/linear.py, model.py.

? Write down x and dy of each linear, and cross out what is the same tensor.
? With c the config: c.head_dim, c.num_attention_heads, c.num_key_value_heads, c.hidden_size,
  c.intermediate_size, c.has_experts(layer), c.num_experts_per_tok, c.moe_intermediate_size,
  c.n_shared_experts; layout.tp, layout.etp; _factor(dtype, fp8), BYTES[dtype] for experts.
? Attention: E before q, k, v; their gradients Q D and 2 K D; o's input Q D; E behind o. An MLP of
  M: E before, gradients of gate and up and down's input, M each, E behind. A row of an expert has
  the same with F; its two E count etp times, and the whole is divided by tp.
! 76 KB a token and layer wait for W in Llama-3.2-1B, 65% of what forward has kept. In production:
  `torch.distributed.pipelining.ScheduleZBVZeroBubble`.
"""

from collections.abc import Callable
from functools import cache
from types import SimpleNamespace

import torch

from exercises.exercise import Case, Dice, sizes_of
from exercises.memory import storage_bytes
from exercises.pictures import bars
from picotron_min.extensions.experts.moe import apply_moe
from picotron_min.extensions.experts.router import RoutingCounts
from picotron_min.extensions.overlap.linear import WeightGradients, apply_queue, take_apart
from picotron_min.extensions.settings import ModelConfig, Routing
from picotron_min.model import Llama
from picotron_min.planner.activations import BYTES

TOKENS = 6
# By how much a size is enlarged, to see what it counts for; the last three where there are experts.
MORE = {"hidden": 8, "heads": 4, "key_heads": 2, "head_dim": 2, "inner": 4}
MORE |= {"expert": 4, "k": 1, "shared": 2}


def cases(dice: Dice) -> list[Case]:
    sizes = {"hidden": dice.choice((12, 20)), "inner": 2 * dice.randint(5, 9), "k": 3}
    sizes |= {"expert": 2 * dice.randint(10, 14), "heads": 4, "key_heads": 2, "head_dim": 4}
    common = sizes | {"shared": 0, "tp": 1, "ep": 1, "etp": 1, "fp8": False, "experts": 0}
    common |= {"dense": (), "layer": 0}
    odd = sizes["expert"] + 1  # with this size a rank's share is no whole number
    return [
        Case(1, **common | {"dtype": "float64"}),
        Case(1, **common | {"dtype": "bfloat16", "tp": 2}),
        Case(1, **common | {"dtype": "bfloat16", "fp8": True}),
        Case(1, **common | {"dtype": "float32", "experts": 6, "tp": 2, "ep": 2, "expert": odd}),
        Case(1, **common | {"dtype": "bfloat16", "experts": 4, "tp": 2, "etp": 2, "shared": 2}),
        Case(1, **common | {"dtype": "bfloat16", "experts": 4, "shared": 2, "fp8": True}),
        Case(1, **common | {"dtype": "bfloat16", "experts": 4, "dense": (1,), "layer": 1}),
    ]


def config_of(case: dict, tp: int = 1, etp: int = 1) -> ModelConfig:
    """What a rank has of the model."""
    c = SimpleNamespace(**case)
    options = {"head_dim": c.head_dim, "scoring_func": "sigmoid"}  # shared experts have no gate
    if c.dense:  # with sigmoid it could only be the first layers
        options |= {"scoring_func": "softmax", "moe_shared_expert_gate": c.shared > 0}
    if c.experts:
        options |= {"num_local_experts": c.experts, "num_experts_per_tok": c.k}
        options |= {"moe_intermediate_size": c.expert // etp, "mlp_only_layers": c.dense}
        options |= {"n_shared_experts": c.shared * etp // tp}  # of a size that is divided by etp
    sizes = c.hidden, c.inner // tp, 1 + len(c.dense), c.heads // tp, c.key_heads // tp
    return ModelConfig(7, *sizes, **options)


def enlarged(case: Case, bytes_of: Callable[[dict], float]) -> dict[str, float]:
    """Bytes of a case, and what they grow by with each of its sizes."""
    sizes, names = sizes_of(case), list(MORE)[: None if case.experts else -3]
    total = bytes_of(sizes)
    more = {n: bytes_of(sizes | {n: sizes[n] + MORE[n]}) - total for n in names}
    return {"bytes per token": total} | {f"bytes more with {n} + {MORE[n]}": more[n] for n in names}


def on_rank(rank, case: Case) -> dict:
    sizes = {"tp": case.tp, "ep": case.ep, "etp": case.etp, "sequence_parallel": case.tp > 1}
    rest = rank.course.settings.Layout(**sizes), case.layer, case.fp8
    bytes_of = rank.course.activations.factors_per_token
    found = enlarged(case, lambda sizes: float(bytes_of(config_of(sizes), case.dtype, *rest)))
    saved = rank.course.activations.saved_per_token
    return found | {"until B": saved(config_of(sizes_of(case)), case.dtype, "none", *rest)}


def expected(case: Case) -> list[dict]:
    def bytes_of(sizes: dict) -> float:
        experts, others = elements_per_token(**sizes)
        width = BYTES[case.dtype]
        each_rank = case.etp / case.tp  # of the tokens whose rows a rank gets
        return experts * each_rank * width + others * (1 if case.fp8 else width)

    return [enlarged(case, bytes_of)]


@cache  # a check compares each case with all known mistakes
def elements_per_token(**sizes) -> tuple[float, float]:
    """The factors of experts, and of all other linears of the layer, as backward leaves them."""
    config = config_of(sizes, sizes["tp"], sizes["etp"])
    model, queue = Llama(config), WeightGradients()
    apply_moe(model, Routing(), RoutingCounts(config, torch.device("cpu")))
    take_apart(model.double())
    queue.split = True
    apply_queue(model, queue)
    for tensor in (*model.parameters(), *model.buffers()):
        torch.nn.init.normal_(tensor)
    tokens = torch.arange(TOKENS)[None] % 7
    model(tokens, torch.arange(TOKENS), tokens).backward()
    layer = model.model.layers[str(sizes["layer"])]
    is_expert = set(getattr(layer.mlp, "experts", torch.nn.Module()).modules()).__contains__
    queue = [(linear, factors) for linear, *factors in queue if linear in set(layer.modules())]
    experts = [x for linear, factors in queue if is_expert(linear) for x in factors]
    others = [x for linear, factors in queue if not is_expert(linear) for x in factors]
    return storage_bytes(experts) / 8 / TOKENS, storage_bytes(others) / 8 / TOKENS


def picture(runs):
    rows = {}
    for case, records in runs[:4]:
        kind = f"{case.experts} experts" if case.experts else "an MLP"
        name = f"{case.dtype}{', fp8' * case.fp8}, tp {case.tp}, {kind}"
        rows[f"{name}: until B"] = records[0].values["until B"]
        rows[f"{name}: until W"] = records[0].values["bytes per token"]
    return ["bytes of a layer per token", bars(rows)]


VERSIONS = """
input_for_each: The input of q, k and v, and of gate and up, is counted for each: it is one tensor.
    2 * E + heads => 4 * E + heads
    2 * E + 3 * inner / tp if => 3 * E + 3 * inner / tp if
around_divided: The E around linears are divided by tp: messages have made them whole.
    2 * E + heads => 2 * E / tp + heads
    2 * E + 3 * inner / tp if => 2 * E / tp + 3 * inner / tp if
head_dim_ignored: hidden_size / heads is used as the head dimension: c.head_dim can be another.
    model_config.head_dim => model_config.hidden_size // model_config.num_attention_heads
outputs_gradients_forgotten: dy of o and of down is left out: a linear needs x and dy.
    2 * E + 3 * inner / tp if => E + 3 * inner / tp if
    2 * E + heads => E + heads
keys_as_queries: As many key heads as query heads are counted: there may be fewer.
    2 * D * (c.num_attention_heads + c.num_key_value_heads) => 4 * D * c.num_attention_heads
o_forgotten: The input of o is left out: attention's output is not among the gradients of q, k, v.
    2 * D * (c.num_attention_heads + c => D * (c.num_attention_heads + 2 * c
heads_whole: All heads are counted: with tp a rank has only some.
    heads / tp => heads
all_divided: All of an MLP is divided by tp: its input and the gradient of its output are whole.
    2 * E + 3 * inner / tp if => (2 * E + 3 * inner) / tp if
as_forward: Four tensors of M are counted, as forward keeps them: W needs the gradients of gate and
    up, and the input of down.
    3 * inner / tp => 4 * inner / tp
layer_ignored: A layer without experts is counted as if it had them: c.has_experts(layer) tells.
    c.has_experts(layer) => c.num_local_experts
one_row: One row is counted for a token: it has one for each of its k experts.
    c.num_experts_per_tok * ( => (
all_experts: A row is counted for every expert: a token has rows for those it chooses.
    c.num_experts_per_tok => c.num_local_experts
etp_forgotten: The copies that etp ranks get are left out: their rows are whole.
    2 * layout.etp * E => 2 * E
none_shared: An MLP's x and dy are counted where a layer has experts, and none of them is shared.
    2 * E + 3 * inner / tp if inner else 0 => 2 * E + 3 * inner / tp
rows_whole: The rows of experts are not divided by tp: each tp rank has only some tokens.
    c.moe_intermediate_size) / tp => c.moe_intermediate_size)
divided_by_ep: The rows of experts are divided by ep: a rank gets as many from others as it sends.
    c.moe_intermediate_size) / tp => c.moe_intermediate_size) / tp / layout.ep
rounded_down: A rank's share of rows is rounded down: it is an average, and need not be whole.
    c.moe_intermediate_size) / tp => c.moe_intermediate_size) // tp
size_of_an_mlp: Routed experts are counted with intermediate_size: use moe_intermediate_size.
    3 * c.moe_intermediate_size => 3 * c.intermediate_size
divided_by_etp: F is divided by etp alone: a rank has etp / tp of the rows, too, so F / tp in all.
    3 * c.moe_intermediate_size => 3 * c.moe_intermediate_size * tp / layout.etp
shared_one_by_one: Each shared expert is counted with an input and an output of its own: together
    they are one MLP.
    2 * E + 3 * inner / tp if => (c.n_shared_experts if experts else 1) * 2 * E + 3 * inner / tp if
shared_not_in_8_bits: Shared experts are not counted in 8 bits: only routed ones never are.
    / tp + mlp) => / tp) + (BYTES[dtype] if experts else _factor(dtype, fp8)) * mlp
shared_forgotten: Shared experts are left out: they are an MLP beside the others.
    c.n_shared_experts * c.moe_intermediate_size => 0
experts_in_8_bits: Factors of experts are counted in 8 bits: only other linears multiply in them.
    BYTES[dtype] * experts => _factor(dtype, fp8) * experts
also_right:
def factors_per_token(model_config, dtype, layout, layer, fp8=False):
    c, tp, width = model_config, layout.tp, BYTES[dtype]
    E, D, F = c.hidden_size, c.head_dim, c.moe_intermediate_size
    q, k = c.num_attention_heads * D / tp, c.num_key_value_heads * D / tp
    numbers = [E, q, k, k, q, E]
    if not c.has_experts(layer):
        numbers += [E, *[c.intermediate_size / tp] * 3, E]
    elif c.n_shared_experts:
        numbers += [E, *[c.n_shared_experts * F / tp] * 3, E]
    total = (1 if fp8 else width) * sum(numbers)
    if c.has_experts(layer):
        copies = layout.etp / tp
        total += width * c.num_experts_per_tok * sum([copies * E, *[F / tp] * 3, copies * E])
    return total
"""
