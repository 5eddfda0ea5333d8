"""What tests/pool.py promises when a rank fails."""

import signal
import time
from functools import partial

import pytest
import torch.distributed as dist

from tests.pool import RankFailed

FAULTS = [
    (partial(int, "x"), 60, "(?s)^rank 1 of 3 failed, ValueError: .*in on_rank_1.*then rank 0: "),
    (exit, 60, "^rank 1 of 3 failed, SystemExit: "),
    (partial(signal.raise_signal, signal.SIGKILL), 60, "^rank 1 of 3 failed, killed by SIGKILL"),
    (partial(time.sleep, 200), 2, "(?s)^3 of 3 ranks had no .*rank 1 was at\n.*in on_rank_1"),
]


def on_rank_1(fault: partial) -> None:
    if dist.get_rank() == 1:
        fault()
    dist.barrier()


@pytest.mark.parametrize("fault,seconds,report", FAULTS, ids=["raises", "exits", "dies", "hangs"])
def test_a_failure_is_reported_first_and_the_next_run_is_clean(pool, fault, seconds, report):
    pool.run(3, dist.get_rank)  # the workers are up, so that the time below is the function's
    with pytest.raises(RankFailed, match=report):
        pool.run(3, on_rank_1, fault, timeout=seconds)
    assert pool.run(3, dist.get_rank) == [0, 1, 2]
