"""Saving and loading: any layout in, any layout out.

A checkpoint is a folder `step-00000010` of safetensors shards, a file a rank, and `state.json` with
the few facts that are not tensors. Model and optimizer tensors lie side by side under the names of
the parameters, with their full shapes, so that what was saved by one layout can be read by another:

    model.layers.0.mlp.up_proj.weight
    optimizer.exp_avg.model.layers.0.mlp.up_proj.weight

It is written under another name and renamed when it is on the disk: a folder that is called a
checkpoint is a complete one. Nothing is pickled, so a stranger's checkpoint cannot run code.

`torch.distributed.checkpoint` does the work: it writes what several ranks hold alike only once.
"""

import runpy
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from picotron_min.mesh import Axes
from picotron_min.model_config import ModelConfig, RopeScaling
from picotron_min.placement import Placement
from picotron_min.runtime.folders import checkpoints, complete_or_absent, forget_older
from picotron_min.runtime.json_file import read_json, write_json


class Saver:
    """Writes the folders of a run, one at a time; in the background if asked.

    Every method is called by all ranks. The ranks' writers meet in a process group of their own,
    so that what they say does not get between the train steps. It is patient: a model of a terabyte
    takes its time.
    """

    def __init__(self, in_background: bool = False, keep: int = 0) -> None:
        self.in_background, self.keep = in_background, keep
        self.group = dist.new_group(backend="gloo", timeout=timedelta(hours=1))
        self.thread = ThreadPoolExecutor(1)
        self.writing: Future | None = None
        self.latest: Path | None = None  # the newest complete checkpoint
        self.copies: dict[str, Tensor] = {}

    def save(
        self,
        save_dir: Path,
        step: int,
        tensors: dict[str, Tensor],
        parts_of_whole: Callable[[dict[str, Tensor]], dict[str, DTensor]],
        facts: dict,
    ) -> None:
        """Write the checkpoint of a step; in the background, a copy of it.

        `parts_of_whole` is left to the writer: to make DTensors takes as long as to copy tensors.
        """
        self.wait()
        if self.in_background:
            tensors = self._copy(tensors)

        def write(folder: Path) -> None:
            write_tensors(folder, parts_of_whole(tensors), self.group)
            if dist.get_rank() == 0:
                files = {path.name: path.stat().st_size for path in folder.glob("*.safetensors")}
                write_json(folder / "state.json", {"step": step, "files": files, **facts})

        def run() -> None:
            folder = save_dir / f"step-{step:08d}"
            complete_or_absent(folder, write, self.group)
            if dist.get_rank() == 0 and self.keep:
                forget_older(folder, self.keep)
            self.latest = folder

        self.writing = self.thread.submit(run)
        if not self.in_background:
            self.wait()

    def _copy(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """On the CPU, in the memory of the copies before: new memory would take longer."""
        for name, tensor in tensors.items():
            if name not in self.copies:
                self.copies[name] = torch.empty_like(
                    tensor, device="cpu", pin_memory=tensor.is_cuda
                )
            self.copies[name].copy_(tensor)
        return self.copies

    def check(self) -> None:
        """Raise what the writer has raised, if it has."""
        if self.writing and self.writing.done():
            self.wait()

    def wait(self) -> None:
        """Return when everything is written; raises what the writer has raised."""
        writing, self.writing = self.writing, None
        if writing:
            writing.result()


def write_tensors(
    folder: Path, tensors: dict[str, Tensor], group: dist.ProcessGroup | None, **options
) -> None:
    """Write this rank's part of the tensors; OSError if any rank cannot."""
    writer = HuggingFaceStorageWriter(folder, save_distributed=True, **options)
    try:
        dcp.save(tensors, storage_writer=writer, process_group=group)
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        raise OSError(f"rank {rank} cannot write {folder}: {cause}") from error


def load(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Read a checkpoint into the given tensors, in place, on all ranks together.

    OSError if that fails; what `read_state` has passed is whole.
    """
    try:
        dcp.load(tensors, storage_reader=HuggingFaceStorageReader(str(folder)))
    except CheckpointException as error:
        cause, _ = next(iter(error.failures.values()))
        raise OSError(f"cannot load {folder}: {cause}") from error


def open_safetensors(path: Path) -> safe_open:
    """A file of named tensors; OSError if it is none, or not whole."""
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise OSError(f"{path} is damaged, or no safetensors file: {error}") from None


def read_state(folder: Path) -> dict:
    """The facts of a checkpoint; ValueError if it is none, or not whole.

    Without its last part a tensor would look like a smaller one, and without another part like one
    with a gap: torch would load what there is.
    """
    try:
        facts = read_json(folder / "state.json")
        problems = _problems(folder, facts)
    except (ValueError, OSError) as error:
        problems = [str(error)]
    if problems:
        others = [other for other in checkpoints(folder.parent) if other.name < folder.name]
        raise ValueError(
            f"{folder} is no checkpoint, or damaged: {', '.join(problems)}. Name another, to go on"
            f" from in checkpoint.load_path{f': {max(others)} is before it' if others else ''}"
        )
    return facts


def _problems(folder: Path, facts: dict) -> list[str]:
    absent = [key for key, kind in FACTS.items() if not isinstance(_at(facts, key), kind)]
    if absent:
        return [f"state.json lacks {', '.join(absent)} as they were saved"]
    model_of(facts)
    problems = []
    if not 0 <= facts["skipped_steps"] <= facts["step"] < 10**8:
        problems.append("state.json counts {skipped_steps} of {step} steps".format(**facts))
    for name, size in facts["files"].items():
        file = folder / name
        if not file.exists():
            problems.append(f"{name} is missing")
        elif file.stat().st_size != size:
            problems.append(f"{name} has {file.stat().st_size} bytes, not {size}")
        else:
            open_safetensors(file)
    return problems


# What is read of state.json: here, by Training.load and by the export.
FACTS = {
    "step": int,
    "skipped_steps": int,
    "files": dict,
    "data": dict,
    "model": dict,
    "config.training.optimizer": str,
    "config.model.dtype": str,
    "config.dataset.tokenizer": str,
}


def _at(facts: object, dotted: str) -> object:
    for key in dotted.split("."):
        facts = facts.get(key) if isinstance(facts, dict) else None
    return facts


def model_of(facts: dict) -> ModelConfig:
    """The model that a checkpoint is of."""
    try:
        scaling = facts["model"].get("rope_scaling")
        scaling = RopeScaling(**scaling) if scaling else None
        return ModelConfig(**facts["model"] | {"rope_scaling": scaling})
    except TypeError as error:
        raise ValueError(f"state.json's model is none that was saved ({error})") from None


def read_facts(folder: Path, model: ModelConfig, optimizer: str) -> dict:
    """The same; ValueError also if the checkpoint is of another model or optimizer."""
    facts = read_state(folder)
    saved = asdict(model_of(facts)) | {"optimizer": facts["config"]["training"]["optimizer"]}
    wanted = asdict(model) | {"optimizer": optimizer}
    problems = [f"{k}={saved[k]!r}, now {v!r}" for k, v in wanted.items() if saved[k] != v]
    if problems:
        raise ValueError(
            f"the checkpoint {folder} is of another run: it has {'; '.join(problems)}."
            " Set them as they were, or start anew with checkpoint.load_path null"
        )
    return facts


def parts_of_whole(
    tensors: dict[str, Tensor],
    model_config: ModelConfig,
    placements: dict[str, Placement],
    axes: Axes,
) -> dict[str, DTensor]:
    """Say of each parameter's tensor, or its optimizer state's, which part of the full one it is.

    The memory is shared: what is loaded into the result is loaded into the tensors.
    """
    device = next(iter(tensors.values())).device.type
    # A DTensor moves its part to the device of its mesh; copies of a GPU's tensors are on the CPU.
    mesh = DeviceMesh.from_group(axes.tp.group, device)
    whole = {}
    for name, shape in model_config.parameter_shapes().items():
        cuts = placements[name].cuts
        dim = cuts[0].dim if cuts else None
        for key in (name, f"optimizer.exp_avg.{name}", f"optimizer.exp_avg_sq.{name}"):
            if key not in tensors:
                continue
            whole[key] = DTensor.from_local(
                tensors[key],
                mesh,
                [Replicate() if dim is None else Shard(dim)],
                run_check=False,
                shape=torch.Size(shape),
                stride=torch.empty(shape, device="meta").stride(),
            )
    return whole


def training_tensors(
    parameters: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer
) -> dict[str, Tensor]:
    """Everything that a step changes: the parameters, and AdamW's two moments of each.

    The moments are made, as zeros, if the optimizer has not stepped yet, so that there is something
    to load into.
    """
    tensors = {name: parameter.data for name, parameter in parameters.items()}
    if isinstance(optimizer, torch.optim.AdamW):
        for name, parameter in parameters.items():
            state = optimizer.state[parameter]
            if not state:
                device = parameter.device if optimizer.defaults["fused"] else "cpu"
                state["step"] = torch.zeros((), dtype=torch.float32, device=device)
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
            tensors[f"optimizer.exp_avg.{name}"] = state["exp_avg"]
            tensors[f"optimizer.exp_avg_sq.{name}"] = state["exp_avg_sq"]
    return tensors


def set_optimizer_steps(optimizer: torch.optim.Optimizer, steps: int) -> None:
    """AdamW's bias correction needs to know how many steps it has made; it counts per parameter."""
    for state in optimizer.state.values():
        if "step" in state:
            state["step"].fill_(steps)


if __name__ == "__main__":
    runpy.run_module("picotron_min.runtime.hugging_face", run_name="__main__")
