"""The files of a dataset: each is read, or listed as not read, or refused."""

import bz2
import gzip
import json
import os
import sys
from functools import partial
from pathlib import Path

import datasets
import pyarrow.parquet
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
    train, test = (datasets.Dataset.from_dict({text: texts}) for texts in (["a", "b"], ["c", "c"]))
    train.save_to_disk(folder / "one")
    datasets.DatasetDict({"test": test, "train": train}).save_to_disk(folder / "two")
    pyarrow.parquet.write_table(pyarrow.table({text: ["a", "b"]}), folder / "c.parquet")


def test_every_kind_of_dataset_gives_the_same_documents(corpus, tmp_path):
    corpus({"d.jsonl": rows("a", "b"), "texts/1.txt": "a", "texts/deep/2.TXT": "b"})
    write_saved(tmp_path)
    for name in ("one", "two", "c.parquet", "d.jsonl", "texts"):
        assert read(tmp_path / name) == ["a", "b"], name
    assert read(tmp_path / "two", split="test") == ["c", "c"]
    (tmp_path / "two" / "more.jsonl").write_bytes(rows("c"))
    assert find_corpus(Dataset(name=str(tmp_path / "two"))).not_read == ["more.jsonl"]


def test_the_standard_library_begins_with_english_and_ends_with_text_like_the_rest():
    first, *rest = (file.name for file in find_corpus(Dataset(name="stdlib")).files)
    assert first == "topics.py" and len(rest) > 100 and rest == sorted(rest)


@pytest.mark.quick
def test_files_and_folders_behind_links_are_read_once(corpus, tmp_path):
    files = {"corpus/a.jsonl": rows("a"), "store/b/b.jsonl": rows("b"), "blobs/4f2a9c": rows("c")}
    folder = corpus(files)
    (folder / "b").symlink_to("../store/b")
    (folder / "c.jsonl").symlink_to("../blobs/4f2a9c")  # as in the hub's cache
    # Once is enough, or held-out text is trained on.
    (folder / "again").symlink_to("../store/b")
    (folder / "d.jsonl").symlink_to("a.jsonl")
    (tmp_path / "link").symlink_to("corpus")
    assert read(folder) == read(tmp_path / "link") == ["a", "b", "c"]
    assert read(folder / "c.jsonl") == ["c"]
    assert find_corpus(Dataset(name=str(folder))).not_read == []
    (folder / "e.jsonl").symlink_to("gone")
    with pytest.raises(ValueError, match=r"e.jsonl is a link to a file that is not there: mend"):
        read(folder)
    (folder / "b" / "up").symlink_to(folder)
    with pytest.raises(ValueError, match=r"up leads back to .*corpus, in a circle: remove one"):
        read(folder)


def test_every_compressed_file_is_read_to_its_end_whatever_its_name(corpus):
    """Other readers take such names for patterns."""
    zst = partial(pyarrow.compress, codec="zstd", asbytes=True)
    kinds = {"2::b*.jsonl.gz": gzip.compress, "3$HOME?.json.zst": zst}
    kinds["4[{a,b}]ü\n.v1.JSONL.BZ2"] = bz2.compress
    files = {  # two parts in each
        f"corpus/{name}": b"".join(map(compress, (rows("b"), rows("c"))))
        for name, compress in kinds.items()
    }
    assert read(corpus(files | {"corpus/1.jsonl": rows("a")})) == ["a", *"bcbcbc"]


def test_other_files_are_listed_as_not_read(corpus):
    names = {"README.md", "a.csv", "a.tar.gz", ".git/a.jsonl", ".b.jsonl", "deep/c"}
    folder = corpus({"corpus/a.jsonl": rows("a")} | {f"corpus/{name}": "x" for name in names})
    os.mkfifo(folder / "pipe.jsonl")
    found = find_corpus(Dataset(name=str(folder)))
    assert found.files == [folder / "a.jsonl"]
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


# What is in a file, and what is reported about it.
MISTAKES = [
    ("a.jsonl", '{"body": "x"}', r"document 1: there is no text 'text' in {'body': 'x'} .set dat"),
    ("a.jsonl", '{"text": "x"}\n\n{"te', "a.jsonl: document 3: .*: mend or remove it"),  # the line
    ("a.jsonl", '{"text": "\\ud83d"}', "document 1: .* surrogates not allowed: mend"),
    ("a.jsonl", b'{"text": "x"}\n{"text": "\xff"}', "document 2: .* can't decode byte 0xff"),
    ("a.json", '\n [{"text": "x"}, {"te', "a.json: document 1: .*: line 2"),
    ("a.parquet", "x" * 99, "cannot read .*a.parquet: .*: mend or remove it"),
    ("a.txt.gz", gzip.compress(b"x" * 999)[:-9], "cannot read .*a.txt.gz: .*: mend or remove it"),
    ("a.docx", "x", "a.docx is no dataset, .*: use .txt, .jsonl, .json, .parquet; these with .gz"),
]


@pytest.mark.parametrize("name,content,message", MISTAKES, ids=range(len(MISTAKES)))
def test_a_mistake_is_reported_with_its_place_and_the_remedy(
    name, content, message, corpus, tmp_path
):
    corpus({name: content})
    with pytest.raises(ValueError, match=message):
        read(tmp_path / name)


def test_options_and_folders_that_do_not_fit_are_reported(corpus, monkeypatch, tmp_path):
    folder = corpus({"corpus/a.txt": "x", "corpus/b.jsonl": "{}"})
    write_saved(tmp_path, text="n")
    file, subset = folder / "a.txt", {"subset_name": "en"}
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    for path, options, message in (
        (tmp_path / "c.parquet", {}, "document 1: there is no text 'text' in {'n': 'a'}"),
        (folder, {}, r"mixes 2 kinds of dataset \(a.txt, b.jsonl\)"),
        (file, {"split": "dev"}, r"no split 'dev': .* \['train'\]"),
        (file, subset, "subset_name='en' .* to null"),
        ("no/thing", subset, r"\(subset 'en', split 'train'\): Couldn't reach .*netw"),
    ):
        with pytest.raises(ValueError, match=message):
            read(path, **options)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"needs a package: .*pip install datasets, or .*\.npy"):
        read("owner/text")
