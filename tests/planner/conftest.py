"""Shared by the tests of create_config.py."""

import pytest

from create_config import main


@pytest.fixture
def create(tmp_path, monkeypatch, capsys):
    """Run create_config.py with flags in one string; returns (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def run(flags: str = "", exp_name: str = "exp"):
        code = main(["--out_dir", "runs", "--exp_name", exp_name, *flags.split()])
        return code, *capsys.readouterr()

    return run
