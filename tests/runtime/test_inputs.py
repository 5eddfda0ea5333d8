"""What ranks start from, and that it is the same on all nodes."""

from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from picotron_min.runtime import inputs
from picotron_min.runtime.config import Config
from tests.pool import RankFailed


@pytest.mark.quick
def test_max_tokens_is_reached_after_the_steps_that_see_so_many():
    for first, tokens, last in (0, 24, 2), (0, 25, 3), (10, 120, 10), (0, 9999, 200):
        config = Config(training={"max_tokens": tokens})
        batches = SimpleNamespace(seen_before=12 * first, tokens_per_step=12)
        started = SimpleNamespace(config=config, first_step=first, batches=batches)
        assert inputs.Inputs.last_step.fget(started) == last


def start_up(seeds: tuple[int, int], folders: tuple[Path, Path]) -> None:
    """Two nodes of a rank each, which have these seeds, and see these folders."""
    rank, device = dist.get_rank(), torch.device("cpu")
    checkpoint = {"save_dir": str(folders[rank])}
    config = Config(distributed={"dp_size": 2, "timeout_seconds": 1}, checkpoint=checkpoint)
    settings = {"training.seed": seeds[rank]}
    read = SimpleNamespace(backend="gloo", in_common=lambda: settings, device=device)
    monitor = SimpleNamespace(launch=None, connect=lambda backend: None, group=None)
    with mock.patch.object(inputs, "read_inputs", lambda *_: read):
        inputs.start_up(config, monitor)


@pytest.mark.parametrize(
    "seed,folder,reason",
    [
        (7, "here", "rank 1 was not started as rank 0: it has training.seed=7, not 42"),
        (42, "elsewhere", "is not the same folder on all nodes: rank 1"),
    ],
)
def test_ranks_that_do_not_fit_together_do_not_start(seed, folder, reason, pool, tmp_path):
    (tmp_path / "here").mkdir()
    (tmp_path / "elsewhere").mkdir()
    with pytest.raises(RankFailed, match=reason):
        pool.run(2, start_up, (42, seed), (tmp_path / "here", tmp_path / folder))
