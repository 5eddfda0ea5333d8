"""The files of a dataset: each is read, or listed as not read, or refused."""

import gzip
import json
import os

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
            path.write_bytes(content)
        return tmp_path / "corpus"

    return corpus


def read(path, **options):
    dataset = Dataset(name=str(path), **options)
    return list(open_documents(dataset, find_corpus(dataset))())


def test_files_and_folders_behind_links_are_read(corpus, tmp_path):
    files = {"corpus/a.jsonl": rows("a"), "store/b/b.jsonl": rows("b"), "blobs/4f2a9c": rows("c")}
    folder = corpus(files)
    (folder / "b").symlink_to("../store/b")
    (folder / "c.jsonl").symlink_to("../blobs/4f2a9c")  # as in the hub's cache
    (tmp_path / "link").symlink_to("corpus")
    assert read(folder) == read(tmp_path / "link") == ["a", "b", "c"]
    assert read(folder / "c.jsonl") == ["c"]
    (tmp_path / "plain").symlink_to("corpus/a.jsonl")  # a link without a suffix of its own
    assert read(tmp_path / "plain") == ["a"]
    (folder / "again").symlink_to("../store/b")  # once is enough, or held-out text is trained on
    found = find_corpus(Dataset(name=str(folder)))
    assert found.not_read == ["b/b.jsonl"] and read(folder) == ["a", "b", "c"]


def test_a_circle_of_links_and_a_link_to_nothing_are_refused(corpus):
    folder = corpus({"corpus/deep/a.jsonl": rows("a")})
    (folder / "deep" / "up").symlink_to("..")
    with pytest.raises(ValueError, match=r"deep/up leads back to .*corpus, in a circle: remove"):
        read(folder)
    (folder / "deep" / "up").unlink()
    (folder / "b.jsonl").symlink_to("gone")
    with pytest.raises(ValueError, match=r"b.jsonl is a link to a file that is not there: mend"):
        read(folder)


def test_names_that_other_readers_take_for_patterns_are_read(corpus):
    names = ["a::b", "$HOME", "a*", "a?[0-9]", "a b#c%20", "~", "{a,b}", "ü\n"]
    assert read(corpus({f"corpus/{name}.txt": name.encode() for name in names})) == sorted(names)


def test_every_compressed_file_is_read_to_its_end(corpus):
    import pyarrow

    def zst(content):
        sink = pyarrow.BufferOutputStream()
        with pyarrow.CompressedOutputStream(sink, "zstd") as stream:
            stream.write(content)
        return sink.getvalue().to_pybytes()

    parts = rows("b"), rows("c")
    files = {"corpus/1.jsonl": rows("a"), "corpus/4.JSONL.GZ": gzip.compress(rows("d"))}
    files["corpus/2.jsonl.gz"] = b"".join(map(gzip.compress, parts))  # two parts in one file
    files["corpus/3.json.zst"] = b"".join(map(zst, parts))
    assert read(corpus(files)) == ["a", "b", "c", "b", "c", "d"]


def test_other_files_are_listed_as_not_read(corpus, tmp_path):
    names = ["README.md", "a.csv", "a.tar.gz", ".git/a.jsonl", ".b.jsonl", "deep/c"]
    folder = corpus({"corpus/a.jsonl": rows("a")} | {f"corpus/{name}": b"x" for name in names})
    os.mkfifo(folder / "pipe.jsonl")
    found = find_corpus(Dataset(name=str(folder)))
    assert found.files == [folder / "a.jsonl"]
    expected = {".b.jsonl", ".git", "README.md", "a.csv", "a.tar.gz", "deep/c", "pipe.jsonl"}
    assert {*found.not_read} == expected
    assert read(folder) == ["a"]
    assert find_corpus(Dataset(name=str(folder / ".b.jsonl"))).files  # by its own name


def test_only_the_column_of_text_is_read(corpus):
    """Shards whose other columns differ, numbers of any size, NaN, and an order of its own."""
    others = [{}, {"meta": None}, {"meta": {"url": "x"}}, {"meta": [1, "x"]}, {"n": float("nan")}]
    others += [{"n": 2**70}, {"text2": "\ud83d"}]
    files = {f"corpus/{i}.jsonl": rows(str(i), **other) for i, other in enumerate(others)}
    files["corpus/9.jsonl"] = b'{"n": ' + b"1" * 5000 + b', "text": "10"}'
    files["corpus/7.jsonl"] = b'\xef\xbb\xbf{"n": 1, "text": "7"}\r\n\r\n'
    files["corpus/8.json"] = b' [{"text": "8"},\n {"text": "9"}]'
    assert read(corpus(files)) == [*"0123456789", "10"]


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
    message = r"c.parquet: it has no column 'x': set dataset.text_column to .*\['text', 'n'\]"
    with pytest.raises(ValueError, match=message):
        read(tmp_path / "c.parquet", text_column="x")


def test_what_lies_beside_a_saved_dataset_is_listed(tmp_path):
    from datasets import Dataset as Saved

    Saved.from_dict({"text": ["a"]}).save_to_disk(tmp_path)
    (tmp_path / "more.jsonl").write_bytes(rows("b"))
    assert read(tmp_path) == ["a"]
    assert find_corpus(Dataset(name=str(tmp_path))).not_read == ["more.jsonl"]


def test_a_missing_package_is_named(corpus, monkeypatch):
    import sys

    folder = corpus({"corpus/a.txt.gz": gzip.compress(b"a")})
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError, match=r"a.txt.gz: package pyarrow is needed .*pip install"):
        read(folder)
