"""The bug hunts of exercises/: symptoms as the stories claim, and answers."""

import ast
from functools import cache

import pytest

from exercises import __main__ as commands
from exercises import hunts, progress
from exercises.hunts import HUNTS, judge
from exercises.source import lookup

STEPS = 2
RIGHT = "", "cp=2", "tp=2", "micro_batches=4", "dp=2,pp=2"


@cache
def measure(number):
    """All runs of a hunt; of hunt 0: what a course without a change does."""
    if number:
        return [*hunts.measure(HUNTS[number], HUNTS[number].runs, STEPS)]
    return [*hunts.measure(HUNTS[1]._replace(new=HUNTS[1].old), RIGHT, STEPS)]


def test_without_a_change_all_runs_of_all_hunts_are_right():
    right, *others = measure(0)
    for found in others:
        assert found.losses == pytest.approx(right.losses, abs=1e-10) and found.apart == 0
        assert found.norm == pytest.approx(right.norm, abs=1e-10)


# Of each hunt: pairs of its runs that train alike, and a pair that does not from a step on.
STORIES = [(1, "01", "02", 2), (2, "", "01", 2), (3, "12 34", "01", 2)]
STORIES += [(4, "01", "02", 1), (6, "01", "02", 2), (7, "01", "02", 1)]


@pytest.mark.parametrize(("number", "alike", "unlike", "step"), STORIES)
def test_a_hunt_has_the_symptoms_that_its_story_tells(number, alike, unlike, step):
    found = measure(number)
    for a, b in alike.split():  # AdamW hides a rate up to its eps
        assert found[int(b)].losses == pytest.approx(found[int(a)].losses, abs=1e-5)
    a, b = (found[int(i)].losses for i in unlike)
    assert a[: step - 1] == pytest.approx(b[: step - 1], abs=1e-10)
    assert a[1] != pytest.approx(b[1], abs=1e-9)
    if number == 1:
        assert found[1].apart == 0 and found[2].apart > 1e-3
        assert found[2].sent["dp_cp"] < measure(0)[1].sent["dp_cp"] / 4
    if number == 2:  # its third run does not clip
        assert found[2].losses == pytest.approx(measure(0)[0].losses, abs=1e-10)


TOLD = {
    6: ("pp=2,micro_batches=2", "micro-batch 1: it is the tensor of micro-batch 0", "_backward"),
    7: ("cp=2", "positions 4-11 are those of 0-7", "Batches._read"),
}


@pytest.mark.parametrize("number", TOLD)
def test_a_hunt_is_told_by_its_first_wrong_tensor(number, capsys):
    run, said, function = TOLD[number]
    assert commands.main(["hunt", str(number), "--difference", run]) == 1
    found, _, named = capsys.readouterr().out.partition("look at")
    assert said in found and function in named


@pytest.mark.quick
@pytest.mark.parametrize("number", HUNTS)
def test_an_answer_is_the_function_that_the_change_is_in(number):
    hunt = HUNTS[number]
    file, name = (hunts.ROOT / hunt.file).read_text(), hunt.file.rpartition("/")[2]
    node = lookup(ast.parse(file), hunt.function)
    assert file.count(hunt.old) == 1 and hunt.old in ast.get_source_segment(file, node)
    # The second as `difference` prints it.
    for place in (f"{name}:{hunt.function.rpartition('.')[2]}", f"{hunt.file}:7 {hunt.function}"):
        assert judge(hunt, place) == "right"
    assert judge(hunt, f"{hunt.file}:other") == "file"
    assert judge(hunt, f"mesh.py:{hunt.function}") == "wrong"
    with pytest.raises(ValueError, match="is no place"):
        judge(hunt, "nowhere.py:run")


def test_a_wrong_answer_costs_a_hint(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(progress, "FILE", tmp_path / "progress.json")
    answers = {"train.py:main": "No.\nhint 1 of 3", "optimizer.py:clip": "right file.\nhint 2 of"}
    answers |= {"optimizer.py:measure_gradient": "Right, with 2 of 3 hints"}
    for place, said in answers.items():
        assert commands.main(["hunt", "2", "--answer", place]) == (not said.startswith("Right"))
        assert said in capsys.readouterr().out


REFUSED = """
1 --run dp=2,cp=4 | 8 ranks: use at most 4
1 --run depth=2 | not a setting
1 --run optimizer=lion | sgd or adamw
5 | there is no hunt 5: use one of 1, 2, 3, 4, 6, 7
"""


@pytest.mark.parametrize("line", REFUSED.strip().splitlines())
def test_a_run_that_cannot_be_measured_is_refused_with_the_numbers(line, capsys):
    words, message = line.split(" | ")
    assert commands.main(["hunt", *words.split()]) == 2
    shown = capsys.readouterr()
    assert not shown.out and message in shown.err
