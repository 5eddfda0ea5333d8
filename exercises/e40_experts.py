"""40 experts: a grid of their own, and gradients along one of its axes

target: extensions.experts.mixture:_placement
train: distributed.ep_size=2 model.num_local_experts=4 model.num_experts_per_tok=2

Return the Placement of one parameter that only layers with experts have; for all others None, also
for the matrices of shared experts, which are placed as in any MLP. An expert lies on one rank
of ep, in the order of their numbers, and is cut over etp as other matrices are over tp, o and down
by columns (dim 1), the others by rows: its copies are along edp. It is a hidden matrix. The router,
its bias and the gate of shared experts are not cut, so all ranks of dp_cp and of tp have copies.
All ranks of a stage (dp_cp_tp) have different tokens in a router, always; in the gate, with
sequence parallelism.
Read: extensions/experts/mixture.py, placement.py.

? Three kinds: experts; routers; the gate of shared experts. Whose tokens differ?
? Cut(axis, dim, owner), Placement(cuts, copies, sums, is_hidden_matrix), EXPERT.search, ROUTER,
  ROW_PARALLEL, layout.ep, layout.sequence_parallel.
? EXPERT finds the number of an expert in a name. Expert i of n is on rank i * ep // n of ep: first
  a cut with this owner, then one over etp. Ranks with the same part of an expert are along edp, and
  its gradient is summed over that.
! 1 / (ep etp) of all experts is on a rank, whatever dp, cp and tp are: their product is edp ep etp.
  In production: `expert_model_parallel_size` of Megatron-LM.
"""

from exercises.cut_model import add_up, put_together
from exercises.exercise import Case, Dice, draw

LAYER, ROUTER, GATE = "model.layers.0.", "mlp.gate.weight", "mlp.shared_expert_gate.weight"
BIAS = "mlp.gate.e_score_correction_bias"


def cases(dice: Dice) -> list[Case]:
    sizes = {"hidden": dice.choice((4, 6)), "inner": dice.choice((8, 10))}
    wide = {"tp": 4, "ep": 2, "etp": 2}
    layouts = {"dp": 2, "tp": 2, "ep": 4}, wide, wide | {"sequence_parallel": True}
    each = zip((4, 4, 12), layouts, strict=True)  # 12: numbers with two digits, too
    return [Case(4, **sizes, experts=experts, layout=layout) for experts, layout in each]


def shapes_of(case: Case) -> dict[str, tuple[int, ...]]:
    E, F, X = case.hidden, case.inner, case.experts
    shapes = {LAYER + ROUTER: (X, E), LAYER + BIAS: (X,), LAYER + GATE: (1, E)}
    for mlp in ("mlp", "mlp.shared_experts"):  # which the core places
        shapes |= {f"{LAYER}{mlp}.{kind}_proj.weight": (F, E) for kind in ("gate", "up")}
    for i in range(X):
        kind, shape = ("down", (E, F)) if i % 2 else ("up", (F, E))
        shapes[f"{LAYER}mlp.experts.{i}.{kind}_proj.weight"] = shape
    return shapes


def on_rank(rank, case: Case) -> dict:
    course, shapes = rank.course, shapes_of(case)
    layout = course.settings.Layout(**case.layout)
    axes, gradients = rank.axes(layout), {}
    table = course.placement.placements(shapes, layout, tied=False)
    for name, placement in table.items():
        mine = course.placement.part(shapes[name], placement.cuts, axes.ranks, axes.sizes)
        tokens = seen(name, case, axes.ranks)
        gradients[name] = draw(case, name, tokens, shape=shapes[name])[mine].clone()
    add_up(rank, axes, table, gradients)
    wholes = put_together(rank, axes, table, shapes, gradients)
    results = {f"gradient of {name}, each part once": whole for name, whole in wholes.items()}
    results["hidden matrices"] = [name for name in shapes if table[name].is_hidden_matrix]
    parts = {name: tuple(gradient.shape) for name, gradient in gradients.items()}
    results["experts here"] = {n: s for n, s in parts.items() if ".experts." in n and 0 not in s}
    return results


def seen(name: str, case: Case, ranks: dict[str, int]) -> int:
    """A number that ranks share if they see the same tokens, and so have the same gradient."""
    return ranks["edp" if ".experts." in name else "dp_cp_tp" if differs(name, case) else "dp_cp"]


