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
import os
import re
import sysconfig
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from picotron_min.runtime.config import Dataset

COMPRESSION = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}  # as pyarrow calls them
HALF = re.compile("[\ud800-\udfff]")  # of a character, which JSON can hold and UTF-8 cannot
# Readers yield each document's place in the file, for messages, and its row.
Rows = Iterator[tuple[str, object]]


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
        problem = f"subset_name={dataset.subset_name!r} is for the hub, but {path} is here"
        raise ValueError(f"{problem}: set dataset.subset_name to null")
    found = sorted(_walk(path)) if path.is_dir() else [path]
    is_saved = (path / "state.json").exists() and (path / "dataset_info.json").exists()
    if is_saved or (path / "dataset_dict.json").exists():
        rest = [file for file in found if file.suffix not in (".arrow", ".json")]
        return Corpus("saved", found, [str(file.relative_to(path)) for file in rest])
    files = [file for file in found if _kind(file) and (file == path or not _is_hidden(file))]
    names = {}  # a file may have two, and is read once
    for file in files:
        names.setdefault(os.path.realpath(file), file)
    files = [*names.values()]
    examples = {READERS[_kind(file)]: str(file.relative_to(path)) for file in files}
    if not files:
        kinds = f"{', '.join(READERS)}; these with {', '.join(COMPRESSION)}"
        problem = f"{path} is no dataset, nor a folder of one: use {kinds}"
        raise ValueError(f"{problem}; or one file of ids, .npy or .bin")
    if len(examples) > 1:
        mixed = f"{len(examples)} kinds of dataset ({', '.join(examples.values())})"
        raise ValueError(f"folder {path} mixes {mixed}: keep one kind in it")
    rest = sorted({*found} - {*files})
    return Corpus(_kind(files[0]), files, [str(file.relative_to(path)) for file in rest])


def _walk(folder: Path, above: tuple[Path, ...] = ()) -> Iterator[Path]:
    """All files of a folder and of those below; hidden folders are not entered."""
    if (real := folder.resolve()) in above:
        raise ValueError(f"{folder} leads back to {real}, in a circle: remove one of the links")
    for entry in folder.iterdir():
        if entry.is_dir() and not _is_hidden(entry):
            yield from _walk(entry, (*above, real))
        elif entry.exists() or _is_hidden(entry):
            yield entry
        else:
            raise ValueError(f"{entry} is a link to a file that is not there: mend or remove it")


def _is_hidden(path: Path) -> bool:
    return path.name.startswith(".")


def _kind(file: Path) -> str:
    """The key of READERS, ".jsonl" of A.JSONL.gz; "" for other files."""
    return next((suffix for suffix in _suffixes(file) if suffix in READERS), "")


def _suffixes(file: Path) -> list[str]:
    """[".jsonl", ".gz"]: of the file's own name, or else of the file that a link leads to."""
    for path in (file, Path(os.path.realpath(file))):
        suffixes = [suffix.lower() for suffix in path.suffixes[-2:]]
        if suffixes[-1:] and suffixes[-1] not in COMPRESSION:
            del suffixes[:-1]  # ".v1" of data.v1.jsonl
        if suffixes and suffixes[0] in READERS and path.is_file():
            return suffixes
    return []


def open_documents(dataset: Dataset, corpus: Corpus) -> Callable[[], Iterator[str]]:
    """A function that reads the documents, all of them and in one order, at each call.

    Both raise ValueError, with the file, the line or row, and the remedy.
    """
    if corpus.kind in READERS:
        return _split({"train": partial(_read_files, corpus, dataset.text_column)}, dataset)
    return partial(_read_rows, _load_rows(dataset, corpus), dataset)


def _read_files(corpus: Corpus, column: str) -> Iterator[str]:
    for file in corpus.files:
        try:
            for place, row in READERS[corpus.kind](file, column):
                yield _text(row, column, place)
        except ModuleNotFoundError as error:
            raise ValueError(f"{file}: {_needs(error)}") from None
        except (OSError, ValueError, NotImplementedError) as error:  # pyarrow's are among them
            reason = "it is not text in UTF-8" if isinstance(error, UnicodeError) else error
            raise ValueError(f"cannot read {file}: {reason}: mend or remove it") from error


def _read_text(file: Path, column: str) -> Rows:
    with _open(file) as stream:
        yield "the file", {column: io.TextIOWrapper(stream, encoding="utf-8-sig").read()}


