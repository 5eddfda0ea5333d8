"""35 grid: which ranks are one axis

target: mesh:build_axes
train: distributed.dp_size=2 distributed.tp_size=2

Build all axes of a layout, each with the row of ranks that this rank is in. Ranks are numbered row
by row over (pp, dp, cp, tp), tp varies fastest; experts lie on another grid over the same ranks,
(pp, edp, ep, etp), also row by row. layout.grids has both, each with its sizes and its axes. An
axis has the ranks that differ in its coordinate only, a joint axis those that differ in some, and
`ends` the first and the last stage; a rank between them is in another group, alone or with others.
All ranks must make all groups, also other ranks', in the same order, with the timeout:
dist.new_subgroups_by_enumeration(lists of ranks) makes them, and gives back the one that this rank
is in. Where two axes have the same ranks, they share a group; but those over which gradients are
summed (dp in the name, and world) share none with the others, which send activations.
Read: mesh.py, layout.py, extensions/settings.py (`grids`).

? Put the numbers of all ranks on a grid. The ranks of an axis are the rows along some dims.
? layout.grids, grid.axes.items(), rows_of(grid, varying), a dict of groups by what for
  and str(lists), Axis(name, group, device), Axes, timedelta(seconds=timeout_seconds).
? For each axis of each grid, rows_of moves the dims that vary to the end and reshapes: each row is
  a group. ends: of each row along pp the first and the last rank, which are one rank if pp is 1;
  and a group of its own for each rank between.
! 14 axes of 1 numbering: tensor-parallel ranks are neighbours, on one node. In production:
  `torch.distributed.device_mesh.init_device_mesh`.
"""

from datetime import timedelta
from itertools import combinations

from exercises.exercise import Case, Dice

SHAPES = ((4, {"pp": 2, "tp": 2}), (4, {"dp": 2, "cp": 2}))
SHAPES += ((8, {"pp": 2, "dp": 2, "tp": 2, "ep": 2}), (8, {"dp": 2, "cp": 2, "tp": 2, "etp": 2}))
SHAPES += ((8, {"dp": 4, "tp": 2, "ep": 2, "etp": 2}),)
GRID, EXPERT_GRID = ("pp", "dp", "cp", "tp"), ("pp", "edp", "ep", "etp")
VARY = {name: (name,) for name in GRID} | {"dp_cp": ("dp", "cp"), "cp_tp": ("cp", "tp")}
VARY |= {"dp_cp_tp": GRID[1:], "world": GRID}
EXPERTS_VARY = {name: (name,) for name in EXPERT_GRID[1:]}
EXPERTS_VARY |= {"ep_etp": ("ep", "etp"), "edp_etp": ("edp", "etp")}


def cases(dice: Dice) -> list[Case]:
    pp = dice.choice((3, 4))
    cases = [Case(ranks, sizes=sizes, seconds=7.0) for ranks, sizes in (*SHAPES, (pp, {"pp": pp}))]
    return [*cases, Case(4, sizes=SHAPES[0][1], seconds=3.0)]  # another run in the same process


def on_rank(rank, case: Case) -> dict:
    axes = rank.axes(rank.course.settings.Layout(**case.sizes), case.seconds)
    groups = [id(axis.group) for axis in axes]
    members = {axis.name: list(axis.group.ranks) for axis in axes}
    if rank.number not in (ends := ends_of(case, rank.number)):  # with whom it is does not matter
        members["ends"] = [other for other in members["ends"] if other in ends]
    names = {name: axis.name for name, axis in vars(axes).items()}
    timeouts = {axis.name: axis.group.timeout for axis in axes}
    seconds = {n: t.total_seconds() if isinstance(t, timedelta) else t for n, t in timeouts.items()}
    results = {"members": members, "names": names, "timeouts in seconds": seconds}
    return results | {"groups": dict(zip(members, map(groups.index, groups), strict=True))}


def ends_of(case: Case, rank: int) -> list[int]:
    """The ranks of the first and of the last stage that differ from this one in pp only."""
    each = case.ranks // case.sizes.get("pp", 1)
    return sorted({rank % each, case.ranks - each + rank % each})


def coordinates(case: Case, rank: int) -> dict[str, int]:
    sizes = {"pp": 1, "dp": 1, "cp": 1, "tp": 1, "ep": 1, "etp": 1} | case.sizes
    sizes["edp"] = case.ranks // (sizes["pp"] * sizes["ep"] * sizes["etp"])
    found = {}
    for grid in (GRID, EXPERT_GRID):
        left = rank
        for name in reversed(grid):  # the last one varies fastest
            left, found[name] = divmod(left, sizes[name])
    return found


