"""The commands of `python -m exercises`: start, hint, check."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from exercises import __main__ as commands
from exercises import exercise as catalogue
from exercises import progress
from exercises.exercise import Verdict
from exercises.source import find, starter

ROOT = Path(__file__).parents[2]
SHIFT = catalogue.load(4)


@pytest.fixture
def own_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(commands, "FOLDER", tmp_path)
    monkeypatch.setattr(progress, "FILE", tmp_path / "progress.json")
    return tmp_path


@pytest.mark.quick
def test_start_refuses_to_overwrite_and_hints_come_one_by_one(own_folder, capsys):
    assert commands.main(["check", "4"]) == 2
    assert "run  python -m exercises start 04" in capsys.readouterr().err
    assert commands.main(["start", "4"]) == 0
    assert (own_folder / "04_shift.py").read_text() == starter(SHIFT)
    assert commands.main(["start", "4"]) == 2
    assert "is there already" in capsys.readouterr().err
    for used in (1, 2, 3, 3):
        assert commands.main(["hint", "4"]) == 0
        out = capsys.readouterr().out
        assert out.count("of 3:") == used and SHIFT.hints[used - 1] in out
    assert commands.main(["start", "99"]) == 2
    assert "use one of 01, " in capsys.readouterr().err


def test_a_check_is_shown_and_counted(own_folder, monkeypatch, capsys):
    wrong = Verdict(False, {"V": "wrong", "B": "", "O": "not checked"}, "unknown", "a sentence")
    verdicts = iter([wrong, Verdict(True, {"V": ""}, "", "it", "a picture", printed="noise")])
    monkeypatch.setattr(commands.Sandbox, "check", lambda *_: next(verdicts))
    (own_folder / "04_shift.py").touch()
    assert commands.main(["check", "4"]) == 1
    out = capsys.readouterr().out
    assert "V value   failed\n      wrong" in out and "O order   not checked" in out
    assert "a sentence" in out and "python -m exercises train 04" in out
    assert commands.main(["check", "4"]) == 0
    out = capsys.readouterr().out
    assert "noise" in out and "a picture" in out and "Passed. Remember: it" in out
    assert progress.read(4) == {"passed": True, "tries": 2, "hints": 0}
    assert commands.main([]) == 0 and "  solved  04 shift" in capsys.readouterr().out


def test_without_torch_one_line_names_the_remedy():
    hidden = "import sys; sys.modules['torch'] = None; from exercises.__main__ import main; "
    command = [sys.executable, "-c", f"{hidden} sys.exit(main(['check', '4', '--solution']))"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    remedy = f"No module named 'torch': run  pip install -e .  in {ROOT}\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", remedy)


def test_a_starter_of_a_class_has_all_methods_and_no_body():
    exercise = catalogue.load(4)
    exercise.target = "collectives:Shift"
    (node,) = (n for n in ast.parse(starter(exercise)).body if isinstance(n, ast.ClassDef))
    assert [ast.unparse(n.body[-1]) for n in node.body[1:]] == ["raise NotImplementedError"] * 2
    assert ast.get_docstring(node) == ast.get_docstring(find(exercise).node)
