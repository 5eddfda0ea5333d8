"""`pytest -m quick` is a fair sample of the suite; the whole suite runs in two processes."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.conftest import pytest_xdist_auto_num_workers, quick_sample, those_that_wait


def case(file: str, number: int, *markers: str) -> SimpleNamespace:
    return SimpleNamespace(
        path=Path(file), number=number, get_closest_marker=lambda name: name in markers
    )


@pytest.mark.parametrize("kept,of", [(3, 7), (2, 7), (2, 5), (3, 5), (2, 11)], ids=str)
def test_cases_that_take_turns_meet_all_values_of_their_parameters(kept, of):
    turns = SimpleNamespace(args=(kept, of))
    items = [
        SimpleNamespace(path=file, originalname=name, number=i, get_closest_marker=marker.get)
        for file, name, marker in (
            ("a.py", "test_marked", {"turns": turns}),
            ("a.py", "test_unmarked", {}),
            ("b.py", "test_marked", {"turns": turns}),
        )
        for i in range(of * 12)
    ]
    waiting = those_that_wait(items)
    assert len(waiting) == 2 * 12 * (of - kept)
    for file in ("a.py", "b.py"):
        left = [
            x.number
            for x in items
            if x not in waiting and (x.path, x.originalname) == (file, "test_marked")
        ]
        assert left[0] == 0 and len(left) == 12 * kept
        for period in (2, 4, 6):
            assert {number % period for number in left} == set(range(period))
    assert all(item.originalname == "test_marked" for item in waiting)


def test_quick_cases_come_from_every_file_and_every_kind():
    items = [case("long.py", number) for number in range(220)] + [case("short.py", 0)]
    quick = quick_sample(items)
    assert len(quick) == 13
    assert {item.path.name for item in quick} == {"long.py", "short.py"}
    for period in (2, 3, 5, 6, 10):
        assert {item.number % period for item in quick} == set(range(period))


def test_slow_and_gpu_cases_are_never_quick():
    items = [case("a.py", 0, "slow"), case("a.py", 1, "gpu"), case("a.py", 2), case("a.py", 3)]
    assert [item.number for item in quick_sample(items)] == [2]


def test_files_that_are_named_run_in_one_process():
    def workers(*arguments: str) -> int:
        return pytest_xdist_auto_num_workers(SimpleNamespace(args=list(arguments)))

    assert workers("tests") == 2
    assert workers("tests/core/test_loss.py", "tests/core/test_data.py") == 0
    assert workers("tests/core/test_loss.py::test_a_second_backward_is_refused") == 0
