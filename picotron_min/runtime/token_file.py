"""Text -> one stream of token ids on disk, in a folder named after all that it is made from."""

import glob
import hashlib
import json
import os
import shutil
import sys
import sysconfig
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from filelock import FileLock

from picotron_min.runtime.config import Config
from picotron_min.runtime.json_file import read_json, write_json
from picotron_min.runtime.tokenizer import Tokenizer, tokenizer_files

VERSION = 3  # of what is written
PART = 2**24  # ids that are looked at together: a file may be larger than memory


class TokenFile(NamedTuple):
    """A tokenised text: the stream, mapped into memory and read from disk as it is used."""

    tokens: np.ndarray  # [num_tokens], one end-of-text after each document
    num_bytes: int | None  # UTF-8 bytes of the text; None: not known
    num_documents: int
    ends: np.ndarray | None = None  # int64: where in the stream each document ends, for its mask

    @property
    def tokens_per_byte(self) -> float | None:
        """Turns a loss per token into one per byte, which compares across tokenizers."""
        return len(self.tokens) / self.num_bytes if self.num_bytes else None


def open_text(config: Config, tokenizer: Tokenizer, vocab_size: int) -> TokenFile:
    """The tokens of the dataset, made now if no run has made them before.

    Every process calls this: one tokenises, the others wait. Raises ValueError for the user's
    mistakes, such as ids that a model of this vocabulary does not have.
    """
    if (ids := tokenizer.vocab_size) > vocab_size:
        problem = f"dataset.tokenizer={config.tokenizer} has token ids up to {ids - 1}, and"
        remedy = f"set model.vocab_size to {ids} or more, or dataset.tokenizer to the model's own"
        raise ValueError(f"{problem} model.vocab_size={vocab_size}: {remedy}")
    if os.path.isfile(config.dataset.name) and config.dataset.name.endswith((".npy", ".bin")):
        return _open_ids(config, tokenizer, vocab_size)
    loader, files = _find_files(config)
    folder = Path(config.dataset.cache_dir, _cache_key(config, files))
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        # A file lock, not a process group: it works before there is one, across nodes with or
        # without a common file system, and without a timeout, for tokenising can take hours.
        with FileLock(folder.with_suffix(".lock")):
            if not folder.exists():
                _write_token_file(folder, config, tokenizer, loader, files)
    return _open_token_file(folder)


def _open_ids(config: Config, tokenizer: Tokenizer, vocab_size: int) -> TokenFile:
    """Ids that another tool has made: numpy's .npy, or .bin as nanoGPT's, without a header."""
    name = config.dataset.name
    if config.training.num_samples or config.dataset.subset_name:
        raise ValueError(f"num_samples and subset_name must be null: {name} has no documents apart")
    try:
        if name.endswith(".npy"):
            tokens = np.load(name, mmap_mode="r")
        else:
            tokens = np.memmap(name, "uint16" if vocab_size <= 2**16 else "uint32", mode="r")
    except (ValueError, EOFError) as error:
        raise ValueError(f"dataset.name={name} cannot be read: {error}") from None
    if tokens.ndim != 1 or tokens.dtype not in (np.uint16, np.uint32):
        found = f"{tokens.ndim} axes of {tokens.dtype}"
        raise ValueError(f"dataset.name={name} has {found}: write one of uint16 or uint32")
    largest, ends = 0, [len(tokens)]  # of the last document, whether it is whole or cut off
    for start in range(0, len(tokens), PART):
        part = tokens[start : start + PART]
        largest = max(largest, part.max())
        ends = np.append(ends, start + 1 + np.flatnonzero(part == tokenizer.eos_token_id))
    if largest >= vocab_size:
        problem = f"dataset.name={name} has the token id {largest}, and the model {vocab_size} ids"
        raise ValueError(f"{problem}: set model.vocab_size, or dataset.tokenizer to its maker's")
    ends, end = np.unique(ends), tokenizer.eos_token_id
    if config.dataset.document_mask and end not in tokens[ends[0] - 1 : ends[0]]:
        problem = f"document_mask=true, but dataset.name={name} has no end-of-text id {end}"
        raise ValueError(f"{problem}: set dataset.tokenizer to its maker's, or the mask to false")
    return TokenFile(tokens, None, len(ends), ends)


