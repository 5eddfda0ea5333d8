"""Checks a student's version of a function: runs its cases, asks the gates, finds the mistake.

    V value    equal to an obvious slow reference, to 1e-10; never compared with the solution
    B bytes    calls and bytes by the network equal the formula, exactly; so does the ledger
    M memory   bytes alive
    O order    what was started before what; and that all work was awaited

When a gate fails, known mistakes of the exercise are run in the same cases. One that does the same
as the student's version in all of them is named. Of other versions the answer says what all wrong
results have in common, or shows the smallest case that fails.
"""

import linecache
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from exercises.calls import Call, Calls, changed_argument, wrong_call
from exercises.compare import common_pattern, equal, first_difference, only_wrong
from exercises.counts import traffic_problem
from exercises.exercise import (
    GATES,
    ROOT,
    Case,
    Exercise,
    Mistake,
    Verdict,
    in_common,
    order_of,
)
from exercises.loading import course_with
from exercises.ranks import Record, run_case
from exercises.simulated_dist import simulated
from exercises.source import BadFile, solution
from exercises.world import Deadlock


class Failure(NamedTuple):
    """Why a case has no results."""

    kind: str  # not_written, deadlock, exception, unusable_file
    what: str  # without lines of code: the same for the same mistake written differently
    text: str  # for the student
    line: str = ""  # of the student's code, without a comment


@dataclass(eq=False)
class CaseResult:
    case: Case
    records: list[Record] = field(default_factory=list)
    failure: Failure | None = None
    problems: dict[str, str] = field(default_factory=dict)  # by gate that failed
    expected: list[dict] = field(default_factory=list)
    calls: dict[int | None, list[Call]] = field(default_factory=dict)  # by rank
    keeps: bool = False  # something between calls, without which all is right

    @property
    def values(self) -> list[dict]:
        return [record.values for record in self.records]

    def same_as(self, other: "CaseResult", in_line: bool = False) -> bool:
        """Whether both did the same, as far as gates can see; `in_line`: or failed in one line."""
        mine, theirs = self.failure, other.failure
        if mine and theirs:
            return mine[:2] == theirs[:2] and (not in_line or mine.line == theirs.line)
        is_alike = not mine and not theirs and self._seen == other._seen
        return is_alike and equal(self.values, other.values)

    @property
    def all_calls(self) -> list[Call]:
        return [call for calls in self.calls.values() for call in calls]

    @property
    def _seen(self) -> tuple[dict, list]:
        """What gates other than V have seen."""
        problems = {gate: problem for gate, problem in self.problems.items() if gate != "V"}
        return problems, [record.sent for record in self.records]


Outcome = list[CaseResult]


def outcome_of(
    exercise: Exercise,
    text: str,
    path: Path,
    seed: int = 0,
    places: list[int] | None = None,
    forgets: bool = False,
    is_watched: bool = True,
) -> Outcome:
    """Run all cases, or those at some places, with the definition in a student's text.

    `forgets`: a function, or a method, is made anew for each call, so that it keeps nothing.
    `is_watched`: its calls are noted.
    """
    cases, calls, results = exercise.seeded_cases(seed), Calls(), []
    watch = calls.watch if is_watched else lambda definition: definition
    cases = cases if places is None else [cases[i] for i in places]
    linecache.cache[str(path)] = len(text), None, text.splitlines(keepends=True), str(path)
    with simulated():
        try:
            with course_with(exercise, text, path, watch, forgets) as course:
                for case in cases:
                    results.append(_result_of(exercise, case, course, path))
                    results[-1].calls = calls.take()
                return results
        except Exception as error:  # raised while the student's file was imported
            if not isinstance(error, BadFile) and not _lines_of(path, error):
                raise  # an error of this checker
            return [CaseResult(case, failure=failure_of(error, path)) for case in cases]


def outcome_of_student(exercise: Exercise, text: str, path: Path, seed: int) -> Outcome:
    """All cases, and the first that fails once more, alone, with a function that forgets."""
    outcome = outcome_of(exercise, text, path, seed)
    for first in _failed(outcome)[:1]:
        again = outcome_of(exercise, text, path, seed, [outcome.index(first)], forgets=True)
        first.keeps = not _failed(again)
    return outcome


def _failed(outcome: Outcome) -> Outcome:
    """The smallest case first."""
    return sorted((r for r in outcome if r.failure or r.problems), key=lambda r: order_of(r.case))


