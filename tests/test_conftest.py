"""The whole suite runs in two processes, and files that are named in one."""

from types import SimpleNamespace

from tests.conftest import pytest_xdist_auto_num_workers


def test_files_that_are_named_run_in_one_process():
    for arguments, workers in ((["tests"], 2), (["a.py", "b.py"], 0), (["a.py::test_loss"], 0)):
        assert pytest_xdist_auto_num_workers(SimpleNamespace(args=arguments)) == workers
