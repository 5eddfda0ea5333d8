"""Text -> one stream of token ids on disk, in a folder named after all that it is made from."""

import hashlib
import json
import os
import shutil
import time
import zlib
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from filelock import FileLock
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from picotron_min.runtime.config import Config
from picotron_min.runtime.corpus import Corpus, find_corpus, open_documents
from picotron_min.runtime.json_file import read_json, write_json
from picotron_min.runtime.launch import exit_with_parent
from picotron_min.runtime.ready_ids import open_ids
from picotron_min.runtime.tokenizer import Tokenizer
from picotron_min.runtime.wording import human

VERSION = 4  # of what is written
BATCH = 2**20  # characters that are encoded together


class TokenFile(NamedTuple):
    """A tokenised text: the stream, mapped into memory and read from disk as it is used."""

    tokens: np.ndarray  # [num_tokens], one end-of-text after each document
    num_bytes: int | None  # UTF-8 bytes of the text; None: not known
    num_documents: int
    ends: np.ndarray | None = None  # int64: where in the stream each document ends, for its mask
    checksum: str = ""  # of the stream, to notice another one
    with_end_inside: int = 0  # documents whose own text has the end-of-text token
    not_read: tuple[str, ...] = ()  # files of the dataset's folder

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
    corpus = find_corpus(config.dataset)
    folder = Path(config.dataset.cache_dir, _cache_key(config, tokenizer, corpus.files))
    try:
        if not folder.exists():
            folder.parent.mkdir(parents=True, exist_ok=True)
            # A file lock, not a process group: it works before there is one, across nodes with or
            # without a common file system, and without a timeout, for tokenising can take hours.
            with FileLock(folder.with_suffix(".lock")):
                if not folder.exists():
                    _write_token_file(folder, config, tokenizer, corpus)
        text = _open_token_file(folder)
    except OSError as error:  # those of the corpus are ValueErrors
        problem = f"dataset.cache_dir={config.dataset.cache_dir} cannot be used ({error})"
        raise ValueError(f"{problem}: mend that, or name another folder") from error
    return text._replace(not_read=tuple(corpus.not_read))


def _open_ids(config: Config, tokenizer: Tokenizer, vocab_size: int) -> TokenFile:
    name, end = config.dataset.name, tokenizer.eos_token_id
    if config.training.num_samples or config.dataset.subset_name:
        raise ValueError(f"num_samples and subset_name must be null: {name} has no documents apart")
    tokens, ends, checksum = open_ids(name, vocab_size, end)
    if config.dataset.document_mask and end not in tokens[ends[0] - 1 : ends[0]]:
        problem = f"document_mask=true, but dataset.name={name} has no end-of-text id {end}"
        raise ValueError(f"{problem}: set dataset.tokenizer to its maker's, or the mask to false")
    return TokenFile(tokens, None, len(ends), ends, checksum)


