"""The stream of token ids: what it is made from, by which process, and the user's mistakes."""

import gzip
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from picotron_min.runtime import token_file
from picotron_min.runtime.config import Config
from picotron_min.runtime.token_file import open_text
from picotron_min.runtime.tokenizer import BytesTokenizer, load_tokenizer
from tests.pool import run_forked

TEXTS = ["To be, or not to be", "grün 😀\n\tand\x00 so on", "x"]
STREAM = [i for text in TEXTS for i in [*text.encode(), 256]]


@pytest.fixture
def prepare(tmp_path):
    """open_text with a cache of this test's own."""

    def prepare(name, *, vocab_size=257, num_samples=None, **options):
        dataset = {"name": str(name), "cache_dir": str(tmp_path / "cache"), **options}
        config = Config(dataset=dataset, training={"num_samples": num_samples})
        return open_text(config, load_tokenizer(config.tokenizer), vocab_size)

    return prepare


@pytest.fixture
def offline(monkeypatch):
    import datasets
    import huggingface_hub

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


def write_jsonl(path, texts=TEXTS, column="text"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({column: text, "n": 1}) + "\n" for text in texts))
    return path


def write_dataset(kind, folder):
    """TEXTS in one of the forms a dataset can have."""
    from datasets import Dataset, DatasetDict

    folder.mkdir()
    dataset = Dataset.from_dict({"text": TEXTS})
    if kind == "jsonl":
        return write_jsonl(folder / "a.jsonl")
    if kind == "json":
        (folder / "a.json").write_text(json.dumps([{"text": text} for text in TEXTS]))
        return folder / "a.json"
    if kind == "parquet":
        dataset.to_parquet(folder / "a.parquet")
        return folder / "a.parquet"
    if kind == "saved dataset":
        dataset.save_to_disk(folder)
    if kind == "saved splits":
        other = Dataset.from_dict({"text": ["other"]})
        DatasetDict({"test": other, "train": dataset}).save_to_disk(folder)
    if kind == "folder of text":
        # Names that `datasets` would read as patterns, and files that are not part of a dataset.
        (folder / "deep").mkdir()
        for name, text in zip(["a[1].txt", "b*.txt", "deep/c.TXT"], TEXTS, strict=True):
            (folder / name).write_bytes(text.encode())
        (folder / "README.md").write_text("about")
        (folder / ".hidden.txt").write_text("hidden")
    if kind == "folder of jsonl":
        write_jsonl(folder / "a" / "1.jsonl", TEXTS[:2])
        write_jsonl(folder / "b" / "1.jsonl", TEXTS[2:])
    return folder


KINDS = ["jsonl", "json", "parquet", "saved dataset", "saved splits"]
KINDS += ["folder of text", "folder of jsonl"]


def test_the_saved_bytes_tokenizer_gives_the_bytes_back(tmp_path):
    from transformers import AutoTokenizer

    text = " \n\n\t leading, isn't it é 日本 😀 \x00\r\n" + "".join(map(chr, range(999)))
    BytesTokenizer().save(tmp_path)
    # Beside a Llama's config, as in a finished model's folder, which must not change its class.
    (tmp_path / "config.json").write_text('{"model_type": "llama", "vocab_size": 257}')
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer(text)["input_ids"]
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text
    assert BytesTokenizer().encode([text])[0].tolist() == ids
    assert (tokenizer.eos_token_id, len(tokenizer)) == (256, 257)
    assert tokenizer.decode([65, 256], skip_special_tokens=True) == "A"


