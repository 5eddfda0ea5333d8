"""What a run finds, moves and deletes in checkpoint.save_dir, and what it leaves alone."""

from pathlib import Path

import pytest

from picotron_min.runtime.folders import (
    complete_or_absent,
    delete_older,
    find_start,
    lock_folder,
    make_room,
)
from tests.core.test_checkpoint import names


def make(folder: Path, content: str = "") -> Path:
    """What looks like the folder of a checkpoint or of a finished model."""
    folder.mkdir()
    mark = "generation_config.json" if folder.name == "hf" else "state.json"
    (folder / mark).write_text(content)
    return folder


def test_latest_is_the_newest_complete_checkpoint(tmp_path):
    assert find_start(None, tmp_path) is None
    assert find_start("latest", tmp_path / "not yet") is None
    assert find_start("latest", tmp_path) is None
    for name in ("step-00000009", "step-00000010", ".step-00000020.partial", "step-final"):
        make(tmp_path / name)
    (tmp_path / "step-00000030").write_text("a file")
    (tmp_path / "step-00000040").mkdir()  # the user's own
    make(tmp_path / "step-٠٠٠٠٠٠٩٩")  # digits, but not those of a run
    assert find_start("latest", tmp_path) == tmp_path / "step-00000010"
    chosen = tmp_path / "step-00000009"
    assert find_start(str(chosen), tmp_path) == chosen
    assert find_start(None, tmp_path) is None


def test_the_oldest_checkpoints_are_deleted_and_no_folder_of_the_user(tmp_path):
    for step in (2, 3, 4):
        make(tmp_path / f"step-{step:08d}")
    (tmp_path / "step-00000001").mkdir()
    delete_older(tmp_path / "step-00000004", keep=2)
    assert names(tmp_path) == ["step-00000001", "step-00000003", "step-00000004"]


def test_what_killed_saves_have_left_is_deleted_and_nothing_else(tmp_path, capsys):
    leftovers = [".hf.deleted", ".hf.partial", ".step-00000001.deleted", ".step-00000004.partial"]
    others = [".git", ".photos.deleted", ".step-4.partial", ".step-final.deleted", "step-00000003"]
    for name in leftovers + others:
        (tmp_path / name).mkdir()
        (tmp_path / name / "content").touch()
    (tmp_path / ".step-00000005.partial").write_text("a file")
    make_room(tmp_path, None)
    assert names(tmp_path) == sorted([*others, ".step-00000005.partial"])
    printed = capsys.readouterr().out
    assert all(str(tmp_path / name) in printed for name in leftovers)
    make_room(tmp_path, None)
    assert capsys.readouterr().out == ""


def test_an_earlier_run_is_set_aside_and_nothing_is_lost(tmp_path, capsys):
    own = ("step-by-step-guide", "step-final", "step-1", "step-000000010", "notes", "step-00000007")
    for name in own:
        (tmp_path / name).mkdir()
        (tmp_path / name / "photo.jpg").touch()
    make_room(tmp_path, None)
    assert names(tmp_path) == sorted(own) and capsys.readouterr().out == ""
    for run in (1, 2):
        make(tmp_path / "step-00000010", f"run {run}")
        make(tmp_path / "hf")
        (tmp_path / "metrics.jsonl").write_text(f"metrics {run}")
        (tmp_path / "run.jsonl").write_text(f"starts {run}")
        # Also by a run that starts from a checkpoint elsewhere.
        make_room(tmp_path, None if run == 1 else tmp_path / "notes" / "step-00000010")
        assert f"it is now in {tmp_path / f'earlier-{run}'}\n" in capsys.readouterr().out
    for run in (1, 2):
        aside = tmp_path / f"earlier-{run}"
        assert names(aside) == ["hf", "metrics.jsonl", "run.jsonl", "step-00000010"]
        assert (aside / "metrics.jsonl").read_text() == f"metrics {run}"
        assert (aside / "step-00000010" / "state.json").read_text() == f"run {run}"
    assert names(tmp_path) == sorted(["earlier-1", "earlier-2", *own])


