"""The files of a dataset: each is read, or listed as not read, or refused."""

import gzip
import json
import os
import sys
from pathlib import Path

import pytest

from picotron_min.runtime.config import Dataset
from picotron_min.runtime.corpus import find_corpus, open_documents


def rows(*texts, **more):
    return "".join(json.dumps({"text": text} | more) + "\n" for text in texts).encode()


@pytest.fixture
def corpus(tmp_path):
    """The folder `corpus` of the given files."""

    def corpus(files):
        for name, content in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return tmp_path / "corpus"

    return corpus


def read(path, **options):
    dataset = Dataset(name=str(path), **options)
    return list(open_documents(dataset, find_corpus(dataset)))


def write_saved(folder: Path, text="text") -> None:
    from datasets import Dataset as Saved
    from datasets import DatasetDict

    train, test = (Saved.from_dict({text: texts}) for texts in (["a", "b"], ["c"] * 2))
    train.save_to_disk(folder / "one")
    DatasetDict({"test": test, "train": train}).save_to_disk(folder / "two")
    train.to_parquet(folder / "c.parquet")


@pytest.mark.parametrize("name", ["one", "two", "c.parquet", "d.jsonl", "d.json", "texts"])
def test_every_kind_of_dataset_gives_the_same_documents(name, corpus, tmp_path):
    files = {"d.jsonl": rows("a", "b"), "d.json": '\n[{"text": "a"}, {"text": "b"}]'}
    corpus(files | {"texts/1.txt": "a", "texts/deep/2.TXT": "b", "texts/.x.txt": "hidden"})
    write_saved(tmp_path)
    assert read(tmp_path / name) == ["a", "b"]


def test_a_split_is_chosen_and_what_lies_beside_a_saved_dataset_is_listed(tmp_path):
    write_saved(tmp_path)
    assert read(tmp_path / "two", split="test") == ["c", "c"]
    (tmp_path / "two" / "more.jsonl").write_bytes(rows("b"))
    assert find_corpus(Dataset(name=str(tmp_path / "two"))).not_read == ["more.jsonl"]


@pytest.mark.quick
def test_files_and_folders_behind_links_are_read_once(corpus, tmp_path):
    files = {"corpus/a.jsonl": rows("a"), "store/b/b.jsonl": rows("b"), "blobs/4f2a9c": rows("c")}
    folder = corpus(files)
    (folder / "b").symlink_to("../store/b")
    (folder / "c.jsonl").symlink_to("../blobs/4f2a9c")  # as in the hub's cache
    (tmp_path / "link").symlink_to("corpus")
    assert read(folder) == read(tmp_path / "link") == ["a", "b", "c"]
    assert read(folder / "c.jsonl") == ["c"]
    # Once is enough, or held-out text is trained on.
    (folder / "again").symlink_to("../store/b")
    (folder / "d.jsonl").symlink_to("a.jsonl")
    assert read(folder) == ["a", "b", "c"]
    assert find_corpus(Dataset(name=str(folder))).not_read == []
    (folder / "e.jsonl").symlink_to("gone")
    with pytest.raises(ValueError, match=r"e.jsonl is a link to a file that is not there: mend"):
        read(folder)
    (folder / "b" / "up").symlink_to(folder)
    with pytest.raises(ValueError, match=r"up leads back to .*corpus, in a circle: remove one"):
        read(folder)


def test_names_that_other_readers_take_for_patterns_are_read(corpus):
    names = ["a::b", "$HOME", "a*", "a?[0-9]", "a b#c%20", "~", "{a,b}", "ü\n"]
    assert read(corpus({f"corpus/{name}.txt": name for name in names})) == sorted(names)


def test_every_compressed_file_is_read_to_its_end(corpus):
    import bz2

    import pyarrow

    def zst(content):
        sink = pyarrow.BufferOutputStream()
        with pyarrow.CompressedOutputStream(sink, "zstd") as stream:
            stream.write(content)
        return sink.getvalue().to_pybytes()

    parts = rows("b"), rows("c")  # two in one file
    files = {"corpus/1.jsonl": rows("a"), "corpus/5.JSONL.GZ": gzip.compress(rows("d"))}
    kinds = {"2.jsonl.gz": gzip.compress, "3.json.zst": zst, "4.v1.jsonl.bz2": bz2.compress}
    for name, compress in kinds.items():
        files[f"corpus/{name}"] = b"".join(map(compress, parts))
    assert read(corpus(files)) == ["a", *"bcbcbc", "d"]


def test_other_files_are_listed_as_not_read(corpus):
    names = {"README.md", "a.csv", "a.tar.gz", ".git/a.jsonl", ".b.jsonl", "deep/c"}
    folder = corpus({"corpus/a.jsonl": rows("a")} | {f"corpus/{name}": "x" for name in names})
    os.mkfifo(folder / "pipe.jsonl")
    found = find_corpus(Dataset(name=str(folder)))
    assert found.files == [folder / "a.jsonl"] and read(folder) == ["a"]
    assert {*found.not_read} == names - {".git/a.jsonl"} | {".git", "pipe.jsonl"}
    assert find_corpus(Dataset(name=str(folder / ".b.jsonl"))).files  # by its own name


