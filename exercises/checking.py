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

from exercises.calls import changed_argument, wrong_call
from exercises.compare import common_pattern, only_wrong
from exercises.exercise import GATES, Exercise, Mistake, Verdict, in_common, order_of
from exercises.outcome import Outcome, failed_of, outcome_of, outcome_of_student
from exercises.source import solution


def check(
    exercise: Exercise, text: str, path: Path, seed: int = 0, others: dict | None = None
) -> Verdict:
    """Check a student's text; `others`: outcomes of known mistakes, if they have been run."""
    return verdict_on(exercise, outcome_of_student(exercise, text, path, seed), seed, others)


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
        return Verdict(True, gates, "", exercise.remember, "\n".join(exercise.picture(runs)))
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
    """The smallest case with an argument that is changed, though the course's own leaves it."""
    if not any(call.changed for result in outcome for call in result.all_calls):
        return ""
    rights = outcome_of(exercise, solution(exercise), Path("<solution>"), seed)
    right = [call for result in rights for call in result.all_calls]
    results = sorted(outcome, key=lambda result: order_of(result.case))
    texts = ((result.case, changed_argument(result.all_calls, right)) for result in results)
    return next((f"{case}: {text}" for case, text in texts if text), "")


def _known(
    exercise: Exercise, outcome: Outcome, failed: Outcome, seed: int, others: dict[str, Outcome]
) -> tuple[str, str] | None:
    """Name and sentence of a known mistake that agrees with the version; the first of these rules.

    1. It does the same in all cases.
    2. It does the same in all cases that fail, and differs in fewer cases than these: a student may
       have written one rank as a case of its own.
    3. It alone does the same in all cases in which the version raises no error, of which one fails.
    4. It alone raises the same errors in all cases, and not one error only.
    Two mistakes can raise one error: if all failures are errors, 1 and 2 ask for the same line.
    """
    crashes_only = all(r.failure and r.failure.kind == "exception" for r in failed)

    def agrees(mistake: Mistake, places: list[int], in_line: bool = crashes_only) -> list[bool]:
        if mistake.name in others:
            its = [others[mistake.name][i] for i in places]
        else:
            text, path = mistake.apply(solution(exercise)), Path(f"<{mistake.name}>")
            its = outcome_of(exercise, text, path, seed, places, is_watched=False)
        return [outcome[i].same_as(its[k], in_line) for k, i in enumerate(places)]

    everywhere, places = [*range(len(outcome))], [outcome.index(result) for result in failed]
    finished = [i for i in everywhere if not outcome[i].failure]
    first, partly, alike = [i for i in places if i in finished][:1], None, []
    for mistake in exercise.mistakes:
        # What a version keeps comes from the cases before: one case alone would lack it.
        if failed[0].keeps or all(agrees(mistake, first or places[:1])):
            same = agrees(mistake, everywhere)
            if all(same):
                return mistake.name, mistake.sentence
            if all(same[i] for i in places) and same.count(False) < len(failed):
                where = "In the cases that fail, it does the same as this mistake: "
                partly = partly or (mistake.name, where + mistake.sentence)
            elif first and all(same[i] for i in finished):
                alike.append(mistake)
    if partly:
        return partly
    where = "Where no error is raised, it does the same as this mistake: "
    if not alike and crashes_only and len({r.failure.what for r in failed}) > 1:
        alike = [m for m in exercise.mistakes if all(agrees(m, places[:1], in_line=False))]
        alike = [m for m in alike if all(agrees(m, everywhere, in_line=False))]
        where = "This mistake raises the same errors: "
    return (alike[0].name, where + alike[0].sentence) if len(alike) == 1 else None


def _unlisted(exercise: Exercise, outcome: Outcome, failed: Outcome, seed: int) -> tuple[str, str]:
    """What is wrong about a version that is no known mistake: a name, and a sentence, if any."""
    right = [result for result in outcome if result not in failed]
    if failed[0].keeps:
        how = "all is right if the function is made anew for each call, and the case runs alone"
        return "kept", f"Something is kept between calls: with {failed[0].case}, {how}."
    crash = next((result for result in failed if result.failure), None)
    if crash and crash.failure.kind != "exception":
        return crash.failure.kind, ""
    if not crash:
        wrong = [r for r in failed if "V" in r.problems]
        if not wrong:  # the sentences of the other gates have the reason
            gate, text = next(iter(failed[0].problems)), ", and ".join(failed[0].problems.values())
            return GATES[gate], f"Results are right. With {failed[0].case}: {text}."
        runs = [(exercise.factors(r.case), r.values, r.expected) for r in wrong]
        unlike = [exercise.factors(r.case) for r in right]
        sentence = common_pattern(runs, unlike)
    rights = outcome_of(exercise, solution(exercise), Path("<solution>"), seed)
    wrong = [wrong_call(a.calls, b.calls) for a, b in zip(outcome, rights, strict=True)]
    # A result's type explains what fails in the same cases; or a crash where it was used later.
    of_type = [bool(found and found.has_other_form) for found in wrong]
    is_later = bool(crash) and not crash.failure.line
    place = outcome.index(crash if is_later else failed[0])
    if of_type == [r in failed for r in outcome] or (is_later and of_type[place]):
        return "wrong_type", f"With {outcome[place].case}: {wrong[place].text}"
    if crash:  # noticed later: what the function returned before may be the reason
        before = wrong[place] if is_later else None
        return "exception", f"With {crash.case}: {before.text}" if before else ""
    cases = in_common([r.case for r in failed], [r.case for r in right])
    if not sentence:
        pairs = zip(outcome, wrong, strict=True)
        calls = [(exercise.factors(r.case), *w.results) for r, w in pairs if w]
        if how := common_pattern(calls, unlike):
            sentence = f"In the first wrong call of each case, {how[0].lower()}{how[1:]}"
        elif "O" in failed[0].problems:
            sentence = f"With {failed[0].case}: {failed[0].problems['O']}."
    text = f"{sentence or 'I do not know this mistake.'}{only_wrong(runs)}{cases}"
    if wrong[place]:
        text += f"\nWith {failed[0].case}: {wrong[place].text}"
    return "pattern" if sentence else "unknown", text
