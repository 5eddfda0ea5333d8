"""Text to token ids: one byte a token, which needs nothing, or any Hugging Face tokenizer."""

from pathlib import Path
from typing import Protocol

import numpy as np


class Tokenizer(Protocol):
    """What training needs of a tokenizer."""

    name: str
    vocab_size: int  # the number of ids, special tokens included
    eos_token_id: int  # end of text: what separates documents

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """The ids of each text, unsigned, with no special tokens added."""

    def save(self, folder: str | Path) -> None:
        """Write the files that `transformers.AutoTokenizer.from_pretrained(folder)` loads."""


def load_tokenizer(name: str) -> Tokenizer:
    """`bytes`, a local folder, or a hub id; ValueError with the remedy if there is none."""
    return BytesTokenizer() if name == "bytes" else HuggingFaceTokenizer(name)


class BytesTokenizer:
    """A token is a byte of UTF-8: ids 0 to 255 are the bytes, 256 is end of text."""

    name = "bytes"
    vocab_size = 257
    eos_token_id = 256

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def save(self, folder: str | Path) -> None:
        from tokenizers import AddedToken, decoders, models, pre_tokenizers
        from tokenizers import Tokenizer as Backend
        from transformers import PreTrainedTokenizerFast

        # The files must be text, so GPT-2 gave every byte a character: printable bytes stand for
        # themselves, the others for the characters from 256 on. With no merges, a BPE over these
        # characters never makes a token longer than a byte.
        printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = [byte for byte in range(256) if byte not in printable]
        ids = {chr(byte): byte for byte in printable}
        ids |= {chr(256 + i): byte for i, byte in enumerate(others)}
        backend = Backend(models.BPE(ids, []))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
        eos = "<|endoftext|>"
        backend.add_special_tokens([AddedToken(eos, special=True)])
        PreTrainedTokenizerFast(
            tokenizer_object=backend, eos_token=eos, clean_up_tokenization_spaces=False
        ).save_pretrained(folder)


class HuggingFaceTokenizer:
    """A tokenizer from a local folder or the hub; code that comes with one is never run."""

    def __init__(self, name: str) -> None:
        from transformers import AutoTokenizer

        self.name = name
        path = Path(name).expanduser()
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(
                str(path) if path.exists() else name, trust_remote_code=False
            )
        except Exception as error:
            reason = str(error).strip().split("\n")[0].rstrip(".: ")
            raise ValueError(
                f"cannot load tokenizer {name!r}: {reason}. Check the spelling and the network, or"
                ' set dataset.tokenizer to "bytes" or to a folder that holds a tokenizer'
            ) from error
        if self._tokenizer.eos_token_id is None:
            raise ValueError(
                f"tokenizer {name!r} has no end-of-text token to put between documents: set"
                ' "eos_token" in its tokenizer_config.json, or choose another dataset.tokenizer'
            )
        self.vocab_size = len(self._tokenizer)
        self.eos_token_id = self._tokenizer.eos_token_id

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        # verbose=False: a document longer than the model's context is no reason for a warning,
        # it is cut into sequences later.
        ids = self._tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        return [np.array(row, dtype=np.uint32) for row in ids]

    def save(self, folder: str | Path) -> None:
        self._tokenizer.save_pretrained(folder)