def _cache_key(config: Config, files: list[Path]) -> str:
    """Another one for a changed file; after a change on the hub, delete the cache by hand."""
    source = config.dataset.model_dump(include={"name", "subset_name", "split", "text_column"})
    source |= {"num_samples": config.training.num_samples, "tokenizer": config.tokenizer}
    parts = [VERSION, source]
    for file in [*files, *tokenizer_files(config.tokenizer)]:
        parts.append((str(file), (stat := file.stat()).st_size, stat.st_mtime_ns))
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


LOADERS = {".txt": "text", ".jsonl": "json", ".json": "json", ".parquet": "parquet"}


def _find_files(config: Config) -> tuple[str, list[Path]]:
    """What reads the dataset ("hub", "saved" or a loader of `datasets`), and its local files.

    A .txt file is one document, and needs many times its size in memory; lines of .jsonl and .json
    and rows of .parquet are documents. A folder is what `save_to_disk` wrote, or all files of one
    of these kinds, at any depth.
    """
    name, subset = config.dataset.name, config.dataset.subset_name
    path = Path(name).resolve()
    if name != "stdlib" and not os.path.exists(path):  # the config's checks allow no other name
        return "hub", []
    if subset:
        problem = f"subset_name={subset!r} is for the hub, but {name!r} is not there"
        raise ValueError(f"{problem}: set dataset.subset_name to null")
    if name == "stdlib":  # the top level of Python's own library: 5 MB of text on any machine
        library = Path(sysconfig.get_path("stdlib"))
        # English first: runs validate on the end of the text, which should be like the rest.
        return "text", [*library.glob("pydoc_data/topics.py"), *sorted(library.glob("*.py"))]
    files = sorted(file for file in (path, *path.rglob("*")) if file.is_file())
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


