"""Every exercise in exercises/: starter, solution, known mistakes, right versions."""

import ast
from pathlib import Path

import pytest

from exercises import checking
from exercises import exercise as catalogue
from exercises.checking import check, verdict_on
from exercises.exercise import Exercise
from exercises.outcome import outcome_of
from exercises.source import NOT_WRITTEN, find, lookup, reading, solution, starter
from tests.exercises.right import RIGHT

EXERCISES = [catalogue.load(number) for number in catalogue.files()]
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
def test_the_source_passes_with_another_seed(exercise):
    verdict = checked(exercise, solution(exercise), seed=100 + exercise.number)
    assert verdict.passed and verdict.picture, verdict


@each
def test_a_known_mistake_is_recognised_and_no_other(exercise, monkeypatch):
    texts = {mistake.name: mistake.apply(solution(exercise)) for mistake in exercise.mistakes}
    texts["solution"] = solution(exercise)
    kept = {name: outcome_of(exercise, text, Path("wrong.py")) for name, text in texts.items()}

    def outcome_again(exercise, text, path, seed, places=None):
        found = kept[path.name.strip("<>")]
        return found if places is None else [found[i] for i in places]

    monkeypatch.setattr(checking, "outcome_of", outcome_again)
    assert verdict_on(exercise, kept["solution"]).passed
    for name, sentence, _ in exercise.mistakes:
        pairs = {other: zip(kept[name], outcome, strict=True) for other, outcome in kept.items()}
        same = [other for other, both in pairs.items() if all(a.same_as(b) for a, b in both)]
        assert same == [name], [(r.failure, r.problems) for r in kept[name]]
        # The edit of a mistake has only the names that the course's own version uses.
        assert not any(r.failure and "NameError" in r.failure.what for r in kept[name])
        verdict = verdict_on(exercise, kept[name])
        assert not verdict.passed and verdict.mistake == name and sentence in verdict.message


@pytest.mark.parametrize("number", RIGHT)
def test_a_right_function_that_is_written_differently_passes(number):
    assert (verdict := checked(catalogue.load(number), RIGHT[number])).passed, verdict
