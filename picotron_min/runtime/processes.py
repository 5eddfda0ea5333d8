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
from multiprocessing import connection

import torch.distributed as dist

from picotron_min.runtime.failures import GRACE, report
from picotron_min.runtime.launch import Launch


def start_processes(main: Callable[[Launch], None], world_size: int) -> None:
    """Run `main` in so many processes here; SystemExit with the exit code unless all succeed."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:

        def open_store(timeout_seconds: float) -> dist.Store:
            return dist.FileStore(os.path.join(folder, "store"), world_size)

        launches = [Launch(rank, rank, world_size, open_store) for rank in range(world_size)]
        ranks = [context.Process(target=_run_forked, args=(main, launch)) for launch in launches]
        before = signal.getsignal(signal.SIGTERM)

        def forward_sigterm(*_) -> None:
            for process in ranks:
                process.terminate()

        try:
            for process in ranks:
                process.start()
            signal.signal(signal.SIGTERM, forward_sigterm)
            code, rank = _wait(ranks)
            if code < 0:  # the number of a signal; otherwise the rank has reported its error
                what = f"rank {rank} was killed by {signal.Signals(-code).name}"
                what += " (perhaps because memory ran out)" * (-code == signal.SIGKILL)
                report(what, open_store(GRACE), rank, launches[0])
                code = 1
        except KeyboardInterrupt:
            report("stopped by Ctrl-C", open_store(GRACE), 0, launches[0])
            code = 130
        finally:
            signal.signal(signal.SIGTERM, before)
            for process in [p for p in ranks if p.is_alive()]:
                process.kill()
                process.join()
    if code:
        raise SystemExit(code)


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
    running = {process.sentinel: rank for rank, process in enumerate(ranks)}
    while running:
        for sentinel in connection.wait(list(running)):
            rank = running.pop(sentinel)
            ranks[rank].join()
            if code := ranks[rank].exitcode:
                return code, rank
    return 0, 0
