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


def test_every_run_has_its_own_group_seed_and_dtype(pool):
    """A message that nobody received in one run is not received in the next."""
    first = pool.run(2, _draw_and_send, -1.0, False)
    second = pool.run(2, _draw_and_send, 5.0, True)
    assert first == [second[0], first[0]] and second[1] == 5.0


def _draw_and_send(number: float, receives: bool) -> float:
    drawn, message = torch.rand(1), torch.full((1,), number)
    torch.set_default_dtype(torch.float64)
    if dist.get_rank() == 0:
        sending = dist.isend(message, dst=1)
        if receives:
            sending.wait()
    elif receives:
        dist.recv(message.zero_(), src=0)
        return message.item()
    return drawn.item()


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


@pytest.mark.parametrize("fails", [False, True])
def test_a_stuck_rank_is_named_and_not_waited_for_after_a_failure(pool, fails):
    pool.run(3, dist.get_rank)  # the workers are up, so that the time below is the function's
    with pytest.raises(RankFailed) as failed:
        pool.run(3, _oversleep, fails, timeout=100.0 if fails else 2.0)
    text = str(failed.value)
    if fails:
        assert text.startswith("rank 2 of 3 failed, ValueError") and "rank 1: still running" in text
        return
    headline, *stuck = text.split("\nrank ")
    assert headline == "2 of 3 ranks had no result after 2 s"
    assert [of[:9] for of in stuck] == ["0 was at\n", "1 was at\n"]
    assert all("in _oversleep" in of for of in stuck)


def _oversleep(fails: bool) -> None:
    """Rank 1 sleeps, rank 0 waits for it, and rank 2 is done or fails."""
    if dist.get_rank() == 1:
        time.sleep(200)
    if dist.get_rank() == 0:
        dist.recv(torch.zeros(1), src=1)
    if fails:
        raise ValueError("the cause")
