"""09 table: one table cuts a whole model

target: placement:_placement
train: distributed.tp_size=2

Return the Placement of one parameter: see the picture at the top of placement.py. Cuts: over tp, q,
k, v, gate and up by rows (dim 0), o and down by columns (dim 1), embeddings by rows, norms not at
all. Copies: the axes whose ranks hold the same part (of dp_cp, tp; and ends, for a tied embedding
that two ranks hold). Sums: the axes over which gradients differ. With sequence parallelism all
ranks of a stage (dp_cp_tp) have different tokens in a norm. Hidden matrices are in attention and in
MLPs. Of an unknown name, such as a bias, nothing is returned: None.
Read: placement.py, tensor_parallel.py.

? Three kinds: matrices of layers; embedding and head; norms.
? Cut(axis, dim), Placement(cuts, copies, sums, is_hidden_matrix), HIDDEN, ROW_PARALLEL,
  VOCABULARY_PARALLEL, NORMS, ends_share_rank(schedule, ranks, chunks), layout.schedule.
? The last part of the name decides, without .weight. A tied embedding has copies over dp_cp and
  ends, which are summed over both, unless the ends share a rank.
! 2 sums a layer are enough, since what is cut by rows meets what is cut by columns. In production:
  the `parallelize_plan` of `torch.distributed.tensor.parallel`.
"""

from exercises.exercise import Case, Dice
from picotron_min.model_config import ModelConfig

UNKNOWN = "rotary.scale", "self_attn.q_norm.weight", "mlp.gate_up_proj.weight", "q_proj.bias"
BY_COLUMNS, NOT_CUT = (
    ("o_proj", "down_proj"),
    ("input_layernorm", "post_attention_layernorm", "norm"),
)


def cases(dice: Dice) -> list[Case]:
    # Each alone, but sequence parallelism, which needs tp.
    layouts = [{"tp": 2}, {"dp": 2, "tp": 2, "sequence_parallel": True}, {"cp": 2}, {"pp": 2}]
    layouts.append({"pp": 2, "pp_engine": "zb_v", "pp_chunks": 2})  # its ends are on one rank
    layers = dice.randint(1, 3)
    return [Case(1, layers=layers, layout=x, tied=tied) for x in layouts for tied in (False, True)]


def names(case: Case) -> list[str]:
    config = ModelConfig(16, 8, 12, case.layers, 4, 2, tie_word_embeddings=case.tied)
    return [*config.parameter_shapes(), *UNKNOWN]


def on_rank(rank, case: Case) -> dict:
    layout, results = rank.course.settings.Layout(**case.layout), {}
    for name in names(case):
        row = rank.course.placement._placement(name, layout, case.tied)
        results[name] = row if row is None else [*map(list, row[:3]), bool(row.is_hidden_matrix)]
    return results


def expected(case: Case) -> list[dict]:
    """Rows as [cuts, copies, sums, whether it is a hidden matrix]."""
    return [{name: None if name in UNKNOWN else right_row(name, case) for name in names(case)}]


def right_row(name: str, case: Case) -> list:
    module = name.split(".")[-2]
    if module in NOT_CUT:
        is_part = "sequence_parallel" in case.layout  # each tp rank has seen other tokens
        return [[], ["dp_cp", "tp"], ["dp_cp_tp" if is_part else "dp_cp"], False]
    # Lookup and head are on two ranks, and each has a part of the gradient.
    at_both_ends = case.tied and case.layout.get("pp") == 2 and "pp_engine" not in case.layout
    is_hidden = module.endswith("_proj")
    axes = ["dp_cp", "ends"] if at_both_ends and not is_hidden else ["dp_cp"]
    return [[("tp", int(module in BY_COLUMNS), None)], axes, axes, is_hidden]


MISTAKES = """
all_by_rows: o_proj and down_proj are cut by rows, too: a part of their inputs needs columns.
    1 if module in ROW_PARALLEL else 0 => 0
keys_whole: k_proj and v_proj are whole on every rank: its query heads meet the key heads of others.
    cuts = (Cut( => cuts = () if module in ("k_proj", "v_proj") else (Cut(
embedding_by_columns: embed_tokens is cut along the hidden size: cut its vocabulary.
    in ROW_PARALLEL => in (*ROW_PARALLEL, "embed_tokens")
norms_not_summed: With sequence parallelism each rank has seen a part of the tokens, and its
    gradient of a norm is a part of the sum.
    ("dp_cp_tp",) if layout.sequence_parallel else ("dp_cp",) => ("dp_cp",)
cp_forgotten: The gradients of hidden matrices are summed over dp alone: ranks of cp have other
    tokens, too.
    ("dp_cp",), sums=("dp_cp",) => ("dp_cp",), sums=("dp",)
tied_not_summed: A tied embedding has a copy on the first and on the last stage, and their gradients
    are not added: the copies drift apart.
    sums=axes => sums=("dp_cp",)
"""