def expected(case: Case) -> list[dict]:
    results, every = [], [coordinates(case, rank) for rank in range(case.ranks)]
    for me, mine in enumerate(every):
        members = {}
        for axis, vary in (VARY | EXPERTS_VARY).items():
            fixed = {*(GRID if axis in VARY else EXPERT_GRID)} - {*vary}
            alike = [all(its[name] == mine[name] for name in fixed) for its in every]
            members[axis] = [rank for rank in range(case.ranks) if alike[rank]]
        members["ends"] = ends if me in (ends := ends_of(case, me)) else []
        results.append({"members": members, "names": {name: name for name in members}})
        results[-1]["timeouts in seconds"] = dict.fromkeys(members, case.seconds)
    return results


def memory(case: Case, rank: int, record) -> str | None:
    # Axes along which all ranks have the same members.
    of_ranks = [right["members"] for right in expected(case)]
    if record.values["members"] != of_ranks[rank]:
        return None  # gate V says so
    groups = record.values["groups"]
    needed = {n: ("dp" in n or n == "world", str([m[n] for m in of_ranks])) for n in groups}
    for a, b in combinations(groups, 2):
        if groups[a] == groups[b] and needed[a][0] != needed[b][0]:
            return f"on rank {rank} {a} shares a group with {b}: sums of gradients need their own"
        if groups[a] != groups[b] and needed[a] == needed[b]:
            return f"{a} and {b} have the same ranks, but a group each: NCCL needs memory for both"


def picture(runs):
    case, records = runs[2]
    yield from [f"axes of rank 5 of {', '.join(f'{k} {v}' for k, v in case.sizes.items())}"]
    for name, members in records[5].values["members"].items():
        row = "".join(f"{r:3}" if r in members else "  ." for r in range(case.ranks))
        yield f"{name:9}{row}"
    yield f"groups: {len({*records[5].values['groups'].values()})}"


VERSIONS = """
pp_fastest: The first coordinate varies fastest: tp ranks, which communicate most, are far apart.
- pipelines = rows_of(layout.grids[0], ("pp",))
+ pipelines = torch.arange(layout.world_size).view(-1, layout.pp).tolist()
- for grid in layout.grids
+ for grid in (grid._replace(sizes=dict(reversed(grid.sizes.items()))) for grid in layout.grids)
neighbours_always: Every axis gets ranks that are neighbours: ranks of an outer axis are as far
    apart as the inner sizes multiply to.
    rows_of(grid, varying) => torch.arange(layout.world_size).view(-1, grid.size(name)).tolist()
groups_of_the_mesh_before: Groups are kept for the next mesh, which gets the old ones: their timeout
    and their ranks may be other ones.
    timeout_seconds: float = 60.0) => timeout_seconds: float = 60.0, every={})
    ProcessGroup] = {} => ProcessGroup] = every.setdefault(dist.get_rank(), {})
shared_with_activations: Sums of gradients share groups with messages of activations: with NCCL all
    that uses a group is done in turn, and a layer's message waits for a sum of gradients.
    key = "dp" in name or name == "world", str(members) => key = str(members)
one_end: ends has the first stage only: the gradient of a tied embedding is not summed.
    sorted({ranks[0], ranks[-1]}) => [ranks[0]]
    ranks[1:-1] => ranks[1:]
all_stages: ends has all stages: those between have no embedding.
    sorted({ranks[0], ranks[-1]}) => ranks
    ranks[1:-1] => []
between_left_out: The ranks of the stages between are in no group of ends: all ranks must be in one.
    ends + between => ends
shared_by_own_row: Groups are shared where this rank's own row is the same: on other ranks it is
    not, and ranks make different numbers of groups.
    str(members) => str([row for row in members if dist.get_rank() in row])
no_timeout: The groups do not have the timeout: a rank that fails is noticed after half an hour.
    (members, timeout=timeout) => (members)
days: timedelta(n) is n days: name the argument, seconds=n.
    timedelta(seconds=timeout_seconds) => timedelta(timeout_seconds)
cp_left_out: dp_cp varies dp only: with cp, gradients are summed over a part of the tokens.
    rows_of(grid, varying) => rows_of(grid, ("dp",) if name == "dp_cp" else varying)
ep_and_etp_swapped: ep and etp are swapped in the grid of experts: etp must vary fastest.
- for grid in layout.grids
+ for grid in [
+     g._replace(sizes={n: g.sizes[n] for n in "pp dp cp tp edp etp ep".split() if n in g.sizes})
+     for g in layout.grids
+ ]
also_right:
    str(members) => str(sorted(members))
- groups[key], _ = dist.new_subgroups_by_enumeration(members, timeout=timeout)
+ mine = [dist.new_group(row, timeout=timeout) for row in members]
+ groups[key] = next(g for g, row in zip(mine, members) if dist.get_rank() in row)
- between = [[rank] for ranks in pipelines for rank in ranks[1:-1]]
+ between = [row for row in [sum([ranks[1:-1] for ranks in pipelines], [])] if row]
"""
