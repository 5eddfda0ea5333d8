"""Ranks for tests: worker processes that live as long as the test session.

Eight processes that each import torch need ten seconds on two cores. Here torch and the project
are imported once, in the server process of multiprocessing's `forkserver`. Every worker is a fork
of that server and stays for the next test:

    test process --pipe--> worker 0  \\
                 --pipe--> worker 1   > one gloo group, made for this run and destroyed after it
                 --pipe--> worker 2  /
                 --pipe--> worker 3     idle: this run asked for three ranks

A test passes a function of its own module and gets what each rank returned:

    def sum_of_ranks():
        total = torch.tensor(dist.get_rank())
        dist.all_reduce(total)
        return total.item()

    def test_all_reduce_sums(pool):
        assert pool.run(3, sum_of_ranks) == [3, 3, 3]

When one rank fails, the others fail because its connections close. The pool reports the first
failure in full and the others in one line each, and the next run gets new workers.

Every worker imports the test's module: keep heavy imports (transformers, datasets) out of its top.
"""

import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import connection
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

MAX_RANKS = 8
GRACE = 1.0  # seconds after a failure in which the other ranks may report how it affected them

# torch._dynamo because the first optimizer of a process imports it, pytest because test modules do.
PRELOAD = ["torch", "torch.distributed", "torch._dynamo", "pytest", "train"]
# What a run imports when it begins.
PRELOAD += ["picotron_min.runtime.inputs", "picotron_min.runtime.reporter", "tests.rows"]


class RankFailed(Exception):
    """Ranks raised, died or timed out; the message begins with the first failure's traceback."""


class Pool:
    """Worker processes, started as needed, that run functions as the ranks of a process group."""

    def __init__(self, preload: tuple[str, ...] = ()) -> None:
        """`preload`: modules that the server imports besides its own, for all forks of it."""
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload([*PRELOAD, *preload])
        self.folder = tempfile.TemporaryDirectory()
        self.workers: list[Worker] = []

    def run(
        self, world_size: int, function: Callable, *args: Any, timeout: float = 60.0
    ) -> list[Any]:
        """Call `function(*args)` on each of `world_size` ranks; return the results in rank order.

        `function` must be at the top level of a module; arguments and results are pickled, tensors
        included. Each rank is in a new default process group and starts from the same random seed.
        Raises RankFailed if a rank raises or dies, or has no result within `timeout` seconds.
        """
        __tracebackhide__ = True  # pytest then shows the test's line and our message
        assert 1 <= world_size <= MAX_RANKS, f"{world_size=}: the pool has 1 to {MAX_RANKS} ranks"
        deadline = time.monotonic() + timeout
        call = pickle.dumps((function, args))
        store = os.path.join(tempfile.mkdtemp(dir=self.folder.name), "store")
        self._discard([worker for worker in self.workers if not worker.process.is_alive()])
        while len(self.workers) < world_size:
            self.workers.append(Worker(self.context))
        workers = self.workers[:world_size]
        try:
            for rank, worker in enumerate(workers):
                worker.pipe.send((call, store, rank, world_size, timeout))
            answers = _collect(workers, deadline)
            if len(answers) < world_size or any(answer.failure for answer in answers.values()):
                raise RankFailed(_report(workers, answers, timeout))
            results = [pickle.loads(answers[rank].result) for rank in range(world_size)]
            for worker in workers:
                worker.pipe.send("every rank is done: leave the group")
            return results
        except BaseException:  # Ctrl-C too: these workers are in an unknown state now
            self._discard(workers)
            raise

    def close(self) -> None:
        """End all workers."""
        self._discard(self.workers)
        self.folder.cleanup()

    def _discard(self, workers: list["Worker"]) -> None:
        for worker in workers:
            worker.process.kill()
        for worker in workers:
            worker.process.join()
            worker.pipe.close()
            worker.stacks.close()
        self.workers = [worker for worker in self.workers if worker not in workers]


class Worker:
    """The test process's end of one worker process."""

    def __init__(self, context: multiprocessing.context.BaseContext) -> None:
        self.pipe, theirs = context.Pipe()
        self.stacks = tempfile.NamedTemporaryFile(mode="r")  # noqa: SIM115 (closed by _discard)
        args = (theirs, self.stacks.name)
        self.process = context.Process(target=_serve, args=args, daemon=True)
        self.process.start()
        theirs.close()  # only the worker holds it now, so its death reads as an end of file


class Answer(NamedTuple):
    """A rank's pickled result or, if `failure` is set, how it failed."""

    result: bytes = b""
    failure: str = ""  # one line
    traceback: str = ""
    time: float = 0.0  # of the failure, in seconds on a clock that all processes share