def test_only_the_column_of_text_is_read(corpus):
    """Shards whose other columns differ, numbers of any size, NaN, and an order of its own."""
    others = [{}, {"meta": None}, {"meta": {"url": "x"}}, {"meta": [1, "x"]}, {"n": float("nan")}]
    others += [{"n": 2**70}, {"text2": "\ud83d"}]
    files = {f"corpus/{i}.jsonl": rows(str(i), **other) for i, other in enumerate(others)}
    files["corpus/7.jsonl"] = b'\xef\xbb\xbf{"n": 1, "text": "7"}\r\n\r\n'
    files["corpus/8.json"] = b' [{"text": "8"},\n {"text": "9"}]'
    assert [*filter(None, read(corpus(files)))] == [*"0123456789"]


def test_of_parquet_only_the_column_of_text_is_read(tmp_path):
    import pyarrow
    from pyarrow import parquet

    category = pyarrow.array(["c", "d", "c"]).dictionary_encode()  # as pandas writes it
    for name, columns in {
        "a": {"text": ["a"]},
        "b": {"n": [1], "text": pyarrow.array(["b"], pyarrow.large_string())},
        "c": {"text": category, "n": [{"x": 1}] * 3},
    }.items():
        parquet.write_table(pyarrow.table(columns), tmp_path / f"{name}.parquet")
    assert read(tmp_path) == ["a", "b", "c", "d", "c"]


# What is in a file, and what is reported about it.
MISTAKES = [
    ("a.jsonl", '{"body": "x"}', r"document 1: there is no text 'text' in {'body': 'x'} .set dat"),
    ("a.jsonl", '{"text": "x"}\n{"text": null}', "document 2: there is no text 'text' in {'text'"),
    ("a.jsonl", '"x"', "there is no text 'text' in 'x'"),
    ("a.jsonl", '{"text": "x"}\n\n{"te', "a.jsonl: document 3: .*: mend or remove it"),  # the line
    ("a.jsonl", '{"text": "\\ud83d"}', "document 1: .* surrogates not allowed: mend"),
    ("a.jsonl", b'{"text": "x"}\n{"text": "\xff"}', "document 2: .* can't decode byte 0xff"),
    ("a.json", '\n [{"text": "x"}, {"te', "a.json: document 1: .*: line 2"),
    ("a.txt", b"\xff\xfe", "a.txt: .* can't decode byte 0xff"),
    ("a.parquet", "x" * 99, "cannot read .*a.parquet: .*: mend or remove it"),
    ("c.parquet", None, "c.parquet: document 1: there is no text 'text' in {'n': 'a'}"),
    (
        "a.txt.gz",
        gzip.compress(b"x" * 999, mtime=0)[:-9],
        "cannot read .*a.txt.gz: .*: mend or remove it",
    ),
    ("a.docx", "x", "a.docx is no dataset, .*: use .txt, .jsonl, .json, .parquet; these with .gz"),
]


@pytest.mark.parametrize("name,content,message", MISTAKES)
def test_a_mistake_is_reported_with_its_place_and_the_remedy(
    name, content, message, corpus, tmp_path
):
    if content is None:
        write_saved(tmp_path, text="n")
    else:
        corpus({name: content})
    with pytest.raises(ValueError, match=message):
        read(tmp_path / name)


def test_options_and_folders_that_do_not_fit_are_reported(corpus, tmp_path):
    folder = corpus({"corpus/a.txt": "x", "corpus/b.jsonl": "{}"})
    write_saved(tmp_path)
    cases = {r"mixes 2 kinds of dataset \(a.txt, b.jsonl\)": (folder, {})}
    cases[r"no split 'dev': .* \['test', 'train'\]"] = tmp_path / "two", {"split": "dev"}
    cases[r"no split 'dev': .* \['train'\]"] = folder / "a.txt", {"split": "dev"}
    cases["subset_name='en' .* to null"] = folder / "a.txt", {"subset_name": "en"}
    for message, (path, options) in cases.items():
        with pytest.raises(ValueError, match=message):
            read(path, **options)


def test_a_dataset_that_the_hub_does_not_give_is_reported_with_what_was_tried(monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    message = r"'no/thing' \(subset 'en', split 'train'\): Couldn't reach .*network; or set datase"
    with pytest.raises(ValueError, match=message):
        read("no/thing", subset_name="en")


def test_a_missing_package_is_named_with_what_needs_none(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"needs a package: .*pip install datasets, or .*\.npy"):
        open_documents(Dataset(name="owner/text"), find_corpus(Dataset(name="owner/text")))
