"""What a run finds, moves and deletes in checkpoint.save_dir, and what it leaves alone."""

from pathlib import Path

import pytest

from picotron_min.runtime.folders import (
    clean_up,
    delete_older,
    find_start,
    lock_folder,
    set_aside,
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


def test_what_killed_saves_have_left_is_deleted_and_nothing_else(tmp_path):
    leftovers = [".hf.deleted", ".hf.partial", ".step-00000001.deleted", ".step-00000004.partial"]
    others = [".git", ".photos.deleted", ".step-4.partial", ".step-final.deleted", "step-00000003"]
    for name in leftovers + others:
        (tmp_path / name).mkdir()
        (tmp_path / name / "content").touch()
    (tmp_path / ".step-00000005.partial").write_text("a file")
    assert names_of(clean_up(tmp_path)) == leftovers
    assert names(tmp_path) == sorted([*others, ".step-00000005.partial"])
    assert clean_up(tmp_path) == []


def names_of(paths: list[Path]) -> list[str]:
    return sorted(path.name for path in paths)


def test_an_earlier_run_is_set_aside_and_nothing_is_lost(tmp_path):
    assert set_aside(tmp_path / "not yet") is None
    (tmp_path / "notes.txt").write_text("the user's own")
    assert set_aside(tmp_path) is None
    for run in (1, 2):
        make(tmp_path / "step-00000010", f"run {run}")
        make(tmp_path / "hf")
        (tmp_path / "metrics.jsonl").write_text(f"metrics {run}")
        (tmp_path / "run.jsonl").write_text(f"starts {run}")
        assert set_aside(tmp_path) == tmp_path / f"earlier-{run}"
    for run in (1, 2):
        aside = tmp_path / f"earlier-{run}"
        assert names(aside) == ["hf", "metrics.jsonl", "run.jsonl", "step-00000010"]
        assert (aside / "metrics.jsonl").read_text() == f"metrics {run}"
        assert (aside / "step-00000010" / "state.json").read_text() == f"run {run}"
    assert names(tmp_path) == ["earlier-1", "earlier-2", "notes.txt"]


def test_folders_of_the_user_are_not_set_aside(tmp_path):
    for name in ("step-by-step-guide", "step-final", "step-1", "step-000000010"):
        make(tmp_path / name)
    for name in ("hf", "step-00000007"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "photo.jpg").touch()
    before = names(tmp_path)
    assert set_aside(tmp_path) is None
    assert set_aside(tmp_path, newer_than=tmp_path / "step-00000001") is None
    make(tmp_path / "step-00000001")
    assert set_aside(tmp_path, newer_than=tmp_path / "step-00000001") is None
    assert names(set_aside(tmp_path)) == ["step-00000001"]
    assert names(tmp_path) == ["earlier-1", *before]


def test_resuming_from_an_older_checkpoint_sets_the_newer_ones_aside(tmp_path):
    for step in (1, 2, 3):
        make(tmp_path / f"step-{step:08d}")
    (tmp_path / "metrics.jsonl").touch()
    make(tmp_path / "hf")
    assert set_aside(tmp_path, newer_than=tmp_path / "step-00000003") is None
    aside = set_aside(tmp_path, newer_than=tmp_path / "step-00000001")
    assert names(aside) == ["step-00000002", "step-00000003"]
    assert names(tmp_path) == ["earlier-1", "hf", "metrics.jsonl", "step-00000001"]


def test_a_run_in_the_working_directory_is_set_aside_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("metrics.jsonl").touch()
    assert set_aside(Path(".")) == Path("earlier-1")


def test_a_finished_model_never_replaces_something_else(tmp_path):
    make(tmp_path / "hf")
    lock_folder(tmp_path).release()
    (tmp_path / "hf" / "generation_config.json").unlink()
    with pytest.raises(ValueError, match=r"hf is not of a run, .* rename it, or set checkpoint"):
        lock_folder(tmp_path)


@pytest.mark.parametrize("path", ["step-00000004", "step-00000004/notes"])
def test_a_checkpoint_never_replaces_something_of_the_user(tmp_path, path):
    make(tmp_path / "step-00000002")
    lock_folder(tmp_path).release()
    (tmp_path / path).parent.mkdir(exist_ok=True)
    (tmp_path / path).write_text("notes")
    with pytest.raises(ValueError, match=r"step-00000004 is not of a run, .* rename it"):
        lock_folder(tmp_path)
    assert (tmp_path / path).read_text() == "notes"


def test_a_folder_that_cannot_be_made_is_refused_with_the_remedy(tmp_path):
    with pytest.raises(ValueError, match=r"=.*xxx cannot be written \(File name too long\): name"):
        lock_folder(tmp_path / ("x" * 300))