def _result_of(exercise: Exercise, case: Case, course, path: Path) -> CaseResult:
    result = CaseResult(case)
    try:
        result.records = run_case(course, case, exercise.on_rank, path)
    except BaseException as error:  # SystemExit, too
        if isinstance(error, KeyboardInterrupt):
            raise
        result.failure = failure_of(error, path)
        return result
    result.expected = exercise.expected(case)
    problems = {"V": first_difference(result.values, result.expected)}
    if exercise.traffic:
        problems["B"] = traffic_problem(exercise.traffic(case), result.records)
    for gate, problem_of in (("M", exercise.memory), ("O", exercise.order)):
        if problem_of:
            found = (problem_of(case, rank, record) for rank, record in enumerate(result.records))
            problems[gate] = next(filter(None, found), "")
    left = [(rank, what) for rank, r in enumerate(result.records) for what in r.unawaited]
    if left and not problems.get("O"):
        what = "rank {} starts {}, and never waits for it".format(*left[0])
        problems["O"] = f"{what}: its memory may still be read or written"
    for rank, record in enumerate(result.records):
        if record.changed and not problems.get("O"):
            what = f"rank {rank} changes a tensor while it is sent to rank {record.changed[0]}"
            problems["O"] = f"{what}: until the message is awaited, its memory is still read"
    result.problems = {gate: problem for gate, problem in problems.items() if problem}
    return result


def failure_of(error: BaseException, path: Path) -> Failure:
    """What to answer for an error that a student's version has raised."""
    if isinstance(error, NotImplementedError) and not str(error):
        what = "not written yet: replace `raise NotImplementedError` by your code"
        return Failure("not_written", what, f"This is {what}.")
    if isinstance(error, Deadlock):
        lines = "\n".join(f"    {line}" for line in error.lines)
        return Failure("deadlock", str(error), f"Deadlock: {error}.\n{lines}".rstrip())
    if isinstance(error, BadFile):
        return Failure("unusable_file", str(error), f"Your file cannot be used: {error}.")
    frames = traceback.extract_tb(error.__traceback__)
    mine = _lines_of(path, error)
    what = "".join(traceback.format_exception_only(error)).strip()
    rank = f" on rank {error.rank}" if hasattr(error, "rank") else ""
    course = [f for f in frames if f.filename.startswith(str(ROOT / "picotron_min"))]

    def shown(frame: traceback.FrameSummary) -> str:
        return f"{Path(frame.filename).name}, line {frame.lineno}: {frame.line}"

    lines = [*map(shown, mine)]
    if not mine:  # what the function returned, or did not do, was noticed later
        ours = [f for f in frames if f.filename.startswith(str(ROOT / "exercises"))]
        ours = course or [f for f in ours if f.line[:6] != "raise "] or frames
        lines = [f"noticed later, in {shown(ours[-1])}"]
    elif course and frames.index(course[-1]) > frames.index(mine[-1]):
        lines.append(shown(course[-1]))
    text = "\n    ".join([f"Your version fails{rank}: {what}", *lines])
    return Failure("exception", what, text, mine[-1].line.partition("  #")[0] if mine else "")


def _lines_of(path: Path, error: BaseException) -> list[traceback.FrameSummary]:
    frames = traceback.extract_tb(error.__traceback__)  # many, if a function calls itself
    return [*{f.lineno: f for f in frames if f.filename == str(path)}.values()]


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
    failed = _failed(outcome)
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
    """Name and sentence of the known mistake that does the same in all cases, or in all that fail.

    The latter must fail in fewer other cases than the version does: a student may, for example,
    have written one rank as a case of its own. Two mistakes can raise the same error. So if every
    failing case raises one, the line must be the same, too.
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
        sentence = common_pattern(runs, [exercise.factors(r.case) for r in right])
    rights = outcome_of(exercise, solution(exercise), Path("<solution>"), seed)
    wrong = [wrong_call(a.calls, b.calls) for a, b in zip(outcome, rights, strict=True)]
    # A result's type explains what fails in the same cases; or a crash where it was used later.
    of_type = [bool(found and found[1]) for found in wrong]
    is_later = bool(crash) and not crash.failure.line
    place = outcome.index(crash if is_later else failed[0])
    if of_type == [r in failed for r in outcome] or (is_later and of_type[place]):
        return "wrong_type", f"With {outcome[place].case}: {wrong[place][0]}"
    if crash:  # noticed later: what the function returned before may be the reason
        before = wrong[place] if is_later else None
        return "exception", f"With {crash.case}: {before[0]}" if before else ""
    cases = in_common([r.case for r in failed], [r.case for r in right])
    text = f"{sentence or 'I do not know this mistake.'}{only_wrong(runs)}{cases}"
    if wrong[place]:
        text += f"\nWith {failed[0].case}: {wrong[place][0]}"
    return "pattern" if sentence else "unknown", text
