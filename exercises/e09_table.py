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

import torch
from torch import Tensor, nn

from exercises.compare import SumOf
from exercises.exercise import Case, Dice, draw
from exercises.ranks import Rank
from picotron_min.mesh import Axes
from picotron_min.model import Llama
from picotron_min.model_config import ModelConfig

EMBEDDING = "model.embed_tokens.weight"
UNKNOWN = "rotary.scale", "self_attn.q_norm.weight", "mlp.gate_up_proj.weight", "q_proj.bias"
RIGHT = dict.fromkeys((f"of {name}" for name in UNKNOWN), None)
# A V has the first and the last stage on one rank.
ONE_RANK = {"a tied embedding in a V": ({"pp": 2, "pp_engine": "zb_v", "pp_chunks": 2}, True)}
ONE_RANK |= {"an embedding that is not tied": ({"pp": 2}, False)}
RIGHT |= {f"copies and sums of {what}": ["dp_cp", "dp_cp"] for what in ONE_RANK}
COUNTS = "how often the gradient norm counts {}".format
PLAIN = ("embed_tokens", "lm_head", "norm")  # in a name: no hidden matrix


def cases(dice: Dice) -> list[Case]:
    sizes = {"vocab": dice.randint(9, 15), "inner": dice.choice((12, 18))}
    kinds = (2, {"tp": 2}), (4, {"dp": 2, "tp": 2, "sequence_parallel": True}), (2, {"cp": 2})
    some = [Case(ranks, heads=4, **sizes, layout=layout) for ranks, layout in kinds]
    return [*some, Case(4, layout={"pp": 2, "dp": 2})]  # the last has a tied embedding


def on_rank(rank, case: Case) -> dict:
    course, layout, shapes = rank.course, rank.course.layout.Layout(**case.layout), shapes_of(case)
    axes = rank.axes(layout)
    table, results = course.placement.placements(shapes, layout, tied="pp" in case.layout), {}
    part = course.placement.part
    parts = {n: part(shapes[n], row.cuts, axes.ranks, axes.sizes) for n, row in table.items()}
    if hasattr(case, "heads"):
        results["loss"], gradients = run_cut(rank, case, axes, parts)
        results["messages for a norm's gradient"] = len(table["model.norm.weight"].sums)
    else:
        gradients = {EMBEDDING: made_up(case, axes.ends.rank)[parts[EMBEDDING]].clone()}
    share = shares(case)[axes.dp_cp.rank]
    gradients = {name: share * gradient for name, gradient in gradients.items()}
    add_up(rank, axes, table, gradients)
    results |= {f"gradient of {name}": gradient for name, gradient in gradients.items()}
    ones = {name: torch.ones_like(gradient) for name, gradient in gradients.items()}
    counts = put_together(rank, axes, table, shapes, ones)
    results |= {COUNTS(name): count for name, count in counts.items()}
    results["hidden matrices"] = [name for name in shapes if table[name].is_hidden_matrix]
    for name in UNKNOWN:
        results[f"of {name}"] = course.placement._placement(name, layout, False)
    for what, (sizes, tied) in ONE_RANK.items():
        row = course.placement._placement(EMBEDDING, course.settings.Layout(**sizes), tied)
        results[f"copies and sums of {what}"] = [*row.copies, *row.sums]
    results["elements"] = sum(gradient.numel() for gradient in gradients.values())
    return results


def add_up(rank: Rank, axes: Axes, table: dict, gradients: dict[str, Tensor]) -> None:
    """Sums each rank's part of every gradient over ranks, in place."""
    for name, gradient in gradients.items():
        for axis in table[name].sums:
            rank.course.collectives.all_reduce(gradient, axes[axis])


