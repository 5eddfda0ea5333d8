"""A student's function in the real training: whether it gets there, and how losses are compared."""

import importlib
import inspect
import json
import signal
import sys
import time
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest

from exercises import __main__ as commands
from exercises import exercise as catalogue
from exercises import training
from exercises.calls import Calls
from exercises.compare import equal
from exercises.exercise import Case, Exercise
from exercises.loading import course_with, fresh_modules, import_with
from exercises.ranks import run_case
from exercises.simulated_dist import simulated
from exercises.source import find, parse, solution, starter
from exercises.tiny import tiny_run
from picotron_min.extensions.settings import Workload
from picotron_min.runtime.config_file import parse_config
from tests.exercises.right import RIGHT

CONFIG = json.loads(Path(catalogue.FOLDER.parent, "config.json").read_text())


@pytest.mark.parametrize("number", [2, 4, 10, 19])  # a method, a constructor, a class, a static one
def test_train_runs_the_function_of_the_student(number, tmp_path):
    exercise, path = catalogue.load(number), tmp_path / "student.py"
    *owners, name = exercise.qualified_name.split(".")
    with fresh_modules():
        import_with(exercise, parse(exercise, solution(exercise)), path)
        found = importlib.import_module(exercise.source_module)  # as `import train` would
        for owner in owners:
            found = vars(found)[owner]
        found = vars(found)[name]
        found = getattr(found, "__func__", found)  # of a staticmethod
        functions = vars(found).values() if isinstance(found, type) else [found]
        functions = [inspect.unwrap(function) for function in functions if callable(function)]
        files = {f.__code__.co_filename for f in functions if hasattr(f, "__code__")}
    assert str(path) in files, find(exercise).path


@pytest.mark.parametrize("number", catalogue.files())
def test_the_config_of_train_is_valid(number, tmp_path):
    exercise = catalogue.load(number)
    short = training.short_config(exercise.changed(CONFIG), 3, tmp_path)
    parsed = parse_config(short)
    assert parsed.training.max_tokens == 3 * parsed.tokens_per_step
    assert parsed.world_size <= 8 and "max_tokens" not in CONFIG["training"]


def trained(exercise: Exercise, text: str) -> tuple[list, bool]:
    """Losses of a tiny model in the settings of `train`, by rank, and whether a text was run."""
    config, calls = parse_config(exercise.changed(CONFIG)), Calls()
    pairs = (setting.partition(".")[2].split("=") for setting in exercise.train.split())
    given = {key: json.loads(value) for key, value in pairs}
    kinds = {f.name: given[f.name] for f in fields(Workload) if f.name in given}

    def on_rank(rank, case) -> dict:
        layout = {f.name: getattr(config.layout, f.name) for f in fields(config.layout)}
        layout = rank.course.settings.Layout(**layout)
        model = {key: value for key, value in given.items() if key.startswith("num_")}
        names = "optimizer", "moments"
        recipe = {name: getattr(config.recipe, name) for name in names}
        more = {"workload": kinds, "learning_rate": 0.01, "dtype": kinds.get("dtype", "float64")}
        run = tiny_run(rank, layout, num_micro_batches=2, model=model, **recipe, **more)
        losses = [rank.course.train.train_step(run, step).loss for step in range(2)]
        saved = rank.course.checkpoint.training_tensors(run.model.parameters, {}, run.optimizer)
        return {"losses": losses, "saved": sorted(saved)}

    path = Path("student.py")
    with simulated(), course_with(exercise, text, path, calls.watch) as course:
        records = run_case(course, Case(config.world_size), on_rank, path)
    return [record.values for record in records], bool(calls.take())


@cache  # runs with the course's own functions, by settings
def right_training(settings: str) -> list:
    exercises = map(catalogue.load, catalogue.files())
    exercise = next(exercise for exercise in exercises if exercise.train == settings)
    return trained(exercise, solution(exercise))[0]


