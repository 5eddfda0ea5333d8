"""Checks a student's version of a function: runs its cases, asks the gates, finds the mistake.

    V value    equal to an obvious slow reference, to 1e-10; never compared with the solution
    B bytes    calls and bytes by the network equal the formula, exactly; so does the ledger
    M memory   bytes alive
    O order    what was started before what; and that all work was awaited

When a gate fails, known mistakes of the exercise are run in the same cases. One that does the same
as the student's version is named: see `_known`. Of other versions the answer says what all wrong
results have in common, or shows the smallest case that fails.
"""

from pathlib import Path

from exercises.calls import wrong_call
from exercises.compare import common_pattern
from exercises.exercise import GATES, Exercise, Mistake, Verdict
from exercises.outcome import Outcome, failed_of, outcome_of
from exercises.pictures import picture
from exercises.source import solution


def check(
    exercise: Exercise, text: str, path: Path, seed: int = 0, others: dict | None = None
) -> Verdict:
    """Check a student's text; `others`: outcomes of known mistakes, if they have been run."""
    return verdict_on(exercise, outcome_of(exercise, text, path, seed), seed, others)


def verdict_on(
    exercise: Exercise, outcome: Outcome, seed: int = 0, others: dict | None = None
) -> Verdict:
    """What a check answers, given what a student's version did in all cases."""
    gates = dict.fromkeys(exercise.gates, "")
    failed = failed_of(outcome)
    for result in reversed(failed):  # what remains is of the smallest case
        if result.failure:
            gates = dict.fromkeys(gates, "not checked")
        gates |= {gate: f"{result.case}: {text}" for gate, text in result.problems.items()}
    changed = _changed(exercise, outcome, seed)
    if not failed and changed:
        return Verdict(False, gates | {"V": changed}, "argument_changed", f"With {changed}.")
    if not failed:
        runs = [(result.case, result.records) for result in outcome]
        return Verdict(True, gates, "", exercise.remember, picture(runs))
    crash = next((result for result in failed if result.failure), None)
    if crash and crash.failure.kind in ("not_written", "unusable_file"):
        return Verdict(False, gates, crash.failure.kind, crash.failure.text)
    text = f"With {crash.case}:\n{crash.failure.text}" if crash else ""
    known = _known(exercise, outcome, failed, seed, others or {})
    name, sentence = known or _unlisted(exercise, outcome, failed, seed)
    sentence += f"\nWith {changed}." if changed and not known else ""
    texts = [text, sentence] if known else [sentence, text]
    return Verdict(False, gates, name, "\n".join(filter(None, texts)))


def _changed(exercise: Exercise, outcome: Outcome, seed: int) -> str:
    """The first case with an argument that is changed, though the course's own leaves it."""
    if not any(call.changed for result in outcome for call in result.all_calls):
        return ""
    rights = outcome_of(exercise, solution(exercise), Path("<solution>"), seed)
    may = {(call.name, x) for result in rights for call in result.all_calls for x in call.changed}
    for result in outcome:
        for call in result.all_calls:
            if names := [name for name in call.changed if (call.name, name) not in may]:
                what = f"{call.name} changes its argument `{names[0]}`, which its caller may use"
                return f"{result.case}: {what}"
    return ""


def _known(
    exercise: Exercise, outcome: Outcome, failed: Outcome, seed: int, others: dict[str, Outcome]
) -> tuple[str, str] | None:
    """Name and sentence of a known mistake that does the same as the version, or partly does.

    It does the same in all cases; or in all cases that fail, and differs in fewer cases than these:
    a student may have written one rank as a case of its own. Two mistakes can raise one error: if
    all failures are errors, they must come from the same line.
    """
    crashes_only = all(r.failure and r.failure.kind == "exception" for r in failed)

    def agrees(mistake: Mistake, places: list[int]) -> list[bool]:
        if mistake.name in others:
            its = [others[mistake.name][i] for i in places]
        else:
            text, path = mistake.apply(solution(exercise)), Path(f"<{mistake.name}>")
            its = outcome_of(exercise, text, path, seed, places, is_watched=False)
        return [outcome[i].same_as(its[k], crashes_only) for k, i in enumerate(places)]

    places, partly = [outcome.index(result) for result in failed], None
    for mistake in exercise.mistakes:
        if all(agrees(mistake, places[:1])):
            same = agrees(mistake, [*range(len(outcome))])
            if all(same):
                return mistake.name, mistake.sentence
            if all(same[i] for i in places) and same.count(False) < len(failed):
                where = "In the cases that fail, it does the same as this mistake: "
                partly = partly or (mistake.name, where + mistake.sentence)
    return partly


def _unlisted(exercise: Exercise, outcome: Outcome, failed: Outcome, seed: int) -> tuple[str, str]:
    """What is wrong about a version that is no known mistake: a name, and a sentence, if any."""
    crash = next((result for result in failed if result.failure), None)
    if crash and crash.failure.kind != "exception":
        return crash.failure.kind, ""
    wrong = [result for result in failed if "V" in result.problems]
    if not crash and not wrong:  # the sentences of the other gates have the reason
        gate, text = next(iter(failed[0].problems)), ", and ".join(failed[0].problems.values())
        return GATES[gate], f"Results are right. With {failed[0].case}: {text}."
    rights = outcome_of(exercise, solution(exercise), Path("<solution>"), seed)
    calls = [wrong_call(a.calls, b.calls) for a, b in zip(outcome, rights, strict=True)]
    # A result's form explains what fails in the same cases; or a crash where it was used later.
    is_later = bool(crash) and not crash.failure.line
    place = outcome.index(crash if is_later else failed[0])
    text, has_other_form = calls[place]
    call = f"With {outcome[place].case}: {text}" if text else ""
    everywhere = [has_form for _, has_form in calls] == [r in failed for r in outcome]
    if everywhere or (is_later and has_other_form):
        return "wrong_type", call
    if crash:  # noticed later: what the function returned before may be the reason
        return "exception", call if is_later else ""
    # A size that is the same in all cases may be as large by chance.
    sizes = [exercise.factors(result.case).items() for result in outcome]
    same = set.intersection(*map(set, sizes)) if len(sizes) > 1 else set()
    factors = [dict(exercise.factors(r.case).items() - same) for r in wrong]
    runs = [(f, r.values, r.expected) for f, r in zip(factors, wrong, strict=True)]
    sentence = common_pattern(runs)
    text = sentence or "I do not know this mistake."
    return "pattern" if sentence else "unknown", "\n".join(filter(None, [text, call]))
