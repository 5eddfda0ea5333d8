"""Yours: which of your own functions are guilty, by name, and what is wrong inside of them."""

from itertools import chain

from torch import Tensor

from difference.algebra import FITS, ranges, same, weights_of
from difference.calls import TOTAL, Call
from difference.compare import Comparison
from difference.inside import Inside
from difference.places import Here, take
from difference.taps import INSIDE, RESULT, outer
from difference.why import lines_along, size_named, times

MOST = 4  # statements
DIMS = {1: ("number",), 2: ("row", "column")}


def named(both: Comparison, said: str) -> tuple[list[str], str]:
    """The guilty function and those that call it, and what is wrong inside.

    Without a sentence it is less certain: a right one, too, can make what one process does not.
    """
    if not any(record.key.phase == INSIDE for record in chain(*both.runs)):
        return [], ""
    inside = Inside(both)
    calls = [*chain(*inside.calls)]
    backwards = {c.key.name for c in calls if c.key.name.endswith(".backward")}
    of_autograd = {name.removesuffix(".backward") for name in backwards}

    def function(name: str) -> str:
        """Of the two methods of an autograd.Function, the class."""
        of, _, method = outer(name).rpartition(".")
        return of if of in of_autograd and method in ("forward", "backward") else outer(name)

    def functions(*names: str) -> list[str]:
        return [*dict.fromkeys(map(function, names))]

    if found := inside.first_guilty():
        guilty = found[0]
        name = function(guilty.key.name)
        # Autograd calls it in backward; it may have been given something in forward.
        alike = (call.callers for call in calls if function(call.key.name) == name)
        callers = guilty.callers or chain(*alike)
        return functions(name, *(callers if guilty.got else ())), what_is_wrong(*found, inside)
    names, what = handed_on(inside, "the sum is missing" in said)
    return functions(*names), what


def handed_on(inside: Inside, is_missing: bool) -> tuple[list[str], str]:
    """Of a wrong gradient: functions that lack a sum in backward; perhaps what tells it."""
    one, calls = inside.both.first[0], [*chain(*inside.calls)]
    if one.key.phase != "backward":
        return [], ""
    if is_missing:
        # What each rank computes with a tensor that all have alike begins with a copy.
        others = {call.key.name for call in calls if not copied(call)}
        if copies := [call.key.name for call in calls if call.key.name not in others]:
            return copies, "what it gets is returned as it is"
        of = one.key._replace(phase="forward")
        read = [o.got for o in inside.both.all if o.at is one.at and o.key == of][:1]
        mine = ((c.key.name, t) for c in inside.calls[one.at.rank] for t in c.got.values())
        return [name for name, tensor in mine if any(same(x, tensor) for x in read)], ""
    for call, at in reversed(inside.before + inside.since):
        for variable in copied(call) if call.key[3:] == one.key[3:] else ():
            over = inside.sum_over(call.got[variable], variable, call, at)
            if over and inside.place(call.got[variable], call, at) is None:
                what = f"{variable} is a part of a sum over {over}, and is returned as it is"
                return [call.key.name], what
    return [], ""


def copied(call: Call) -> list[str]:
    """What a call gets and returns unchanged."""
    out = call.made.get(RESULT)
    return [v for v, tensor in call.got.items() if out is not None and same(out, tensor)]


def what_is_wrong(call: Call, at: Here, inside: Inside) -> str:
    """Of what a call gets and makes: parts, what all ranks have alike, and what is wrong."""
    cut, sums, wholes, wrong, seen = [], [], [], [], []
    made = {TOTAL: call.made[TOTAL]} if TOTAL in call.made else call.made
    for variable, tensor in sorted(made.items(), key=lambda of: " of " in of[0]):
        if any(same(tensor, other) for other in seen):
            continue
        seen.append(tensor)
        dims = inside.place(tensor, call, at)
        if dims is None and (over := inside.sum_over(tensor, variable, call, at)):
            sums.append((tensor.shape, f"{variable} is a part of a sum over {over}"))
        elif dims is None:
            wrong.append(f"{variable} is {how_wrong(tensor, variable, call, at, inside)}")
        elif dims and variable in call.got:
            cut.append(f"{variable} is a rank's part along dim {dims[0]}")
        elif not dims:
            wholes.append((tensor.shape, f"{variable} is what one process has"))
    formulas = [text for text in wrong if not text.endswith(" is wrong")]
    if not formulas and not sums and TOTAL not in made:
        return ""
    wrong = formulas or wrong
    shapes = {shape for shape, _ in sums}
    parts = [text for shape, text in sums + wholes if shape in shapes] + cut
    return "; ".join([*parts[: max(1, MOST - len(wrong))], *wrong[: MOST - bool(parts)]])


def how_wrong(tensor: Tensor, variable: str, call: Call, at: Here, inside: Inside) -> str:
    """How it differs from this variable in a call in one process, if that is known."""
    rights = [c for c in inside.right_calls if c.key == call.key and variable in c.made]
    rights.sort(key=lambda c: c.which != call.which)
    for right in (c.made[variable] for c in rights if tensor.isfinite().all()):
        for indices in inside.parts(tensor.shape, right.shape, at):
            c = weights_of(tensor, [take(right, indices)])
            # Any number is some factor times any other.
            if c and c[0] not in (0, 1) and (tensor.numel() > 1 or size_named(c[0], inside.both)):
                return f"{times(c[0], inside.both)} what one process has"
            if where := somewhere(tensor, take(right, indices), variable == TOTAL, inside.both):
                return where
    for given, mine in call.got.items():
        for axes, row in inside.rows(mine, given, call, at):
            if same(sum(row), tensor):
                return f"the sum of {given} over {axes}"
    return "wrong"


def somewhere(got: Tensor, right: Tensor, is_total: bool, both: Comparison) -> str:
    """What is wrong in some rows, columns or numbers alone.

    Before a sum over ranks, zeros can be in the place of other ranks' numbers.
    """
    wrong = (got - right).abs() > FITS * right.abs().max()
    for dim, name in reversed([*enumerate(DIMS.get(got.ndim, ()))]):
        where = lines_along(wrong, dim).any(1).nonzero()[:, 0].tolist()
        if 0 < len(where) < got.shape[dim]:
            ratios, how = got[wrong] / right[wrong], "wrong"
            is_one = (ratios - ratios[0]).abs().max() <= FITS * ratios.abs().max()
            if not is_total and not (is_one and ratios[0]):
                return ""
            if is_one:
                how = f"{times(float(ratios[0]), both)} what one process has" if ratios[0] else "0"
            return f"{how} in {name}{'s' * (len(where) > 1)} {ranges(where)}, and right in others"
    return ""
