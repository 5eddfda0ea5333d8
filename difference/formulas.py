"""Formulas: what is wrong inside of a call of your own function, beside one process."""

from collections import defaultdict
from itertools import combinations
from typing import NamedTuple

import torch
from torch import Tensor

from difference.algebra import FITS, REDUCTIONS, ranges, same, scaled_by_parts, weights_of
from difference.calls import TOTAL, Call
from difference.inside import Inside
from difference.places import Here, take
from difference.reads import lines_along
from difference.why import size_named, times

MOST = 4  # statements
DIMS = {1: ("number",), 2: ("row", "column")}


def what_is_wrong(call: Call, at: Here, inside: Inside) -> str:
    """Of what a call gets and makes: parts, what all ranks have alike, and what is wrong."""
    cut, sums, wholes, formulas, unknown, seen = [], [], [], [], [], []
    made = {TOTAL: call.made[TOTAL]} if TOTAL in call.made else inside.made(call, at)
    for variable, tensor in sorted(made.items(), key=lambda of: " of " in of[0]):
        if any(same(tensor, other) for other in seen):
            continue
        seen.append(tensor)
        dims, is_kept = inside.place(tensor, call, at), variable.startswith("self.")
        if dims is None and (part := inside.part_of(tensor, variable, call, at)):
            sums += [(tensor.shape, f"{variable} is a part of {part}")] * (not is_kept)
        elif dims is None and inside.is_right(variable, tensor, call, at):
            continue
        elif dims is None and (how := how_wrong(tensor, variable, call, at, inside)):
            formulas.append(f"{variable} {how}")
        elif dims is None:
            unknown.append(f"{variable} is wrong")
        elif dims and variable in call.got and not is_kept:
            cut.append(f"{variable} is a rank's part along dim {dims[0]}")
        elif not dims and not is_kept:
            wholes.append((tensor.shape, f"{variable} is what one process has"))
    if not formulas and not sums and TOTAL not in made:
        return ""
    wrong, shapes = formulas or unknown, {shape for shape, _ in sums}
    parts = [text for shape, text in sums + wholes if shape in shapes] + cut
    return "; ".join([*parts[: max(1, MOST - len(wrong))], *wrong[: MOST - bool(parts)]])


def how_wrong(tensor: Tensor, variable: str, call: Call, at: Here, inside: Inside) -> str:
    """How it differs from this variable in a call in one process, if that is known."""
    if part := inside.part_of(tensor, variable, call, at, *REDUCTIONS):
        return f"is this rank's own part of {part}"
    rights = [c for c in inside.right_calls if c.key == call.key and variable in c.made]
    rights.sort(key=lambda c: c.which != call.which)
    for whole in (c.made[variable] for c in rights if tensor.isfinite().all()):
        for indices in inside.parts(tensor.shape, whole.shape, at):
            one = Wrong(tensor, take(whole, indices), whole, variable, call, at, inside)
            if found := next(filter(None, (formula(one) for formula in FORMULAS)), ""):
                return found
    for given, mine in call.got.items():
        for axes, row in inside.rows(mine, given, call, at):
            for name, reduce in REDUCTIONS.items():
                if same(reduce([*row.values()]), tensor):
                    return f"is the {name} of {given} over {axes}"
    return ""


class Wrong(NamedTuple):
    """A tensor of a call, beside the part of one process's tensor that it should be."""

    got: Tensor
    right: Tensor
    whole: Tensor
    variable: str
    call: Call
    at: Here
    inside: Inside

    def is_times(self, c: float) -> str:
        return f"is {times(c, self.inside.both)} what one process has"


def scaled(one: Wrong) -> str:
    c = weights_of(one.got, [one.right])
    # Any number is some factor times any other.
    is_one = c and c[0] not in (0, 1) and (one.got.numel() > 1 or size_named(c[0], one.inside.both))
    return one.is_times(c[0]) + _why_scaled(one) if is_one else ""


def _why_scaled(one: Wrong) -> str:
    """Where each rank has another factor: what scales it is a part of something."""
    for axes, row in one.inside.rows(one.got, one.variable, one.call, one.at):
        factors = []
        for at, mine in row.items():
            parts = one.inside.parts(mine.shape, one.whole.shape, at)
            found = (weights_of(mine, [take(one.whole, indices)]) for indices in parts)
            factors += next(filter(None, found), [])
        if len(factors) == len(row) and (why := scaled_by_parts(factors)):
            return f": {why} over {axes}"
    return ""


def of_another(one: Wrong) -> str:
    """Another rank's part of it."""
    ranks = one.inside.both.ranks if one.got.shape != one.whole.shape else ()
    owners = (at for at in ranks if one.inside.has_part(one.got, one.whole, at))
    return next((f"is the part of {at}" for at in owners), "")


def lacking(one: Wrong) -> str:
    """Of a sum over all ranks: whose numbers it lacks."""
    ranks = one.inside.both.ranks
    calls = [call for at in ranks if (call := one.inside.call_of(one.call, at))]
    for variable in one.call.made if one.variable == TOTAL else ():
        owners = defaultdict(list)  # of the same numbers
        for at, call in zip(ranks, calls, strict=False):
            numbers = call.made.get(variable, one.got[:0]).flatten().tolist()
            owners[tuple(numbers)].append(at)
        if {*map(len, owners)} == {one.got.numel()}:
            columns = [torch.tensor(numbers, dtype=torch.float64) for numbers in owners]
            weights = [weights_of(sums.flatten(), columns) or [] for sums in (one.got, one.right)]
            sums = zip(owners.values(), *weights, strict=False)
            if lost := sorted(at for of, c, should in sums if should > c == 0 for at in of):
                return f"lacks {variable} of {one.inside.both.name_of(lost)}"
    return ""


