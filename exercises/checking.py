"""Checks a student's version of a function: runs its cases, asks the gates, finds the mistake.

    V value    equal to an obvious slow reference, to 1e-10; never compared with the solution
    B bytes    calls and bytes by the network equal the formula, exactly; so does the ledger
    M memory   bytes alive
    O order    what was started before what; and that all work was awaited

When a gate fails, known mistakes of the exercise are run in the same cases. One that does the same
as the student's version is named: see `_known`. Of other versions the answer says what all wrong
results have in common, or shows the first call that returns something else than the course's own.
"""

from itertools import chain
from pathlib import Path

from exercises.calls import wrong_call
from exercises.compare import common_pattern
from exercises.exercise import GATES, Case, Exercise, Mistake, Verdict
from exercises.outcome import CaseResult, Outcome, failed_of, outcome_of
from exercises.pictures import picture
from exercises.source import solution


def check(exercise: Exercise, text: str, path: Path, seed: int = 0) -> Verdict:
    return verdict_on(exercise, outcome_of(exercise, text, path, seed), seed)


def verdict_on(exercise: Exercise, outcome: Outcome, seed: int = 0) -> Verdict:
    """What a check answers, given what a student's version did in all cases."""
    gates = dict.fromkeys(exercise.gates, "")
    failed = failed_of(outcome)
    for result in reversed(failed):  # what remains is of the smallest case
        if result.failure:
            gates = dict.fromkeys(gates, "not checked")
        gates |= {gate: f"{result.case}: {text}" for gate, text in result.problems.items()}
    changed = _changed(exercise, outcome, seed)
    # The results are right; what a caller computes next from the argument would not be.
    if not failed and changed:
        return Verdict(False, gates | {"V": changed}, "argument_changed", f"With {changed}.")
    if not failed:
        runs = [(result.case, result.records) for result in outcome]
        return Verdict(True, gates, "", exercise.remember, picture(runs))
    crash = next((result for result in failed if result.failure), None)
    if crash and crash.failure.kind in ("not_written", "unusable_file"):
        return Verdict(False, gates, crash.failure.kind, crash.failure.text)
    # A known mistake is named below the error that it raises.
    text = f"With {crash.case}:\n{crash.failure.text}" if crash else ""
    known = _known(exercise, outcome, failed, seed)
    name, sentence = known or _unlisted(exercise, outcome, failed, crash, seed)
    sentence += f"\nWith {changed}." if changed and not known else ""
    return Verdict(False, gates, name, "\n".join(filter(None, [text, sentence])))


def _right(exercise: Exercise, seed: int, places: list[int] | None = None) -> Outcome:
    """What the course's own does in the cases, or in those at some places."""
    return outcome_of(exercise, solution(exercise), Path("<solution>"), seed, places)


def _changed(exercise: Exercise, outcome: Outcome, seed: int) -> str:
    """The first case with an argument that is changed, though the course's own leaves it."""
    mine = _changes(outcome)
    may = _changes(_right(exercise, seed)) if mine else {}
    for (call, name), case in mine.items():
        if (call, name) not in may:
            return f"{case}: {call} changes its argument `{name}`, which its caller may use"
    return ""


def _changes(outcome: Outcome) -> dict[tuple[str, str], Case]:
    """Each function and argument of it that is changed, with a case."""
    found: dict[tuple[str, str], Case] = {}
    for result in outcome:
        for call in chain.from_iterable(result.calls.values()):
            for name in call.changed:
                found.setdefault((call.name, name), result.case)
    return found


def _known(
    exercise: Exercise, outcome: Outcome, failed: Outcome, seed: int
) -> tuple[str, str] | None:
    """Name and sentence of a known mistake that does the same as the version, or partly does.

    It does the same in all cases; or in all cases that fail, and differs in fewer cases than these:
    a student may have written one rank as a case of its own. Two mistakes can raise one error: if
    all failures are errors, they must come from the same line.
    """
    crashes_only = all(r.failure and r.failure.kind == "exception" for r in failed)

    def agrees(mistake: Mistake, places: list[int]) -> list[bool]:
        text, path = mistake.apply(solution(exercise)), Path(f"<{mistake.name}>")
        its = outcome_of(exercise, text, path, seed, places)
        return [outcome[i].same_as(its[k], crashes_only) for k, i in enumerate(places)]

    places, partly = [outcome.index(result) for result in failed], None
    for mistake in exercise.mistakes:
        if all(agrees(mistake, places[:1])):  # most differ there, which saves the other cases
            same = agrees(mistake, [*range(len(outcome))])
            if all(same):
                return mistake.name, mistake.sentence
            if all(same[i] for i in places) and same.count(False) < len(failed):
                where = "In the cases that fail, it does the same as this mistake: "
                partly = partly or (mistake.name, where + mistake.sentence)
    return partly


def _unlisted(
    exercise: Exercise, outcome: Outcome, failed: Outcome, crash: CaseResult | None, seed: int
) -> tuple[str, str]:
    """What is wrong about a version that is no known mistake: a name, and a sentence, if any."""
    if crash and (crash.failure.kind != "exception" or crash.failure.line):
        return crash.failure.kind, ""  # its line says more
    wrong = [result for result in failed if "V" in result.problems]
    if not crash and not wrong:  # the sentences of the other gates have the reason
        gate, text = next(iter(failed[0].problems)), ", and ".join(failed[0].problems.values())
        return GATES[gate], f"Results are right. With {failed[0].case}: {text}."
    place = outcome.index(crash or failed[0])
    text = wrong_call(outcome[place].calls, _right(exercise, seed, [place])[0].calls)
    call = f"With {outcome[place].case}: {text}" if text else ""
    if crash:  # noticed later: what the function has returned before may be the reason
        return "exception", call
    # A size that is the same in all cases may be as large by chance.
    sizes = [exercise.factors(result.case).items() for result in outcome]
    same = set.intersection(*map(set, sizes))
    sentence = common_pattern(
        [(dict(exercise.factors(r.case).items() - same), r.values, r.expected) for r in wrong]
    )
    text = sentence or "I do not know this mistake."
    return "pattern" if sentence else "unknown", "\n".join(filter(None, [text, call]))
