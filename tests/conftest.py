"""What every test gets: no network, one thread a process, the pool of ranks, and GPU tests."""

import os
from collections.abc import Iterator

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
def pool() -> Iterator[Pool]:
    """Up to 8 ranks: `pool.run(world_size, function, *args)`, see tests/pool.py."""
    pool = Pool()
    yield pool
    pool.close()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all-layouts", action="store_true", help="see test_layouts.py: ten minutes")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device, and torch.cuda.is_available() is False")