def save_word_tokenizer(folder, words, puts=None, **special):
    """`puts` is a word put before each text."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel(words, "w0"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    if puts:
        front = [(puts, words[puts])]
        backend.post_processor = processors.TemplateProcessing(f"{puts} $A", None, front)
        special["bos_token"] = puts
    PreTrainedTokenizerFast(tokenizer_object=backend, **special).save_pretrained(folder)
    return str(folder)


def numbered(count):
    return {f"w{i}": i for i in range(count)}


def test_a_text_that_has_the_end_of_text_token_is_counted(prepare, tmp_path):
    tokenizer = save_word_tokenizer(tmp_path / "words", numbered(9), eos_token="w8")
    path = write_jsonl(tmp_path / "a.jsonl", ["w1 w8 w2", "w3"])
    file = prepare(path, tokenizer=tokenizer)
    assert file.tokens.tolist() == [1, 8, 2, 8, 3, 8] and file.with_end_inside == 1
    assert file.ends.tolist() == [4, 6]


def test_a_tokenizer_shows_its_bos_and_a_checksum_of_its_rules(tmp_path):
    """BOS may be put before a text, and then also be the end of the one before."""
    words, special = numbered(9), {"eos_token": "w8"}
    plain = load_tokenizer(save_word_tokenizer(tmp_path / "plain", words, **special))
    assert plain.bos_token_id is None and plain.adds == ([], [])
    puts = load_tokenizer(save_word_tokenizer(tmp_path / "bos", words, puts="w7", **special))
    assert puts.bos_token_id == 7 and puts.adds == ([7], [])
    same = load_tokenizer(save_word_tokenizer(tmp_path / "same", words, puts="w8", **special))
    assert same.bos_token_id == 8 and same.adds == ([], [])  # as GPT-2's
    other = load_tokenizer(save_word_tokenizer(tmp_path / "other", numbered(10), **special))
    again = load_tokenizer(str(tmp_path / "plain"))
    assert again.checksum == plain.checksum
    assert len({t.checksum for t in (plain, puts, other, BytesTokenizer())}) == 4


def test_ids_above_gaps_in_a_small_vocabulary_are_kept(prepare, tmp_path):
    """Ten tokens, and yet an id that two bytes would turn into another one."""
    words = {f"w{i}": i for i in range(9)} | {"end": 65536 + 7}
    tokenizer = save_word_tokenizer(tmp_path / "words", words, eos_token="end")
    assert load_tokenizer(tokenizer).vocab_size == 65536 + 8
    path = write_jsonl(tmp_path / "a.jsonl", ["w1 w2"])
    file = prepare(path, tokenizer=tokenizer, vocab_size=65536 + 8)
    assert file.tokens.dtype == np.uint32 and file.tokens.tolist() == [1, 2, 65536 + 7]
    with pytest.raises(ValueError, match=r"up to 65543, and model.vocab_size=65543: .* to 65544"):
        prepare(path, tokenizer=tokenizer, vocab_size=65536 + 7)


def train_tokenizer(path, special_tokens=()):
    """What a user of the `tokenizers` library has."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=262, special_tokens=list(special_tokens), initial_alphabet=alphabet,
        show_progress=False,
    )  # fmt: skip
    backend.train_from_iterator(["the cat and the dog"] * 9, trainer)
    path.parent.mkdir(exist_ok=True)
    backend.save(str(path))
    return backend


@pytest.mark.parametrize(
    "name,end",
    [("mine.json", "<|endoftext|>"), ("folder/tokenizer.json", "</s>"), ("folder", "[EOS]")],
)
def test_a_tokenizer_of_the_tokenizers_library_is_used_as_it_is(name, end, prepare, tmp_path):
    file = tmp_path / name / "tokenizer.json" if name == "folder" else tmp_path / name
    backend = train_tokenizer(file, ["[PAD]", end])
    path, tokenizer = write_jsonl(tmp_path / "a.jsonl", ["the dog"]), str(tmp_path / name)
    tokens = prepare(path, tokenizer=tokenizer, vocab_size=262).tokens.tolist()
    assert tokens == [*backend.encode("the dog").ids, 1]
    assert backend.decode(tokens, skip_special_tokens=False).endswith(end)
    assert load_tokenizer(tokenizer).vocab_size == 262
    load_tokenizer(tokenizer).save(tmp_path / "exported")
    assert load_tokenizer(str(tmp_path / "exported")).eos_token_id == 1


@pytest.mark.parametrize("name", ["folder/tokenizer.json", "folder"])
def test_the_line_that_is_asked_for_gives_a_tokenizer_its_end_of_text(name, prepare, tmp_path):
    train_tokenizer(tmp_path / "folder/tokenizer.json")
    path, tokenizer = write_jsonl(tmp_path / "a.jsonl", ["the dog"]), str(tmp_path / name)
    with pytest.raises(ValueError) as refusal:
        load_tokenizer(tokenizer)
    found = re.search(r"write (\{.*\}) to (\S+) in (\S+);", str(refusal.value))
    line, file, folder = found.groups()
    Path(folder, file).write_text(line)
    assert load_tokenizer(tokenizer).vocab_size == 263  # a new id
    tokens = prepare(path, tokenizer=tokenizer, vocab_size=263).tokens
    assert tokens[-1] == 262 and max(tokens[:-1]) < 262


