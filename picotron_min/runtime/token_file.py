"""Text -> one stream of token ids on disk, in a folder named after all that it is made from."""

import hashlib
import json
import os
import shutil
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
from filelock import FileLock

from picotron_min.runtime.config import Config
from picotron_min.runtime.corpus import IDS, Corpus, find_corpus, open_documents
from picotron_min.runtime.json_file import read_json, write_json
from picotron_min.runtime.ready_ids import open_ids
from picotron_min.runtime.tokenizer import Tokenizer
from picotron_min.runtime.wording import explained, human

VERSION = 5  # of what is written
TOKENS, ENDS = "tokens.bin", "documents.bin"
BATCH = 64  # documents that are encoded together


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
        raise ValueError(
            f"dataset.tokenizer={config.tokenizer} has token ids up to {ids - 1}, and "
            f"model.vocab_size={vocab_size}: "
            f"set model.vocab_size to {ids} or more, or dataset.tokenizer to the model's own"
        )
    if os.path.isfile(config.dataset.name) and config.dataset.name.endswith(IDS):
        return _open_ids(config, tokenizer, vocab_size)
    corpus = find_corpus(config.dataset)
    folder = Path(config.dataset.cache_dir, _cache_key(config, tokenizer, corpus.files))
    problem = f"dataset.cache_dir={config.dataset.cache_dir} cannot be used"
    with explained(problem, "mend that, or name another folder", of=OSError):
        if not folder.exists():
            folder.parent.mkdir(parents=True, exist_ok=True)
            # A file lock, not a process group: it works before there is one, across nodes with or
            # without a common file system, and without a timeout, for tokenising can take hours.
            with FileLock(folder.with_suffix(".lock")):
                if not folder.exists():
                    _write_token_file(folder, config, tokenizer, corpus)
        return _open_token_file(folder)._replace(not_read=tuple(corpus.not_read))


def _open_ids(config: Config, tokenizer: Tokenizer, vocab_size: int) -> TokenFile:
    name, end = config.dataset.name, tokenizer.eos_token_id
    if config.training.num_samples or config.dataset.subset_name:
        raise ValueError(f"num_samples and subset_name must be null: {name} has no documents apart")
    tokens, ends, checksum = open_ids(name, vocab_size, end)
    if config.dataset.document_mask and end not in tokens[ends[0] - 1 : ends[0]]:
        raise ValueError(
            f"document_mask=true, but dataset.name={name} has no end-of-text id {end}: "
            "set dataset.tokenizer to its maker's, or the mask to false"
        )
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
    aside.mkdir(exist_ok=True)  # a killed process may have left it
    num_tokens, checksum, counts, last_print = 0, 0, Counter(), time.monotonic()
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, aside, ignore_errors=True)  # after a mistake in the corpus
        documents = open_documents(config.dataset, corpus)
        documents = islice(documents, config.training.num_samples)
        with open(aside / TOKENS, "wb") as tokens, open(aside / ENDS, "wb") as ends:
            for ids, lengths, found in _encoded(documents, config.dataset.num_proc, tokenizer):
                (num_tokens + lengths.cumsum(dtype=np.int64)).tofile(ends)
                written = ids.astype(dtype).tobytes()
                tokens.write(written)
                num_tokens, checksum = num_tokens + len(ids), zlib.crc32(written, checksum)
                counts.update(found)
                if time.monotonic() > last_print + 30:
                    print(f"tokenised {human(num_tokens)} tokens of {name}", flush=True)
                    last_print = time.monotonic()
        if not num_tokens:
            raise ValueError(f"dataset {name!r} holds no text")
        facts = {**counts, "dtype": dtype, "checksum": f"{checksum:08x}"}
        write_json(aside / "metadata.json", facts)
        os.replace(aside, folder)


Part = tuple[np.ndarray, np.ndarray, dict[str, int]]  # ids of documents, their lengths, and counts


def _encoded(documents: Iterator[str], num_proc: int, tokenizer: Tokenizer) -> Iterator[Part]:
    """The ids of all documents, in order, made by `num_proc` threads."""
    documents = filter(None, documents)  # an empty document would be a lone end-of-text
    batches = iter(lambda: [*islice(documents, BATCH)], [])
    with ThreadPoolExecutor(num_proc) as threads:
        while some := [*islice(batches, num_proc)]:
            yield from threads.map(partial(_encode, tokenizer=tokenizer), some)


def _encode(texts: list[str], tokenizer: Tokenizer) -> Part:
    end, ids = np.uint32(tokenizer.eos_token_id), tokenizer.encode(texts)
    counts = {"num_bytes": sum(len(text.encode()) for text in texts)}
    counts["with_end_inside"] = sum(bool((row == end).any()) for row in ids)
    ids = [np.append(row, end) for row in ids]
    return np.concatenate(ids), np.array([*map(len, ids)]), counts


def _open_token_file(folder: Path) -> TokenFile:
    facts = read_json(folder / "metadata.json")
    tokens = np.memmap(folder / TOKENS, dtype=facts.pop("dtype"), mode="r")
    ends = np.memmap(folder / ENDS, dtype=np.int64, mode="r")
    if ends[-1] != len(tokens):
        raise ValueError(
            f"{folder} is damaged: its {len(tokens)} tokens should be {ends[-1]}. "
            "Delete it, and it will be made again"
        )
    return TokenFile(tokens, num_documents=len(ends), ends=ends, **facts)
