"""Saver: writes a run's checkpoints, one at a time, in the background if asked; and its model."""

import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from picotron_min.checkpoint import save, training_tensors
from picotron_min.runtime.folders import complete_or_absent, delete_older
from picotron_min.runtime.json_file import write_json

if TYPE_CHECKING:
    from picotron_min.runtime.inputs import Inputs
    from picotron_min.runtime.reporter import Reporter


class Saver:
    """All ranks call every method. A thread writes, even when the caller waits for it.

    `run` is a train.Run; `group`, of all ranks and with a long timeout, is used by nothing else.
    """

    def __init__(self, run, inputs: "Inputs", group: dist.ProcessGroup) -> None:
        self.run, self.inputs, self.group, self.device = run, inputs, group, inputs.device
        self.settings, self.is_due, self.copies = inputs.config.checkpoint, False, {}
        self.folder = Path(self.settings.save_dir)
        self.thread = ThreadPoolExecutor(1)
        self.writing: Future | None = None

    def after(self, step: int, reporter: "Reporter", is_last: bool) -> None:
        """Save if a checkpoint is due after `step` steps, or if this step is the last.

        What a skipped step leaves has learned nothing, or may have diverged: to save it could cost
        a good checkpoint, by `keep`. The next good step saves instead.
        """
        skipped = self.run.skipped
        self.is_due |= is_last or self.inputs.is_due(step, self.settings.save_frequency)
        if self.is_due and skipped.has_learned and (is_last or not skipped.in_a_row):
            began = time.perf_counter()
            self.save(step)
            reporter.saved(step, time.perf_counter() - began)
            self.is_due = False
        self.wait(until_written=is_last)

    def save(self, step: int) -> None:
        """Write the checkpoint after `step` steps; in the background, from a copy."""
        self.wait()
        model, inputs = self.run.model, self.inputs
        metadata = {  # without its files: see metadata.py
            "step": step,
            "skipped_steps": self.run.skipped.total,
            "tokens_seen": self.run.batches.tokens_seen(step),
            "model": asdict(inputs.model_config),
            "config": inputs.config.model_dump(by_alias=True),
            "data": inputs.data,
        }
        tensors = training_tensors(model.parameters, model.buffers, self.run.optimizer)
        if self.settings.in_background:
            tensors = self._copy(tensors)
        folder = self.folder / f"step-{step:08d}"
        self.writing = self.thread.submit(self._write, folder, tensors, metadata)
        if not self.settings.in_background:
            self.wait()

    def _copy(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """To the CPU, into the memory of the last copies: allocating again would take longer."""
        for name, tensor in tensors.items():
            if name not in self.copies:
                cpu = {"device": "cpu", "pin_memory": tensor.is_cuda}
                self.copies[name] = torch.empty_like(tensor, **cpu)
            self.copies[name].copy_(tensor, non_blocking=True)
        if any(tensor.is_cuda for tensor in tensors.values()):
            torch.cuda.current_stream().synchronize()  # once, not for each tensor
        return self.copies

    def _write(self, folder: Path, tensors: dict[str, Tensor], metadata: dict) -> None:
        if self.device.type == "cuda":  # a new thread starts with device 0, on every rank
            torch.cuda.set_device(self.device)

        def write(partial: Path) -> None:
            # Declared in this thread: that takes as long as to copy the tensors.
            save(partial, self.run.model.parts_of_whole(tensors), self.group)
            if dist.get_rank() == 0:
                files = {path.name: path.stat().st_size for path in partial.glob("*.safetensors")}
                write_json(partial / "state.json", {"files": files, **metadata})

        complete_or_absent(folder, write, self.group)
        if dist.get_rank() == 0 and self.settings.keep:
            delete_older(folder, self.settings.keep)
        dist.barrier(self.group)  # here, where the wait may be long

    def wait(self, until_written: bool = True) -> None:
        """Raise what the thread has raised, if anything; by default wait for it to end."""
        if self.writing and (until_written or self.writing.done()):
            writing, self.writing = self.writing, None
            writing.result()

    def export(self, folder: Path) -> None:
        """Write the model as a Hugging Face folder, if it has such a form, in the run's dtype."""
        from picotron_min.runtime.architectures import without_form  # needs pydantic
        from picotron_min.runtime.hugging_face import export_hf

        model, inputs = self.run.model, self.inputs
        # Steps whose gradient is not finite change nothing, so they do not notice such weights.
        finite = all(parameter.isfinite().all() for parameter in model.parameters.values())
        finite = torch.tensor(finite, dtype=torch.uint8)
        dist.all_reduce(finite, dist.ReduceOp.MIN, group=self.group)  # of all ranks
        problem, skipped = None if finite else "the weights are not finite", self.run.skipped
        if skipped.in_a_row and not skipped.has_learned:
            problem = "the gradient was not finite in any step, so that nothing was learned"
        if problem:
            raise FloatingPointError(
                f"{problem}: no model is written. "
                "Resume from an earlier checkpoint, or start anew, from other weights"
            )
        if without_form(inputs.model_config):  # the run has said so at its start
            return
        dtype = getattr(torch, inputs.config.model.dtype)
        weights = {name: p.data.to(dtype) for name, p in model.parameters.items()} | model.buffers
        parts = model.parts_of_whole(weights)
        export_hf(folder, parts, inputs.model_config, inputs.tokenizer, self.group)