def test_a_tokenizer_that_cannot_be_used_is_refused_with_the_remedy(tmp_path, offline):
    train_tokenizer(tmp_path / "mine.json", ["<pad>", "<stop>"])
    with pytest.raises(ValueError, match=r"in a folder .* own .<pad>, <stop>.$"):
        load_tokenizer(str(tmp_path / "mine.json"))
    (tmp_path / "other.json").write_text('{"hello": 1}')
    (tmp_path / "empty").mkdir()
    folders = [tmp_path / "other.json", tmp_path / "empty", "owner/nothing"]
    for name in ("tokenizer.json", "tokenizer_config.json"):  # whose copy was cut off
        folders.append(save_word_tokenizer(tmp_path / name[:-5], numbered(10), eos_token="w9"))
        path = Path(folders[-1], name)
        path.write_bytes(path.read_bytes()[:50])
    for name in map(str, folders):
        message = f"cannot load tokenizer '{name}': .*Check its files, or .*set dataset.tokenizer"
        with pytest.raises(ValueError, match=message):
            load_tokenizer(name)


def test_a_changed_tokenizer_folder_is_noticed(prepare, tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", ["w1"])
    for num_words in (10, 20):
        save_word_tokenizer(tmp_path / "words", numbered(num_words), eos_token=f"w{num_words - 1}")
        file = prepare(path, tokenizer=str(tmp_path / "words"))
        assert file.tokens.tolist() == [1, num_words - 1]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_dataset_gives_the_same_stream(kind, prepare, tmp_path):
    file = prepare(write_dataset(kind, tmp_path / "text"))
    assert file.tokens.tolist() == STREAM
    assert file.tokens.dtype == np.uint16
    assert (file.num_documents, file.num_bytes) == (3, len(STREAM) - 3)
    assert file.tokens_per_byte == len(STREAM) / (len(STREAM) - 3)
    assert file.ends.tolist() == (np.flatnonzero(file.tokens == 256) + 1).tolist()


def test_the_standard_library_is_text_on_every_machine(prepare):
    file = prepare("stdlib")
    assert len(file.tokens) > 1_000_000
    assert (file.tokens == 256).sum() == file.num_documents
    assert file.num_documents + file.num_bytes == len(file.tokens)
    library = Path(json.__file__).parent.parent
    assert (library / "argparse.py").read_bytes() in file.tokens.astype(np.uint8).tobytes()
    # Runs validate on the end of the text, so it must not be the one file of English.
    last = sorted(library.glob("*.py"))[-1].read_bytes()
    assert file.tokens[-len(last) - 1 : -1].astype(np.uint8).tobytes() == last


def test_the_mask_of_documents_needs_ids_in_which_documents_end(prepare, tmp_path):
    np.save(path := tmp_path / "a.npy", np.array([1, 2, 256, 3], np.uint16))
    assert prepare(path, document_mask=True).ends.tolist() == [3, 4]
    np.save(path, np.array([1, 2, 3], np.uint16))
    with pytest.raises(ValueError, match=r"a.npy has no end-of-text id 256: set dataset.tok"):
        prepare(path, document_mask=True)
    assert len(prepare(path).tokens) == 3


def test_options_choose_documents(prepare, tmp_path):
    saved = write_dataset("saved splits", tmp_path / "saved")
    assert bytes(prepare(saved, split="test").tokens[:-1].tolist()) == b"other"
    with pytest.raises(ValueError, match=r"^dataset '.*saved' has no split 'dev': .* \['test', 't"):
        prepare(saved, split="dev")
    path = write_jsonl(tmp_path / "a.jsonl", column="body")
    assert prepare(path, text_column="body", num_samples=1).num_documents == 1
    assert prepare(path, text_column="body", num_samples=9).num_documents == 3


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "saved dataset"])
def test_more_processes_make_the_same_stream(kind, prepare, tmp_path, monkeypatch):
    path = write_dataset(kind, tmp_path / "text")
    monkeypatch.setattr(token_file, "BATCH", 1)  # so that each process has one
    file = prepare(path, num_proc=2)
    assert file.tokens.tolist() == STREAM and file.ends[-1] == len(STREAM)


def never_ends(folder: Path, texts: list[str]) -> list:
    (folder / str(os.getpid())).touch()
    time.sleep(60)


def test_processes_that_tokenise_end_with_the_one_that_started_them(prepare, tmp_path, monkeypatch):
    path, seen = write_jsonl(tmp_path / "a.jsonl"), tmp_path / "seen"
    seen.mkdir()
    monkeypatch.setattr(token_file, "BATCH", 1)
    monkeypatch.setattr(BytesTokenizer, "encode", lambda _, texts: never_ends(seen, texts))
    parent = multiprocessing.get_context("fork").Process(
        target=prepare, args=[path], kwargs={"num_proc": 2}
    )
    parent.start()
    deadline = time.monotonic() + 30
    while len(pids := [int(file.name) for file in seen.iterdir()]) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    parent.kill()
    parent.join()
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline + 10, "a process is left"
        time.sleep(0.05)


