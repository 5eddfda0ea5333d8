"""For all tests: no network, one thread a process, the pool of ranks, quick and GPU tests."""

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator

# Before anything imports these libraries, because they read it then; the pool's workers inherit it.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["WANDB_MODE"] = "offline"
os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads do not survive a fork
os.environ["OMP_NUM_THREADS"] = "1"  # eight ranks share few cores

import pytest
import torch

from tests.pool import Pool

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def pool(request: pytest.FixtureRequest) -> Iterator[Pool]:
    """Up to 8 ranks: `pool.run(world_size, function, *args)`, see tests/pool.py."""
    # The end of each complete run exports its model, and importing transformers takes a second.
    runs = any("workplace" in getattr(item, "fixturenames", ()) for item in request.session.items)
    pool = Pool(preload=("transformers",) if runs else ())
    yield pool
    pool.close()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all-layouts", action="store_true", help="see test_layouts.py: ten minutes")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in quick_tenth(items):
        item.add_marker(pytest.mark.quick)


def quick_tenth(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Every eleventh case of each file, beginning with the first; none that is slow or for a GPU.

    Eleven, because parameters repeat after 2, 3, 5, 6 or 10 cases: all their values are met.
    """
    files = defaultdict(list)
    for item in items:
        if not (item.get_closest_marker("slow") or item.get_closest_marker("gpu")):
            files[item.path].append(item)
    return [item for cases in files.values() for item in cases[::11]]


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device, and torch.cuda.is_available() is False")
