"""Checks a student's version of a function: runs its cases, asks the gates, finds the mistake.

    V value    equal to an obvious slow reference, to 1e-10; never compared with the solution
    B bytes    calls and bytes by the network equal the formula, exactly; so does the ledger
    M memory   bytes alive
    O order    what was started before what

When a gate fails, every known mistake of the exercise is run in the same cases. One that does the
same as the student's version, in every case, is named.
"""

import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from exercises.compare import equal, first_difference, pattern
from exercises.exercise import Case, Exercise, Mistake, Sent
from exercises.forms import Call, Calls, form_problem
from exercises.loading import course_with
from exercises.ranks import Record, run_case
from exercises.simulated_dist import simulated
from exercises.source import BadFile, solution
from exercises.world import Deadlock

NONE = Sent(0, 0.0)
UNKNOWN = "I do not know this mistake."


class Failure(NamedTuple):
    """Why a case has no results."""

    kind: str  # not written, deadlock, exception, file
    what: str  # without lines of code: the same for the same mistake written differently
    text: str  # for the student


@dataclass
class CaseResult:
    case: Case
    records: list[Record] = field(default_factory=list)
    failure: Failure | None = None
    problems: dict[str, str] = field(default_factory=dict)  # by gate that failed
    expected: list[dict] = field(default_factory=list)
    calls: dict[int | None, list[Call]] = field(default_factory=dict)  # by rank

    def same_as(self, other: "CaseResult") -> bool:
        """Whether both did the same, as far as gates can see."""
        if self.failure or other.failure:
            mine, theirs = self.failure, other.failure
            return bool(mine and theirs) and mine[:2] == theirs[:2]
        problems = [{g: p for g, p in r.problems.items() if g != "V"} for r in (self, other)]
        if problems[0] != problems[1]:
            return False
        pairs = zip(self.records, other.records, strict=True)
        return all(equal(a.values, b.values) and a.sent == b.sent for a, b in pairs)


Outcome = list[CaseResult]


class Verdict(NamedTuple):
    """The result of a check; only text and numbers, since it is written to a file."""

    passed: bool
    gates: dict[str, str]  # gate -> "" if passed, what is wrong, or "not checked: ..."
    mistake: str  # the name of a known mistake, or not_written, deadlock, exception, unknown
    message: str
    picture: str


def outcome_of(exercise: Exercise, text: str, path: Path, seed: int = 0) -> Outcome:
    """Run all cases with the definition in a student's text."""
    cases, calls, results = exercise.seeded_cases(seed), Calls(), []
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
    got = [record.values for record in result.records]
    problems = {"V": first_difference(got, result.expected)}
    if exercise.traffic:
        problems["B"] = _traffic_problem(exercise, case, result.records)
    if exercise.memory:
        problems["M"] = exercise.memory(case, result.records)
    if exercise.order:
        problems["O"] = exercise.order(case, result.records)
    result.problems = {gate: str(problem) for gate, problem in problems.items() if problem}
    return result


def _traffic_problem(exercise: Exercise, case: Case, records: list[Record]) -> str:
    for rank, (record, right) in enumerate(zip(records, exercise.traffic(case), strict=True)):
        travels, counted = {}, {}  # "send as shift": what travels, and how it counts
        for names, sent in right.items():
            operation, _, name = names.partition(" as ")
            for where, key in ((travels, operation), (counted, name or operation)):
                where[key] = Sent(*map(sum, zip(where.get(key, NONE), sent, strict=True)))
        if problem := _count_problem(record.sent, travels):
            return f"rank {rank} sends {problem}"
        counted = {name: sent for name, sent in counted.items() if sent.bytes}
        if problem := _count_problem(record.ledger, counted):
            return f"the ledger of rank {rank} has {problem}"
    return ""


def _count_problem(found: dict[str, Sent], right: dict[str, Sent]) -> str:
    """All operations whose calls or bytes differ: what they are, and what they should be."""
    differ = []
    for what in {**right, **found}:
        got, expected = found.get(what, NONE), right.get(what, NONE)
        if got.calls != expected.calls or abs(got.bytes - expected.bytes) > 1e-6:
            differ.append(what)
    if not differ:
        return ""
    texts = []
    for counts in (found, right):
        there = [(what, counts[what]) for what in differ if what in counts]
        words = [f"{sent.calls} x {what}, {sent.bytes:g} bytes" for what, sent in there]
        texts.append(" and ".join(words) or "nothing")
    return f"{texts[0]}; it should be {texts[1]}"


