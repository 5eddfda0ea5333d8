"""A student's function in the real training: whether it gets there, and how losses are compared."""

import json
import os
import select
import subprocess
from pathlib import Path

import pytest

from exercises import __main__ as commands
from exercises import exercise as catalogue
from exercises import training
from exercises.source import starter
from picotron_min.runtime.config_file import parse_config

CONFIG = json.loads(Path(catalogue.FOLDER.parent, "config.json").read_text())


@pytest.mark.parametrize("number", catalogue.files())
def test_the_config_of_train_is_valid(number, tmp_path):
    exercise = catalogue.load(number)
    short = training.short_config(exercise.changed(CONFIG), 3, tmp_path)
    parsed = parse_config(short)
    assert parsed.training.max_tokens == 3 * parsed.tokens_per_step
    assert parsed.world_size <= 8 and "max_tokens" not in CONFIG["training"]
    assert parsed.checkpoint.load_path == "latest"  # of its own: the folder is new


def test_a_step_of_exercise_2_has_several_micro_batches():
    """With one, a version that deals them alike would train as the course does."""
    assert catalogue.load(2).changed(CONFIG)["training"]["gradient_accumulation_steps"] > 1


def test_a_run_that_loads_a_checkpoint_is_stopped_once():
    assert training.stops_of(catalogue.load(16).changed(CONFIG), 5) == [2, 5]
    assert training.stops_of(CONFIG, 5) == [5]


def test_a_file_that_cannot_be_run_is_refused_before_training(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(commands, "FOLDER", tmp_path)
    texts = {starter(catalogue.load(4)): "is not written yet", "def (": "line 1 is not Python"}
    for text, problem in texts.items():
        (tmp_path / "04_shift.py").write_text(text)
        assert commands.main(["train", "4"]) == 2
        assert problem in capsys.readouterr().err


def test_ctrl_c_ends_all_processes_of_a_run_and_prints_no_traceback(tmp_path, monkeypatch, capsys):
    ours, theirs = os.pipe()

    class Interrupted(subprocess.Popen):
        def __init__(self, command, **options):
            super().__init__(["sh", "-c", "sleep 99 & echo; sleep 99"], stdout=theirs, **options)

        def wait(self, timeout=None):
            monkeypatch.undo()
            assert os.read(ours, 1)  # both sleep
            raise KeyboardInterrupt

    monkeypatch.setattr(training.subprocess, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        training._succeeds(catalogue.load(4), "mine.py", tmp_path, "train")
    os.close(theirs)  # whoever sleeps has it, too
    assert select.select([ours], [], [], 10)[0] and not os.read(ours, 1)

    def interrupted(number):
        raise KeyboardInterrupt

    monkeypatch.setattr(catalogue, "load", interrupted)
    assert commands.main(["train", "4"]) == 130
    assert capsys.readouterr().err.strip() == "stopped"


@pytest.mark.parametrize(
    ("second", "text"),
    [
        (1.25, "equal to the last digit in all 2 steps"),
        (1.25 + 1e-6, "same up to rounding: they differ by at most 8.0e-07"),
        (1.26, "differ by up to 8.0e-03"),
    ],
)
def test_losses_are_equal_or_so_up_to_rounding(second, text):
    found, is_right = training.judge([2.5, 1.25], [2.5, second])
    assert text in found and is_right == (second < 1.26)
