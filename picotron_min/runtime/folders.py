"""The contents of checkpoint.save_dir: which folders a run writes there, moves and deletes.

    .lock, .run               held by the run that writes here; its name
    step-00000020             a complete checkpoint
    .step-00000030.partial    one that is being written; .deleted: being deleted
    hf                        the finished model; .hf.partial and .hf.deleted as above
    metrics.jsonl, run.jsonl  see metrics.py
    earlier-1                 an earlier run

save_dir may be the user's working directory, so a run moves and deletes only what has exactly these
names and, if it is a checkpoint or a model, a file that only runs write there.
"""

import itertools
import os
import shutil
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist
from filelock import FileLock, Timeout

from picotron_min.runtime.wording import explained

CHECKPOINT = "step-" + 8 * "[0-9]"  # as a pattern of file names


def lock_folder(save_dir: Path) -> FileLock:
    """Make the folder, and keep other runs out as long as the result and this process live."""
    lock = FileLock(save_dir / ".lock", blocking=False)
    where, remedy = f"checkpoint.save_dir={save_dir}", "mend that, or name another folder"
    with explained(f"{where} cannot be written", remedy, of=OSError):
        save_dir.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire()
        except Timeout:  # two runs would move each other's files away
            remedy = "wait for its end, or name another folder"
            raise ValueError(f"{where} is in use by another run: {remedy}") from None
    own = {*checkpoints(save_dir), *models(save_dir)}
    if others := sorted({*save_dir.glob(CHECKPOINT), *save_dir.glob("hf")} - own):
        raise ValueError(
            f"{others[0]} is not of a run, and a run writes a folder of this name: "
            "rename it, or set checkpoint.save_dir to another folder"
        )
    return lock


def check_shared(save_dir: Path, group: dist.ProcessGroup, patience: float) -> None:
    """OSError on a rank that does not see the folder of rank 0 within `patience` seconds."""
    note, name = save_dir / ".run", [uuid.uuid4().hex]
    if dist.get_rank() == 0:
        note.write_text(name[0])
    dist.broadcast_object_list(name, group=group)  # of rank 0
    deadline = time.monotonic() + patience  # NFS may show a file of another node only later
    while not (note.exists() and note.read_text() == name[0]):
        if time.monotonic() > deadline:
            raise OSError(
                f"checkpoint.save_dir={save_dir} is not the same folder on all nodes: "
                f"rank {dist.get_rank()} does not see what rank 0 has written there. "
                "Name a folder that all nodes share"
            )
        time.sleep(0.5)


def find_start(load_path: str | None, save_dir: Path) -> Path | None:
    """The checkpoint to start from: "latest" is the newest in save_dir, None if there is none."""
    if load_path == "latest":
        return max(checkpoints(save_dir), default=None)
    return Path(load_path) if load_path else None


def checkpoints(save_dir: Path) -> list[Path]:
    return [path.parent for path in save_dir.glob(f"{CHECKPOINT}/state.json")]


def models(save_dir: Path) -> list[Path]:  # at most one
    return [path.parent for path in save_dir.glob("hf/generation_config.json")]


def delete_older(folder: Path, keep: int) -> None:
    """Delete the oldest checkpoints beside this one, so that `keep` are left, this one included."""
    older = [path for path in checkpoints(folder.parent) if path.name < folder.name]
    for path in sorted(older, reverse=True)[keep - 1 :]:
        delete(path)


def make_room(save_dir: Path, start: Path | None) -> None:
    """Delete what killed saves have left, and move an earlier run to the first free `earlier-N`.

    A run that resumes from `start` here moves only the checkpoints after it: otherwise "latest"
    could one day find a step of the abandoned branch.
    """
    names = [f".{name}.{end}" for name in (CHECKPOINT, "hf") for end in ("partial", "deleted")]
    for leftover in [path for name in names for path in save_dir.glob(name) if path.is_dir()]:
        print(f"deleting what an interrupted save has left: {leftover}")
        remove(leftover)
    records = [save_dir / name for name in ("metrics.jsonl", "run.jsonl")]
    earlier = [*checkpoints(save_dir), *models(save_dir), *filter(Path.is_file, records)]
    if start and start.parent.resolve() == save_dir.resolve():  # the checkpoint may be a link
        earlier = [path for path in checkpoints(save_dir) if path.name > start.name]
    if earlier:
        numbered = (save_dir / f"earlier-{number}" for number in itertools.count(1))
        (aside := next(path for path in numbered if not path.exists())).mkdir()
        for path in earlier:
            path.rename(aside / path.name)
        print(f"{save_dir} held an earlier run: it is now in {aside}")


def complete_or_absent(
    folder: Path, write: Callable[[Path], None], group: dist.ProcessGroup | None = None
) -> None:
    """Let all ranks write a folder under another name, and rename it once it is on the disk."""
    partial = folder.with_name(f".{folder.name}.partial")
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)  # left by a save that was killed
        partial.mkdir(parents=True)
    dist.barrier(group)  # the folder exists
    write(partial)
    dist.barrier(group)  # all parts are written
    if dist.get_rank() == 0:
        for path in [*partial.iterdir(), partial]:
            _sync(path)  # before the rename
        if os.path.lexists(folder):
            delete(folder)  # a rename replaces no folder that has content
        os.replace(partial, folder)  # atomic: there is no moment with half a checkpoint
        _sync(folder.parent)  # the name, too, is on the disk
    dist.barrier(group)  # all ranks may rely on it


def delete(folder: Path) -> None:
    """Rename, then delete: a kill between leaves a folder that a later run deletes."""
    remove(folder.replace(folder.with_name(f".{folder.name}.deleted")))


def remove(path: Path) -> None:
    """Delete a folder, or a link but not what it leads to; a warning if that is not possible."""
    path.unlink() if path.is_symlink() else shutil.rmtree(path, ignore_errors=True)
    if path.exists():  # no reason to end a run whose newer checkpoint is complete
        print(f"warning: cannot delete {path}")


def _sync(path: Path) -> None:
    """Wait for the disk: else a rename could survive a power cut, and the files not."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