def _write_token_file(
    folder: Path, config: Config, tokenizer: Tokenizer, loader: str, files: list[Path]
) -> None:
    """Write aside and rename, so that `folder` is complete or absent, whenever we are killed."""
    import datasets

    aside, num_proc = folder.with_suffix(".partial"), config.dataset.num_proc
    shutil.rmtree(aside, ignore_errors=True)  # what a killed process left
    (done := aside / "done").mkdir(parents=True)
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    ids = datasets.Sequence(datasets.Value("uint32"))
    try:
        texts = _texts(config, _load_splits(config, loader, files, aside))
        documents = texts.map(
            partial(_encode, tokenizer=tokenizer),
            batched=True,
            input_columns=texts.column_names,
            remove_columns=texts.column_names,
            features=datasets.Features({"ids": ids, "num_bytes": datasets.Value("int64")}),
            num_proc=num_proc if num_proc > 1 else None,  # 1 would start a process
            cache_file_name=str(aside / "ids.arrow"),
            desc=f"Tokenising {config.dataset.name}",
        )
        if not len(documents):
            raise ValueError(f"dataset {config.dataset.name!r} holds no text")
        dtype = "uint16" if tokenizer.vocab_size <= 2**16 else "uint32"  # 2 bytes halve the stream
        chunks = documents.data.column("ids").chunks  # mapped into memory
        lengths = np.concatenate([chunk.value_lengths().to_numpy() for chunk in chunks])
        lengths.cumsum(dtype=np.int64).tofile(done / "documents.bin")
        with open(done / "tokens.bin", "wb") as file:
            for chunk in chunks:
                chunk.flatten().to_numpy().astype(dtype).tofile(file)
            num_tokens = file.tell() // np.dtype(dtype).itemsize
        counts = {"num_bytes": sum(documents["num_bytes"]), "num_documents": len(documents)}
        write_json(done / "metadata.json", counts | {"num_tokens": num_tokens, "dtype": dtype})
        os.replace(done, folder)
    except UnicodeDecodeError as error:  # it has the bytes of a document, and names no file
        file = next((f for f in files if error.object in f.read_bytes()), config.dataset.name)
        raise ValueError(f"{file} is not text in UTF-8: convert or remove it") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _load_splits(config: Config, loader: str, files: list[Path], aside: Path) -> dict:
    """Split -> `datasets.Dataset`."""
    import datasets

    name, subset, split = config.dataset.name, config.dataset.subset_name, config.dataset.split
    try:
        if loader == "hub":
            return {split: datasets.load_dataset(name, subset, split=split)}
        if loader == "saved":
            splits = datasets.load_from_disk(name)
            return {"train": splits} if isinstance(splits, datasets.Dataset) else splits
        options = {"sample_by": "document"} if loader == "text" else {}
        paths = [glob.escape(str(file)) for file in files]  # datasets reads them as patterns
        return datasets.load_dataset(loader, data_files=paths, cache_dir=aside, **options)
    except Exception as error:
        cause = error.__cause__ or error
        reason = f"{type(cause).__name__}: {str(cause).strip().partition(chr(10))[0].rstrip('.')}"
        if isinstance(cause, UnicodeDecodeError):  # see _write_token_file
            raise cause from None
        if files and not any(file.read_bytes().strip() for file in files):
            reason = "it holds no text"
        problem = f"cannot read dataset {name!r}: {reason}"
        if loader == "hub":
            problem += f" (of the hub, subset {subset!r}, split {split!r}). Check the spelling and"
            problem += ' network, or set dataset.name to "stdlib" or a local file'
        raise ValueError(problem) from error


def _texts(config: Config, splits: dict):
    """The rows of the split that is asked for, with their column of text alone, checked."""
    split, column = config.dataset.split, config.dataset.text_column
    name = f"dataset {config.dataset.name!r}"
    if split not in splits:
        raise ValueError(f"{name} has no split {split!r}: set dataset.split to one of {[*splits]}")
    rows = splits[split]
    kinds = {key: getattr(feature, "dtype", "nested") for key, feature in rows.features.items()}
    remedy = f"set dataset.text_column to one that holds strings, of {kinds}"
    if kinds.get(column) not in ("string", "large_string"):
        raise ValueError(f"{name} has no text in column {column!r}: {remedy}")
    rows = rows.select(range(len(rows))[: config.training.num_samples]).select_columns(column)
    if (row := rows.data.column(column).is_null().index(True).as_py()) >= 0:
        raise ValueError(f"row {row} of {name} has no text (null): remove it, or {remedy}")
    return rows


def _encode(texts: list[str], tokenizer: Tokenizer) -> dict[str, list]:
    texts = [text for text in texts if text]  # an empty document would be a lone end-of-text
    end = np.uint32(tokenizer.eos_token_id)
    ids = [np.append(row, end) for row in tokenizer.encode(texts)]
    return {"ids": ids, "num_bytes": [len(text.encode()) for text in texts]}


def _open_token_file(folder: Path) -> TokenFile:
    metadata = read_json(folder / "metadata.json")
    tokens = np.memmap(folder / "tokens.bin", dtype=metadata["dtype"], mode="r")
    ends = np.memmap(folder / "documents.bin", dtype=np.int64, mode="r")
    expected = metadata["num_tokens"], metadata["num_documents"], metadata["num_tokens"]
    if (found := (len(tokens), len(ends), int(ends[-1]))) != expected:
        what = f"tokens, documents and the end of the last are {found} instead of {expected}"
        raise ValueError(f"{folder} is damaged: {what}. Delete it, and it will be made again")
    return TokenFile(tokens, metadata["num_bytes"], metadata["num_documents"], ends)