def test_a_cache_that_cannot_be_written_is_named(prepare, tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl")
    with pytest.raises(ValueError, match=r"dataset.cache_dir=.*a.jsonl cannot be used .*another"):
        prepare(path, cache_dir=str(path))


def test_empty_documents_are_left_out(prepare, tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [""] * 1500 + TEXTS[:1] + [""] + TEXTS[1:])
    assert prepare(path).tokens.tolist() == STREAM


def test_a_text_is_tokenised_once_and_again_when_it_changes(prepare, tmp_path, monkeypatch):
    path = write_jsonl(tmp_path / "a.jsonl")
    written = []
    write = token_file._write_token_file
    monkeypatch.setattr(
        token_file, "_write_token_file", lambda *args: (written.append(args[0]), write(*args))
    )
    prepare(path)
    assert prepare(path).tokens.tolist() == STREAM
    assert len(written) == 1
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    path.write_bytes(path.read_bytes())  # as long as before
    os.utime(path, ns=times)  # and of the same time, as copies can be
    prepare(path)
    assert len(written) == 2
    write_jsonl(path, ["other"])
    assert bytes(prepare(path).tokens[:-1].tolist()) == b"other"
    prepare(path, num_samples=1)
    assert len(set(written)) == 4


def test_a_finished_cache_is_opened_without_a_lock_so_it_may_be_read_only(
    prepare, tmp_path, monkeypatch
):
    path = write_jsonl(tmp_path / "a.jsonl")
    prepare(path)
    monkeypatch.setattr(token_file, "FileLock", None)
    assert prepare(path).tokens.tolist() == STREAM


def test_processes_that_start_together_tokenise_once(prepare, tmp_path, monkeypatch):
    path = write_jsonl(tmp_path / "a.jsonl")
    log = tmp_path / "log"
    write = token_file._write_token_file

    def slow_write(*args):
        with log.open("a") as file:
            file.write("written\n")
        time.sleep(0.3)
        write(*args)

    monkeypatch.setattr(token_file, "_write_token_file", slow_write)

    def check():
        assert prepare(path).tokens.tolist() == STREAM

    assert run_forked(check, 3) == [0, 0, 0]
    assert log.read_text() == "written\n"


def test_a_process_killed_in_the_middle_leaves_nothing_half_made(prepare, tmp_path, monkeypatch):
    path = write_jsonl(tmp_path / "a.jsonl")
    with monkeypatch.context() as patch:
        patch.setattr(token_file.os, "replace", lambda *args: os.kill(os.getpid(), signal.SIGKILL))
        assert run_forked(lambda: prepare(path), 1) == [-signal.SIGKILL]
    left = [entry.suffix for entry in (tmp_path / "cache").iterdir()]
    assert ".partial" in left and "" not in left
    assert prepare(path).tokens.tolist() == STREAM
    assert sorted(entry.suffix for entry in (tmp_path / "cache").iterdir()) in ([""], ["", ".lock"])


def test_prepared_bytes_need_neither_transformers_nor_datasets(prepare, tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl")
    prepare(path)
    code = (
        "import sys; from picotron_min.runtime.config import Config;"
        "from picotron_min.runtime.token_file import open_text;"
        "from picotron_min.runtime.tokenizer import BytesTokenizer;"
        f"dataset = {{'name': {str(path)!r}, 'cache_dir': {str(tmp_path / 'cache')!r}}};"
        "open_text(Config(dataset=dataset), BytesTokenizer(), 257);"
        "assert not {'transformers', 'datasets'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


MISTAKES = {  # what is on disk, the options, the message
    "no text at all": ({"a.txt": ""}, {}, "holds no text"),
    "an empty file of lines": ({"a.jsonl": ""}, {}, "a.jsonl' holds no text$"),
    "a file of empty lines": ({"a.jsonl": "\n\n"}, {}, "a.jsonl' holds no text$"),
    "only empty documents": (
        {"a.jsonl": '{"text": ""}\n' * 3},
        {},
        "holds no text",
    ),
    "a missing column": (
        {"a.jsonl": '{"body": "x", "n": 1}'},
        {},
        r"line 1 has no text in .*'text' .set .*text_column to .* {'body': 'str', 'n': 'float'}",
    ),
    "numbers for text": ({"a.jsonl": '{"text": 5}'}, {}, "no text in column .* {'text': 'float'}"),
    "a null": ({"a.jsonl": '{"text": "x"}\n{"text": null}'}, {}, "a.jsonl: line 2 has no text in"),
    "no object": (
        {"a.jsonl": '"x"'},
        {},
        "line 1 is no object with a text, but 'x': mend",
    ),
    "half an emoji": (
        {"a.jsonl": '{"text": "x", "n": "\\ud83d"}\n{"text": "\\ud83d"}'},
        {},
        r"a.jsonl: line 2 has half a character, .*, at 0 of its text: mend or remove it",
    ),
    "UTF-16": ({"a.jsonl": '{"text": "x"}'.encode("utf-16")}, {}, "line 1 is not text in UTF-8"),
    "a torn line": ({"a.jsonl": '{"text": "x"}\n\n{"te'}, {}, "a.jsonl: line 3 is not JSON"),
    "a torn array": ({"a.json": '\n [{"text": "x"}, {"te'}, {}, "a.json: the array is not JSON"),
    "no parquet": ({"a.parquet": "x" * 99}, {}, "cannot read .*a.parquet: .*mend or remove it"),
    "a torn archive": ({"a.txt.gz": gzip.compress(b"x" * 999)[:-9]}, {}, "a.txt.gz: Truncated"),
    "a split of a file": ({"a.txt": "x"}, {"split": "test"}, r"no split 'test': .* \['train'\]"),
    "a subset of a file": ({"a.txt": "x"}, {"subset_name": "en"}, "subset_name='en' .* to null"),
    "broken JSON": ({"a.jsonl": '{"text": '}, {}, "cannot read .*a.jsonl: line 1 is not JSON"),
    "not UTF-8": (
        {"text/a.txt": "x", "text/b.txt": b"\xff\xfe"},
        {},
        "cannot read .*text/b.txt: it is not text in UTF-8: mend or remove it",
    ),
    "not UTF-8 among processes": (
        {"a.jsonl": b'{"text": "x"}\n' * 5 + b'{"text": "\xff\xfe"}'},
        {"num_proc": 2},
        "^cannot read .*a.jsonl: line 6 is not text in UTF-8 .*: mend or remove it$",
    ),
    "an unknown kind": (
        {"a.docx": "x"},
        {},
        "a.docx is no dataset, .*: use .txt, .jsonl, .json, .p",
    ),
    "an outside token": (
        {"a.txt": "x"},
        {"vocab_size": 256},
        "tokenizer=bytes has token ids up to 256, and model.vocab_size=256: set .* to 257 or more",
    ),
    "mixed kinds": (
        {"text/a.txt": "x", "text/b.jsonl": "{}"},
        {},
        r"mixes 2 kinds of dataset \(a.txt, b.jsonl\)",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_reported_with_the_remedy(mistake, prepare, tmp_path):
    files, options, message = MISTAKES[mistake]
    for name, content in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message):
        prepare(tmp_path / "text" if path.parent.name == "text" else path, **options)
    assert not list((tmp_path / "cache").glob("*.partial"))


def test_a_dataset_that_the_hub_does_not_give_is_reported_with_what_was_tried(prepare, offline):
    with pytest.raises(ValueError, match=r"'no/thing'.*subset 'en', split 'train'.*\"stdlib\""):
        prepare("no/thing", subset_name="en")
    with pytest.raises(ValueError, match="Couldn't reach 'no/thing' on the Hub"):
        prepare("no/thing")


def test_a_damaged_cache_is_noticed(prepare, tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl")
    ends = prepare(path).ends.tolist()
    file = next((tmp_path / "cache").glob("*/documents.bin"))
    for wrong in (ends[:-1], [*ends[:-1], ends[-1] + 1]):
        np.array(wrong).tofile(file)
        found = rf"\({len(STREAM)}, {len(wrong)}, {wrong[-1]}\) instead of .* Delete it, and"
        with pytest.raises(ValueError, match=found):
            prepare(path)
    np.array(ends).tofile(file)
    file.with_name("tokens.bin").write_bytes(b"1234")
    with pytest.raises(ValueError, match=r"is damaged: .* are \(2, 3, .*Delete it, and"):
        prepare(path)


def test_a_stream_of_the_version_before_is_made_anew(prepare, tmp_path, monkeypatch):
    path = write_jsonl(tmp_path / "a.jsonl")
    with monkeypatch.context() as patch:
        patch.setattr(token_file, "VERSION", token_file.VERSION - 1)
        prepare(path)
    (old,) = (tmp_path / "cache").glob("*/documents.bin")
    old.unlink()  # it had none
    assert len(prepare(path).ends) == 3
