"""Text -> one stream of token ids on disk, in a folder named after all that it is made from."""

import glob
import hashlib
import json
import os
import shutil
import sys
import sysconfig
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np

from picotron_min.runtime.tokenizer import Tokenizer, load_tokenizer, tokenizer_files


@dataclass(frozen=True)
class TextSource:
    """All that decides which ids are in the stream; the fields are keys of config.json."""

    name: str  # `stdlib`, a local file, a local folder, or a hub id; see _find_files
    subset_name: str | None = None
    split: str = "train"
    text_column: str = "text"
    num_samples: int | None = None  # only the first so many documents
    tokenizer: str = "bytes"


@dataclass(frozen=True)
class TokenFile:
    """A tokenised text: the stream, mapped into memory and read from disk as it is used."""

    tokens: np.ndarray  # [num_tokens], one end-of-text after each document
    num_bytes: int  # UTF-8 bytes of the text
    num_documents: int

    @property
    def tokens_per_byte(self) -> float:
        """Turns a loss per token into one per byte, which compares across tokenizers."""
        return len(self.tokens) / self.num_bytes


def prepare_tokens(
    source: TextSource, *, vocab_size: int, cache_dir: str | Path, num_proc: int = 1
) -> TokenFile:
    """Tokenise a text unless `cache_dir` has it already, and open the stream.

    Every process calls this: one tokenises, the others wait. Raises ValueError for the user's
    mistakes, such as ids that a model with `vocab_size` does not have.
    """
    from filelock import FileLock

    loader, files = _find_files(source)
    folder = Path(cache_dir).expanduser() / _cache_key(source, files)
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        # A file lock, not a process group: it works before there is one, across nodes with or
        # without a common file system, and without a timeout, for tokenising can take hours.
        with FileLock(folder.with_suffix(".lock")):
            if not folder.exists():
                _write_token_file(folder, source, (loader, files), num_proc)
    return _open_token_file(folder, vocab_size)


def _cache_key(source: TextSource, files: list[Path]) -> str:
    """Another one for a changed file; after a change on the hub, delete the cache by hand."""
    parts = [2, asdict(source)]  # 2: the version of what is written
    for file in [*files, *tokenizer_files(source.tokenizer)]:
        parts.append((str(file), (stat := file.stat()).st_size, stat.st_mtime_ns))
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


LOADERS = {".txt": "text", ".jsonl": "json", ".json": "json", ".parquet": "parquet"}
Found = tuple[str, list[Path]]  # "hub", "saved", or a loader of `datasets`; and its files


def _find_files(source: TextSource) -> Found:
    """What the name stands for. `stdlib` is the top level of Python's own library: 5 MB anywhere.

    A .txt file is one document; lines of .jsonl and .json and rows of .parquet are documents. A
    folder is what `save_to_disk` wrote, or all files of one of these kinds, at any depth.
    """
    name, path = source.name, Path(source.name).expanduser().resolve()
    if name != "stdlib" and not path.exists():
        if name.count("/") != 1:  # `datasets` would read "text" as all files in the working folder
            problem = f"dataset {name!r} is not on this machine; on the hub it would be owner/name"
            remedy = 'set dataset.name to "stdlib", to a file or folder here, or to a hub id'
            raise ValueError(f"{problem}: {remedy}")
        return "hub", []
    if source.subset_name:
        problem = f"subset_name={source.subset_name!r} is for the hub, but {name!r} is not there"
        raise ValueError(f"{problem}: set dataset.subset_name to null")
    if name == "stdlib":
        library = Path(sysconfig.get_path("stdlib"))
        # English first: runs validate on the end of the text, which should be like the rest of it.
        files = [library / "pydoc_data" / "topics.py", *sorted(library.glob("*.py"))]
        return "text", [file for file in files if file.exists()]
    files = [path] if path.is_file() else sorted(f for f in path.rglob("*") if f.is_file())
    if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
        return "saved", files
    files = [file for file in files if "/." not in str(file).removeprefix(str(path))]  # not hidden
    files = [file for file in files if file.suffix.lower() in LOADERS]
    found = {LOADERS[file.suffix.lower()]: str(file.relative_to(path)) for file in files}
    if not found:
        raise ValueError(f"{path} is no dataset, nor a folder of one: use {', '.join(LOADERS)}")
    if len(found) > 1:
        mixed = f"{len(found)} kinds of dataset ({', '.join(found.values())})"
        raise ValueError(f"folder {path} mixes {mixed}: keep one kind in it")
    return next(iter(found)), files


