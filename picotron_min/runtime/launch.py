"""How a process was started and what it runs on: the only file that touches the environment."""

import contextlib
import ctypes
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import NamedTuple, TextIO

import torch
import torch.distributed as dist

from picotron_min.collectives import as_message
from picotron_min.mesh import Axes
from picotron_min.runtime.wording import explained


class Launch(NamedTuple):
    """How this process was started."""

    rank: int
    local_rank: int  # on this node
    world_size: int
    open_store: Callable[[float], dist.Store]  # the ranks' key-value store, given a timeout in s


def torchrun_launch() -> Launch | None:
    """Read the variables that torchrun sets; None if this process was started without it."""
    env = os.environ
    if "RANK" in env:
        problem = "RANK is set, but not all that torchrun sets with it"
        with explained(problem, "start with torchrun, or unset RANK"):
            numbers = [int(env[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")]
        return Launch(*numbers, _open_tcp_store)
    if (copies := env.get("SLURM_STEP_NUM_TASKS", "1")) != "1":
        problem = f"srun has started this command {copies} times (SLURM_STEP_NUM_TASKS)"
        remedy = "start it once a node, and let it run  torchrun ... train.py --config FILE"
        raise ValueError(f"{problem}: {remedy}; see docs/running.md")
    return None


def _open_tcp_store(timeout_seconds: float) -> dist.Store:  # open_store under a launcher
    store, *_ = next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout_seconds)))
    # torchrun may keep one store for all of its --max-restarts, in which ranks would find the
    # addresses of processes that are gone. So every attempt has its own keys.
    return dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)


def print_end(message: str) -> None:
    """Print a message about the end of the run, above torchrun's own, if it will print one."""
    is_torchrun = "TORCHELASTIC_RUN_ID" in os.environ  # other launchers set RANK, too
    footer = "\n(What follows is torchrun's own report. The reason is above.)" * is_torchrun
    print(f"\n{message}{footer}\n", file=sys.stderr, flush=True)


class Terminal:
    """An output stream that never raises: a print that fails must not end a run.

    If the terminal is gone (EIO), its reader has ended (EPIPE) or the disk is full (ENOSPC), the
    text is dropped. Letters that the encoding lacks are written as escapes.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self.stream = stream or open(os.devnull, "w")  # noqa: SIM115  None: closed at the start
        if hasattr(self.stream, "reconfigure"):  # not in a notebook
            self.stream.reconfigure(errors="backslashreplace")

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self.stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self.stream.flush()

    def __getattr__(self, name: str):
        return getattr(self.stream, name)


def begin_process() -> None:
    """Let no failed print end this process; SIGTERM ends it with 0: it has trained nothing yet."""
    sys.stdout, sys.stderr = Terminal(sys.stdout), Terminal(sys.stderr)
    signal.signal(signal.SIGTERM, _stop_early)


def _stop_early(*_) -> None:
    if os.environ.get("RANK", "0") == "0":
        print_end(STOPPED_EARLY)
    os._exit(0)


STOPPED_EARLY = "stopped by SIGTERM before the first step: nothing was trained"


def exit_with_parent() -> None:
    """Let this process end when the one that has forked it does, however that ends."""

    def wait() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


# Errors that a user can mend; the last is a package that is not installed.
USAGE_ERRORS = (ValueError, OSError, ModuleNotFoundError)


@contextlib.contextmanager
def exit_on_usage_error() -> Iterator[None]:
    """Report the user's mistakes by their message alone; exit code 2."""
    try:
        yield
    except (*USAGE_ERRORS, dist.DistError) as error:
        # Every rank finds most of them: the first one of a node reports them, and the launcher then
        # ends the others while they sleep. They report only what the first one has not found.
        time.sleep(5 if os.environ.get("LOCAL_RANK", "0") != "0" else 0)
        message = str(error)
        if isinstance(error, dist.DistError):  # of the ranks' store, with a C++ stack below it
            message = f"{first_line(error)} See rank 0, or check MASTER_ADDR and MASTER_PORT"
        print_end(message)
        raise SystemExit(2) from None


def first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


def set_environment(tokenizers_parallelism: bool | None = None) -> None:
    """Set variables for this process and those it starts, before it touches a GPU."""
    # Memory in segments that can grow: fixed ones end up in pieces too small for a large tensor.
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # the older name of the same variable
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    # oneDNN makes code for each shape, and keeps it: by default 400 MB, where experts have
    # other numbers of rows in each step.
    for cache in ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"):
        os.environ.setdefault(cache, "64")
    known, given = [name for _, name in socket.if_nameindex()], os.environ.get(INTERFACE, "")
    if unknown := [name for name in given.split(",") if name and name not in known]:
        problem = f"{INTERFACE}={given}: this machine has no network interface {unknown[0]}"
        raise ValueError(f"{problem}: unset it, or name one of {', '.join(known)}")
    if tokenizers_parallelism is not None:
        os.environ["TOKENIZERS_PARALLELISM"] = str(tokenizers_parallelism).lower()


