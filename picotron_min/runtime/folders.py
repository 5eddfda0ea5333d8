"""What lies in save_dir, and how folders come and go there.

    .lock                     held by the run that writes here
    .run                      its name, by which all nodes know that this is one folder
    .step-00000030.partial    being written
    step-00000020             complete: it got its name when it was on the disk
    hf                        the finished model, the same way
    earlier-1                 a run that was here before

A folder is written aside and renamed, and renamed before it is deleted. So whatever moment a kill
comes at, what has a checkpoint's name is a complete one.
"""

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist
from filelock import FileLock, Timeout


def lock_folder(save_dir: Path) -> FileLock:
    """Make the folder, and keep other runs out of it as long as the result and this process live.

    ValueError if another run is in it: two would move each other's files away.
    """
    save_dir.mkdir(parents=True, exist_ok=True)
    lock = FileLock(save_dir / ".lock", blocking=False)
    try:
        lock.acquire()
    except Timeout:
        raise ValueError(
            f"checkpoint.save_dir={save_dir} is in use by another run: wait for its end, or name"
            " another folder"
        ) from None
    return lock


def check_shared(save_dir: Path, run: str, group: dist.ProcessGroup, patience: float) -> None:
    """OSError, on all ranks, unless they see the same folder. `run` is their name for this run.

    For up to `patience` seconds NFS may go on saying that a file is not there.
    """
    note = save_dir / ".run"
    if dist.get_rank() == 0:
        note.write_text(run)
    dist.barrier(group)
    deadline = time.monotonic() + patience
    while not (sees := note.exists() and note.read_text() == run) and time.monotonic() < deadline:
        time.sleep(0.5)
    all_see = [None] * dist.get_world_size()
    dist.all_gather_object(all_see, sees, group)
    if False in all_see:
        raise OSError(
            f"checkpoint.save_dir={save_dir} is not the same folder on all nodes: rank"
            f" {all_see.index(False)} does not see there what rank 0 has written. Name one that"
            " all see"
        )


def find_start(load_path: str | None, save_dir: Path) -> Path | None:
    """The checkpoint to start from: "latest" is the newest in save_dir, None if there is none."""
    if load_path == "latest":
        return max(checkpoints(save_dir), default=None)
    return Path(load_path) if load_path else None


def checkpoints(save_dir: Path) -> list[Path]:
    return list(save_dir.glob("step-" + "[0-9]" * 8))


def complete_or_absent(
    folder: Path, write: Callable[[Path], None], group: dist.ProcessGroup | None = None
) -> None:
    """Let all ranks write a folder aside, and give it its name once it is on the disk."""
    partial = folder.with_name(f".{folder.name}.partial")
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)  # of a save that was killed
        partial.mkdir(parents=True)
    dist.barrier(group)
    write(partial)
    dist.barrier(group)
    if dist.get_rank() == 0:
        for path in [*partial.iterdir(), partial]:
            _sync(path)
        if folder.exists():
            _delete(folder)
        os.replace(partial, folder)
        _sync(folder.parent)
    dist.barrier(group)


def _delete(folder: Path) -> None:
    """First the name, then the content: what is called a checkpoint is one to the last moment."""
    leftover = folder.with_name(f".{folder.name}.deleted")
    os.replace(folder, leftover)
    shutil.rmtree(leftover)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def forget_older(folder: Path, keep: int) -> None:
    """Delete the oldest checkpoints beside one, so that with it there are `keep`."""
    older = [path for path in checkpoints(folder.parent) if path.name < folder.name]
    for path in sorted(older, reverse=True)[keep - 1 :]:
        _delete(path)


def clean_up(save_dir: Path) -> list[Path]:
    """Delete what killed saves have left; returns what that was."""
    leftovers = [p for end in ("partial", "deleted") for p in save_dir.glob(f".*.{end}")]
    for path in leftovers:
        shutil.rmtree(path)
    return leftovers


def set_aside(save_dir: Path, newer_than: Path | None = None) -> Path | None:
    """Move an earlier run out of the way of a new one that writes to the same folder.

    A run that goes on from a checkpoint there, `newer_than`, moves only those after it: else
    "latest" could one day find the steps of a branch that was left.
    Returns where it went, `save_dir/earlier-1` or the next free number, or None if there was none.
    Only what a run writes is moved: save_dir may be the user's working directory.
    """
    patterns = ("step-*", "hf", "metrics.jsonl")
    earlier = [path for pattern in patterns for path in save_dir.glob(pattern)]
    if newer_than:
        earlier = [path for path in save_dir.glob("step-*") if path.name > newer_than.name]
    if not earlier:
        return None
    number = 1
    while (aside := save_dir / f"earlier-{number}").exists():
        number += 1
    aside.mkdir()
    for path in earlier:
        path.rename(aside / path.name)
    return aside
