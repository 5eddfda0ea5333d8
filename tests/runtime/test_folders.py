"""What a run finds, moves and deletes in checkpoint.save_dir, and what it leaves alone."""

from pathlib import Path

import pytest

from picotron_min.runtime.folders import (
    delete_older,
    find_start,
    lock_folder,
    make_room,
)
from tests.core.test_checkpoint import names


def make(folder: Path, content: str = "") -> Path:
    """What looks like the folder of a checkpoint or of a finished model."""
    folder.mkdir(parents=True)
    mark = "generation_config.json" if folder.name == "hf" else "state.json"
    (folder / mark).write_text(content)
    return folder


def test_latest_is_the_newest_complete_checkpoint(tmp_path):
    assert find_start("latest", tmp_path / "not yet") is None
    assert find_start("latest", tmp_path) is None
    for name in ("step-00000009", "step-00000010", ".step-00000020.partial", "step-final"):
        make(tmp_path / name)
    (tmp_path / "step-00000040").mkdir()  # the user's own
    make(tmp_path / "step-٠٠٠٠٠٠٩٩")  # digits, but not those of a run
    assert find_start("latest", tmp_path) == tmp_path / "step-00000010"
    chosen = tmp_path / "step-00000009"
    assert find_start(str(chosen), tmp_path) == chosen
    assert find_start(None, tmp_path) is None


def test_what_killed_saves_have_left_is_deleted_and_nothing_else(tmp_path, capsys):
    leftovers = [".hf.deleted", ".hf.partial", ".step-00000001.deleted", ".step-00000004.partial"]
    others = [".git", ".photos.deleted", ".step-4.partial", ".step-final.deleted", "step-00000003"]
    for name in leftovers + others:
        (tmp_path / name / "content").mkdir(parents=True)
    make_room(tmp_path, None)
    assert names(tmp_path) == sorted(others)
    printed = capsys.readouterr().out
    assert all(str(tmp_path / name) in printed for name in leftovers)


def test_an_earlier_run_is_set_aside_and_nothing_is_lost(tmp_path, capsys):
    own = ["notes", "step-000000010", "step-00000007", "step-1", "step-final"]
    for name in own:
        (tmp_path / name / "photos").mkdir(parents=True)
    for run in ("1", "2"):
        make(tmp_path / "step-00000010", run)
        make(tmp_path / "hf")
        for name in ("metrics.jsonl", "run.jsonl"):
            (tmp_path / name).write_text(run)
        # Also by a run that starts from a checkpoint elsewhere.
        make_room(tmp_path, None if run == "1" else tmp_path / "notes" / "step-00000010")
        aside = tmp_path / f"earlier-{run}"
        assert f"it is now in {aside}\n" in capsys.readouterr().out
        assert names(aside) == ["hf", "metrics.jsonl", "run.jsonl", "step-00000010"]
        for name in ("metrics.jsonl", "step-00000010/state.json"):
            assert (aside / name).read_text() == run
    assert names(tmp_path) == ["earlier-1", "earlier-2", *own]


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


@pytest.mark.parametrize("path", ["step-00000004", "hf/model"])
def test_a_run_never_replaces_something_of_the_user(tmp_path, path):
    make(tmp_path / "step-00000002")
    lock_folder(tmp_path).release()
    (tmp_path / path).mkdir(parents=True)
    with pytest.raises(ValueError, match=r"(hf|step-00000004) is not of a run, .* rename it, or"):
        lock_folder(tmp_path)
    assert (tmp_path / path).exists()


def test_a_folder_that_cannot_be_made_is_refused_with_the_remedy(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"=.*file cannot be .*File exists.* another folder"):
        lock_folder(tmp_path / "file")
    lock = lock_folder(tmp_path / "run")
    with pytest.raises(ValueError, match="run is in use by another run: wait for its end, or name"):
        lock_folder(tmp_path / "run")
    lock.release()


def test_a_link_is_deleted_but_not_what_it_leads_to(tmp_path):
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    make(run / "step-00000001").rename(elsewhere)  # to a larger disk
    (run / "step-00000001").symlink_to(elsewhere)
    (run / "step-00000003").symlink_to(elsewhere)
    (run / "step-00000000").mkdir()  # the user's own
    make(run / "step-00000002")
    delete_older(run / "step-00000002", keep=1)
    (run / ".step-00000001.deleted").symlink_to(elsewhere)  # of an interrupted deletion
    make_room(run, find_start("latest", run))  # which is a link, and is not set aside
    assert names(run) == ["step-00000000", "step-00000002", "step-00000003"]
    assert names(elsewhere) == ["state.json"]
