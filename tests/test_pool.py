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
    first, second = pool.run(2, _draw_and_send)
    assert torch.equal(first, second) and first.dtype == torch.float32
    again, received = pool.run(2, _send_and_receive, 5.0)
    assert torch.equal(first, again) and received == 5.0


def _draw_and_send() -> torch.Tensor:
    drawn = torch.rand(3)
    torch.set_default_dtype(torch.float64)
    if dist.get_rank() == 0:
        dist.isend(torch.tensor(-1.0), dst=1)
    return drawn


def _send_and_receive(number: float) -> torch.Tensor | float:
    message = torch.tensor(number)
    if dist.get_rank() == 0:
        dist.send(message, dst=1)
        return torch.rand(3)
    message.zero_()
    dist.recv(message, src=0)
    return message.item()


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="needs Linux")
def test_the_groups_of_earlier_runs_are_closed(pool):
    """Each has threads of its own, which would slow down all later runs."""
    threads = [max(pool.run(4, _num_threads)) for _ in range(8)]
    assert min(threads[4:]) <= max(threads[:4])  # one that is just ending may be counted, too


def _num_threads() -> int:
    _groups = [dist.new_group() for _ in range(3)]
    return len(os.listdir("/proc/self/task"))


def test_workers_stay_and_are_replaced_only_where_they_failed_or_died(pool):
    before = pool.run(2, os.getpid)
    assert pool.run(2, os.getpid) == before
    os.kill(before[1], signal.SIGKILL)
    pool.workers[1].process.join()
    first, second = pool.run(2, os.getpid)
    assert first == before[0] and second != before[1]
    with pytest.raises(RankFailed):
        pool.run(2, _fail_on, 0)
    assert not set(pool.run(2, os.getpid)) & {first, second}


def test_the_first_failure_is_reported_in_full_and_the_others_in_a_line_each(pool):
    with pytest.raises(RankFailed) as failed:
        pool.run(4, _fail_on, 2)
    cause, *consequences = str(failed.value).split("\nthen ")
    assert cause.startswith("rank 2 of 4 failed, ValueError: the cause\nTraceback ")
    assert "in _fail_on" in cause
    assert sorted(line[:7] for line in consequences) == ["rank 0:", "rank 1:", "rank 3:"]
    assert all(len(line.splitlines()) == 1 for line in consequences)


def _fail_on(rank: int, signum: int = 0) -> None:
    dist.all_reduce(torch.ones(1))
    if dist.get_rank() == rank:
        if signum:
            os.kill(os.getpid(), signum)
        raise ValueError("the cause\nin two lines")
    dist.all_reduce(torch.ones(1))


def test_a_rank_that_ignores_a_failure_is_not_waited_for_and_none_leaves_unnoticed(pool):
    start = time.monotonic()
    with pytest.raises(RankFailed, match=r"(?s)^rank 1 of 2 failed.*then rank 0: still running"):
        pool.run(2, _oversleep_on, 0, 1)
    assert time.monotonic() - start < 10  # though the limit is 60 s
    for leave in (pytest.skip, exit):
        with pytest.raises(RankFailed, match=r"rank 0 of 1 failed, (Skipped|SystemExit): "):
            pool.run(1, leave, "enough")


def test_a_hang_shows_the_stack_of_the_stuck_ranks_only(pool):
    pool.run(3, dist.get_rank)  # the workers are up, so that the time below is the function's
    with pytest.raises(RankFailed) as failed:
        pool.run(3, _oversleep_on, 1, None, timeout=2.0)
    headline, rank_0, rank_1 = str(failed.value).split("\nrank ")
    assert headline == "2 of 3 ranks had no result after 2 s"
    assert rank_0.startswith("0 was at\n") and "in _wait_for_peer" in rank_0
    assert rank_1.startswith("1 was at\n") and "in _oversleep_on" in rank_1


def _oversleep_on(sleeper: int, failing: int | None) -> None:
    """One rank sleeps, one fails or waits for the sleeper, and the others do nothing."""
    if dist.get_rank() == sleeper:
        time.sleep(100)
    if dist.get_rank() == failing:
        raise ValueError("the cause")
    if dist.get_rank() == 0:
        _wait_for_peer(sleeper)


def _wait_for_peer(peer: int) -> None:
    dist.recv(torch.zeros(1), src=peer)


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV"])
def test_a_rank_killed_by_a_signal_is_named_first(pool, name):
    with pytest.raises(RankFailed) as failed:
        pool.run(3, _fail_on, 1, signal.Signals[name])
    cause, *consequences = str(failed.value).split("\nthen ")
    assert cause.startswith(f"rank 1 of 3 failed, killed by {name}\n")
    assert sorted(line[:7] for line in consequences) == ["rank 0:", "rank 2:"]
    if name != "SIGKILL":  # which leaves no time to write a stack
        assert "in _fail_on" in cause


def test_what_cannot_be_sent_is_refused_at_once(pool):
    with pytest.raises(Exception, match=r"[Cc]an't (pickle|get local)"):
        pool.run(1, lambda: None)
    with pytest.raises(AssertionError, match="the pool has 1 to 8 ranks"):
        pool.run(9, dist.get_rank)
