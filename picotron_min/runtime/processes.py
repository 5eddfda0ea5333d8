"""Start the processes of a run on this machine, and end all of them when one fails.

python train.py     the parent: imports torch once (12 seconds for 8 ranks become 2), forks, waits
|-- rank 0
|-- rank 1          killed by SIGKILL: the parent reports it and kills the others
'-- rank 2          exits with code 1: it has reported its error itself, see failures.py
"""

import multiprocessing
import os
import signal
import tempfile
import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from multiprocessing import connection

import torch.distributed as dist

from picotron_min.runtime.failures import GRACE, report
from picotron_min.runtime.launch import Launch


def start_processes(main: Callable[[Launch], None], world_size: int) -> None:
    """Run `main` in so many processes here; SystemExit with the exit code unless all succeed."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        open_store = partial(_file_store, os.path.join(folder, "store"), world_size)
        launches = [Launch(rank, rank, world_size, open_store) for rank in range(world_size)]
        ranks = [context.Process(target=_run_forked, args=(main, launch)) for launch in launches]
        for process in ranks:
            process.start()

        def forward_sigterm(*_) -> None:
            for process in ranks:
                process.terminate()

        before = signal.signal(signal.SIGTERM, forward_sigterm)
        try:
            code, rank = _wait(ranks)
            if code < 0:  # the number of a signal; otherwise the rank has reported its error
                what = f"rank {rank} was killed by {signal.Signals(-code).name}"
                report(what, open_store(GRACE), rank, launches[0])
                code = 1
        except KeyboardInterrupt:
            report("stopped by Ctrl-C", open_store(GRACE), 0, launches[0])
            code = 130
        finally:
            signal.signal(signal.SIGTERM, before)
            for process in ranks:
                process.kill()
                process.join()
    if code:
        raise SystemExit(code)


def _file_store(path: str, world_size: int, timeout_seconds: float) -> dist.Store:
    store = dist.FileStore(path, world_size)
    store.set_timeout(timedelta(seconds=timeout_seconds))
    return store


def _run_forked(main: Callable[[Launch], None], launch: Launch) -> None:
    # A terminal sends Ctrl-C to all processes at once. The parent reports it and kills the ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    main(launch)


def _exit_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)


def _wait(ranks: list) -> tuple[int, int]:
    """Wait until all ranks are done or one fails: its exit code, otherwise 0, and its number."""
    codes = [None] * len(ranks)
    while None in codes and not any(codes):
        running = [rank for rank, code in zip(ranks, codes, strict=True) if code is None]
        connection.wait([process.sentinel for process in running])
        codes = [process.exitcode for process in ranks]
    return next(((code, rank) for rank, code in enumerate(codes) if code), (0, 0))
