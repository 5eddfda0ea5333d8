"""09 table: one table cuts a whole model

A real model of one layer, cut by the table, must give the loss and the gradients of the whole one.
Experts, routers and tied embeddings of two stages are tried on paper: each rank makes up its part
of a gradient, which is then summed and put together as the table has it.
"""

import random

from exercises.cut_model import model_config, run_cut, run_whole
from exercises.exercise import Case, Exercise, Wrong, draw

TASK = """
Return the Placement of one parameter, without a shard: see the picture at the top of placement.py.
Cuts: over tp, q, k, v, gate and up by rows (dim 0), o and down by columns (dim 1), embeddings by
rows, norms and routers not at all. An expert lies on one rank of ep, in the order of their numbers,
and is cut over etp as other matrices are over tp. Copies: the axes whose ranks hold the same part
(of dp_cp, tp, edp; and ends, for a tied embedding that two ranks hold). Sums: those over which
gradients differ. All ranks of a stage (dp_cp_tp) have different tokens in a router, always, and in
norms with sequence parallelism. Hidden matrices are those of attention, of MLPs and of experts.
Read: placement.py, tensor_parallel.py.
"""

HINTS = (
    "Four kinds: experts; other matrices of layers; embedding and head; vectors and routers.",
    "Cut(axis, dim, owner), Placement(cuts, None, copies, sums, is_hidden_matrix), EXPERT, ROUTER,"
    " COLUMN_PARALLEL, ROW_PARALLEL, VOCABULARY_PARALLEL, ends_share_rank(engine, ranks, chunks).",
    "The last part of the name decides, without .weight; only experts and routers need more of it."
    " Expert i of n is on rank i * ep // n of ep. A tied embedding has copies over dp_cp and ends,"
    " which are summed over both, unless the ends share a rank.",
)

EMBEDDING, NORM, ROUTER = "model.embed_tokens.weight", "model.norm.weight", "mlp.gate.weight"
EXPERTS = 4
PLAIN = ("embed_tokens", "lm_head", "norm", ROUTER)  # in a name: no hidden matrix


def cases(dice: random.Random) -> list[Case]:
    sizes = {"vocab": dice.randint(9, 15), "inner": dice.choice((12, 18))}
    return [
        Case(2, heads=4, **sizes, layout={"tp": 2}),
        Case(2, heads=4, **sizes, layout={"tp": 2, "sequence_parallel": True}),
        Case(2, layout={"pp": 2}),  # a tied embedding
        Case(4, layout={"dp": 2, "tp": 2, "ep": 4}),
        Case(4, layout={"tp": 4, "ep": 2, "etp": 2}),
    ]


def on_rank(rank, case: Case) -> dict:
    layout = rank.course.module("extensions.settings").Layout(**case.layout)
    axes = rank.axes(layout)
    shapes = shapes_of(case)
    table = rank.course.placement.placements(shapes, layout, tied="pp" in case.layout)
    parts = {
        name: rank.course.placement.part(shapes[name], place.cuts, axes.ranks, axes.sizes)
        for name, place in table.items()
    }
    results = {}
    if hasattr(case, "heads"):
        results["loss"], gradients = run_cut(rank, case, axes, parts)
    else:
        gradients = made_up(case, axes, parts)
    for name, gradient in gradients.items():  # summed, and put together where it counts
        for axis in table[name].sums:
            rank.course.collectives.all_reduce(gradient, getattr(axes, axis))
        whole = gradient.new_zeros(shapes[name])
        if all(axes.ranks[axis] == 0 for axis in table[name].copies):
            whole[parts[name]] = gradient
        results[f"gradient of {name}"] = rank.course.collectives.all_reduce(whole, axes.world)
    results["hidden matrices"] = [name for name in shapes if table[name].is_hidden_matrix]
    results["parts"] = {name: tuple(g.shape) for name, g in gradients.items() if g.numel()}
    results["experts here"] = {n: s for n, s in results["parts"].items() if "experts" in n}
    results["elements"] = sum(gradient.numel() for gradient in gradients.values())
    return results


def shapes_of(case: Case) -> dict[str, tuple[int, ...]]:
    if hasattr(case, "heads"):
        return model_config(case).parameter_shapes()
    if "pp" in case.layout:
        return {EMBEDDING: (10, 4)}
    shapes = {f"model.layers.0.{ROUTER}": (EXPERTS, 4)}
    for i in range(EXPERTS):
        shape = (4, 6) if i % 2 else (6, 4)
        shapes[f"model.layers.0.mlp.experts.{i}.{'down' if i % 2 else 'up'}_proj.weight"] = shape
    return shapes