def test_resuming_from_an_older_checkpoint_sets_the_newer_ones_aside(tmp_path, monkeypatch):
    for step in (1, 2, 3):
        make(tmp_path / f"step-{step:08d}")
    (tmp_path / "metrics.jsonl").touch()
    make(tmp_path / "hf")
    before = names(tmp_path)
    make_room(tmp_path, tmp_path / "step-00000003")
    assert names(tmp_path) == before
    monkeypatch.chdir(tmp_path)
    make_room(Path("."), tmp_path / "step-00000001")
    assert names(tmp_path / "earlier-1") == ["step-00000002", "step-00000003"]
    assert names(tmp_path) == ["earlier-1", "hf", "metrics.jsonl", "step-00000001"]


@pytest.mark.parametrize("path", ["step-00000004", "step-00000004/notes", "hf/model"])
def test_a_run_never_replaces_something_of_the_user(tmp_path, path):
    make(tmp_path / "step-00000002")
    lock_folder(tmp_path).release()
    (tmp_path / path).parent.mkdir(exist_ok=True)
    (tmp_path / path).write_text("notes")
    with pytest.raises(ValueError, match=r"(hf|step-00000004) is not of a run, .* rename it, or"):
        lock_folder(tmp_path)
    assert (tmp_path / path).read_text() == "notes"


def test_a_folder_that_cannot_be_made_is_refused_with_the_remedy(tmp_path):
    (tmp_path / "file").touch()
    for name, why in {"x" * 300: "File name too long", "file": "File exists"}.items():
        with pytest.raises(ValueError, match=rf"=.*{name} cannot be .*{why}.* another folder"):
            lock_folder(tmp_path / name)
    lock = lock_folder(tmp_path / "run")
    with pytest.raises(ValueError, match="run is in use by another run: wait for its end, or name"):
        lock_folder(tmp_path / "run")
    lock.release()


def link(path: Path, elsewhere: Path) -> None:
    """Move a folder elsewhere, and leave a link to it, as to a larger disk."""
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def test_a_link_is_deleted_but_not_what_it_leads_to(tmp_path):
    run, disk = tmp_path / "run", tmp_path / "disk"
    run.mkdir()
    disk.mkdir()
    for step in (1, 2):
        make(run / f"step-{step:08d}")
    link(run / "step-00000001", disk / "old")
    delete_older(run / "step-00000002", keep=1)
    # As an interrupted deletion leaves it.
    (run / ".step-00000001.deleted").symlink_to(disk / "old")
    make_room(run, run / "step-00000002")
    assert names(run) == ["step-00000002"] and names(disk / "old") == ["state.json"]
    link(run / "step-00000002", disk / "new")  # a run that resumes through one is not set aside
    make_room(run, find_start("latest", run))
    assert names(run) == ["step-00000002"]


def test_what_cannot_be_deleted_is_a_warning(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("shutil.rmtree", lambda path, ignore_errors: None)
    for step in (1, 2):
        make(tmp_path / f"step-{step:08d}")
    delete_older(tmp_path / "step-00000002", keep=1)
    make_room(tmp_path, tmp_path / "step-00000002")
    left = tmp_path / ".step-00000001.deleted"
    assert capsys.readouterr().out.count(f"warning: cannot delete {left}") == 2


def replace_a_link(run: Path) -> None:
    def write(partial: Path) -> None:
        make(partial / "hf").rename(partial / "new")

    complete_or_absent(run / "hf", write)


@pytest.mark.parametrize("is_dangling", [False, True])
def test_a_model_replaces_a_link_and_not_what_it_leads_to(pool, tmp_path, is_dangling):
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    run.mkdir()
    if is_dangling:
        (run / "hf").symlink_to(elsewhere)
    else:
        link(make(run / "hf"), elsewhere)
    pool.run(1, replace_a_link, run)
    assert names(run) == ["hf"] and names(run / "hf") == ["new"]
    assert is_dangling or names(elsewhere) == ["generation_config.json"]
