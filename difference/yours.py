"""Yours: which of your own functions are guilty, by name, and what is wrong inside."""

from collections.abc import Iterator
from itertools import chain, islice

import torch
from torch import Tensor

from difference.algebra import REDUCTIONS, same
from difference.calls import TOTAL, Call, counters_of
from difference.compare import Comparison
from difference.formulas import what_is_wrong
from difference.inside import AFTER, Inside
from difference.parts import REST, parts_of
from difference.places import Here, along, take
from difference.suspects import with_makers
from difference.taps import BUFFERS, INSIDE, NUMBERS, RESULT, Key, is_yours, outer

# Methods of extensions that write what modules keep, the last one first.
WRITERS = (*AFTER, ".begin", ".wrap", ".connect", ".swap")
MOST_GUILTY = 20  # calls that are asked what is wrong


def named(both: Comparison, why: str) -> tuple[list[str], str]:
    """The guilty function, what it depends on, who calls it, and what is wrong inside."""
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

    def with_sentences(guilty: Iterator) -> list[tuple[Call, str, Here]]:
        """Those with a sentence first, since a right call, too, can make what one process does not;
        then inner calls before those around them."""
        few = islice(guilty, MOST_GUILTY)
        found = [(call, what_is_wrong(call, at, inside), at) for call, at in few]
        outers = {caller for call, *_ in found for caller in call.callers}
        return sorted(found, key=lambda one: (not one[1], one[0].key.name in outers))

    found = with_sentences(inside.guilty())
    if not found or not found[0][1] or TOTAL in found[0][0].made:
        for names, what in (misnumbered(both), unlike_updates(inside)):
            if what:
                return functions(*names), what
    if not found or not found[0][1]:
        names, what = wrong_buffer(inside)
        if what:
            return functions(*names), what
        found = [one for one in with_sentences(inside.guilty_later()) if one[1]] + found
    if found:
        guilty, what, at = found[0]
        name = function(guilty.key.name)
        # Autograd calls it in backward; it may have been given something in forward.
        alike = (call.callers for call in calls if function(call.key.name) == name)
        callers = [*(guilty.callers or chain(*alike))] if guilty.got and is_yours(name) else []
        others = counting(guilty, calls, both) if TOTAL in guilty.made else []
        others += [c.key.name for c, sentence, _ in found if not sentence][: TOTAL in guilty.made]
        methods = [c for c in callers if function(c) == outer(c)][:1]  # none of autograd's
        others = others or writers([guilty.key.name, *methods], what, both)
        near = [*givers(guilty, at, inside), *callers[:1], *others]
        return functions(name, *near, *callers), what
    names, what = handed_on(inside, "the sum is missing" in why)
    return functions(*names), what


def givers(guilty: Call, at: Here, inside: Inside) -> list[str]:
    """Who has made what the guilty call gets, where it is a part of a sum."""
    got = [t for t in guilty.got.values() if inside.place(t, guilty, at) is None]

    def gives(call: Call) -> bool:
        results = [t for v, t in call.made.items() if v.startswith(RESULT)]
        return any(same(result, t) for result in results for t in got)

    return [call.key.name for call in inside.calls[at.rank] if gives(call)]


def writers(names: list[str], what: str, both: Comparison) -> list[str]:
    """What made, or last wrote to, the object of the first of these methods of which that is known.

    Who wrote ran after the step before, or in the build. Of a sum over an axis (see `explain` for
    the sentence) only the writer counts: it has given the object the axis.
    """
    first = both.first[0].key
    phases = ("loss", first.step - 1) if first.step else ("initial", 0)
    ran = {n for o in both.all if (o.key.phase, o.key.step) == phases for n in o.ran}
    for of in (name.rpartition(".")[0] for name in names):
        maker = both.makers.get(of)
        made = [maker] if maker and is_yours(maker) else []
        keeper = made[0].rpartition(".")[0] if made else of
        methods = (f"{keeper}{method}" for method in (*WRITERS, ".__init__"))
        wrote = [method for method in methods if method in ran]
        if found := wrote[:1] if " over " in what else made or wrote[:1]:
            return found
    return []


def counting(guilty: Call, calls: list[Call], both: Comparison) -> list[str]:
    """The method that counted what `counts` returns, its caller, and what made the object."""
    of, name = guilty.key.name.rpartition(".")[0], guilty.key.name
    counters = counters_of(guilty, calls)
    return [*counters, *with_makers([name], both)[1:2], *[f"{of}.__init__"] * bool(counters)]


def unlike_updates(inside: Inside) -> tuple[list[str], str]:
    """An `updated` whose tensors differ on the ranks of a stage, although they get equal ones."""
    for call, at in inside.before + inside.since + inside.late:
        row = [inside.call_of(call, other) for other in inside.both.ranks if other.pp == at.pp]
        given = {v: t for v, t in call.got.items() if not v.startswith("self.")}
        if not call.key.name.endswith(".updated") or not given or None in row:
            continue

        def is_alike(variable: str, side: str, row: list[Call] = row) -> bool:
            tensors = [getattr(one, side).get(variable) for one in row]
            return all(t is not None and same(t, tensors[0]) for t in tensors)

        # A rank's own part of what it gets may differ, and what its object keeps.
        parts = torch.cat([t.flatten() for t in given.values()])
        made = {v: t for v, t in call.made.items() if not v.startswith("self.")}
        made = {v: t for v, t in made.items() if not torch.isin(t, parts).all()}
        rights = [right.made for right in inside.right_calls if right.key == call.key]
        whole = [v for v, t in made.items() if any(t.shape == r[v].shape for r in rights if v in r)]
        unlike = next((v for v in whole if not is_alike(v, "made")), "")
        if unlike and all(is_alike(variable, "got") for variable in given):
            what = f"{unlike} is not the same on all ranks of a stage, though what it gets is"
            return [call.key.name], what
    return [], ""


