"""Each known mistake of each exercise is named by its own sentence, and is no other's twin."""

from functools import cache
from pathlib import Path

import pytest

from exercises import exercise as catalogue
from exercises.checking import verdict_on
from exercises.exercise import Exercise
from exercises.outcome import Outcome, outcome_of
from exercises.source import solution

EXERCISES = [catalogue.load(number) for number in catalogue.files()]
MISTAKES = [
    pytest.param(exercise, mistake, id=f"{exercise.number}-{mistake.name}")
    for exercise in EXERCISES
    for mistake in exercise.mistakes
]


@cache  # each known mistake is compared with all others of the exercise
def outcomes_of_mistakes(exercise: Exercise) -> dict[str, Outcome]:
    text, path = solution(exercise), Path("wrong.py")
    return {
        mistake.name: outcome_of(exercise, mistake.apply(text), path, is_watched=False)
        for mistake in exercise.mistakes
    }


@pytest.mark.slow  # the first of an exercise runs all of its mistakes
@pytest.mark.parametrize(("exercise", "mistake"), MISTAKES)
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