def made_up(case: Case, axes, parts) -> dict:
    """A gradient on each rank; the ranks of an axis that see the same make up the same."""
    return {
        name: draw(case, name, seen(name, axes), shape=shape)[parts[name]].clone()
        for name, shape in shapes_of(case).items()
    }


def seen(name: str, axes) -> int:
    """A number that ranks share if they see the same tokens, and so have the same gradient."""
    if "experts" in name:
        return axes.edp.rank
    if name == EMBEDDING:
        return axes.ends.rank * axes.dp_cp.size + axes.dp_cp.rank
    return axes.dp_cp_tp.rank if name.endswith(ROUTER) else axes.dp_cp.rank


def expected(case: Case) -> list[dict]:
    shapes = shapes_of(case)
    common = {"hidden matrices": [n for n in shapes if not any(p in n for p in PLAIN)]}
    if not hasattr(case, "heads"):
        return [common | on_paper(case, rank) for rank in range(case.ranks)]
    loss, gradients = run_whole(case)
    common |= {f"gradient of {name}": gradients[name] for name in shapes}
    return [common | {"loss": loss}] * case.ranks


def on_paper(case: Case, rank: int) -> dict:
    """The sum of what ranks made up that see something else, and where experts are."""
    sizes = {"pp": 1, "dp": 1, "tp": 1, "ep": 1, "etp": 1} | case.layout
    place, each = rank // sizes["etp"] % sizes["ep"], EXPERTS // sizes["ep"]
    results, here = {}, {}
    for name, shape in shapes_of(case).items():
        others = sizes["pp"] * sizes["dp"] * (sizes["tp"] if name.endswith(ROUTER) else 1)
        if "experts" in name:
            others = case.ranks // (sizes["ep"] * sizes["etp"])
            if int(name.split(".")[5]) // each == place:
                cut = 1 if "down" in name else 0
                here[name] = tuple(
                    n // sizes["etp"] if dim == cut else n for dim, n in enumerate(shape)
                )
        parts = [draw(case, name, other, shape=shape) for other in range(others)]
        results[f"gradient of {name}"] = sum(parts)
    return results | ({"experts here": here} if "ep" in case.layout else {})