def misnumbered(both: Comparison) -> tuple[list[str], str]:
    """What should keep the number of its layer in the whole model, and keeps another."""
    right = {key.name: int(n) for key, n in both.whole.items() if key.phase == NUMBERS}
    others = {
        of.split(" ", 1)[1] for of, n in right.items() if f".layers.{n}." not in f"{of.split()[0]}."
    }
    for record in chain(*both.runs):
        of, n = record.key.name, record.tensor
        if record.key.phase == NUMBERS and int(n) != right.get(of, int(n)):
            module, keeper, name = of.split(" ")
            if f"{keeper} {name}" not in others:
                makers = with_makers([keeper + "." * (keeper in both.makers)], both)[1:]
                what = f"{name} of {keeper.partition(':')[2]} in {module} is {int(n)}"
                return makers or [keeper], f"{what}, and {right[of]} in one process"
    return [], ""


def wrong_buffer(inside: Inside) -> tuple[list[str], str]:
    """The first buffer that is no part of what one process keeps, and what can have written it."""
    both, kept = inside.both, {}
    for at, run in zip(inside.both.ranks, inside.both.runs, strict=False):
        kept |= {(at, key): tensor for key, tensor, *_ in run if key.phase == BUFFERS}
    early = [of for of in kept if of[1].step < both.first[0].key.step and of[1] in both.whole]
    for at, key in sorted(early, key=lambda of: of[1].step):
        phase, step = ("loss", key.step) if key.step >= 0 else ("initial", 0)
        if what := how_kept(kept, at, key, inside):
            ran = (n for o in both.all if (o.at, *o.key[:2]) == (at, step, phase) for n in o.ran)
            names = [name for name in ran if is_yours(name) and name.endswith(WRITERS)]
            names.sort(key=lambda name: [name.endswith(end) for end in reversed(WRITERS)])
            when = f"after step {key.step + 1}" if key.step >= 0 else "before the first step"
            names = with_makers(names[:1], both) + names[1:]
            return names, f"{key.name} of {at} is {what}, {when}"
    return [], ""


def how_kept(kept: dict, at: Here, key: Key, inside: Inside) -> str:
    """Why a buffer is wrong; a part of a sum, such as a count, is right."""
    whole, tensor = inside.both.whole[key], kept[at, key]
    if inside.has_part(tensor, whole, at):
        return ""
    ranks = [
        o for o in inside.both.ranks if (o, key) in kept and kept[o, key].shape == tensor.shape
    ]
    for axes, row in along(at, ranks if tensor.any() else []):
        for name, reduce in REDUCTIONS.items():
            if inside.has_part(reduce([kept[o, key] for o in row]), whole, at):
                return f"this rank's own part of a {name} over {axes}" * (name != "sum")
    if owner := next((o for o in ranks if inside.has_part(tensor, whole, o)), None):
        return f"the part of {owner}"
    for axes, row in along(at, ranks):
        if by_a_number(key, [(o, kept[o, key]) for o in row], inside):
            how = f"wrong by one number on each rank, and these add up to 0 over {axes}"
            return f"{how}, as if a mean were of each rank's own part"
    wholes = inside.both.whole.items()
    alike = (o for o, t in wholes if o[:2] == key[:2] and inside.has_part(tensor, t, at))
    if other := next(alike, None):
        return f"what one process has of {other.name}"
    before = kept.get((at, key._replace(step=key.step - 1)))
    is_old = before is not None and same(before, tensor)
    return "as it was before" if is_old else "not what one process has"


def by_a_number(key: Key, row: list[tuple[Here, Tensor]], inside: Inside) -> bool:
    """Whether each rank's tensor lies by one number off its part, and these add up to 0."""
    whole, numbers = inside.both.whole[key], []
    for at, mine in row:
        parts = inside.parts(mine.shape, whole.shape, at)
        errors = [mine - take(whole, indices) for indices in parts]
        means = (e.mean().expand_as(e) for e in errors)
        numbers += [e[0] for e, mean in zip(errors, means, strict=True) if same(e, mean)][:1]
    most = max(map(abs, numbers), default=0)
    return len(numbers) == len(row) and most > 0 and abs(sum(numbers)) < 1e-8 * most


def handed_on(inside: Inside, is_missing: bool) -> tuple[list[str], str]:
    """Of a wrong gradient: functions that lack a sum in backward; perhaps what tells it."""
    one, calls = inside.both.first[0], [call for call, _ in inside.before + inside.since]
    if one.key.phase != "backward":
        return [], ""
    if is_missing:
        rest = parts_of(one, inside.both).get(REST, one.right)
        own = one.got - (one.right - rest)  # what this rank has of the sum
        results = ((c, t) for c in calls for v, t in c.made.items() if v.startswith(RESULT))
        if makers := [c.key.name for c, t in results if same(t, own)]:
            return makers, "what it returns is the part whose sum is missing"
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
            part = inside.part_of(call.got[variable], variable, call, at)
            if part and inside.place(call.got[variable], call, at) is None:
                what = f"{variable} is a part of {part}, and is returned as it is"
                return [call.key.name], what
    return [], ""


def copied(call: Call) -> list[str]:
    """What a call gets and returns unchanged."""
    out = call.made.get(RESULT)
    return [v for v, tensor in call.got.items() if out is not None and same(out, tensor)]
