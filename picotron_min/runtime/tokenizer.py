"""Text to token ids: one byte a token, which needs nothing, or any Hugging Face tokenizer."""

import zlib
from pathlib import Path

import numpy as np

from picotron_min.runtime.hub import fetch
from picotron_min.runtime.json_file import write_json
from picotron_min.runtime.wording import explained


class BytesTokenizer:
    """A token is a byte of UTF-8: ids 0 to 255 are the bytes, 256 is end of text."""

    vocab_size = 257  # the largest id + 1: vocabularies can have gaps
    eos_token_id = 256  # end of text, which separates documents
    bos_token_id, adds, checksum = None, (), "of bytes"  # as below

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """The ids of up to BATCH texts (token_file.py), each unsigned; no special tokens added."""
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def save(self, folder: Path) -> None:
        """Write the files that `transformers.AutoTokenizer.from_pretrained(folder)` loads."""
        # Not transformers, which takes a second to import: in a short run, a quarter of its time.
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers

        # The files must be text, so GPT-2 gave every byte a printable character: its own, or one of
        # those from 256 on.
        split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        characters = sorted(split.alphabet())
        own = [ord(character) for character in characters if ord(character) < 256]
        ids = dict(zip(characters, [*own, *sorted(set(range(256)) - set(own))], strict=True))
        whole = Tokenizer(models.BPE(ids, []))  # without merges
        whole.pre_tokenizer, whole.decoder = split, decoders.ByteLevel()
        whole.add_special_tokens([END_OF_TEXT])
        folder.mkdir(exist_ok=True)
        whole.save(str(folder / "tokenizer.json"))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_OF_TEXT}
        write_json(folder / "tokenizer_config.json", settings)


FILES = ("*.json", "*.model", "*.txt", "*.tiktoken")  # of a tokenizer on the hub
END_OF_TEXT = "<|endoftext|>"


class HuggingFaceTokenizer:
    """A tokenizer from a local folder or the hub; no code that comes with it is run."""

    def __init__(self, name: str) -> None:
        from transformers import AutoTokenizer

        remedy = "check {}, or set dataset.tokenizer to bytes"
        folder = fetch(name, *FILES, remedy=remedy.format("spelling and network"))
        with explained(f"cannot load tokenizer {name!r}", remedy.format("this folder's files")):
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        if tokenizer.eos_token_id is None:
            raise ValueError(
                f"tokenizer {name!r} has no end-of-text token to put between documents: "
                f'write {{"eos_token": "{END_OF_TEXT}"}}, or its own, to tokenizer_config.json '
                "in that folder"
            )
        vocabulary = tokenizer.get_vocab()
        self._tokenizer, self.eos_token_id = tokenizer, tokenizer.eos_token_id
        self.vocab_size = max(self.eos_token_id, *vocabulary.values()) + 1
        self.bos_token_id = tokenizer.bos_token_id
        rules = getattr(tokenizer, "backend_tokenizer", None)  # without, it is written in Python
        rules = rules.to_str() if rules else str(sorted(vocabulary.items()))
        self.checksum = f"{zlib.crc32(rules.encode(), self.eos_token_id):08x}"  # to notice another
        # Special tokens that it adds to a text, for its users. Training has the end-of-text token
        # around each text, so that one is not counted.
        self.adds = [i for i in tokenizer("")["input_ids"] if i != self.eos_token_id]

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        # verbose would warn of documents that are longer than the model's context.
        ids = self._tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        return [np.array(row, dtype=np.uint32) for row in ids]

    def save(self, folder: Path) -> None:
        self._tokenizer.save_pretrained(folder)


Tokenizer = BytesTokenizer | HuggingFaceTokenizer


def load_tokenizer(name: str) -> Tokenizer:
    """`bytes`, a local folder, or a hub id."""
    return BytesTokenizer() if name == "bytes" else HuggingFaceTokenizer(name)