def somewhere(one: Wrong) -> str:
    """What is wrong in some rows, columns or numbers alone: another number of times the right ones.

    Before a sum over ranks, zeros can be in the place of other ranks' numbers.
    """
    wrong = (one.got - one.right).abs() > FITS * one.right.abs().max()
    ratios, is_total = one.got[wrong] / one.right[wrong], one.variable == TOTAL
    c, how = float(ratios.mean()), "is wrong" * is_total
    if (ratios - c).abs().max() <= FITS * abs(c):
        # Of one number, any factor fits.
        is_sure = len(ratios) > 1 or size_named(c, one.inside.both)
        how = one.is_times(c) * bool(is_sure) if c else "is 0" * is_total
    for dim, name in reversed([*enumerate(DIMS.get(one.got.ndim, ()))]):
        where = lines_along(wrong, dim).any(1).nonzero()[:, 0].tolist()
        if how and 0 < len(where) < one.got.shape[dim]:
            return f"{how} in {name}{'s' * (len(where) > 1)} {ranges(where)}, and right in others"
    return ""


def moved(one: Wrong) -> str:
    """Numbers, or rows, that are other ones of one process, or sums of two of them."""
    if one.got.ndim not in DIMS:
        return ""
    views = [(DIMS[one.got.ndim][0], lines_along(one.got, 0), lines_along(one.right, 0))]
    layers = one.inside.num_layers if one.got.ndim == 1 and one.got.shape == one.right.shape else ()
    # A table of all layers, flattened.
    tables = [L for L in layers if len(one.got) > L and len(one.got) % L == 0]
    views += [("layer", one.got.view(L, -1), one.right.view(L, -1)) for L in tables]
    return next(filter(None, (_moved(*view) for view in views)), "")


def _moved(name: str, mine: Tensor, lines: Tensor) -> str:
    if not 1 < len(lines) <= 64:
        return ""
    most, n = FITS * lines.abs().max(), len(lines)
    pairs = [*combinations(range(n), 2)] + [(i,) for i in range(n)]
    sums = torch.stack([lines[[*of]].sum(0) for of in pairs])
    near = torch.cdist(mine, sums, p=torch.inf) <= most
    wrong = ((mine - lines).abs() > most).any(1) & mine.any(1)
    if not near[wrong].any(1).all():
        return ""
    for i in (wrong & (near.sum(1) == 1)).nonzero()[:, 0].tolist():
        of = pairs[int(near[i].int().argmax())]
        if len(of) == 1 or not same(*lines[[*of]]):  # equal ones tell nothing
            which = f"the sum of {of[0]} and {of[1]}" if of[1:] else f"{of[0]}"
            return f"is wrong: {name} {i} is {which} in one process"
    return ""


def added(one: Wrong) -> str:
    """A multiple of what one process adds to something that the call has got."""
    for given, tensor in one.call.got.items():
        if tensor.shape == one.got.shape and one.got.numel() > 2 and not same(tensor, one.right):
            c = weights_of(one.got, [one.right, tensor])
            if c and abs(sum(c) - 1) < 1e-6 and abs(c[0] - 1) > 1e-4:
                to = "it" if given == one.variable else given
                much = times(round(c[0], 6), one.inside.both)
                return f"is wrong: what is added to {to} is {much} what one process adds"
    return ""


def added_on_ranks(one: Wrong) -> str:
    """As `added`, where each rank adds a part of a sum to its part of another one."""
    call, inside = one.call, one.inside
    right = next((c for c in inside.right_calls if c[:2] == call[:2]), None)
    for given in call.got.keys() & right.got.keys() if right else ():
        if call.got[given].shape != one.got.shape or right.got[given].shape != one.whole.shape:
            continue
        for axes, row in inside.rows(one.got, one.variable, call, one.at):
            adds = [got - inside.call_of(call, at).got.get(given, got) for at, got in row.items()]
            for indices in inside.parts(one.got.shape, one.whole.shape, one.at):
                c = weights_of(sum(adds), [take(one.whole - right.got[given], indices)])
                is_sure = one.got.numel() > 1 or size_named(c[0] if c else 0, inside.both)
                if c and c[0] not in (0, 1) and is_sure:
                    much = f"{times(c[0], inside.both)} what one process adds"
                    return f"is wrong: what is added to {given}, summed over {axes}, is {much}"
    return ""


def behind_a_power(one: Wrong) -> str:
    """Of c x + a constant, or of 1 / sqrt(it), such as a norm: the factor c."""
    if one.got.numel() < 8:
        return ""
    for power in (1, 2, -1, -2) if min(one.got.min(), one.right.min()) > 0 else (1,):
        c = weights_of(one.got**power, [one.right**power, torch.ones_like(one.right)])
        if c and size_named(c[0], one.inside.both):
            which = f"its power {power}" if power != 1 else "it"
            return f"is wrong: {which} {one.is_times(c[0])}, and a constant"
    return ""


FORMULAS = scaled, of_another, lacking, moved, added, added_on_ranks, behind_a_power, somewhere
