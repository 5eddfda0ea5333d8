"""What tests/pool.py promises, above all when a rank fails."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from tests.pool import Pool, RankFailed


@pytest.fixture(autouse=True)
def _next_run_works(pool: Pool):
    """After every test here, failed ranks or not, a run with the same workers is clean."""
    yield
    assert pool.run(4, _sum_of_ranks) == [6] * 4


def _sum_of_ranks() -> int:
    total = torch.tensor(dist.get_rank())
    dist.all_reduce(total)
    return total.item()


@pytest.mark.parametrize("signum", [0, signal.SIGSEGV, signal.SIGKILL])
def test_the_first_failure_is_reported_in_full_and_the_others_in_a_line_each(pool, signum):
    with pytest.raises(RankFailed) as failed:
        pool.run(3, _fail_on, 1, signum)
    cause, *consequences = str(failed.value).split("\nthen ")
    how = f"killed by {signal.Signals(signum).name}" if signum else "ValueError: the cause"
    assert cause.startswith(f"rank 1 of 3 failed, {how}\n")
    if signum != signal.SIGKILL:  # which leaves no time to write a stack
        assert "in _fail_on" in cause
    assert sorted(line[:7] for line in consequences) == ["rank 0:", "rank 2:"]
    assert all(len(line.splitlines()) == 1 for line in consequences)


def _fail_on(rank: int, signum: int) -> None:
    dist.all_reduce(torch.ones(1))
    if dist.get_rank() == rank:
        if signum:
            os.kill(os.getpid(), signum)
        raise ValueError("the cause\nin two lines")
    dist.all_reduce(torch.ones(1))


@pytest.mark.parametrize("leave", [pytest.skip, exit])
def test_no_rank_leaves_unnoticed(pool, leave):
    with pytest.raises(RankFailed, match=r"rank 0 of 1 failed, (Skipped|SystemExit): "):
        pool.run(1, leave, "enough")


def test_a_stuck_rank_is_named_with_its_stack(pool):
    pool.run(3, dist.get_rank)  # the workers are up, so that the time below is the function's
    with pytest.raises(RankFailed) as failed:
        pool.run(3, _oversleep, timeout=2.0)
    headline, *stuck = str(failed.value).split("\nrank ")
    assert headline == "2 of 3 ranks had no result after 2 s"
    assert [of[:9] for of in stuck] == ["0 was at\n", "1 was at\n"]
    assert all("in _oversleep" in of for of in stuck)


def _oversleep() -> None:
    """Rank 1 sleeps, rank 0 waits for it, and rank 2 is done."""
    if dist.get_rank() == 1:
        time.sleep(200)
    if dist.get_rank() == 0:
        dist.recv(torch.zeros(1), src=1)