def differs(name: str, case: Case) -> bool:
    """Whether a matrix that is not cut has other tokens on each tp rank."""
    return name.endswith((ROUTER, BIAS) + (GATE,) * ("sequence_parallel" in case.layout))


def expected(case: Case) -> list[dict]:
    """The sum of what ranks made up that see other tokens, and where experts are."""
    sizes = {"dp": 1, "etp": 1} | case.layout
    ep, etp, each = sizes["ep"], sizes["etp"], case.experts // sizes["ep"]
    common, here = {}, [{} for _ in range(case.ranks)]
    for name, shape in shapes_of(case).items():
        number = case.ranks if differs(name, case) else sizes["dp"]  # of ranks with other tokens
        if ".experts." in name:
            number, cut = case.ranks // (ep * etp), 1 if "down" in name else 0
            part = tuple(n // etp if dim == cut else n for dim, n in enumerate(shape))
            for rank in range(case.ranks):
                if int(name.split(".")[5]) // each == rank // etp % ep:
                    here[rank][name] = part
        made_up = (draw(case, name, other, shape=shape) for other in range(number))
        common[f"gradient of {name}, each part once"] = sum(made_up)
    common["hidden matrices"] = [name for name in shapes_of(case) if "_proj" in name]
    return [common | {"experts here": found} for found in here]


def picture(runs):
    case, records = runs[1]
    yield from [f"{case.experts} experts over ep 2 and etp 2: what each rank has of every matrix"]
    for name, shape in shapes_of(case).items():
        parts = [record.values["experts here"].get(name) for record in records]
        if any(parts):
            texts = ["x".join(map(str, part)) if part else "-" for part in parts]
            whole, columns = "x".join(map(str, shape)), "".join(f"{text:>8}" for text in texts)
            yield f"{name.removeprefix(LAYER):30} {whole:>6}  {columns}"


VERSIONS = """
router_not_summed: The gradient of a router is summed like a norm's: but routers see different
    tokens on each tensor-parallel rank, always.
    sums=("dp_cp_tp",)) => sums=("dp_cp_tp",) if layout.sequence_parallel else ("dp_cp",))
experts_dealt_round: Experts are dealt round the ranks: 0 2 and 1 3. A rank must have consecutive
    ones, because tokens are sorted by expert before they are sent.
    int(expert[1]) * layout.ep // num_experts => int(expert[1]) % layout.ep
all_experts_everywhere: Every rank of ep has every expert: expert parallelism saves nothing.
    cuts = (Cut("ep", 0, owner), Cut("etp", dim)) => cuts = (Cut("etp", dim),)
experts_over_tp: Experts are cut over tp: they lie on a grid of their own, and are cut over etp.
    Cut("etp", dim) => Cut("tp", dim)
experts_summed_over_dp: The gradients of experts are summed over dp_cp, whose ranks have different
    experts: those with the same ones are along edp.
    sums=("edp",) => sums=("dp_cp",)
no_owner: Each expert is divided among the ranks of ep: it lies on one of them, its owner.
    Cut("ep", 0, owner) => Cut("ep", 0)
number_by_ep: An expert's number is divided by ep: divide by the number of experts of a rank.
    int(expert[1]) * layout.ep // num_experts => int(expert[1]) // layout.ep
number_of_layer: The first number of a name is taken: it is the layer's, not the expert's.
    int(expert[1]) => int(name.split(".")[2])
rows_always: Names end in ".weight", so none ends in ROW_PARALLEL: down is cut by rows, too.
    name.removesuffix(".weight").endswith => name.endswith
also_right:
def _placement(name, layout, num_experts):
    *path, module = name.removesuffix(".weight").split(".")
    if "experts" in path:
        number, each = int(path[-1]), num_experts // layout.ep
        cuts = Cut("ep", 0, number // each), Cut("etp", 1 if module == "down_proj" else 0)
        return Placement(cuts, ("edp",), ("edp",), True)
    if path[-1:] != ["mlp"] and module != "e_score_correction_bias":
        return None
    if module == "shared_expert_gate" and not layout.sequence_parallel:
        return Placement((), ("dp_cp", "tp"), ("dp_cp",))
    return None if module.endswith("_proj") else Placement((), ("dp_cp", "tp"), ("dp_cp_tp",))
"""
