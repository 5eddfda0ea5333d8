"""The bug hunts of exercises/: symptoms as the stories claim, and answers."""

import ast
import sys
from functools import cache

import pytest

from exercises import __main__ as commands
from exercises import hunts, progress
from exercises.hunts import HUNTS, judge, parse_run
from exercises.source import lookup

STEPS = 3


@cache
def measure(number, run, steps):
    return hunts.measure(HUNTS.get(number), run, steps)


def test_without_a_change_all_runs_of_all_hunts_are_right():
    right = measure(None, "", STEPS)
    for run in ("cp=2", "tp=2", "micro_batches=4", "dp=2,pp=2"):
        found = measure(None, run, STEPS)
        assert found.losses == pytest.approx(right.losses, abs=1e-10) and found.apart == 0
        assert found.norm == pytest.approx(right.norm, abs=1e-10)


# Of each hunt: pairs of its runs that train alike, and a pair that does not from a step on.
STORIES = {
    1: ([(0, 1)], (0, 2), 2),
    2: ([(0, 2)], (0, 1), 2),
    3: ([(1, 2), (3, 4)], (0, 1), 2),
    4: ([(0, 1)], (0, 2), 1),
}


@pytest.mark.parametrize("number", STORIES)
def test_a_hunt_has_the_symptoms_that_its_story_tells(number):
    alike, unlike, step = STORIES[number]
    found = [measure(number, run, STEPS) for run in HUNTS[number].runs]
    for a, b in alike:  # hunt 2 clips in one run alone; AdamW hides a rate up to its eps
        same = found[a].losses if number != 2 else measure(None, "", STEPS).losses
        assert found[b].losses == pytest.approx(same, abs=1e-5)
    a, b = (found[i].losses for i in unlike)
    assert a[: step - 1] == pytest.approx(b[: step - 1], abs=1e-10)
    assert a[2] != pytest.approx(b[2], abs=1e-9)
    if number == 1:
        assert found[1].apart == 0 and found[2].apart > 1e-3
        assert found[2].sent["dp_cp"] < measure(None, "cp=2", 1).sent["dp_cp"] / 4


TOLD = {
    6: (
        "pp=2,micro_batches=2",
        "micro-batch 1: it is the tensor of micro-batch 0",
        "_backward",
    ),
    7: ("cp=2", "positions 4-11 are those of 0-7", "Batches._read"),
}


@pytest.mark.parametrize("number", TOLD)
def test_a_hunt_is_told_by_its_first_wrong_tensor(number, monkeypatch, capsys):
    for name in [name for name in sys.modules if name.partition(".")[0] == "difference"]:
        monkeypatch.delitem(sys.modules, name)
    run, said, function = TOLD[number]
    assert commands.main(["hunt", str(number), "--difference", run]) == 1
    found, _, named = capsys.readouterr().out.partition("look at")
    assert said in found and function in named
    table = [measure(number, other, 2) for other in HUNTS[number].runs]
    assert table[0].norm == pytest.approx(table[1].norm, abs=1e-10) != table[2].norm


@pytest.mark.quick
@pytest.mark.parametrize("number", HUNTS)
def test_an_answer_is_the_function_that_the_change_is_in(number):
    hunt = HUNTS[number]
    file = (hunts.ROOT / hunt.file).read_text()
    node = lookup(ast.parse(file), hunt.function)
    assert file.count(hunt.old) == 1 and hunt.old in ast.get_source_segment(file, node)
    for place in (hunt.function, hunt.function.rpartition(".")[2], f"7 {hunt.function}"):
        assert judge(hunt, f"{hunt.file}:{place}") == "right"  # the last as `difference` prints it
    assert judge(hunt, f"{hunt.file.rpartition('/')[2]}:{hunt.function}") == "right"
    assert judge(hunt, f"{hunt.file}:other") == "file"
    assert judge(hunt, f"picotron_min/mesh.py:{hunt.function}") == "wrong"
    with pytest.raises(ValueError, match="is no place"):
        judge(hunt, "nowhere.py:run")


def test_a_wrong_answer_costs_a_hint(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(progress, "FILE", tmp_path / "progress.json")
    for hint in (1, 2, 3, 3):
        assert commands.main(["hunt", "2", "--answer", "train.py:main"]) == 1
        assert f"No.\nhint {hint} of 3" in capsys.readouterr().out
    assert commands.main(["hunt", "2", "--answer", "picotron_min/optimizer.py:clip"]) == 1
    assert "right file" in capsys.readouterr().out
    assert progress.read("hunt 2") == {"passed": False, "tries": 5, "hints": 3}


@pytest.mark.parametrize(
    ("run", "message"),
    [
        ("dp=2,cp=4", "8 ranks: use at most 4"),
        ("depth=2", "not a setting"),
        ("tp=4", "2 key-value heads"),
        ("optimizer=lion", "use sgd or adamw"),
        ("dp=2,micro_batches=4", "must divide 4"),
    ],
)
def test_a_run_that_cannot_be_measured_is_refused_with_the_numbers(run, message, capsys):
    assert commands.main(["hunt", "1", "--run", run]) == 2
    shown = capsys.readouterr()
    assert not shown.out and message in shown.err
    with pytest.raises(ValueError, match=message):
        parse_run(run)


def test_a_hunt_that_is_not_there_is_refused_with_those_that_are(capsys):
    assert commands.main(["hunt", "5"]) == 2
    assert "there is no hunt 5: use one of 1, 2, 3, 4, 6, 7" in capsys.readouterr().err
