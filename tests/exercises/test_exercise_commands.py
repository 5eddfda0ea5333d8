"""The commands of `python -m exercises`: start, hint, check."""

import subprocess
import sys

import pytest

from exercises import __main__ as commands
from exercises import exercise as catalogue
from exercises import progress
from exercises.exercise import ROOT, Verdict
from exercises.source import starter

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
    assert commands.main(["start", "4"]) == commands.main(["start", "99"]) == 2
    err = capsys.readouterr().err
    assert "is there already" in err and "use one of 01, " in err
    for used in (1, 2, 3, 3):
        assert commands.main(["hint", "4"]) == 0
        out = capsys.readouterr().out
        assert out.count("of 3:") == used and SHIFT.hints[used - 1] in out


def test_a_check_is_shown_and_counted(own_folder, monkeypatch, capsys):
    wrong = Verdict(False, {"V": "wrong", "B": "", "O": "not checked"}, "unknown", "a sentence")
    verdicts = iter([wrong, Verdict(True, {"V": ""}, "", "it", "a picture", printed="noise")])
    monkeypatch.setattr(commands.Sandbox, "check", lambda *_: next(verdicts))
    (own_folder / "04_shift.py").touch()
    assert commands.main(["check", "4"]) == 1
    out = capsys.readouterr().out
    assert "V value   failed\n      wrong" in out and "O order   not checked" in out
    assert "a sentence" in out and "python -m exercises train 04" in out
    assert commands.main(["check", "4"]) == commands.main([]) == 0
    out = capsys.readouterr().out
    assert "noise" in out and "a picture" in out and "Passed. Remember: it" in out
    assert "  solved  04 shift" in out


def test_without_torch_one_line_names_the_remedy():
    hidden = "import sys; sys.modules['torch'] = None; from exercises.__main__ import main; "
    command = [sys.executable, "-c", f"{hidden} sys.exit(main(['check', '4', '--solution']))"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert f"No module named 'torch': run  pip install -e .  in {ROOT}" in done.stderr