def memory(case: Case, records) -> str:
    if not hasattr(case, "heads"):
        return ""
    tp, whole = case.layout["tp"], shapes_of(case)
    rows = -(-case.vocab // tp), case.vocab - (tp - 1) * -(-case.vocab // tp)
    for rank, record in enumerate(records):
        vocabulary = 2 * rows[rank % tp == tp - 1] * 2 * case.heads
        matrices = sum(a[0] * a[1] for n, a in whole.items() if "_proj" in n) // tp
        right = vocabulary + matrices + sum(a[0] for a in whole.values() if len(a) == 1)
        if (has := record.values["elements"]) != right:
            return f"rank {rank} holds {has} elements of the model; {right} are its part"
    return ""


def picture(runs) -> str:
    case, records = runs[1]
    lines = ["a layer over tp 2: what each rank has of every matrix"]
    for name, shape in shapes_of(case).items():
        parts = [record.values["parts"][name] for record in records]
        cut = next((d for d in range(len(shape)) if parts[0][d] < shape[d]), None)
        how = {None: "not cut", 0: "by rows", 1: "by columns"}[cut]
        texts = "   ".join(f"{'x'.join(map(str, part)):>6}" for part in parts)
        lines.append(f"{name:46} {'x'.join(map(str, shape)):>6}   {how:10}   {texts}")
    return "\n".join(lines)


CUTS = '    cuts = (Cut("tp", dim),)\n'
DIM = "dim = 1 if module in ROW_PARALLEL else 0"
NORMS = "layout.sequence_parallel or is_router"
SUMS = "return Placement(cuts, None, copies=axes, sums=axes)"
OWNER = "owner = int(expert[1]) * layout.ep // num_experts"
EXPERT_SUMS = 'copies=("edp",), sums=("edp",)'

EXERCISE = Exercise(
    __name__,
    target="placement:_placement",
    task=TASK,
    hints=HINTS,
    cases=cases,
    on_rank=on_rank,
    expected=expected,
    memory=memory,
    picture=picture,
    factors=lambda case: {k: n for k, n in case.layout.items() if n > 1},
    layout={"tp_size": 2},
    remember="2 sums a layer are enough, since what is cut by rows meets what is cut by columns. In"
    " production: the `parallelize_plan` of `torch.distributed.tensor.parallel`.",
    wrong=(
        Wrong(
            "all_by_rows",
            "o_proj and down_proj are cut by rows, too. A rank has a part of their inputs, and"
            " needs the columns for these.",
            DIM,
            "dim = 0",
        ),
        Wrong(
            "keys_whole",
            "k_proj and v_proj are whole on every rank, so that its query heads meet the key heads"
            " of others.",
            CUTS,
            CUTS.replace("(Cut", '() if module in ("k_proj", "v_proj") else (Cut'),
        ),
        Wrong(
            "embedding_by_columns",
            "embed_tokens is cut along the hidden size: a rank must have some of the vocabulary.",
            DIM,
            'dim = 1 if module in (*ROW_PARALLEL, "embed_tokens") else 0',
        ),
        Wrong(
            "norms_cut",
            "Norms are cut: but between sublayers each rank has all of the hidden size.",
            'return Placement((), None, copies=("dp_cp", "tp"), sums=sums)',
            'return Placement(cuts, None, copies=("dp_cp",), sums=sums)',
        ),
        Wrong(
            "nothing_cut",
            "Nothing is cut over tp: every rank computes all of it, and each sum is tp times too"
            " large.",
            CUTS,
            "    cuts = ()\n",
        ),
        Wrong(
            "norms_not_summed",
            "With sequence parallelism each rank has seen a part of the tokens, and its gradient of"
            " a norm is a part of the sum.",
            NORMS,
            "is_router",
        ),
        Wrong(
            "norms_always_summed",
            "The gradients of norms are summed over tp without sequence parallelism, too: there"
            " all ranks have the whole gradient, and it becomes tp times too large.",
            NORMS,
            "True",
        ),
        Wrong(
            "router_not_summed",
            "The gradient of a router is summed like that of a norm: but routers see different"
            " tokens on each tensor-parallel rank, always.",
            NORMS,
            "layout.sequence_parallel",
        ),
        Wrong(
            "tied_not_summed",
            "A tied embedding has a copy on the first and on the last stage, and their gradients"
            " are not added: the copies drift apart.",
            SUMS,
            'return Placement(cuts, None, copies=axes, sums=("dp_cp",))',
        ),
        Wrong(
            "tied_counted_twice",
            "The copies of a tied embedding on both ends are not named as copies: the gradient norm"
            " counts both.",
            SUMS,
            'return Placement(cuts, None, copies=("dp_cp",), sums=axes)',
        ),
        Wrong(
            "experts_dealt_round",
            "Experts are dealt round the ranks: 0 2 and 1 3. A rank must have consecutive ones,"
            " because tokens are sorted by expert before they are sent.",
            OWNER,
            "owner = int(expert[1]) % layout.ep",
        ),
        Wrong(
            "all_experts_everywhere",
            "Every rank of ep has every expert: expert parallelism saves nothing.",
            'cuts = (Cut("ep", 0, owner), Cut("etp", dim))',
            'cuts = (Cut("etp", dim),)',
        ),
        Wrong(
            "experts_over_tp",
            "Experts are cut over tp: they lie on a grid of their own, and are cut over etp.",
            'Cut("etp", dim)',
            'Cut("tp", dim)',
        ),
        Wrong(
            "experts_summed_over_dp",
            "The gradients of experts are summed over dp_cp, whose ranks have different experts:"
            " those with the same ones are along edp.",
            EXPERT_SUMS,
            'copies=("edp",), sums=("dp_cp",)',
        ),
    ),
    also_right=(
        """
def _placement(name, layout, tied, num_experts):
    *path, module = name.removesuffix(".weight").split(".")
    if "experts" in path:
        number, each = int(path[-1]), num_experts // layout.ep
        cuts = Cut("ep", 0, number // each), Cut("etp", 1 if module == "down_proj" else 0)
        return Placement(cuts, None, ("edp",), ("edp",), True)
    if module.endswith("_proj"):
        cut = Cut("tp", 1 if module in ("o_proj", "down_proj") else 0)
        return Placement((cut,), None, ("dp_cp",), ("dp_cp",), True)
    if module in ("embed_tokens", "lm_head"):
        one_rank = ends_share_rank(layout.pp_engine, layout.pp, layout.pp_chunks)
        both = ("dp_cp",) if one_rank or not tied else ("dp_cp", "ends")
        return Placement((Cut("tp", 0),), None, both, both)
    if path[-1:] == ["mlp"] or layout.sequence_parallel:
        return Placement((), None, ("dp_cp", "tp"), ("dp_cp_tp",))
    return Placement((), None, ("dp_cp", "tp"), ("dp_cp",))
""",
    ),
)
