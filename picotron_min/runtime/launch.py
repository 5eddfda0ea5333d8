"""How a process was started, and the environment: the only file that reads or sets variables."""

import os
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

from picotron_min.runtime.hub import hub_answers


class Launch(NamedTuple):
    """How this process was started."""

    rank: int
    local_rank: int  # on this node
    world_size: int
    open_store: Callable[[float], dist.Store]  # given a timeout in seconds; where ranks meet


def torchrun_launch() -> Launch | None:
    """What torchrun told this process, or None if it was started without torchrun."""
    if "RANK" not in os.environ:
        return None
    rank, local_rank, world_size, port = (
        int(os.environ[k]) for k in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT")
    )
    # torchrun may keep one store for all of its --max-restarts, and then ranks would find the
    # addresses of those that are gone: so every attempt has names of its own.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    has_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    open_store = partial(
        _tcp_store, os.environ["MASTER_ADDR"], port, not has_store and rank == 0, attempt
    )
    return Launch(rank, local_rank, world_size, open_store)


def _tcp_store(host: str, port: int, is_master: bool, attempt: str, timeout_seconds: float):
    try:
        store = dist.TCPStore(
            host,
            port,
            is_master=is_master,
            timeout=timedelta(seconds=timeout_seconds),
            multi_tenant=is_master,
        )
    except dist.DistError as error:
        cause, _, _ = str(error).partition("\n")
        if is_master:
            raise ConnectionError(
                f"cannot listen on port {port}, which another run may have: name another ({cause})"
            ) from None
        raise ConnectionError(
            f"rank 0 cannot be reached at {host}:{port} within {timeout_seconds:g} s: if it has"
            f" ended, the output of its node says why; else check the address ({cause})"
        ) from None
    return dist.PrefixStore(f"attempt {attempt}", store)


def set_environment(tokenizers_parallelism: bool | None = None, uses_hub: bool = False) -> None:
    """Set variables for this process and those it starts, before it touches a GPU.

    Unless the user has chosen otherwise, a GPU's memory comes in segments that can grow: fixed ones
    end up in pieces, each too small for a large tensor. None leaves tokenizers as they are.
    """
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # the older name of the same
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    if tokenizers_parallelism is not None:
        os.environ["TOKENIZERS_PARALLELISM"] = str(tokenizers_parallelism).lower()
    if uses_hub and not hub_answers(os.environ.get("HF_ENDPOINT", "https://huggingface.co")):
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # what is cached works, the rest fails at once


def choose_device(launch: Launch, use_cpu: bool) -> torch.device:
    """One GPU a process where there are GPUs, else the CPU; ValueError if they are too few."""
    if use_cpu or not torch.cuda.is_available():
        return torch.device("cpu")
    if launch.local_rank >= torch.cuda.device_count():
        raise ValueError(
            f"process {launch.local_rank} on this node has no GPU: there are"
            f" {torch.cuda.device_count()}; start fewer processes or set distributed.use_cpu"
        )
    device = torch.device("cuda", launch.local_rank)
    torch.cuda.set_device(device)
    return device


def choose_backend(device: torch.device, backend: str) -> str:
    """ "auto" is NCCL between GPUs and gloo between CPUs. Raises ValueError if it cannot work."""
    if backend == "nccl" and device.type == "cpu":
        raise ValueError(
            "distributed.backend=nccl needs GPUs, and torch finds none: set it to auto or gloo"
        )
    if backend == "auto":
        return "nccl" if device.type == "cuda" else "gloo"
    return backend


def open_process_group(
    launch: Launch, backend: str, store: dist.Store, timeout_seconds: float
) -> None:
    """Meet the other ranks. Any communication that takes longer than the timeout then raises."""
    dist.init_process_group(
        backend,
        store=dist.PrefixStore("process group", store),
        rank=launch.rank,
        world_size=launch.world_size,
        timeout=timedelta(seconds=timeout_seconds),
    )
