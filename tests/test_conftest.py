"""`pytest -m quick` is a fair sample of the suite; the whole suite runs in two processes."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.conftest import pytest_xdist_auto_num_workers, quick_sample, those_that_wait


def case(file: str, number: int, **markers) -> SimpleNamespace:
    path = Path(file)
    return SimpleNamespace(
        path=path, originalname=path.stem, number=number, get_closest_marker=markers.get
    )


@pytest.mark.parametrize("kept,of", [(3, 7), (2, 7), (2, 5), (3, 5), (2, 11)], ids=str)
def test_cases_that_take_turns_meet_all_values_of_their_parameters(kept, of):
    turns = SimpleNamespace(args=(kept, of))
    items = [case(file, i, turns=turns) for file in ("a.py", "b.py") for i in range(of * 12)]
    waiting = those_that_wait([*items, case("unmarked.py", 0), case("unmarked.py", 1)])
    assert len(waiting) == 2 * 12 * (of - kept) and all(item in items for item in waiting)
    for file in ("a.py", "b.py"):
        left = [x.number for x in items if x not in waiting and x.path.name == file]
        assert left[0] == 0 and len(left) == 12 * kept
        for period in (2, 4, 6):
            assert {number % period for number in left} == set(range(period))


def test_quick_cases_come_from_every_file_and_every_kind_and_none_is_slow():
    items = [case("long.py", number) for number in range(220)] + [case("short.py", 0)]
    slow = [case("short.py", 1, slow=True), case("other.py", 0, gpu=True)]
    quick = quick_sample([*slow, *items])
    assert len(quick) == 13 and all(item in items for item in quick)
    assert {item.path.name for item in quick} == {"long.py", "short.py"}
    for period in (2, 3, 5, 6, 10):
        assert {item.number % period for item in quick} == set(range(period))


def test_files_that_are_named_run_in_one_process():
    for arguments, workers in ((["tests"], 2), (["a.py", "b.py"], 0), (["a.py::test_loss"], 0)):
        assert pytest_xdist_auto_num_workers(SimpleNamespace(args=arguments)) == workers
