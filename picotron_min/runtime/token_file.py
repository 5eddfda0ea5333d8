"""Text -> one stream of token ids on disk.

All documents stand in one row, an end-of-text token after each; what a sequence is, data.py says.
Made once, by whoever comes first, and kept in a folder named after all that it is made from.
"""

import glob
import hashlib
import json
import os
import shutil
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from picotron_min.runtime.tokenizer import Tokenizer, load_tokenizer


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
    name: str,
    *,
    subset_name: str | None = None,
    split: str = "train",
    text_column: str = "text",
    num_samples: int | None = None,
    num_proc: int = 1,
    tokenizer: str = "bytes",
    vocab_size: int,
    cache_dir: str | Path,
) -> TokenFile:
    """Tokenise a text unless `cache_dir` has it already, and open the stream.

    `name` is `stdlib`, a local file, a local folder, or a hub id; see `_find_files`. `num_samples`
    keeps the first documents only. Every process calls this: one tokenises, the others wait.
    Raises ValueError for what the user can put right.
    """
    from filelock import FileLock

    loader, files = _find_files(name)
    if subset_name and loader != "hub":
        raise ValueError(
            f"subset_name={subset_name!r} is for datasets on the hub, but {name!r} is on this"
            " machine: set dataset.subset_name to null"
        )
    tokenizer_folder = Path(tokenizer).expanduser()
    tokenizer_files = tokenizer_folder.glob("*") if tokenizer_folder.is_dir() else []
    # All that decides which numbers are in the stream. A changed file is noticed; a dataset or
    # tokenizer that changes on the hub is not: delete the cache to fetch it anew.
    source = {
        "format": 1,
        "name": name,
        "files": _identity(files),
        "subset_name": subset_name,
        "split": split,
        "text_column": text_column,
        "num_samples": num_samples,
        "tokenizer": tokenizer,
        "tokenizer_files": _identity(tokenizer_files),
    }
    key = hashlib.sha256(json.dumps(source).encode()).hexdigest()[:32]
    cache = Path(cache_dir).expanduser()
    folder = cache / key
    if not folder.exists():
        cache.mkdir(parents=True, exist_ok=True)
        # A file lock, not a process group: it works before there is one, across nodes with or
        # without a common file system, and without a timeout, for tokenising can take hours.
        with FileLock(cache / f"{key}.lock"):
            if not folder.exists():
                _write_token_file(folder, source, loader, files, num_proc)
    return _open_token_file(folder, vocab_size)


LOADERS = {".txt": "text", ".jsonl": "json", ".json": "json", ".parquet": "parquet"}


def _find_files(name: str) -> tuple[str, list[Path]]:
    """How to load `name`, and from which files.

    `stdlib` is Python's own standard library (its top level, 5 MB): real text on every machine. A
    .txt file is one document; the lines of .jsonl and .json and the rows of .parquet are documents.
    A folder is what `save_to_disk` wrote, or all files of one of these kinds, at any depth. What is
    not on this machine is taken to be on the hub.
    """
    if name == "stdlib":
        library = Path(sysconfig.get_path("stdlib"))
        files = [*sorted(library.glob("*.py")), library / "pydoc_data" / "topics.py"]
        return "text", [file for file in files if file.exists()]
    path = Path(name).expanduser().resolve()
    kinds = ", ".join(LOADERS)
    if path.is_file():
        if path.suffix.lower() not in LOADERS:
            raise ValueError(f"cannot read {path}: a dataset is one of {kinds}, not {path.suffix}")
        return LOADERS[path.suffix.lower()], [path]
    if not path.is_dir():
        # Names without an owner are refused because some, such as "text", would make `datasets`
        # read whatever lies in the working directory.
        if name.count("/") != 1:
            raise ValueError(
                f"dataset {name!r} is not on this machine, and on the hub it would be owner/name:"
                ' set dataset.name to "stdlib", to a file or folder that exists, or to a hub id'
            )
        return "hub", []
    files = sorted(file for file in path.rglob("*") if file.is_file())
    if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
        return "saved", files
    files = [
        file
        for file in files
        if file.suffix.lower() in LOADERS
        and not any(part.startswith(".") for part in file.relative_to(path).parts)
    ]
    if not files:
        raise ValueError(f"folder {path} holds no dataset: none of its files is {kinds}")
    found = {LOADERS[file.suffix.lower()]: file for file in files}
    if len(found) > 1:
        examples = ", ".join(str(file.relative_to(path)) for file in found.values())
        raise ValueError(
            f"folder {path} mixes {len(found)} kinds of dataset ({examples}): keep one kind in it"
        )
    return next(iter(found)), files