@pytest.mark.turns(1, 5)
@pytest.mark.parametrize("number", catalogue.files())
def test_what_a_check_accepts_trains_as_the_course_does(number):
    exercise = catalogue.load(number)
    values, is_called = trained(exercise, RIGHT.get(number, solution(exercise)))
    assert is_called or number == 1  # for reports
    assert equal(values, right_training(exercise.train))


@pytest.mark.parametrize(
    ("text", "problem"),
    [(starter(catalogue.load(4)), "is not written yet"), ("def (", "line 1 is not Python")],
)
def test_a_file_that_cannot_be_run_is_refused_before_training(
    text, problem, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(commands, "FOLDER", tmp_path)
    (tmp_path / "04_shift.py").write_text(text)
    assert commands.main(["train", "4", "--config", str(catalogue.ROOT / "config.json")]) == 2
    assert problem in capsys.readouterr().err


def test_lines_about_a_deleted_folder_are_not_shown():
    lines = ["Done", "  speed  9", "  report  /tmp/x/yours", "Use the model:", "  import it", "end"]
    assert list(training.lines_to_show(lines, "/tmp/x")) == ["Done", "  speed  9", "end"]


def test_a_config_that_is_at_fault_ends_the_comparison(monkeypatch, capsys):
    runs = []

    def fail(*args, **options):
        runs.append(args[3])
        return []

    monkeypatch.setattr(training, "_losses", fail)
    config = {"training": {"total_train_steps": 4}}
    assert not training.compare(catalogue.load(4), Path("mine.py"), config, 10)
    assert runs == [[4]] and "the config or the course is at fault" in capsys.readouterr().out


def test_a_mistake_that_the_tiny_model_does_not_use_is_not_called_right(monkeypatch, capsys):
    losses = iter(([5.5, 5.4], [5.5, 5.3]))
    monkeypatch.setattr(training, "_losses", lambda *args, **options: next(losses))
    monkeypatch.setattr(training, "_succeeds", lambda *args, **options: True)
    assert not training.compare(catalogue.load(21), Path("mine.py"), {"training": {}}, 2)
    assert "No tensor is wrong there" in capsys.readouterr().out


def test_a_run_that_loads_a_checkpoint_is_stopped_and_resumed(monkeypatch, capsys):
    configs = []

    def run(exercise, file, config, command, quiet):
        configs.append(json.loads(config.read_text()))
        metrics = Path(configs[-1]["checkpoint"]["save_dir"], "metrics.jsonl")
        metrics.parent.mkdir(exist_ok=True)
        with metrics.open("a") as stream:
            stream.write('{"loss": 5.5}\n' * (5, 2, 3)[len(configs) - 1])
        return True

    monkeypatch.setattr(training, "_succeeds", run)
    resumes = catalogue.load(16)
    assert training.compare(resumes, Path("mine.py"), resumes.changed(CONFIG), 5)
    each_step = parse_config(configs[0]).tokens_per_step
    steps = [config["training"]["max_tokens"] / each_step for config in configs]
    folders = [config["checkpoint"]["save_dir"] for config in configs]
    assert steps == [5, 2, 5] and folders[0] != folders[1] == folders[2]
    assert {config["checkpoint"]["load_path"] for config in configs} == {"latest"}
    assert "5 steps with yours, stopped and resumed after 2" in capsys.readouterr().out
    assert training.stops_of(CONFIG, 5) == [5] == training.stops_of(resumes.changed(CONFIG), 5)[1:]


def test_ctrl_c_ends_the_run_and_prints_no_traceback(monkeypatch, capsys):
    sleeps = "import os, time; pid = os.fork(); pid and print(pid, flush=True); time.sleep(100)"
    with pytest.raises(KeyboardInterrupt), training._started([sys.executable, "-c", sleeps]) as run:
        state = Path(f"/proc/{int(run.stdout.readline())}/stat")  # of its child
        raise KeyboardInterrupt
    assert run.returncode == -signal.SIGKILL
    for _ in range(100):  # until init has its exit code
        if not state.exists() or ") Z " in state.read_text():
            break
        time.sleep(0.05)
    else:
        pytest.fail("a process of the run is left")

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
