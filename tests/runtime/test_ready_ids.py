"""Files of token ids that other tools have made: used as they are, or refused with a command."""

import subprocess
import sys

import numpy as np
import pytest

from picotron_min.runtime import ready_ids
from picotron_min.runtime.config import Config
from picotron_min.runtime.ready_ids import open_ids
from picotron_min.runtime.token_file import open_text
from picotron_min.runtime.tokenizer import BytesTokenizer

IDS = [116, 256, 10, 11, 12, 256, 13, 104]
LARGE = 2**16 + 1  # a vocabulary whose ids need four bytes


def write(path, ids):
    np.save(path, ids) if path.suffix == ".npy" else ids.tofile(path)
    return str(path)


@pytest.mark.parametrize(
    "name,dtype,vocab_size",
    [("a.npy", "u2", 257), ("a.npy", "u4", 257), ("a.bin", "u2", 257), ("a.bin", "u4", LARGE)],
)
def test_ready_ids_are_used_as_they_are(tmp_path, monkeypatch, name, dtype, vocab_size):
    path = write(tmp_path / name, np.array(IDS, dtype))
    tokens, ends, checksum = open_ids(path, vocab_size, 256)
    assert isinstance(tokens, np.memmap) and tokens.tolist() == IDS
    assert ends.tolist() == [2, 6, 8]  # the last document is cut off
    monkeypatch.setattr(ready_ids, "PART", 4)  # of a file larger than memory
    assert open_ids(path, vocab_size, 256)[2] == checksum
    text = open_text(Config(dataset={"name": path}), BytesTokenizer(), vocab_size)
    assert (text.num_documents, text.tokens_per_byte, text.checksum) == (3, None, checksum)
    write(tmp_path / name, np.array([*IDS[:-1], 105], dtype))
    assert open_ids(path, vocab_size, 256)[2] != checksum


@pytest.mark.parametrize(
    "name,found,vocab_size,problem",
    [
        ("a.bin", "<u4", 257, "half of its numbers are near 0, as in ids of 4 bytes"),
        ("a.bin", ">i4", 257, "half of its numbers are near 0, as in ids of 4 bytes"),
        ("a.bin", "<i8", 257, "three of four of its numbers are near 0, as in ids of 8 bytes"),
        ("a.bin", "<i8", LARGE, "half of its numbers are near 0, as in ids of 8 bytes"),
        ("a.npy", "<i8", 257, "it has 1 axes of int64, not one of uint16 or uint32"),
        ("a.npy", ">u2", 257, "it has 1 axes of >u2"),
    ],
)
def test_ids_of_other_forms_are_refused_with_the_command_that_converts_them(
    tmp_path, name, found, vocab_size, problem
):
    ids = np.array([i for i in IDS * 9 if i < 256], found)
    path = write(tmp_path / name, ids)

    def converted():
        with pytest.raises(ValueError, match=f"dataset.name=.* be read: {problem}") as refusal:
            open_ids(path, vocab_size, 256)
        command = str(refusal.value).partition("run  ")[2].replace("python", sys.executable, 1)
        done = subprocess.run(command, shell=True, cwd=tmp_path, stderr=subprocess.PIPE)
        return open_ids(str(tmp_path / f"ids{name[1:]}"), vocab_size, 256)[0], done.stderr.decode()

    tokens, words = converted()
    assert tokens.tolist() == ids.tolist() and not words
    if "i" in found:  # as some mark what no loss is computed of
        ids[7] = -100
        write(tmp_path / name, ids)
        assert "AssertionError: some ids are no uint" in converted()[1]


@pytest.mark.parametrize(
    "tool,header",
    [("llm.c", np.array([20240520, 1, 8] + [0] * 253, "i4").tobytes()),
     ("litgpt", b"LITPKDS" + bytes(17))],
)  # fmt: skip
def test_a_header_is_cut_off_by_the_command_of_its_message(tmp_path, tool, header):
    path = tmp_path / "a.bin"
    path.write_bytes(header + np.array(IDS, "u2").tobytes())
    with pytest.raises(ValueError, match=f"bytes that {tool} puts before ids: run") as refusal:
        open_ids(str(path), 257, 256)
    subprocess.run(str(refusal.value).partition("run  ")[2], shell=True, cwd=tmp_path, check=True)
    assert open_ids(str(tmp_path / "ids.bin"), 257, 256)[0].tolist() == IDS


@pytest.mark.parametrize(
    "name,content,message",
    [
        ("a.npy", np.zeros((2, 2), "u2"), "has 2 axes of uint16"),
        ("a.npy", np.array([1, 257], "u2"), "as uint16, has the token id 257, and the model 257"),
        ("a.npy", np.zeros(9, "u2"), "it has no id but 0: copy it again, or make it anew"),
        ("a.npy", np.zeros(0, "u2"), "it has no id but 0"),
        ("a.bin", b"PK\x03\x04" + bytes(12), "it is an archive of numpy or torch"),
        (
            "a.npy",
            np.array(IDS, "u2").tobytes(),
            "not begin as numpy's .* rename it to .bin",
        ),
        ("a.npy", np.array([{}]), "cannot be read"),  # a pickle
        ("a.bin", b"\x93NUMPY rest", "begins as numpy's files: rename it to .npy"),
        ("a.bin", b"", "cannot be read"),
        ("a.bin", b"odd", "cannot be read"),
    ],
)
def test_other_files_are_refused(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content) if isinstance(content, bytes) else np.save(path, content)
    with pytest.raises(ValueError, match=f"dataset.name=.*{message}"):
        open_ids(str(path), 257, 256)
    config = Config(dataset={"name": str(path)}, training={"num_samples": 3})
    with pytest.raises(ValueError, match="num_samples and subset_name must be null"):
        open_text(config, BytesTokenizer(), 257)