def _identity(files) -> list[tuple[str, int, int]]:
    facts = [(str(file), file.stat()) for file in sorted(files)]
    return [(file, stat.st_size, stat.st_mtime_ns) for file, stat in facts]


def _write_token_file(
    folder: Path, source: dict, loader: str, files: list[Path], num_proc: int
) -> None:
    """Write aside and rename, so that `folder` is complete or absent, whenever we are killed."""
    aside = folder.with_suffix(".partial")
    shutil.rmtree(aside, ignore_errors=True)  # what a killed process left
    done = aside / "done"
    done.mkdir(parents=True)
    try:
        tokenizer = load_tokenizer(source["tokenizer"])  # first: its failure is the cheap one
        documents = _load_documents(source, loader, files, aside)
        documents = _tokenize(documents, source, tokenizer, num_proc, aside)
        facts = _write_stream(documents, done / "tokens.bin")
        if not facts["num_documents"]:
            raise ValueError(
                f"dataset {source['name']!r} has no text: all of its documents are empty"
            )
        facts |= {"largest_possible_id": tokenizer.vocab_size - 1, "source": source}
        (done / "facts.json").write_text(json.dumps(facts, indent=1))
        os.replace(done, folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _load_documents(source: dict, loader: str, files: list[Path], aside: Path):
    """The `datasets.Dataset` whose rows are the documents, its text column checked."""
    import datasets

    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    name, split, text_column = source["name"], source["split"], source["text_column"]
    if files and not any(file.stat().st_size for file in files):
        raise ValueError(f"dataset {name!r} is empty: all of its {len(files)} file(s) have 0 bytes")
    try:
        if loader == "hub":
            splits = {split: datasets.load_dataset(name, source["subset_name"], split=split)}
        elif loader == "saved":
            splits = datasets.load_from_disk(Path(name).expanduser())
            if isinstance(splits, datasets.Dataset):
                splits = {"train": splits}
        else:
            options = {"sample_by": "document"} if loader == "text" else {}
            paths = [glob.escape(str(file)) for file in files]  # datasets reads them as patterns
            splits = datasets.load_dataset(loader, data_files=paths, cache_dir=aside, **options)
    except Exception as error:
        cause = error
        while cause.__cause__:
            cause = cause.__cause__
        reason = f"{type(cause).__name__}: {str(cause).strip().splitlines()[0].rstrip('.')}"
        if loader != "hub":
            raise ValueError(f"cannot read dataset {name!r}: {reason}") from error
        raise ValueError(
            f"dataset {name!r} is not on this machine, and the Hugging Face hub did not give its"
            f" subset {source['subset_name']!r}, split {split!r}: {reason}. Check the spelling and"
            ' the network, or set dataset.name to "stdlib" or to a local file'
        ) from error
    if split not in splits:
        raise ValueError(
            f"dataset {name!r} has no split {split!r}: set dataset.split to one of {list(splits)}"
        )
    documents = splits[split]
    if not len(documents):
        raise ValueError(f"dataset {name!r} is empty: its split {split!r} has 0 documents")
    if text_column not in documents.column_names:
        raise ValueError(
            f"dataset {name!r} has no column {text_column!r}: set dataset.text_column to one of"
            f" {documents.column_names}"
        )
    dtype = getattr(documents.features[text_column], "dtype", "no single value")
    if dtype not in ("string", "large_string"):
        raise ValueError(
            f"column {text_column!r} of dataset {name!r} holds {dtype}, not text: set"
            f" dataset.text_column to another of {documents.column_names}"
        )
    if source["num_samples"] is not None:
        documents = documents.select(range(min(source["num_samples"], len(documents))))
    return documents


def _tokenize(documents, source: dict, tokenizer: Tokenizer, num_proc: int, aside: Path):
    """The documents as rows of ids; `datasets` shares the work among `num_proc` processes.

    A document is tokenised in one piece, so a text file of gigabytes needs many times its size in
    memory: cut it up, or make each of its paragraphs a line of a .jsonl file.
    """
    import datasets

    # Two bytes a token halve the stream, and vocabularies up to 65536 fit in them.
    dtype = np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32
    ids = datasets.Sequence(datasets.Value(np.dtype(dtype).name))
    return documents.map(
        _tokenize_batch,
        batched=True,
        with_indices=True,
        input_columns=[source["text_column"]],
        remove_columns=documents.column_names,
        features=datasets.Features({"ids": ids, "num_bytes": datasets.Value("int64")}),
        fn_kwargs={"tokenizer": tokenizer, "dtype": dtype, "name": source["name"]},
        num_proc=num_proc if num_proc > 1 else None,
        cache_file_name=str(aside / "ids.arrow"),
        desc=f"Tokenising {source['name']}",
    )


def _tokenize_batch(texts: list[str], rows: list[int], tokenizer: Tokenizer, dtype, name: str):
    if None in texts:
        raise ValueError(
            f"row {rows[texts.index(None)]} of dataset {name!r} has no text (null):"
            " remove such rows, or choose another dataset.text_column"
        )
    texts = [text for text in texts if text]  # an empty document would be a lone end-of-text
    end = np.array([tokenizer.eos_token_id], dtype)
    ids = [np.concatenate([row, end], dtype=dtype) for row in tokenizer.encode(texts)]
    return {"ids": ids, "num_bytes": [len(text.encode()) for text in texts]}


def _write_stream(documents, path: Path) -> dict:
    """Write all ids to one file, a thousand documents at a time, and count."""
    facts = {"num_tokens": 0, "num_bytes": 0, "num_documents": len(documents), "largest_id": 0}
    facts["dtype"] = documents.features["ids"].feature.dtype
    with open(path, "wb") as file:
        for table in documents.with_format("arrow").iter(batch_size=1000):
            for chunk in table["ids"].chunks:
                ids = chunk.flatten().to_numpy()
                ids.tofile(file)
                facts["num_tokens"] += len(ids)
                facts["largest_id"] = max(facts["largest_id"], int(ids.max()))
            facts["num_bytes"] += sum(table["num_bytes"].to_pylist())
    return facts


def _open_token_file(folder: Path, vocab_size: int) -> TokenFile:
    facts = json.loads((folder / "facts.json").read_text())
    if facts["largest_id"] >= vocab_size:
        raise ValueError(
            f"token id {facts['largest_id']} of tokenizer {facts['source']['tokenizer']!r} is"
            f" outside a vocabulary of {vocab_size}: set model.vocab_size to"
            f" {facts['largest_possible_id'] + 1} or more, or dataset.tokenizer to the model's own"
        )
    tokens = np.memmap(folder / "tokens.bin", dtype=facts["dtype"], mode="r")
    if len(tokens) != facts["num_tokens"]:
        raise ValueError(
            f"{folder} is damaged: it has {len(tokens)} tokens instead of {facts['num_tokens']}."
            " Delete it, and it will be made again"
        )
    return TokenFile(tokens, facts["num_bytes"], facts["num_documents"])
