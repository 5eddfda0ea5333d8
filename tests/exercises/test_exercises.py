"""Every exercise in exercises/: starter, solution, known mistakes, right versions."""

import ast
from functools import cache
from pathlib import Path

import pytest

from exercises import checking
from exercises import exercise as catalogue
from exercises.checking import check, verdict_on
from exercises.exercise import Exercise
from exercises.outcome import Outcome, outcome_of
from exercises.source import NOT_WRITTEN, find, lookup, reading, solution, starter
from tests.exercises.right import RIGHT

EXERCISES = [catalogue.load(number) for number in catalogue.files()]
MISTAKES = [(exercise, mistake) for exercise in EXERCISES for mistake in exercise.mistakes]
each = pytest.mark.parametrize("exercise", EXERCISES, ids=lambda one: one.name)


def checked(exercise: Exercise, text: str, seed: int = 0):
    return check(exercise, text, Path("student.py"), seed)


@each
def test_a_starter_is_not_written_yet_and_the_file_to_read_lacks_only_the_body(exercise):
    verdict = checked(exercise, text := starter(exercise))
    assert NOT_WRITTEN in text and verdict.mistake == "not_written" and not verdict.passed
    assert len(exercise.hints) == 3 and any(map(str.isdigit, exercise.remember))
    target, tree = find(exercise), ast.parse(reading(exercise))
    node = lookup(tree, exercise.qualified_name)
    assert NOT_WRITTEN in ast.unparse(node)
    node.body = target.node.body
    assert ast.dump(tree) == ast.dump(target.tree)


@each
def test_the_source_passes_with_two_seeds(exercise):
    first = checked(exercise, solution(exercise))
    assert first.passed, first
    assert first.picture
    assert checked(exercise, solution(exercise), seed=100 + exercise.number).passed


@cache  # each known mistake is compared with all others of the exercise
def outcomes_of(exercise: Exercise) -> dict[str, Outcome]:
    texts = {mistake.name: mistake.apply(solution(exercise)) for mistake in exercise.mistakes}
    texts["solution"] = solution(exercise)
    return {name: outcome_of(exercise, text, Path("wrong.py")) for name, text in texts.items()}


@pytest.mark.slow  # the first of an exercise runs all of its mistakes
@pytest.mark.parametrize(("exercise", "mistake"), MISTAKES, ids=lambda one: one.name)
def test_a_known_mistake_is_recognised_and_no_other(exercise, mistake, monkeypatch):
    kept, name = outcomes_of(exercise), mistake.name

    def outcome_again(exercise, text, path, seed, places=None):
        found = kept[path.name.strip("<>")]
        return found if places is None else [found[i] for i in places]

    monkeypatch.setattr(checking, "outcome_of", outcome_again)
    pairs = {other: zip(kept[name], outcome, strict=True) for other, outcome in kept.items()}
    same = [other for other, both in pairs.items() if all(a.same_as(b) for a, b in both)]
    assert same == [name], [(r.failure, r.problems) for r in kept[name]]
    # The edit of a mistake has only the names that the course's own version uses.
    assert not any(r.failure and "NameError" in r.failure.what for r in kept[name])
    verdict = verdict_on(exercise, kept[name])
    assert not verdict.passed and verdict.mistake == name and mistake.sentence in verdict.message


@pytest.mark.parametrize("number", RIGHT)
def test_a_right_function_that_is_written_differently_passes(number):
    assert (verdict := checked(catalogue.load(number), RIGHT[number])).passed, verdict