INTERFACE = "GLOO_SOCKET_IFNAME"  # through which gloo connects


def listen_on_loopback() -> None:
    """Let gloo, which authenticates no one, be reached from this machine alone."""
    loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    if loopback:
        os.environ.setdefault(INTERFACE, loopback[0])


def set_allocator(returns: bool) -> None:
    """Whether this process, and those that it forks, give large freed tensors back to the system.

    A sharded run does: glibc keeps blocks of up to 32 MB for later, cut into pieces that the next
    ones often do not fit into, and a run that allocates buffers in every step would save nothing.
    Others do not: each step would begin with fresh pages, and wait for the system to zero them.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
    if mallopt and not {"MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"} & set(os.environ):
        M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
        mallopt(M_MMAP_THRESHOLD, 2**17 if returns else 2**25)  # larger ones are mapped alone
        mallopt(M_TRIM_THRESHOLD, 2**17 if returns else 2**31 - 1)  # free bytes that stay


def compute_deterministically() -> None:
    """Let a GPU's kernels add in the same order in every run; RuntimeError where one cannot."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # two buffers, never chosen by load
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # it is written before it is read


def choose_device(
    launch: Launch, backend: str = "auto", use_cpu: bool = False
) -> tuple[torch.device, str]:
    """One GPU a process where there are GPUs, else the CPU; and the backend that connects them.

    ValueError if GPUs are too few, or if the backend cannot work.
    """
    if use_cpu or not torch.cuda.is_available():
        if backend == "nccl":
            problem = "distributed.backend=nccl does not work on the device in use, cpu"
            raise ValueError(f"{problem}: set it to auto or gloo, or change distributed.use_cpu")
        return torch.device("cpu"), "gloo"
    # NCCL refuses two processes on one GPU, gloo does not.
    if launch.local_rank >= (gpus := torch.cuda.device_count()) and backend != "gloo":
        problem = f"process {launch.local_rank} on this node has no GPU: there are {gpus}"
        remedy = "start fewer processes, let them share GPUs by distributed.backend gloo"
        raise ValueError(f"{problem}; {remedy}, or set distributed.use_cpu")
    device = torch.device("cuda", launch.local_rank % gpus)
    torch.cuda.set_device(device)
    _check_segments(device, launch)
    return device, "nccl" if backend == "auto" else backend


def _check_segments(device: torch.device, launch: Launch) -> None:
    """Use fixed segments of memory where a virtual machine's driver has none that can grow."""
    try:
        torch.empty(1, device=device)
    except RuntimeError as error:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
        torch.empty(1, device=device)  # raises if the cause is another one
        if launch.local_rank == 0:
            why = first_line(error)
            print(f"GPU memory is in fixed segments: the driver has no other ({why})", flush=True)


def open_process_group(launch: Launch, backend: str, store: dist.Store, timeout: timedelta) -> None:
    """Connect all ranks. Any communication that takes longer than the timeout then raises."""
    # With NCCL the GPU waits, not the host, which would never return from reading a result. NCCL's
    # watchdog ends the process after the timeout. If that thread hangs, too, another one does: here
    # after the timeout once more, by default after 8 minutes.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")  # abort without cleaning up
    limit = f"{timeout.total_seconds():.0f}"
    os.environ.setdefault("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", limit)
    options = {"store": dist.PrefixStore("process group", store), "timeout": timeout}
    # Without a device_id: with one, torch gives all that a group does one stream, on which a
    # receive that waits for its sender holds up sends to other ranks.
    dist.init_process_group(backend, rank=launch.rank, world_size=launch.world_size, **options)


def open_communicators(axes: Axes) -> None:
    """Let the ranks of every group communicate once, in the same order everywhere.

    NCCL makes a communicator when its group is first used, and blocks the host until all members
    come. Two ranks that first come to different groups would wait for each other forever.
    """
    axis = axes.pp
    tensor = as_message(torch.zeros(1, device=axis.device), axis)
    for group in (axis.group for axis in axes if axis.size > 1):
        dist.all_reduce(tensor, group=group)  # not collectives.all_reduce, which counts bytes
    # Sends have a communicator of their own for each pair of ranks: (0 1), (1 2), ..., (n-1 0).
    for sender in range(axis.size if axis.size > 1 else 0):
        if axis.rank == sender:
            dist.isend(tensor, group=axis.group, group_dst=axis.next).wait()
        elif axis.previous == sender:
            dist.irecv(tensor, group=axis.group, group_src=sender).wait()