def _serve(pipe: connection.Connection, stacks_path: str) -> None:
    """Main function of a worker: run jobs from the pipe until the test process closes it."""
    torch.set_num_threads(1)
    gc.disable()  # _run_as_rank collects after each run
    sys.stdout.reconfigure(line_buffering=True)  # so that the last print before a death is seen
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the test process, which ends us
    if hasattr(os, "SCHED_BATCH"):
        # Eight ranks and their gloo threads share few cores: fewer switches between them.
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    os.nice(5)  # Tests with time limits may run beside these.
    with open(stacks_path, "w") as stacks:
        # A crash writes the Python stack; so does SIGTERM, which then ends the process as usual.
        faulthandler.enable(stacks)
        faulthandler.register(signal.SIGTERM, stacks, chain=True)
        closing = threading.Thread()
        closing.start()
        while True:
            try:
                job = pipe.recv()
            except EOFError:
                return
            try:
                answer = Answer(_run_as_rank(*job))
            except BaseException as error:  # pytest.fail and sys.exit too
                failure = f"{type(error).__name__}: {error}".splitlines()[0]
                pipe.send(Answer(b"", failure, traceback.format_exc(), time.monotonic()))
                os._exit(1)  # closes the group's sockets now, so that the other ranks fail too
            pipe.send(answer)
            # Leaving before the others are done could break their last collective.
            pipe.recv()
            closing.join()
            closing = _leave_groups()


def _leave_groups() -> threading.Thread:
    """Forget all process groups; a thread closes their connections while the next run begins.

    gloo sleeps up to 10 ms for each connection that it closes, which would be a fifth of a second
    for a rank of eight, and does so without Python's lock.
    """
    groups = list(distributed_c10d._world.pg_map)  # keeps them alive for now
    dist.destroy_process_group()
    closing = threading.Thread(target=groups.clear)
    closing.start()
    return closing


def _run_as_rank(call: bytes, store: str, rank: int, world_size: int, timeout: float) -> bytes:
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, world_size),
        rank=rank,
        world_size=world_size,
        # Longer than the test process waits: a gloo timeout would come without the stacks.
        timeout=timedelta(seconds=timeout + 30),
    )
    dist.barrier()  # A rank that fails at once would otherwise break the others' connecting.
    torch.manual_seed(0)  # An earlier test may have changed this and the dtype.
    torch.set_default_dtype(torch.float32)
    function, args = pickle.loads(call)
    gc.freeze()  # The collector need not visit again what exists already.
    result = pickle.dumps(function(*args))
    # Groups in reference cycles keep their threads, and hundreds of threads slow everything down.
    gc.collect()
    return result


def _collect(workers: list[Worker], deadline: float) -> dict[int, Answer]:
    """Receive answers by rank until all are there or time is up; a failure leaves GRACE seconds."""
    answers = {}
    waiting = {worker.pipe: rank for rank, worker in enumerate(workers)}
    while waiting and (left := deadline - time.monotonic()) > 0:
        for pipe in connection.wait(list(waiting), left):
            rank = waiting.pop(pipe)
            try:
                answers[rank] = pipe.recv()
            except (EOFError, OSError):
                answers[rank] = _death(workers[rank])
            if answers[rank].failure:
                deadline = min(deadline, time.monotonic() + GRACE)
    return answers


def _death(worker: Worker) -> Answer:
    worker.process.join()
    code = worker.process.exitcode
    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
    # Time 0: a rank that loses a peer raises but does not die, so a death is the first failure even
    # if we notice it after the errors that it caused.
    return Answer(b"", how, worker.stacks.read(), time=0.0)


def _report(workers: list[Worker], answers: dict[int, Answer], timeout: float) -> str:
    """The message of RankFailed."""
    stuck = [rank for rank in range(len(workers)) if rank not in answers]
    failed = [rank for rank in answers if answers[rank].failure]
    failed.sort(key=lambda rank: answers[rank].time)
    if failed:
        first = answers[failed[0]]
        lines = [f"rank {failed[0]} of {len(workers)} failed, {first.failure}\n{first.traceback}"]
        lines += [f"then rank {rank}: {answers[rank].failure}" for rank in failed[1:]]
        lines += [f"then rank {rank}: still running {GRACE:g} s later" for rank in stuck]
        return "\n".join(lines)
    lines = [f"{len(stuck)} of {len(workers)} ranks had no result after {timeout:g} s"]
    for rank in stuck:
        workers[rank].process.terminate()
    for rank in stuck:
        workers[rank].process.join(GRACE)
        lines.append(f"rank {rank} was at\n{workers[rank].stacks.read() or 'no Python stack'}")
    return "\n".join(lines)


def run_forked(function: Callable[[], object], count: int) -> list[int]:
    """Call `function` in so many forked processes at once, without a group; their exit codes."""
    return exit_codes(*(fork(function) for _ in range(count)))


def fork(function: Callable, *arguments) -> multiprocessing.Process:
    process = multiprocessing.get_context("fork").Process(target=function, args=arguments)
    process.start()
    return process


def exit_codes(*processes: multiprocessing.Process) -> list[int]:
    for process in processes:
        process.join(30)
        process.kill()
        process.join()
    return [process.exitcode for process in processes]