def _cache_key(config: Config, tokenizer: Tokenizer, files: list[Path]) -> str:
    """Another one for a changed file; after a change on the hub, delete the cache by hand."""
    source = config.dataset.model_dump(include={"name", "subset_name", "split", "text_column"})
    parts = [VERSION, source, config.training.num_samples, tokenizer.checksum]
    for file in files:
        stat = file.stat()  # copies may keep the time of a change, but never that of the copy
        parts.append((str(file), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino))
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _write_token_file(folder: Path, config: Config, tokenizer: Tokenizer, corpus: Corpus) -> None:
    """Write aside and rename, so that `folder` is complete or absent, whenever we are killed."""
    aside, name = folder.with_suffix(".partial"), config.dataset.name
    dtype = "uint16" if tokenizer.vocab_size <= 2**16 else "uint32"  # 2 bytes halve the stream
    shutil.rmtree(aside, ignore_errors=True)  # what a killed process left
    aside.mkdir()
    counts = {"num_bytes": 0, "num_documents": 0, "num_tokens": 0, "with_end_inside": 0}
    checksum, last_print = 0, time.monotonic()
    try:
        documents = open_documents(config.dataset, corpus)
        with (
            open(aside / "tokens.bin", "wb") as tokens,
            open(aside / "documents.bin", "wb") as ends,
        ):
            for part in _encoded(documents, config, tokenizer):
                (counts["num_tokens"] + part.lengths.cumsum(dtype=np.int64)).tofile(ends)
                written = part.ids.astype(dtype).tobytes()
                tokens.write(written)
                checksum = zlib.crc32(written, checksum)
                for key in counts:
                    counts[key] += getattr(part, key)
                if time.monotonic() > last_print + 30:
                    print(f"tokenised {human(counts['num_tokens'])} tokens of {name}", flush=True)
                    last_print = time.monotonic()
        if not counts["num_documents"]:
            raise ValueError(f"dataset {name!r} holds no text")
        metadata = {"dtype": dtype, "checksum": f"{checksum:08x}"}
        write_json(aside / "metadata.json", counts | metadata)
        os.replace(aside, folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


class Part(NamedTuple):
    """Some documents as ids."""

    ids: np.ndarray  # of all of them, one after another
    lengths: np.ndarray  # of each
    num_bytes: int  # of their text in UTF-8
    with_end_inside: int

    @property
    def num_documents(self) -> int:
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        return len(self.ids)


def _encoded(
    documents: Callable[[], Iterator[str]], config: Config, tokenizer: Tokenizer
) -> Iterator[Part]:
    """The ids of all documents, in order, made by dataset.num_proc processes."""
    num_samples, num_proc = config.training.num_samples, config.dataset.num_proc
    parts = Encoded(lambda: _batches(islice(documents(), num_samples)), tokenizer)
    # 1 would start a process. With a generator of its own it draws nothing from torch's.
    options = {"num_workers": num_proc, "multiprocessing_context": "fork"} if num_proc > 1 else {}
    options |= {"worker_init_fn": lambda _: exit_with_parent()}
    options |= {"collate_fn": lambda part: part, "generator": torch.Generator()}
    for part in DataLoader(parts, batch_size=None, **options):
        if isinstance(part, ValueError):
            raise part
        yield part


class Encoded(IterableDataset):
    """Each of n processes reads the whole corpus, and encodes every n-th batch of documents."""

    def __init__(self, batches: Callable[[], Iterator[list[str]]], tokenizer: Tokenizer) -> None:
        self.batches, self.tokenizer = batches, tokenizer

    def __iter__(self) -> Iterator[Part | ValueError]:
        worker = get_worker_info()
        first, every = (worker.id, worker.num_workers) if worker else (0, 1)
        try:
            for texts in islice(self.batches(), first, None, every):
                yield _encode(texts, self.tokenizer)
        except ValueError as error:  # if it were raised, torch would make its message a traceback
            yield error


def _batches(documents: Iterator[str]) -> Iterator[list[str]]:
    batch, size = [], 0
    for text in filter(None, documents):  # an empty document would be a lone end-of-text
        batch.append(text)
        if (size := size + len(text)) >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _encode(texts: list[str], tokenizer: Tokenizer) -> Part:
    end, ids = np.uint32(tokenizer.eos_token_id), tokenizer.encode(texts)
    with_end = sum(bool((row == end).any()) for row in ids)
    ids = [np.append(row, end) for row in ids]
    num_bytes = sum(len(text.encode()) for text in texts)
    return Part(np.concatenate(ids), np.array([*map(len, ids)]), num_bytes, with_end)


def _open_token_file(folder: Path) -> TokenFile:
    metadata = read_json(folder / "metadata.json")
    tokens = np.memmap(folder / "tokens.bin", dtype=metadata["dtype"], mode="r")
    ends = np.memmap(folder / "documents.bin", dtype=np.int64, mode="r")
    expected = metadata["num_tokens"], metadata["num_documents"], metadata["num_tokens"]
    if (found := (len(tokens), len(ends), int(ends[-1]))) != expected:
        what = f"tokens, documents and the end of the last are {found} instead of {expected}"
        raise ValueError(f"{folder} is damaged: {what}. Delete it, and it will be made again")
    more = {key: metadata[key] for key in ("checksum", "with_end_inside")}
    return TokenFile(tokens, metadata["num_bytes"], metadata["num_documents"], ends, **more)