def _write_token_file(folder: Path, source: TextSource, found: Found, num_proc: int) -> None:
    """Write aside and rename, so that `folder` is complete or absent, whenever we are killed."""
    aside = folder.with_suffix(".partial")
    shutil.rmtree(aside, ignore_errors=True)  # what a killed process left
    (done := aside / "done").mkdir(parents=True)
    try:
        tokenizer = load_tokenizer(source.tokenizer)  # first: its failure is the cheap one
        documents = _documents(source, _load_splits(source, found, aside))
        documents = _tokenize(documents, source, tokenizer, num_proc, aside)
        if not len(documents):
            raise ValueError(f"dataset {source.name!r} has no text: all of its documents are empty")
        metadata = _write_stream(documents, done / "tokens.bin")
        metadata |= {"tokenizer_vocab_size": tokenizer.vocab_size, "source": asdict(source)}
        (done / "metadata.json").write_text(json.dumps(metadata, indent=1))
        os.replace(done, folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _load_splits(source: TextSource, found: Found, aside: Path) -> dict:
    """Split -> `datasets.Dataset`."""
    import datasets

    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    name, split, (loader, files) = source.name, source.split, found
    if files and not any(file.stat().st_size for file in files):
        raise ValueError(f"dataset {name!r} is empty: all of its {len(files)} file(s) have 0 bytes")
    try:
        if loader == "hub":
            return {split: datasets.load_dataset(name, source.subset_name, split=split)}
        if loader == "saved":
            splits = datasets.load_from_disk(Path(name).expanduser())
            return {"train": splits} if isinstance(splits, datasets.Dataset) else splits
        options = {"sample_by": "document"} if loader == "text" else {}
        paths = [glob.escape(str(file)) for file in files]  # datasets reads them as patterns
        return datasets.load_dataset(loader, data_files=paths, cache_dir=aside, **options)
    except Exception as error:
        cause = error.__cause__ or error
        reason = f"{type(cause).__name__}: {str(cause).strip().partition(chr(10))[0].rstrip('.')}"
        if loader != "hub":
            raise ValueError(f"cannot read dataset {name!r}: {reason}") from error
        problem = f"dataset {name!r} is not on this machine, and the Hugging Face hub did not give"
        subset = f"subset {source.subset_name!r}, " if source.subset_name else ""
        problem += f" its {subset}split {split!r}: {reason}. Check spelling"
        remedy = 'set dataset.name to "stdlib" or to a local file'
        raise ValueError(f"{problem} and network, or {remedy}") from error


def _documents(source: TextSource, splits: dict):
    """The rows of the split that is asked for, its text column checked."""
    name, split, column = f"dataset {source.name!r}", source.split, source.text_column
    if split not in splits:
        remedy = f"set dataset.split to one of {list(splits)}"
        raise ValueError(f"{name} has no split {split!r}: {remedy}")
    documents, columns = splits[split], splits[split].column_names
    other = f"set dataset.text_column to one of {columns}"
    if not len(documents):
        raise ValueError(f"{name} is empty: its split {split!r} has 0 documents")
    if column not in columns:
        raise ValueError(f"{name} has no column {column!r}: {other}")
    dtype = getattr(documents.features[column], "dtype", "no single value")
    if dtype not in ("string", "large_string"):
        raise ValueError(f"column {column!r} of {name} holds {dtype}, not text: {other}")
    return documents.select(range(min(source.num_samples or len(documents), len(documents))))


def _tokenize(documents, source: TextSource, tokenizer: Tokenizer, num_proc: int, aside: Path):
    """The documents as rows of ids; `datasets` shares the work among `num_proc` processes.

    Each document is one piece, and needs many times its size in memory: cut up a .txt of gigabytes.
    """
    import datasets

    dtype = np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32  # 2 bytes halve the stream
    ids = datasets.Sequence(datasets.Value(np.dtype(dtype).name))
    return documents.map(
        partial(_tokenize_batch, tokenizer=tokenizer, dtype=dtype, name=source.name),
        batched=True,
        with_indices=True,
        input_columns=[source.text_column],
        remove_columns=documents.column_names,
        features=datasets.Features({"ids": ids, "num_bytes": datasets.Value("int64")}),
        num_proc=num_proc if num_proc > 1 else None,
        cache_file_name=str(aside / "ids.arrow"),
        desc=f"Tokenising {source.name}",
    )


def _tokenize_batch(texts: list[str], rows: list[int], tokenizer: Tokenizer, dtype, name: str):
    if None in texts:
        problem = f"row {rows[texts.index(None)]} of dataset {name!r} has no text (null)"
        raise ValueError(f"{problem}: remove such rows, or choose another dataset.text_column")
    texts = [text for text in texts if text]  # an empty document would be a lone end-of-text
    ids, end = tokenizer.encode(texts), np.array([tokenizer.eos_token_id], dtype)
    largest = max((int(row.max(initial=0)) for row in ids), default=0)
    if largest >= tokenizer.vocab_size:  # the dtype below would silently make it another id
        problem = f"tokenizer {tokenizer.name!r} gave token id {largest}, but its vocabulary"
        remedy = "repair its files, or choose another dataset.tokenizer"
        raise ValueError(f"{problem} ends at {tokenizer.vocab_size - 1}: {remedy}")
    ids = [np.concatenate([row, end], dtype=dtype) for row in ids]
    return {"ids": ids, "num_bytes": [len(text.encode()) for text in texts]}


def _write_stream(documents, path: Path) -> dict:
    """Write all ids to one file, a thousand documents at a time, and count."""
    counts = {"num_tokens": 0, "num_bytes": 0, "num_documents": len(documents), "largest_id": 0}
    with open(path, "wb") as file:
        for table in documents.with_format("arrow").iter(batch_size=1000):
            ids = table["ids"].combine_chunks().flatten().to_numpy()
            ids.tofile(file)
            counts["num_tokens"] += len(ids)
            counts["largest_id"] = max(counts["largest_id"], int(ids.max()))
            counts["num_bytes"] += sum(table["num_bytes"].to_pylist())
    return counts | {"dtype": documents.features["ids"].feature.dtype}


def _open_token_file(folder: Path, vocab_size: int) -> TokenFile:
    metadata = json.loads((folder / "metadata.json").read_text())
    largest, tokenizer = metadata["largest_id"], metadata["source"]["tokenizer"]
    if largest >= vocab_size:
        problem = f"token id {largest} of tokenizer {tokenizer!r} is outside a vocabulary"
        remedy = f"set model.vocab_size to {metadata['tokenizer_vocab_size']} or more"
        own = "or dataset.tokenizer to the model's own"
        raise ValueError(f"{problem} of {vocab_size}: {remedy}, {own}")
    tokens = np.memmap(folder / "tokens.bin", dtype=metadata["dtype"], mode="r")
    if len(tokens) != (expected := metadata["num_tokens"]):
        problem = f"{folder} is damaged: it has {len(tokens)} tokens instead of {expected}"
        raise ValueError(f"{problem}. Delete it, and it will be made again")
    return TokenFile(tokens, metadata["num_bytes"], metadata["num_documents"])
