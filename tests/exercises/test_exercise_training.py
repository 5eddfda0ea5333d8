"""A student's function in the real training: whether it gets there, and how losses are compared."""

import json
import subprocess
import sys
import time
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


def test_a_step_of_exercise_2_has_several_micro_batches():
    """With one, a version that deals them alike would train as the course does."""
    assert catalogue.load(2).changed(CONFIG)["training"]["gradient_accumulation_steps"] > 1


def test_a_file_that_cannot_be_run_is_refused_before_training(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(commands, "FOLDER", tmp_path)
    texts = {starter(catalogue.load(4)): "is not written yet", "def (": "line 1 is not Python"}
    for text, problem in texts.items():
        (tmp_path / "04_shift.py").write_text(text)
        assert commands.main(["train", "4"]) == 2
        assert problem in capsys.readouterr().err


def test_a_run_that_loads_a_checkpoint_is_stopped_and_resumed(monkeypatch, capsys):
    runs = []  # the folder of each, and after how many tokens it ends

    def run(exercise, file, path, command):
        config = json.loads(path.read_text())
        folder = Path(config["checkpoint"]["save_dir"])
        folder.mkdir(exist_ok=True)
        with (folder / "metrics.jsonl").open("a") as stream:
            stream.write('{"loss": 5.5}\n' * (5, 2, 3)[len(runs)])
        runs.append((folder.name, config["training"]["max_tokens"]))
        return config["checkpoint"]["load_path"] == "latest"

    monkeypatch.setattr(training, "_succeeds", run)
    resumes = catalogue.load(16)
    assert training.compare(resumes, Path("mine.py"), resumes.changed(CONFIG), 5)
    each = runs[0][1] // 5
    assert runs == [("course", 5 * each), ("yours", 2 * each), ("yours", 5 * each)]
    assert "stopped and resumed after 2" in capsys.readouterr().out


def test_ctrl_c_ends_the_run_and_prints_no_traceback(tmp_path, monkeypatch, capsys):
    written = tmp_path / "pid"
    written.touch()
    sleeps = f"import os, time; pid = os.fork(); pid and open({str(written)!r}, 'w')"
    sleeps += ".write(str(pid)); time.sleep(100)"

    class Interrupted(subprocess.Popen):
        def __init__(self, command, **options):
            super().__init__([sys.executable, "-c", sleeps], **options)

        def wait(self, timeout=None):
            while not self.returncode and not written.read_text():
                time.sleep(0.01)
            monkeypatch.undo()
            raise KeyboardInterrupt

    monkeypatch.setattr(training.subprocess, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        training._succeeds(catalogue.load(4), "mine.py", tmp_path, "train")
    state = Path(f"/proc/{written.read_text()}/stat")  # of its child
    ended = time.monotonic() + 10
    while time.monotonic() < ended and state.exists() and ") Z " not in state.read_text():
        time.sleep(0.01)
    assert time.monotonic() < ended

    def interrupted(number):
        raise KeyboardInterrupt

    monkeypatch.setattr(catalogue, "load", interrupted)
    assert commands.main(["train", "4"]) == 130
    assert capsys.readouterr().err.strip() == "stopped"


@pytest.mark.parametrize(
    ("losses", "text", "is_right"),
    [
        ([2.5, 1.25], "equal to the last digit in all 2 steps", True),
        ([2.5, 1.25 + 1e-6], "same up to rounding: they differ by at most 8.0e-07", True),
        ([2.5, 1.26], "differ by up to 8.0e-03", False),
    ],
)
def test_losses_are_equal_or_so_up_to_rounding(losses, text, is_right):
    found = training.judge([2.5, 1.25], losses)
    assert text in found[0] and found[1] == is_right
