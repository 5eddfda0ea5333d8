"""The contents of checkpoint.save_dir: which folders a run writes there, moves and deletes.

    .lock                     held by the run that writes here
    .run                      that run's name: shows whether all nodes see the same folder
    .step-00000030.partial    being written
    .step-00000010.deleted    being deleted
    step-00000020             a complete checkpoint
    hf                        the finished model; .hf.partial and .hf.deleted as above
    metrics.jsonl             see metrics.py
    earlier-1                 an earlier run

save_dir may be the user's working directory, so only what has exactly these names is touched.
"""

import re
import shutil
import time
from pathlib import Path

import torch.distributed as dist
from filelock import FileLock, Timeout

from picotron_min.checkpoint import delete

CHECKPOINT = re.compile(r"step-\d{8}", re.ASCII)
LEFTOVER = re.compile(r"\.(step-\d{8}|hf)\.(partial|deleted)", re.ASCII)


def lock_folder(save_dir: Path) -> FileLock:
    """Make the folder, and keep other runs out of it as long as the result and this process live.

    ValueError if another run is in it, since each would move the other's files away, or if the
    finished model would replace something that is not a model.
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
    model = save_dir / "hf"
    if model.exists() and not is_model(model):
        raise ValueError(
            f"{model} is not a model, and the finished model will be written there: rename it, or"
            " set checkpoint.save_dir to another folder"
        )
    return lock


def is_model(folder: Path) -> bool:
    """Whether it is a model in Hugging Face's form, as every finished run leaves one."""
    return (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))


def check_shared(save_dir: Path, run: str, group: dist.ProcessGroup, patience: float) -> None:
    """OSError, on all ranks, unless they see the same folder. `run` is this run's unique name.

    For up to `patience` seconds NFS may not show a file that another node has written.
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
            f" {all_see.index(False)} does not see what rank 0 has written there. Name a folder"
            " that all nodes share"
        )


def find_start(load_path: str | None, save_dir: Path) -> Path | None:
    """The checkpoint to start from: "latest" is the newest in save_dir, None if there is none."""
    if load_path == "latest":
        return max(checkpoints(save_dir), default=None)
    return Path(load_path) if load_path else None


def checkpoints(save_dir: Path) -> list[Path]:
    folders = (path for path in save_dir.glob("step-*") if path.is_dir())
    return [path for path in folders if CHECKPOINT.fullmatch(path.name)]


def delete_older(folder: Path, keep: int) -> None:
    """Delete the oldest checkpoints beside this one, so that `keep` are left, this one included."""
    older = [path for path in checkpoints(folder.parent) if path.name < folder.name]
    for path in sorted(older, reverse=True)[keep - 1 :]:
        delete(path)


def clean_up(save_dir: Path) -> list[Path]:
    """Delete what killed saves have left, and return what that was."""
    folders = (path for path in save_dir.glob(".*") if path.is_dir())
    leftovers = [path for path in folders if LEFTOVER.fullmatch(path.name)]
    for path in leftovers:
        shutil.rmtree(path)
    return leftovers


def set_aside(save_dir: Path, newer_than: Path | None = None) -> Path | None:
    """Move an earlier run out of the way of a new one that writes to the same folder.

    A run resumed from a checkpoint there, `newer_than`, moves only the checkpoints after it:
    otherwise "latest" could one day find a step of the abandoned branch.
    Returns where they are now, `save_dir/earlier-1` or the next free number, or None if there was
    nothing to move.
    """
    if newer_than:
        earlier = [path for path in checkpoints(save_dir) if path.name > newer_than.name]
    else:
        earlier = checkpoints(save_dir)
        earlier += [model for model in [save_dir / "hf"] if is_model(model)]
        earlier += [metrics for metrics in [save_dir / "metrics.jsonl"] if metrics.is_file()]
    if not earlier:
        return None
    number = 1
    while (aside := save_dir / f"earlier-{number}").exists():
        number += 1
    aside.mkdir()
    for path in earlier:
        path.rename(aside / path.name)
    return aside
