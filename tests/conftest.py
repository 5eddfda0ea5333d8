"""For all tests: no network, one thread a process, the pool of ranks, and GPU tests."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

# Before anything imports these libraries, because they read it then; the pool's workers inherit it.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["WANDB_MODE"] = "offline"
os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads do not survive a fork
os.environ["OMP_NUM_THREADS"] = "1"  # eight ranks share few cores
# Read at a process's first product on a GPU: a test of deterministic steps may come after others.
os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"

import pytest

# A forked process must not free a group of its parent: it would wait for threads it does not have.
os.register_at_fork(after_in_child=gc.freeze)

# Imports inside functions: of several processes, the one that only distributes tests needs none.
if TYPE_CHECKING:
    from tests.pool import Pool
    from tests.workplace import Workplace


@pytest.fixture(scope="session")
def pool(request: pytest.FixtureRequest) -> Iterator["Pool"]:
    """Up to 8 ranks: `pool.run(world_size, function, *args)`, see tests/pool.py."""
    from tests.pool import Pool

    # The end of each complete run exports its model, and importing transformers takes a second.
    runs = any("workplace" in getattr(item, "fixturenames", ()) for item in request.session.items)
    pool = Pool(preload=("transformers.models.llama.modeling_llama",) if runs else ())
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def shared_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text and its tokens, which the first run makes for all."""
    from tests.workplace import write_text

    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def workplace(
    pool: "Pool", shared_text: Path, tmp_path_factory: pytest.TempPathFactory
) -> "Workplace":
    from tests.workplace import Workplace

    pool.run(1, int)  # starts the server now, so that no time limit of a test has to include it
    return Workplace(tmp_path_factory.mktemp("workplace"), shared_text, pool)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """`-n auto`: two for the whole suite, so that one works while the other waits; else none."""
    return 0 if any(".py" in argument for argument in config.args) else 2


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device, and torch.cuda.is_available() is False")