def _read_json(file: Path, column: str) -> Rows:
    """Lines of JSON, or one array: both are found under either name."""
    with _open(file) as stream:
        if stream.peek(64).lstrip(b"\xef\xbb\xbf\t\r\n ").startswith(b"["):
            for number, row in enumerate(_parse(stream.read(), "the array"), 1):
                yield f"row {number}", row
            return
        for number, line in enumerate(stream, 1):
            if line.strip():
                yield f"line {number}", _parse(line, f"line {number}")


def _parse(content: bytes, place: str) -> object:
    try:
        # Without the mark that some begin with; and an int has a limit of digits.
        return json.loads(content.decode("utf-8-sig"), parse_int=float)
    except (ValueError, RecursionError) as error:
        form = "text in UTF-8" if isinstance(error, UnicodeDecodeError) else "JSON"
        raise ValueError(f"{place} is not {form} ({error})") from error


def _read_parquet(file: Path, column: str) -> Rows:
    from pyarrow.parquet import ParquetFile

    with ParquetFile(file) as parquet:
        if column not in (schema := parquet.schema_arrow).names:
            remedy = f"set dataset.text_column to one of text, of {schema.names}"
            raise ValueError(f"it has no column {column!r}: {remedy}")
        pages = parquet.iter_batches(1000, columns=[column])
        rows = chain.from_iterable(page.to_pylist() for page in pages)
        yield from ((f"row {number}", row) for number, row in enumerate(rows, 1))


READERS = {".txt": _read_text, ".jsonl": _read_json, ".json": _read_json, ".parquet": _read_parquet}


def _open(file: Path) -> io.BufferedReader:
    if compression := COMPRESSION.get("".join(_suffixes(file)[-1:])):
        import pyarrow

        # It reads on after the end of a part, and raises where the last one is cut off.
        return io.BufferedReader(pyarrow.input_stream(str(file), compression=compression))
    return file.open("rb")


def _text(row: object, column: str, place: str) -> str:
    """The text of a document; ValueError if the row has none."""
    if not isinstance(row, dict):
        raise ValueError(f"{place} is no object with a text, but {row!r:.40}")
    if not isinstance(text := row.get(column), str):
        kinds = {key: type(value).__name__ for key, value in row.items()}
        remedy = f"set dataset.text_column to one that holds text, of {kinds}"
        raise ValueError(f"{place} has no text in column {column!r} ({remedy})")
    if not text.isascii() and (half := HALF.search(text)):
        raise ValueError(
            f"{place} has half a character, {half[0]!r}, at {half.start()} of its text"
        )
    return text


def _load_rows(dataset: Dataset, corpus: Corpus):
    """The split that is asked for, as a `datasets.Dataset`, of one column if it has that."""
    name, subset, split = dataset.name, dataset.subset_name, dataset.split
    try:
        import datasets

        if corpus.kind == "hub":
            splits = {split: datasets.load_dataset(name, subset, split=split)}
        else:
            splits = datasets.load_from_disk(name)
    except ModuleNotFoundError as error:
        raise ValueError(f"dataset {name!r}: {_needs(error)}") from None
    except Exception as error:  # of many kinds
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        problem = f"cannot read dataset {name!r}: {type(error).__name__}: {reason}"
        if corpus.kind == "hub":
            problem += f" (of the hub, subset {subset!r}, split {split!r}). Check the spelling and"
            problem += ' network, or set dataset.name to "stdlib" or a local file'
        raise ValueError(problem) from error
    rows = _split(splits if isinstance(splits, dict) else {"train": splits}, dataset)
    column = dataset.text_column
    return rows.select_columns(column) if column in rows.column_names else rows


def _needs(error: ModuleNotFoundError) -> str:
    package = error.name.partition(".")[0]
    remedy = f"run  pip install {package}, or name ids in a .npy or .bin file, which need none"
    return f"package {package} is needed to read it, and is not installed: {remedy}"


def _read_rows(rows, dataset: Dataset) -> Iterator[str]:
    for number, row in enumerate(rows, 1):
        yield _text(row, dataset.text_column, f"dataset {dataset.name!r}: row {number}")


def _split(splits: dict, dataset: Dataset):
    if dataset.split in splits:
        return splits[dataset.split]
    problem = f"dataset {dataset.name!r} has no split {dataset.split!r}"
    raise ValueError(f"{problem}: set dataset.split to one of {[*splits]}")
