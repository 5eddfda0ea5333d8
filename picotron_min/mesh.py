"""From processes to named axes: who am I, where do I compute, and whom do I talk to.

The only file that touches the environment: RANK, WORLD_SIZE and the like. Ranks are numbered row by
row over the grid (pp, dp, cp, tp), so that the ranks of a tensor-parallel group, which talk most,
are neighbours and share a node. Gradients are summed over several axes alike, hence the joint ones.

In production `torch.distributed.device_mesh.init_device_mesh` makes the same groups in one call;
the joint axes are its `_flatten`, which is private.
"""

import os
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from picotron_min.collectives import Axis


class Launch(NamedTuple):
    """How this process was started."""

    rank: int
    local_rank: int  # on this node
    world_size: int
    open_store: Callable[[float], dist.Store]  # given a timeout in seconds; where ranks meet


class Coordinates(NamedTuple):
    """Where a rank stands in the grid."""

    pp: int
    dp: int
    cp: int
    tp: int


class Axes(NamedTuple):
    """The row of ranks that this rank is in, along each axis."""

    pp: Axis
    dp: Axis
    cp: Axis
    tp: Axis
    dp_cp: Axis  # gradients are summed over it
    dp_cp_tp: Axis  # and over this one, where tp ranks see different parts of the sequence
    dp_cp_ends: Axis  # and over this one, where the first and the last stage have a tied embedding


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


def set_environment(tokenizers_parallelism: bool | None = None) -> None:
    """Set variables for this process and those it starts, before it touches a GPU.

    Unless the user has chosen otherwise, a GPU's memory comes in segments that can grow: fixed ones
    end up in pieces, each too small for a large tensor. None leaves tokenizers as they are.
    """
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # the older name of the same
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    if tokenizers_parallelism is not None:
        os.environ["TOKENIZERS_PARALLELISM"] = str(tokenizers_parallelism).lower()


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


def coordinates(rank: int, *, pp: int, dp: int, cp: int, tp: int) -> Coordinates:
    """A rank's place in the grid, known before there is any process group."""
    return Coordinates(
        rank // (dp * cp * tp) % pp, rank // (cp * tp) % dp, rank // tp % cp, rank % tp
    )


def build_axes(
    device: torch.device,
    *,
    pp: int = 1,
    dp: int = 1,
    cp: int = 1,
    tp: int = 1,
    timeout_seconds=60.0,
) -> Axes:
    """Split the world into the rows of each axis; every rank must call it, with the same sizes."""
    assert pp * dp * cp * tp == dist.get_world_size(), "the axes must multiply to the world size"
    grid = torch.arange(dist.get_world_size()).view(pp, dp, cp, tp)

    meshes: dict[str, DeviceMesh] = {}

    def axis(name: str, rows: torch.Tensor | list[torch.Tensor]) -> Axis:
        ranks = [row.tolist() for row in rows]
        if str(ranks) not in meshes:  # dp and dp_cp are the same rows when cp is 1
            group, _ = dist.new_subgroups_by_enumeration(
                ranks, timeout=timedelta(seconds=timeout_seconds)
            )
            meshes[str(ranks)] = DeviceMesh.from_group(group, device.type)
        return Axis(name, meshes[str(ranks)])

    # Every rank must be in some row: the stages in between have rows that nobody uses.
    ends = grid if pp == 1 else grid[[0, -1]]
    first_and_last = ends.movedim(3, 0).reshape(tp, -1)
    between = grid[1:-1].movedim(3, 1).reshape(-1, dp * cp)

    return Axes(
        pp=axis("pp", grid.movedim(0, -1).reshape(-1, pp)),
        dp=axis("dp", grid.movedim(1, -1).reshape(-1, dp)),
        cp=axis("cp", grid.movedim(2, -1).reshape(-1, cp)),
        tp=axis("tp", grid.reshape(-1, tp)),
        dp_cp=axis("dp_cp", grid.permute(0, 3, 1, 2).reshape(-1, dp * cp)),
        dp_cp_tp=axis("dp_cp_tp", grid.reshape(-1, dp * cp * tp)),
        dp_cp_ends=axis("dp_cp_ends", [*first_and_last, *between]),
    )
