"""Every exercise in exercises/: starter, solution, wrong types, other right versions."""

import ast
import random
from pathlib import Path

import pytest

from exercises import exercise as catalogue
from exercises.checking import check
from exercises.exercise import Exercise
from exercises.source import NOT_WRITTEN, find, lookup, parse, reading, solution, starter
from tests.exercises.right import RIGHT

NUMBERS = list(catalogue.files())


def checked(exercise: Exercise, text: str, seed: int = 0):
    return check(exercise, text, Path("student.py"), seed)


@pytest.mark.parametrize("number", NUMBERS)
def test_a_starter_is_not_written_yet(number):
    exercise = catalogue.load(number)
    text = starter(exercise)
    assert NOT_WRITTEN in text and parse(exercise, text)
    verdict = checked(exercise, text)
    assert not verdict.passed and verdict.mistake == "not_written"
    assert "not written yet" in verdict.message


@pytest.mark.parametrize("number", NUMBERS)
def test_the_file_to_read_lacks_only_the_solution(number):
    exercise = catalogue.load(number)
    target, tree = find(exercise), ast.parse(reading(exercise))
    node = lookup(tree, exercise.qualified_name)
    assert NOT_WRITTEN in ast.unparse(node)
    node.body = target.node.body
    assert ast.dump(tree) == ast.dump(target.tree)


@pytest.mark.parametrize("number", NUMBERS)
def test_the_source_passes_with_two_seeds(number):
    exercise = catalogue.load(number)
    first = checked(exercise, solution(exercise))
    assert first.passed, first
    other = random.Random(number).randint(1, 10**6)
    assert checked(exercise, solution(exercise), seed=other).passed
    assert first.picture and max(map(len, first.picture.splitlines())) <= 100


def test_a_check_gives_the_same_result_each_time():
    exercise = catalogue.load(7)
    assert checked(exercise, solution(exercise)) == checked(exercise, solution(exercise))


@pytest.mark.turns(1, 3)
@pytest.mark.parametrize("result", ["None", "[2.5]"])
@pytest.mark.parametrize("number", NUMBERS)
def test_a_result_of_a_wrong_type_is_explained(number, result):
    exercise = catalogue.load(number)
    exercise.mistakes = []  # some of which return None
    node = find(exercise).node
    functions = [node] if isinstance(node, ast.FunctionDef) else node.body
    functions = [f for f in functions if isinstance(f, ast.FunctionDef)]
    yields = any(isinstance(n, ast.Yield) for n in ast.walk(node))  # a list may stand for it
    for function in functions:
        returned = "None" if function.name == "__init__" else result
        function.body = ast.parse(f"return {returned}").body
    verdict = checked(exercise, ast.unparse(node))
    assert not verdict.passed and any(verdict.gates.values())
    returns_nothing = all(f.returns and ast.unparse(f.returns) == "None" for f in functions)
    if not returns_nothing and not (yields and result != "None"):
        sentence, form = verdict.message.splitlines()[0], "None" if result == "None" else "a list"
        assert verdict.mistake == "wrong_type", verdict
        assert f" returned {form}" in sentence and "; it should " in sentence
        assert "\n" not in sentence.strip() and exercise.qualified_name.split(".")[-1] in sentence


@pytest.mark.parametrize("number", RIGHT)
def test_a_right_function_that_is_written_differently_passes(number):
    verdict = checked(catalogue.load(number), RIGHT[number])
    assert verdict.passed, verdict


@pytest.mark.parametrize("number", NUMBERS)
def test_a_target_can_be_replaced(number):
    exercise = catalogue.load(number)
    node = find(exercise).node
    names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
    assert "super" not in names or isinstance(node, ast.ClassDef), "it would need its class"
    assert len(exercise.hints) == 3 and exercise.mistakes
    assert any(character.isdigit() for character in exercise.remember), "a number to remember"
