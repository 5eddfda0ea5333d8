"""What a version of a function does in the cases of its exercise, as far as gates can see."""

import linecache
import traceback
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

from exercises.calls import Call, Calls
from exercises.compare import equal, first_difference
from exercises.counts import order_problem, traffic_problem
from exercises.exercise import ROOT, Case, Exercise
from exercises.loading import course_with
from exercises.ranks import Record, run_case
from exercises.simulated_dist import simulated
from exercises.source import BadFile
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

    @property
    def values(self) -> list[dict]:
        return [record.values for record in self.records]

    def same_as(self, other: "CaseResult", in_line: bool = False) -> bool:
        """Whether both did the same, as gates see it; `in_line`: with errors in the same line."""
        mine, theirs = self.failure, other.failure
        if mine and theirs:
            return mine[:2] == theirs[:2] and (not in_line or mine.line == theirs.line)
        is_alike = not mine and not theirs and self._seen() == other._seen()
        return is_alike and equal(self.values, other.values)

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
) -> Outcome:
    """Run all cases, or those at some places, with the definition in a student's text."""
    cases, calls, results = exercise.seeded_cases(seed), Calls(), []
    cases = cases if places is None else [cases[i] for i in places]
    # Tracebacks read lines from here: the text of a known mistake is in no file.
    linecache.cache[str(path)] = len(text), None, text.splitlines(keepends=True), str(path)
    with simulated():
        try:
            with course_with(exercise, text, path, calls.watch) as course:
                for case in cases:
                    results.append(_result_of(exercise, case, course, path))
                    results[-1].calls = calls.take()
                return results
        except Exception as error:  # raised while the student's file was imported
            if not isinstance(error, BadFile) and not _lines_of(path, error):
                raise  # an error of this checker
            return [CaseResult(case, failure=failure_of(error, path)) for case in cases]


def failed_of(outcome: Outcome) -> Outcome:
    """The results of cases that fail: fewer ranks first, and then in the order of the cases."""
    return sorted((r for r in outcome if r.failure or r.problems), key=lambda r: r.case.ranks)


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
    checks = {
        "B": exercise.traffic and partial(traffic_problem, exercise.traffic),
        "M": exercise.memory,
        "O": exercise.order or (exercise.ORDER and partial(order_problem, exercise.ORDER)),
    }
    for gate, problem_of in checks.items():
        if problem_of:
            found = (problem_of(case, rank, record) for rank, record in enumerate(result.records))
            problems[gate] = next(filter(None, found), "")
    # A case is over: what was not awaited by now never is.
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
    course, ours = (
        [frame for frame in frames if frame.filename.startswith(str(folder))]
        for folder in (ROOT / "picotron_min", ROOT)
    )
    what = "".join(traceback.format_exception_only(error)).strip()
    rank = f" on rank {error.rank}" if hasattr(error, "rank") else ""

    def shown(frame: traceback.FrameSummary) -> str:
        return f"{Path(frame.filename).name}, line {frame.lineno}: {frame.line}"

    # Else what the function returned, or did not do, was noticed later.
    later = f"noticed later, in {shown((course or ours or frames)[-1])}"
    lines = [*map(shown, mine)] or [later]
    text = "\n    ".join([f"Your version fails{rank}: {what}", *lines])
    return Failure("exception", what, text, mine[-1].line.partition("  #")[0] if mine else "")


def _lines_of(path: Path, error: BaseException) -> list[traceback.FrameSummary]:
    frames = traceback.extract_tb(error.__traceback__)  # many, if a function calls itself
    return [*{f.lineno: f for f in frames if f.filename == str(path)}.values()]
