"""Every exercise in exercises/: starter, solution, known mistakes, wrong types, right versions."""

import ast
from functools import cache
from pathlib import Path

import pytest

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
    assert first.picture and max(map(len, first.picture.splitlines())) <= 100
    assert checked(exercise, solution(exercise), seed=100 + exercise.number).passed


@cache  # each known mistake is compared with all others of the exercise
def outcomes_of_mistakes(exercise: Exercise) -> dict[str, Outcome]:
    text, path = solution(exercise), Path("wrong.py")
    return {
        mistake.name: outcome_of(exercise, mistake.apply(text), path, is_watched=False)
        for mistake in exercise.mistakes
    }


@pytest.mark.slow  # the first of an exercise runs all of its mistakes
@pytest.mark.parametrize(("exercise", "mistake"), MISTAKES, ids=lambda one: one.name)
def test_a_known_mistake_is_recognised_and_no_other(exercise, mistake):
    known, name = outcomes_of_mistakes(exercise), mistake.name
    same = [
        other
        for other, outcome in known.items()
        if all(a.same_as(b) for a, b in zip(known[name], outcome, strict=True))
    ]
    assert same == [name], [(r.failure, r.problems) for r in known[name]]
    # The edit of a mistake has only the names that the course's own version uses.
    assert not any(r.failure and "NameError" in r.failure.what for r in known[name])
    verdict = verdict_on(exercise, known[name], others=known)
    assert not verdict.passed and verdict.mistake == name and mistake.sentence in verdict.message


# A method, a generator, a class, a function.
@pytest.mark.parametrize("number", [2, 5, 10, 18])
def test_a_result_of_a_wrong_type_is_explained(number):
    exercise = catalogue.load(number)
    exercise.mistakes = []  # some of which return None
    node = find(exercise).node
    for function in [node] if isinstance(node, ast.FunctionDef) else node.body[1:]:
        function.body = ast.parse("return None").body
    verdict = checked(exercise, ast.unparse(node))
    assert verdict.mistake == "wrong_type", verdict
    assert " returned None; it should " in verdict.message.splitlines()[0]


@pytest.mark.parametrize("number", RIGHT)
def test_a_right_function_that_is_written_differently_passes(number):
    assert (verdict := checked(catalogue.load(number), RIGHT[number])).passed, verdict
