"""Checkpoints: what a step changes is saved so that any other layout can load it.

Each rank declares which part of the whole its tensors are, and torch.distributed.checkpoint finds
the overlaps with the parts of the next run, which may cut them differently:

    saved with tp 2     | rank 0: rows 0-3      | rank 1: rows 4-7      |    up_proj [8, E]
    loaded with tp 4    | 0: 0-1    | 1: 2-3    | 2: 4-5    | 3: 6-7    |

A checkpoint (see runtime/saver.py) is a folder of safetensors files, one per rank. Tensors have the
names of the parameters: `optimizer.exp_avg.model.norm.weight` lies beside `model.norm.weight`. What
several ranks hold is written once; with AdamW and float32 a parameter takes 12 bytes. Nothing in it
is pickled: loading someone else's cannot run code.
"""

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from picotron_min.mesh import Axes
from picotron_min.placement import Placement


def training_tensors(
    parameters: Mapping[str, nn.Parameter],
    buffers: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer,
) -> dict[str, Tensor]:
    """All tensors that a step changes: also what the optimizer keeps of each parameter."""
    for group in optimizer.param_groups:
        for parameter in group["params"] if "betas" in group else ():  # AdamW's
            state = optimizer.state[parameter]
            if not state:  # no step yet: make what a checkpoint can be loaded into
                device = parameter.device if group["fused"] else "cpu"
                state["step"] = torch.zeros((), device=device)
                moments = "exp_avg", "exp_avg_sq"
                state.update((moment, torch.zeros_like(parameter)) for moment in moments)
    tensors = {name: parameter.data for name, parameter in parameters.items()} | dict(buffers)
    for name, parameter in parameters.items():
        kept = {key: state for key, state in optimizer.state[parameter].items() if key != "step"}
        tensors |= {f"optimizer.{key}.{name}": state for key, state in kept.items()}
    return tensors


def set_optimizer_steps(optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Restore the number of steps that AdamW has made, which its bias correction needs."""
    for state in optimizer.state.values():
        if "step" in state:  # one for each parameter, all equal; SGD has none
            state["step"].fill_(steps)


def parts_of_whole(
    tensors: dict[str, Tensor], shapes: dict, placements: dict[str, Placement], axes: Axes
) -> dict[str, DTensor]:
    """Declare of each tensor which part of the whole one it is; `shapes` are the whole parameters'.

    The memory is shared: what is loaded into the result is loaded into the tensors.
    """
    # A DTensor moves its part to its mesh's device; a background save passes copies on the CPU.
    device = next(iter(tensors.values())).device.type
    mesh_of, wholes = cache(lambda names: _mesh(axes, names, device)), {}
    for key, tensor in tensors.items():
        name = re.sub(r"^optimizer\.\w+\.", "", key)  # optimizer state is cut as its parameter
        # A cut with an owner needs no mesh: the key is absent on all ranks but that one.
        cuts = [cut for cut in placements[name].owned if cut.owner is None]
        whole = torch.empty(shapes[name], device="meta")
        wholes[key] = DTensor.from_local(
            tensor,
            mesh_of(tuple(cut.axis for cut in cuts) or ("tp",)),  # replicas need some mesh, too
            [Shard(cut.dim) for cut in cuts] or [Replicate()],  # each cuts what the last one left
            run_check=False,  # it would communicate
            shape=whole.shape,  # else inferred, as if all parts had equal sizes
            stride=whole.stride(),
        )
    return wholes


def _mesh(axes: Axes, names: tuple[str, ...], device: str) -> DeviceMesh:
    """One dim for each of the axes, over their process groups."""
    groups = [axes[name].group for name in names]
    ranks = torch.tensor(dist.get_rank())
    # In a grid, steps along an axis are the same from every rank: with [4 5] over tp and [5 7] over
    # dp, rank 5 knows [[4 6] [5 7]].
    for group in groups:
        row = torch.tensor(dist.get_process_group_ranks(group))
        ranks = ranks[..., None] + row - dist.get_rank()
    return DeviceMesh.from_group(groups, device, ranks, mesh_dim_names=names)


def save(folder: Path, tensors: dict, group: dist.ProcessGroup | None = None, **options) -> None:
    """Write this rank's parts, on all ranks together; OSError on all ranks if one cannot."""
    # Without save_distributed, torch would write DTensors into a corrupt file.
    writer = dcp.HuggingFaceStorageWriter(folder, save_distributed=True, **options)
    try:
        dcp.save(tensors, storage_writer=writer, process_group=group)
    except dcp.CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        raise OSError(f"rank {rank} cannot write {folder}: {cause}") from error


def load(folder: Path, tensors: dict, group: dist.ProcessGroup | None = None) -> None:
    """Read a checkpoint into tensors, in place, on all ranks together; OSError if that fails."""
    reader = dcp.HuggingFaceStorageReader(str(folder))  # reads only what overlaps this rank's parts
    try:
        dcp.load(tensors, storage_reader=reader, process_group=group)
    except dcp.CheckpointException as error:
        cause, _ = next(iter(error.failures.values()))  # of the first rank that failed
        raise OSError(f"cannot load {folder}: {cause}") from error