def failure_of(error: BaseException, path: Path) -> Failure:
    """What to answer for an error that a student's version has raised."""
    if isinstance(error, NotImplementedError) and not str(error):
        what = "not written yet: replace `raise NotImplementedError` by your code"
        return Failure("not written", what, f"This is {what}.")
    if isinstance(error, Deadlock):
        lines = "\n".join(f"    {line}" for line in getattr(error, "lines", []))
        return Failure("deadlock", str(error), f"Deadlock: {error}.\n{lines}".rstrip())
    if isinstance(error, BadFile):
        return Failure("file", str(error), f"Your file cannot be used: {error}.")
    frames = traceback.extract_tb(error.__traceback__)
    mine = _lines_of(path, error)
    what = "".join(traceback.format_exception_only(error)).strip()
    rank = f" on rank {error.rank}" if hasattr(error, "rank") else ""
    lines = [f"    {Path(f.filename).name}, line {f.lineno}: {f.line}" for f in mine]
    if not mine:  # what the function returned, or did not do, was noticed later
        last = frames[-1]
        lines = [
            f"    noticed later, in {Path(last.filename).name}, line {last.lineno}: {last.line}"
        ]
    return Failure("exception", what, "\n".join([f"Your version fails{rank}: {what}", *lines]))


def _lines_of(path: Path, error: BaseException) -> list[traceback.FrameSummary]:
    return [f for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]


def known_mistake(
    exercise: Exercise, outcome: Outcome, seed: int, others: dict[str, Outcome]
) -> Mistake | None:
    """The known mistake that does the same in all cases; `others` keeps what has been run."""
    for wrong in exercise.mistakes:
        if wrong.name not in others:
            text = wrong.apply(solution(exercise))
            others[wrong.name] = outcome_of(exercise, text, Path(f"<{wrong.name}>"), seed)
        pairs = zip(outcome, others[wrong.name], strict=True)
        if all(mine.same_as(theirs) for mine, theirs in pairs):
            return wrong
    return None


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
    failed = [result for result in outcome if result.failure or result.problems]
    for result in reversed(failed):  # what remains is of the first case
        where = f"{result.case}: "
        if result.failure:
            gates = dict.fromkeys(gates, "not checked")
        gates |= {gate: where + problem for gate, problem in result.problems.items()}
    if not failed:
        runs = [(result.case, result.records) for result in outcome]
        return Verdict(True, gates, "", exercise.remember, exercise.picture(runs))
    failure = next((result.failure for result in failed if result.failure), None)
    if failure and failure.kind in ("not written", "file"):
        return Verdict(False, gates, failure.kind.replace(" ", "_"), failure.text, "")
    others = {} if others is None else others
    crash = next((f"With {r.case}:\n{r.failure.text}" for r in failed if r.failure), "")
    if wrong := known_mistake(exercise, outcome, seed, others):
        return Verdict(False, gates, wrong.name, f"{crash}\n{wrong.sentence}".lstrip(), "")
    mistake, sentence = _explanation(exercise, outcome, seed, others)
    return Verdict(False, gates, mistake, f"{sentence}\n{crash}".strip(), "")


def _explanation(
    exercise: Exercise, outcome: Outcome, seed: int, others: dict[str, Outcome]
) -> tuple[str, str]:
    """What explains the first case that fails: a mistake's name, and its sentence, if any."""
    first = next(i for i, result in enumerate(outcome) if result.failure or result.problems)
    failure = outcome[first].failure
    if not failure:  # versions may crash in the same way for different reasons
        if wrong := _partly_known(exercise, outcome, first, others):
            return wrong.name, f"With {outcome[first].case}: {wrong.sentence}"
        if sentence := _common_pattern(exercise, outcome):
            return "pattern", sentence
    explains = not failure or failure.kind == "exception"
    if explains and (sentence := _wrong_type(exercise, outcome, seed)):
        return "wrong_type", sentence
    return (failure.kind, "") if failure else ("unknown", UNKNOWN)


def _wrong_type(exercise: Exercise, outcome: Outcome, seed: int) -> str:
    """Where the function returned what has another type or shape, in a sentence; or ""."""
    rights = outcome_of(exercise, solution(exercise), Path("<solution>"), seed)
    for mine, right in zip(outcome, rights, strict=True):
        is_wrong = mine.failure or mine.problems
        if is_wrong and (sentence := form_problem(mine.calls, right.calls)):
            # The text of a crash begins with its case.
            return sentence if mine.failure else f"With {mine.case}: {sentence}"
    return ""


def _partly_known(
    exercise: Exercise, outcome: Outcome, first: int, others: dict[str, Outcome]
) -> Mistake | None:
    """The known mistake that does the same in the first case that fails, but not in all others.

    Only if there is one such sentence. A version may be wrong twice, or the mistake in more cases.
    """
    same = [w for w in exercise.mistakes if outcome[first].same_as(others[w.name][first])]
    return same[0] if len({wrong.sentence for wrong in same}) == 1 else None


def _common_pattern(exercise: Exercise, outcome: Outcome) -> str:
    """What the wrong values of all cases have in common that fail without a crash."""
    patterns = []
    for result in outcome:
        if result.problems:
            got = [record.values for record in result.records]
            patterns.append(pattern(exercise, result.case, got, result.expected))
    is_common = all(patterns) and len({found.kind for found in patterns}) == 1
    return patterns[0].sentence if is_common else ""
