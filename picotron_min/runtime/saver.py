"""Write a run's checkpoints, one at a time, in the background if asked."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from picotron_min.checkpoint import complete_or_absent, save
from picotron_min.runtime.folders import delete_older
from picotron_min.runtime.json_file import write_json


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
        self.in_background, self.copies = in_background, {}
        self.thread = ThreadPoolExecutor(1)
        self.writing: Future | None = None

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
