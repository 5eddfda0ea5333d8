"""Write a run's checkpoints, one at a time, in the background if asked."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from picotron_min.checkpoint import complete_or_absent, save
from picotron_min.runtime.folders import delete_older
from picotron_min.runtime.json_file import write_json


class Saver:
    """All ranks call every method. A thread writes, even when the caller waits for it."""

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, in_background=False, keep: int = 0
    ) -> None:
        """`group`: of all ranks; its timeout is long, and nothing else uses it during a save."""
        self.group, self.device = group, device
        self.in_background, self.keep = in_background, keep  # the newest so many; 0: all
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
        metadata: dict,
    ) -> None:
        """Write the checkpoint of a step; in the background, a copy of it.

        The thread calls `parts_of_whole`: to make DTensors takes as long as to copy tensors.
        """
        self.wait()
        if self.in_background:
            tensors = self._copy(tensors)
        folder, metadata = save_dir / f"step-{step:08d}", {"step": step, **metadata}
        self.writing = self.thread.submit(self._write, folder, tensors, parts_of_whole, metadata)
        if not self.in_background:
            self.wait()

    def _copy(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """To the CPU, into the memory of the last copies: allocating again would take longer."""
        for name, tensor in tensors.items():
            if name not in self.copies:
                like = {"device": "cpu", "pin_memory": tensor.is_cuda}
                self.copies[name] = torch.empty_like(tensor, **like)
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

        complete_or_absent(folder, write, self.group)
        if dist.get_rank() == 0 and self.keep:
            delete_older(folder, self.keep)
        self.latest = folder

    def check(self) -> None:
        """Raise what the thread has raised, if anything."""
        if self.writing and self.writing.done():
            self.wait()

    def wait(self) -> None:
        """Return when everything is written; raises what the thread has raised."""
        writing, self.writing = self.writing, None
        if writing:
            writing.result()
