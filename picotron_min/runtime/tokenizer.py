"""Text to token ids: one byte a token, which needs nothing, or any Hugging Face tokenizer."""

from pathlib import Path

import numpy as np

from picotron_min.runtime.json_file import read_json


class BytesTokenizer:
    """A token is a byte of UTF-8: ids 0 to 255 are the bytes, 256 is end of text."""

    name = "bytes"
    vocab_size = 257  # the largest id + 1: vocabularies can have gaps
    eos_token_id = 256  # end of text, which separates documents

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """The ids of each text, unsigned, with no special tokens added."""
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def save(self, folder: str | Path) -> None:
        """Write the files that `transformers.AutoTokenizer.from_pretrained(folder)` loads."""
        from tokenizers import Tokenizer as Backend
        from tokenizers import decoders, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        # The files must be text, so GPT-2 gave every byte a character: a printable byte its own,
        # the others those from 256 on. A BPE with no merges makes no token longer than a byte.
        characters = sorted(pre_tokenizers.ByteLevel.alphabet())
        printable_first = sorted(range(256), key=lambda byte: chr(byte) not in characters)
        ids = dict(zip(characters, printable_first, strict=True))
        backend = Backend(models.BPE(ids, []))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
        backend.add_special_tokens([END_OF_TEXT[0]])
        PreTrainedTokenizerFast(
            tokenizer_object=backend, eos_token=END_OF_TEXT[0], clean_up_tokenization_spaces=False
        ).save_pretrained(folder)


# Those of public models, for tokenizers whose files do not name theirs.
END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<EOS>", "[EOS]", "<|eos|>")


class HuggingFaceTokenizer:
    """A tokenizer from a local folder or file, or the hub; no code that comes with it is run."""

    def __init__(self, name: str) -> None:
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

        self.name, path = name, _local_path(name)
        source = str(path) if path.exists() else name  # here or on the hub
        try:
            if path.is_file():
                tokenizer = PreTrainedTokenizerFast(tokenizer_file=source)
            else:
                tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
        except Exception as error:
            reason = str(error).strip().partition("\n")[0].rstrip(".: ")
            raise ValueError(
                f"cannot load tokenizer {name!r}: {reason}. Check the spelling and the network, or"
                ' set dataset.tokenizer to "bytes" or to a folder that holds a tokenizer'
            ) from error
        vocabulary = tokenizer.get_vocab()
        if tokenizer.eos_token_id is None:
            tokenizer.eos_token = next((t for t in END_OF_TEXT if t in vocabulary), None)
        if tokenizer.eos_token_id is None:
            where = path if path.is_dir() else "a folder where its file is called tokenizer.json"
            special = ", ".join(tokenizer.get_added_vocab()) or "none"
            raise ValueError(
                f"tokenizer {name!r} has no end-of-text token to put between documents: write"
                f' {{"eos_token": "{END_OF_TEXT[0]}"}} to tokenizer_config.json in {where}; it can'
                f" also be a token that the tokenizer has (special ones: {special})"
            )
        self._tokenizer, self.eos_token_id = tokenizer, tokenizer.eos_token_id
        self.vocab_size = max(self.eos_token_id, *vocabulary.values()) + 1

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        # Not verbose, which would warn of documents that are longer than the model's context.
        ids = self._tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        return [np.array(row, dtype=np.uint32) for row in ids]

    def save(self, folder: str | Path) -> None:
        self._tokenizer.save_pretrained(folder)


Tokenizer = BytesTokenizer | HuggingFaceTokenizer


def load_tokenizer(name: str) -> Tokenizer:
    """`bytes`, a local folder, a .json file of the `tokenizers` library, or a hub id."""
    return BytesTokenizer() if name == "bytes" else HuggingFaceTokenizer(name)


def find_vocab_size(name: str) -> int | None:
    """The vocab_size of a tokenizer on this machine, else None; takes no seconds for imports."""
    from tokenizers import Tokenizer as Backend

    path = _local_path(name)
    if name == "bytes" or not path.exists():
        return BytesTokenizer.vocab_size if name == "bytes" else None
    file, settings = path / "tokenizer.json", path / "tokenizer_config.json"
    try:
        vocabulary = Backend.from_file(str(file if path.is_dir() else path)).get_vocab()
    except Exception:  # it is of another form, or broken, for which there is a message already
        return load_tokenizer(name).vocab_size
    eos_token = read_json(settings).get("eos_token") if settings.exists() else None
    if isinstance(eos_token, str):
        vocabulary.setdefault(eos_token, max(vocabulary.values()) + 1)  # as transformers does
    return max(vocabulary.values()) + 1


def tokenizer_files(name: str) -> list[Path]:
    """The local files that a tokenizer is read from."""
    path = _local_path(name)
    return [file for file in [path, *sorted(path.glob("*"))] if file.is_file()]


def _local_path(name: str) -> Path:
    path = Path(name).expanduser()
    return path.parent if path.name == "tokenizer.json" and path.is_file() else path  # for settings
