"""Saver: writes a run's checkpoints, one at a time, in the background if asked; and its model.

A `run` is always a train.Run.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from picotron_min.checkpoint import complete_or_absent, save, training_tensors
from picotron_min.model_config import ModelConfig
from picotron_min.runtime.folders import delete_older
from picotron_min.runtime.hugging_face import export_hf
from picotron_min.runtime.json_file import write_json

if TYPE_CHECKING:
    from picotron_min.runtime.config import Config
    from picotron_min.runtime.inputs import Inputs
    from picotron_min.runtime.reporter import Reporter


class Saver:
    """All ranks call every method. A thread writes, even when the caller waits for it."""

    def __init__(
        self,
        group: dist.ProcessGroup,  # of all ranks, with a long timeout; a save has it alone
        device: torch.device,
        in_background: bool = False,
        keep: int = 0,  # the newest so many; 0: all
        latest: Path | None = None,  # the newest complete checkpoint
    ) -> None:
        self.group, self.device, self.keep, self.latest = group, device, keep, latest
        self.in_background, self.copies, self.is_due = in_background, {}, False
        self.thread = ThreadPoolExecutor(1)
        self.writing: Future | None = None

    def after(self, step: int, run, inputs: "Inputs", reporter: "Reporter", is_last: bool) -> None:
        """Save if that is due after so many steps, or if this step is the last.

        What a skipped step leaves has learned nothing, or may have diverged: to save it could cost
        a good checkpoint, by `keep`. The next good step saves instead.
        """
        frequency, skipped = inputs.config.checkpoint.save_frequency, run.skipped
        self.is_due = self.is_due or is_last or inputs.is_due(step, frequency)
        if self.is_due and skipped.has_learned and (is_last or not skipped.in_a_row):
            began = time.perf_counter()
            self.save_run(run, inputs.config, inputs.model_config, step)
            reporter.saved(step, time.perf_counter() - began)
            self.is_due = False
        self.wait(until_written=is_last)

    def save_run(self, run, config: "Config", model_config: ModelConfig, step: int) -> None:
        from picotron_min.runtime.metadata import metadata_of  # needs pydantic

        counts = {"skipped_steps": run.skipped.total, "tokens_seen": run.batches.tokens_seen(step)}
        metadata = metadata_of(config, model_config, step=step, **counts)
        tensors = training_tensors(run.model.parameters, run.model.buffers, run.optimizer)
        self.save(Path(config.checkpoint.save_dir), tensors, run.model.parts_of_whole, metadata)

    def save(self, save_dir: Path, tensors: dict, parts_of_whole: Callable, metadata: dict) -> None:
        """Write the checkpoint of a step; in the background, a copy of it.

        The thread calls `parts_of_whole`: to make DTensors takes as long as to copy tensors.
        """
        self.wait()
        if self.in_background:
            tensors = self._copy(tensors)
        folder = save_dir / f"step-{metadata['step']:08d}"
        self.writing = self.thread.submit(self._write, folder, tensors, parts_of_whole, metadata)
        if not self.in_background:
            self.wait()

    def _copy(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """To the CPU, into the memory of the last copies: allocating again would take longer."""
        for name, tensor in tensors.items():
            if name not in self.copies:
                cpu = {"device": "cpu", "pin_memory": tensor.is_cuda}
                self.copies[name] = torch.empty_like(tensor, **cpu)
            self.copies[name].copy_(tensor)
        return self.copies

    def _write(self, folder: Path, tensors: dict, parts_of_whole: Callable, metadata: dict) -> None:
        if self.device.type == "cuda":  # a new thread starts with device 0, on every rank
            torch.cuda.set_device(self.device)
            current = torch.cuda.current_device()
            assert current == self.device.index, f"writes from GPU {current}, not {self.device}"

        def write(partial: Path) -> None:
            save(partial, parts_of_whole(tensors), self.group)
            if dist.get_rank() == 0:
                files = {path.name: path.stat().st_size for path in partial.glob("*.safetensors")}
                write_json(partial / "state.json", {"files": files, **metadata})

        try:
            complete_or_absent(folder, write, self.group)
            if dist.get_rank() == 0 and self.keep:
                delete_older(folder, self.keep)
        except OSError as error:  # save_dir may have been deleted, or the disk be full
            raise OSError(f"cannot save {folder}: {error}") from error
        self.latest = folder

    def wait(self, until_written: bool = True) -> None:
        """Raise what the thread has raised, if anything; by default wait for it to end."""
        if self.writing and (until_written or self.writing.done()):
            writing, self.writing = self.writing, None
            writing.result()


def export_run(run, inputs: "Inputs", folder: Path, group: dist.ProcessGroup) -> None:
    """Write the model as a Hugging Face folder, in the dtype it was computed in."""
    model, dtype = run.model, getattr(torch, inputs.config.model.dtype)
    weights = {name: p.data.to(dtype) for name, p in model.parameters.items()} | model.buffers
    parts = model.parts_of_whole(weights)
    export_hf(folder, parts, inputs.model_config, inputs.tokenizer, group)