def put_together(
    rank: Rank, axes: Axes, table: dict, shapes: dict, parts: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Whole tensors, as the gradient norm counts them: of each part the first of its copies."""
    course, results = rank.course, {}
    for name, mine in parts.items():
        whole = mine.new_zeros(shapes[name])
        if all(axes.ranks[axis] == 0 for axis in table[name].copies):
            place = course.placement.part(shapes[name], table[name].cuts, axes.ranks, axes.sizes)
            whole[place] = mine
        results[name] = course.collectives.all_reduce(whole, axes.world)
    return results


def model_config(case: Case) -> ModelConfig:
    return ModelConfig(case.vocab, 2 * case.heads, case.inner, 1, case.heads, case.heads // 2)


def run_cut(rank, case: Case, axes, parts: dict[str, tuple[slice, ...]]):
    """The loss of this rank's part of the model, and the gradients of its parameters."""
    course = rank.course
    model = course.model.Llama(model_config(case))
    for name, parameter in list(model.named_parameters()):
        mine = draw(case, name, shape=parameter.shape)[parts[name]].clone()
        model.get_submodule(name.removesuffix(".weight")).weight = nn.Parameter(mine)
    sequence_parallel = case.layout.get("sequence_parallel", False)
    course.tensor_parallel.apply_tensor_parallel(model, axes.tp, sequence_parallel)
    return _run(model, case)


def run_whole(case: Case) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of the whole model in one process, and its gradients."""
    model = Llama(model_config(case)).double()
    for name, parameter in model.named_parameters():
        parameter.data = draw(case, name, shape=parameter.shape)
    return _run(model, case)


def _run(model: nn.Module, case: Case) -> tuple[Tensor, dict[str, Tensor]]:
    ids = draw(case, "tokens", shape=(2, 2, 6)).abs() * 100 % case.vocab
    ids, targets = ids.long().unbind()
    loss = model(ids, torch.arange(ids.shape[1]), targets)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def shapes_of(case: Case) -> dict[str, tuple[int, ...]]:
    return model_config(case).parameter_shapes() if hasattr(case, "heads") else {EMBEDDING: (10, 4)}


def shares(case: Case) -> Tensor:
    """What share of the gradient each rank of dp_cp computes, as of the tokens."""
    numbers = torch.arange(1.0, 1 + case.layout.get("dp", 1) * case.layout.get("cp", 1)).double()
    return numbers / numbers.sum()


def made_up(case: Case, end: int) -> Tensor:
    """The gradient of a tied embedding on one of the two stages that have it."""
    return draw(case, end, shape=(10, 4))


def expected(case: Case) -> list[dict]:
    common, tp = dict(RIGHT), case.layout.get("tp", 1)
    if hasattr(case, "heads"):
        common["loss"], wholes = run_whole(case)
        common["messages for a norm's gradient"] = 1
    else:
        wholes = {EMBEDDING: made_up(case, 0) + made_up(case, 1)}
    common |= {COUNTS(name): torch.ones_like(whole) for name, whole in wholes.items()}
    common["hidden matrices"] = [n for n in wholes if not any(p in n for p in PLAIN)]
    results = [dict(common) for _ in range(case.ranks)]
    for name, whole in wholes.items():
        dim = 1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0
        parts = whole.chunk(tp, dim) if whole.ndim == 2 else [whole] * tp
        sums = [SumOf(share * part for share in shares(case)) for part in parts]
        for rank, result in enumerate(results):
            result[f"gradient of {name}"] = sums[rank % tp]
    return results


def memory(case: Case, rank: int, record) -> str | None:
    if not hasattr(case, "heads"):
        return ""
    tp, whole = case.layout.get("tp", 1), shapes_of(case)
    rows = -(-case.vocab // tp), case.vocab - (tp - 1) * -(-case.vocab // tp)
    vocabulary = 2 * rows[rank % tp == tp - 1] * 2 * case.heads
    matrices = sum(a[0] * a[1] for n, a in whole.items() if "_proj" in n) // tp
    right = vocabulary + matrices + sum(a[0] for a in whole.values() if len(a) == 1)
    if (has := record.values["elements"]) != right:
        return f"rank {rank} holds {has} elements of the model; {right} are its part"


MISTAKES = """
all_by_rows: o_proj and down_proj are cut by rows, too: a part of their inputs needs columns.
    1 if module in ROW_PARALLEL else 0 => 0
keys_whole: k_proj and v_proj are whole on every rank: its query heads meet the key heads of others.
    cuts = (Cut( => cuts = () if module in ("k_proj", "v_proj") else (Cut(
embedding_by_columns: embed_tokens is cut along the hidden size: cut its vocabulary.
    in ROW_PARALLEL => in (*ROW_PARALLEL, "embed_tokens")
nothing_cut: Nothing is cut over tp: all ranks compute everything, and sums are tp times too large.
    (Cut("tp", 1 if module in ROW_PARALLEL else 0),) => ()
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
