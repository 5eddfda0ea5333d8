"""Corpus: the files that `dataset.name` means, and the documents in them, one after another.

    stdlib                 the top level of Python's own library: 5 MB of text on any machine
    a file                 .txt: one document; .jsonl, .json, .parquet: one an object or a row
    a folder               all files of one of these kinds, at any depth and behind links
    a saved dataset        the folder that `save_to_disk` of the library `datasets` has written
    owner/name             a dataset of the Hugging Face hub

All but .parquet may be compressed: .gz, .bz2 or .zst. Of an object or a row the column of text is
read, whatever else it has. Each file of a folder is read, or listed as not read, or refused.
"""

import io
import json
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from picotron_min.runtime.config import Dataset
from picotron_min.runtime.wording import choice, explained

COMPRESSION = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}  # as pyarrow calls them
IDS = (".npy", ".bin")  # files of ready token ids: see ready_ids.py


class Corpus(NamedTuple):
    kind: str  # a key of READERS, "saved" or "hub"
    files: list[Path]  # on this machine
    not_read: list[str]  # what else is in the folder


def find_corpus(dataset: Dataset) -> Corpus:
    """ValueError for what is no dataset, or could be read only in part."""
    path = Path(dataset.name).absolute()  # not resolved: a link's own name shows the kind
    if dataset.name == "stdlib":
        library = Path(sysconfig.get_path("stdlib"))
        # English first: runs validate on the end of the text, which should be like the rest.
        files = [*library.glob("pydoc_data/topics.py"), *sorted(library.glob("*.py"))]
        return Corpus(".txt", files, [])
    if not path.exists():  # the config's checks allow no other name
        return Corpus("hub", [], [])
    if dataset.subset_name:
        raise ValueError(
            f"subset_name={dataset.subset_name!r} is for the hub, but {path} is here: "
            "set dataset.subset_name to null"
        )
    found, files = [*_walk(path)], {}  # a file may have two names, and is read once
    is_saved = any((path / mark).exists() for mark in ("state.json", "dataset_dict.json"))
    for file in found:
        is_seen = file == path or not _is_hidden(file)
        if file.suffix in (".arrow", ".json") if is_saved else _kind(file) and is_seen:
            files.setdefault(file.resolve(), file)
    kind = "saved" if is_saved else _only_kind(path, [*files.values()])
    rest = [str(file.relative_to(path)) for file in found if file.resolve() not in files]
    return Corpus(kind, [*files.values()], rest)


def _walk(path: Path, above: tuple[Path, ...] = ()) -> Iterator[Path]:
    """All files at or below a path, in order; hidden folders below are not entered."""
    if not path.is_dir() or (_is_hidden(path) and above):
        if not path.exists() and not _is_hidden(path):
            raise ValueError(f"{path} is a link to a file that is not there: mend or remove it")
        yield path
        return
    if (real := path.resolve()) in above:
        raise ValueError(f"{path} leads back to {real}, in a circle: remove one of the links")
    for entry in sorted(path.iterdir()):
        yield from _walk(entry, (*above, real))


def _is_hidden(path: Path) -> bool:
    return path.name.startswith(".")


def _kind(file: Path) -> str:
    """The key of READERS, ".jsonl" of A.JSONL.gz; "" for other files."""
    name = Path(file.name.lower())
    kind = Path(name.stem).suffix if name.suffix in COMPRESSION else name.suffix
    return kind if kind in READERS and file.is_file() else ""


def _only_kind(path: Path, files: list[Path]) -> str:
    examples = {READERS[_kind(file)]: str(file.relative_to(path)) for file in files}
    if not files:
        raise ValueError(
            f"{path} is no dataset, nor a folder of one: use {', '.join(READERS)}; "
            f"these with {', '.join(COMPRESSION)}; or one file of ids, {choice(IDS)}"
        )
    if len(examples) > 1:
        raise ValueError(
            f"folder {path} mixes {len(examples)} kinds of dataset "
            f"({', '.join(examples.values())}): keep one kind in it"
        )
    return _kind(files[0])


