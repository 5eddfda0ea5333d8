"""The stream of token ids: what it is made from, by which process, and when it is made anew."""

import json
import os
import signal
import time

import numpy as np
import pytest

from picotron_min.runtime import token_file
from picotron_min.runtime.config import Config
from picotron_min.runtime.token_file import open_text
from picotron_min.runtime.tokenizer import load_tokenizer
from tests.pool import run_forked
from tests.runtime.test_tokenizer import save_word_tokenizer

TEXTS = ["To be, or not to be", "grün 😀\n\tand\x00 so on", "x"]
STREAM = [i for text in TEXTS for i in [*text.encode(), 256]]


@pytest.fixture
def prepare(tmp_path):
    """open_text with a cache of this test's own."""

    def prepare(name, *, vocab_size=257, num_samples=None, **options):
        dataset = {"name": str(name), "cache_dir": str(tmp_path / "cache"), **options}
        config = Config(dataset=dataset, training={"num_samples": num_samples})
        return open_text(config, load_tokenizer(config.tokenizer), vocab_size)

    return prepare


@pytest.fixture
def path(tmp_path):
    return write(tmp_path / "a.jsonl")


def write(path, texts=TEXTS):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.mark.quick
def test_a_stream_has_an_end_of_text_after_each_document(prepare, path, monkeypatch):
    monkeypatch.setattr(token_file, "BATCH", 1)  # so that each thread has one
    file = prepare(write(path, ["", *TEXTS[:1], *[""] * 200, *TEXTS[1:]]), num_proc=2)
    assert file.tokens.tolist() == STREAM and file.tokens.dtype == np.uint16
    assert (file.num_documents, file.num_bytes) == (3, len(STREAM) - 3)
    assert file.ends.tolist() == (np.flatnonzero(file.tokens == 256) + 1).tolist()


def test_ids_above_gaps_in_a_small_vocabulary_are_kept_and_ends_inside_are_counted(
    prepare, path, tmp_path
):
    """Three tokens, and yet an id that two bytes would turn into another one."""
    words, end = {"w0": 0, "w1": 1, "end": 65536 + 7}, 65536 + 7
    options = {"tokenizer": save_word_tokenizer(tmp_path / "words", words, end="end")}
    write(path, ["w1 end w0", "w0", "w1"])
    file = prepare(path, vocab_size=end + 1, num_samples=2, **options)
    assert file.tokens.dtype == np.uint32 and file.tokens.tolist() == [1, end, 0, end, 0, end]
    assert file.ends.tolist() == [4, 6] and file.with_end_inside == 1
    with pytest.raises(ValueError, match=r"up to 65543, and model.vocab_size=65543: .* to 65544"):
        prepare(path, vocab_size=end, **options)


def test_ready_ids_have_no_documents_to_choose_and_perhaps_none_to_mask(prepare, tmp_path):
    np.save(path := tmp_path / "a.npy", np.array([1, 2, 3], np.uint16))
    with pytest.raises(ValueError, match=r"a.npy has no end-of-text id 256: set dataset.tok"):
        prepare(path, document_mask=True)
    with pytest.raises(ValueError, match="num_samples and subset_name must be null"):
        prepare(path, num_samples=3)


def test_a_cache_that_cannot_be_written_is_named(prepare, path):
    with pytest.raises(ValueError, match=r"dataset.cache_dir=.*a.jsonl cannot be used: .* another"):
        prepare(path, cache_dir=str(path))


def test_a_text_without_a_document_leaves_nothing_behind(prepare, path, tmp_path):
    with pytest.raises(ValueError, match=r"a.jsonl' holds no text$"):
        prepare(write(path, [""]))
    assert {entry.suffix for entry in (tmp_path / "cache").iterdir()} <= {".lock"}


def test_a_text_is_tokenised_again_when_it_or_the_tokenizer_changes(prepare, path, tmp_path):
    prepare(path)
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    path.write_text(path.read_text().replace("not", "NOT"))  # as long as before
    os.utime(path, ns=times)  # and of the same time, as copies can be
    assert prepare(path).tokens[:22].tobytes() != np.array(STREAM[:22], np.uint16).tobytes()
    for num_words in (10, 20):
        words = save_word_tokenizer(tmp_path / "words", num_words, end=f"w{num_words - 1}")
        assert prepare(write(path, ["w1"]), tokenizer=words).tokens.tolist() == [1, num_words - 1]


def test_processes_that_start_together_tokenise_once(prepare, path, tmp_path, monkeypatch):
    encode = token_file._encode

    def slow(*args, **options):
        with (tmp_path / "log").open("a") as file:
            file.write("made\n")
        time.sleep(0.3)
        return encode(*args, **options)

    monkeypatch.setattr(token_file, "_encode", slow)

    def check():
        assert prepare(path).tokens.tolist() == STREAM

    assert run_forked(check, 3) == [0, 0, 0]
    monkeypatch.setattr(token_file, "FileLock", None)  # the finished cache may be read-only
    check()
    assert (tmp_path / "log").read_text() == "made\n"


def test_a_process_killed_in_the_middle_leaves_nothing_half_made_and_damage_is_noticed(
    prepare, path, tmp_path, monkeypatch
):
    with monkeypatch.context() as patch:
        patch.setattr(token_file.os, "replace", lambda *args: os.kill(os.getpid(), signal.SIGKILL))
        assert run_forked(lambda: prepare(path), 1) == [-signal.SIGKILL]
    (left,) = (tmp_path / "cache").glob("*.partial/tokens.bin")
    assert left.stat().st_size == 2 * len(STREAM), "it is whole before it is renamed"
    left.write_bytes(bytes(99))
    assert prepare(path).tokens.tolist() == STREAM
    assert {entry.suffix for entry in (tmp_path / "cache").iterdir()} <= {"", ".lock"}
    file, size = next((tmp_path / "cache").glob("*/tokens.bin")), len(STREAM)
    os.truncate(file, 2 * size - 8)
    with pytest.raises(ValueError, match=rf"damaged: its {size - 4} .* {size}. Delete it, and it"):
        prepare(path)
