"""Files of token ids that other tools have made: used as they are, or refused with a command."""

import shlex
import subprocess

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


def command_of(path, vocab_size, message):
    """The command of a refusal."""
    with pytest.raises(ValueError, match=f"dataset.name=.* be read: {message}") as refusal:
        open_ids(str(path), vocab_size, 256)
    return str(refusal.value).partition("run  ")[2]


@pytest.mark.parametrize("name,dtype", [("a.npy", "u4"), ("a.bin", "u2")])
def test_ready_ids_are_used_as_they_are(tmp_path, monkeypatch, name, dtype):
    path = write(tmp_path / name, np.array(IDS, dtype))
    tokens, ends, checksum = open_ids(path, 257, 256)
    assert isinstance(tokens, np.memmap) and tokens.tolist() == IDS
    assert ends.tolist() == [2, 6, 8]  # the last document is cut off
    monkeypatch.setattr(ready_ids, "PART", 4)  # of a file larger than memory
    text = open_text(Config(dataset={"name": path}), BytesTokenizer(), 257)
    assert (text.num_documents, text.tokens_per_byte, text.checksum) == (3, None, checksum)
    write(tmp_path / name, np.array([*IDS[:-1], 105], dtype))
    assert open_ids(path, 257, 256)[2] != checksum


# A file and what is in it, the vocabulary, and why it is refused with a command that converts it.
CONVERTED = [
    ("a.bin", "i4", 257, "half of its numbers are 0, as in ids of 4 bytes"),
    ("a.bin", "i8", 257, "three of four of its numbers are 0, as in ids of 8 bytes"),
    ("a.bin", "i8", LARGE, "half of its numbers are 0, as in ids of 8 bytes"),
    ("a.npy", "i8", 257, "it has 1 axes of int64, not one of uint16 or uint32"),
]


@pytest.mark.parametrize("name,found,vocab_size,problem", CONVERTED)
def test_ids_of_other_forms_are_refused_with_the_command_that_converts_them(
    tmp_path, monkeypatch, name, found, vocab_size, problem
):
    monkeypatch.chdir(tmp_path)
    ids = np.array([i for i in IDS * 9 if i < 256], found)
    write(path := tmp_path / name, ids)
    python, option, code = shlex.split(command_of(path, vocab_size, problem))
    assert (python, option) == ("python", "-c")
    exec(code, {})
    assert open_ids(f"ids{path.suffix}", vocab_size, 256)[0].tolist() == ids.tolist()
    write(path, ids - 13)  # some are below 0
    with pytest.raises(AssertionError, match="some ids are no uint"):
        exec(code, {})


def test_a_header_is_cut_off_by_the_command_of_its_message(tmp_path):
    header = np.array([20240520, 1, 8] + [0] * 253, "i4").tobytes()  # of llm.c
    (path := tmp_path / "a.bin").write_bytes(header + np.array(IDS, "u2").tobytes())
    command = command_of(path, 257, "it begins with 1,024 bytes that llm.c puts before ids: run")
    subprocess.run(command, shell=True, cwd=tmp_path, check=True)
    assert open_ids(str(tmp_path / "ids.bin"), 257, 256)[0].tolist() == IDS


REFUSED = [
    ("a.npy", np.array([1, 257], "u2"), "as uint16, has the token id 257, and the model 257"),
    ("a.npy", np.zeros(9, "u2"), "it has no id but 0: copy it again, or make it anew"),
    ("a.npy", np.array(IDS, "u2").tobytes(), "not begin as numpy's .* rename it to .bin"),
    ("a.npy", np.array([{}]), "cannot be read"),  # a pickle
    ("a.bin", b"\x93NUMPY rest", "begins as numpy's files: .* rename it to .npy"),
]


@pytest.mark.quick
@pytest.mark.parametrize("name,content,message", REFUSED, ids=range(len(REFUSED)))
def test_other_files_are_refused(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content) if isinstance(content, bytes) else np.save(path, content)
    with pytest.raises(ValueError, match=f"dataset.name=.*{message}"):
        open_ids(str(path), 257, 256)