def open_documents(dataset: Dataset, corpus: Corpus) -> Iterator[str]:
    """The documents in order; ValueError with the file, the number of a document and the remedy."""
    column = dataset.text_column
    if corpus.kind in READERS:
        read = READERS[corpus.kind]
        splits = {"train": {file: partial(read, file, column) for file in corpus.files}}
    else:
        splits = _load(dataset, corpus)
    if dataset.split not in splits:
        raise ValueError(
            f"dataset {dataset.name!r} has no split {dataset.split!r}: "
            f"set dataset.split to one of {[*splits]}"
        )
    return _documents(splits[dataset.split], column)


Rows = Iterable[object]


def _documents(sources: dict[object, Callable[[], Rows]], column: str) -> Iterator[str]:
    for source, read in sources.items():
        done = 0
        try:
            for row in read():
                yield _text(row, column)
                done += 1
        except Exception as error:  # of many kinds
            raise ValueError(
                f"cannot read {source}: document {done + 1}: {error}: mend or remove it"
            ) from error


def _text(row: object, column: str) -> str:
    """The text of a document; ValueError if the row has none."""
    if isinstance(row, bytes):  # a line
        row = json.loads(row) if row.strip() else {column: ""}
    text = row.get(column) if isinstance(row, dict) else None
    if not isinstance(text, str):
        raise ValueError(
            f"there is no text {column!r} in {row!r:.200} "
            "(set dataset.text_column to a key that holds text)"
        )
    text.encode()  # JSON can hold half a character, as of an emoji that was cut in two
    return text


def _read_text(file: Path, column: str) -> Rows:
    yield {column: io.TextIOWrapper(_open(file), encoding="utf-8-sig").read()}


def _read_json(file: Path, column: str) -> Rows:
    """Lines of JSON, or one array: both are found under either name."""
    stream = _open(file)
    is_array = stream.peek(64).lstrip(b"\xef\xbb\xbf\t\r\n ").startswith(b"[")
    return json.loads(stream.read()) if is_array else stream


def _read_parquet(file: Path, column: str) -> Rows:
    from pyarrow.parquet import ParquetFile

    parquet = ParquetFile(file)
    columns = [column] if column in parquet.schema_arrow.names else None  # None: all
    pages = parquet.iter_batches(1000, columns=columns)
    return chain.from_iterable(page.to_pylist() for page in pages)


READERS = {".txt": _read_text, ".jsonl": _read_json, ".json": _read_json, ".parquet": _read_parquet}


def _open(file: Path) -> io.BufferedReader:
    if not (compression := COMPRESSION.get(file.suffix.lower())):
        return file.open("rb")
    import pyarrow

    # It reads all parts of a file, and raises where the last one is cut off.
    return io.BufferedReader(pyarrow.input_stream(str(file), compression=compression))


def _load(dataset: Dataset, corpus: Corpus) -> dict[str, dict]:
    """The splits that the library `datasets` finds; of the hub the one that is asked for."""
    needs = "run  pip install datasets, or name ids in a .npy or .bin file, which need none"
    with explained(f"dataset {dataset.name!r} needs a package", needs, ModuleNotFoundError):
        import datasets

    name, subset, split = dataset.name, dataset.subset_name, dataset.split
    remedy = 'check its files, or spelling and network; or set dataset.name to "stdlib" or a file'
    with explained(f"cannot read dataset {name!r} (subset {subset!r}, split {split!r})", remedy):
        if corpus.kind == "hub":
            splits = {split: datasets.load_dataset(name, subset, split=split)}
        else:
            splits = datasets.load_from_disk(name)
    splits = splits if isinstance(splits, dict) else {"train": splits}
    return {
        split: {f"dataset {name!r}": partial(_read_rows, rows, dataset.text_column)}
        for split, rows in splits.items()
    }


def _read_rows(rows, column: str) -> Rows:
    return rows.select_columns(column) if column in rows.column_names else rows
