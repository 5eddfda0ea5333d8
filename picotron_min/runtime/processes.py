"""Processes: start a run's processes on this machine, and end all when one fails.

python train.py     the parent: imports torch once (12 seconds for 8 ranks become 2), forks, waits
|-- rank 0
|-- rank 1          killed by SIGKILL: the parent reports it and kills the others
'-- rank 2          exits with code 1: it has reported its error itself, see failures.py
"""

import argparse
import gc
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Callable
from functools import partial
from multiprocessing import connection
from multiprocessing.context import ForkProcess
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from picotron_min.runtime.failures import GRACE, RankMonitor, monitored, report
from picotron_min.runtime.launch import (
    STOPPED_EARLY,
    Launch,
    begin_process,
    compute_deterministically,
    exit_on_usage_error,
    exit_with_parent,
    listen_on_loopback,
    print_end,
    set_allocator,
    set_environment,
    torchrun_launch,
)

if TYPE_CHECKING:
    from picotron_min.runtime.config import Config


def start_run(
    train: Callable[["Config", RankMonitor], None],
    about: str = "Train a Llama as a config.json describes.",
) -> None:
    """Call `train` in every process of a run, with the config that the command line names.

    Under torchrun this is one of the processes; without, it starts as many as the config needs.
    """
    from picotron_min.runtime.config_file import load_config

    begin_process()
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--config", required=True, metavar="FILE", help="see create_config.py")
    path = parser.parse_args().config
    with exit_on_usage_error():
        launch = torchrun_launch()
        config = load_config(path, processes=launch and launch.world_size)
        set_environment(config.environment.TOKENIZERS_PARALLELISM)
    set_allocator(returns=config.layout.sharding != "none")
    # What every rank imports, here once: 8 ranks would take 8 times as long on a few cores.
    import picotron_min.runtime.reporter  # noqa: F401

    if config.tokenizer != "bytes":
        from transformers import AutoTokenizer  # noqa: F401
    gc.freeze()  # what imports have made is never collected, nor its pages copied after a fork
    gc.enable()  # train.py has disabled it
    if launch:
        _run_rank(train, config, launch)
    else:
        start_processes(partial(_run_rank, train, config), config.world_size)


def _run_rank(train: Callable, config: "Config", launch: Launch) -> None:
    if config.environment.OMP_NUM_THREADS:
        torch.set_num_threads(config.environment.OMP_NUM_THREADS)
    if config.training.deterministic:
        compute_deterministically()
    timeout, save_dir = config.distributed.timeout_seconds, config.checkpoint.save_dir
    with monitored(launch, timeout, save_dir) as monitor:
        train(config, monitor)


def start_processes(main: Callable[[Launch], None], world_size: int) -> None:
    """Run `main` in `world_size` processes; SystemExit with the exit code unless all succeed."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:

        def open_store(timeout_seconds: float) -> dist.Store:
            return dist.FileStore(os.path.join(folder, "store"), world_size)

        launches = [Launch(rank, rank, world_size, open_store) for rank in range(world_size)]
        ranks = [context.Process(target=_run_forked, args=(main, launch)) for launch in launches]
        before = signal.getsignal(signal.SIGTERM)
        try:
            # A terminal sends Ctrl-C to all processes. Ranks inherit that it is blocked here:
            # the parent reports it, when all ranks have been forked, and kills them.
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
            for process in ranks:
                process.start()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
            signal.signal(signal.SIGTERM, lambda *_: [process.terminate() for process in ranks])
            code, rank = _wait(ranks)
            store = open_store(GRACE)
            if code == -signal.SIGTERM and not store.check([f"step {rank}"]):
                print_end(STOPPED_EARLY)
                code = 0
            elif code < 0:  # the number of a signal; otherwise the rank has reported its error
                why = " (perhaps because memory ran out)" * (-code == signal.SIGKILL)
                what = f"rank {rank} was killed by {signal.Signals(-code).name}{why}"
                report(what, store, rank)
                code = 1
        except KeyboardInterrupt:
            report("stopped by Ctrl-C", open_store(GRACE), 0)
            code = 130
        finally:
            signal.signal(signal.SIGTERM, before)
            for process in filter(ForkProcess.is_alive, ranks):
                process.kill()
                process.join()
    if code:
        raise SystemExit(code)


def _run_forked(main: Callable[[Launch], None], launch: Launch) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # not the parent's handler
    exit_with_parent()
    listen_on_loopback()
    main(launch)


def _wait(ranks: list[ForkProcess]) -> tuple[int, int]:
    """Wait until all ranks are done or one fails: its exit code, otherwise 0, and its number."""
    running = {process.sentinel: rank for rank, process in enumerate(ranks)}
    while running:
        for rank in map(running.pop, connection.wait(running)):
            ranks[rank].join()
            if code := ranks[rank].exitcode:
                return code, rank
    return 0, 0
