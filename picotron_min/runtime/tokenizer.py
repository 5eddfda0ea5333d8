"""Text to token ids: one byte a token, which needs nothing, or any Hugging Face tokenizer."""

import os
import zlib
from pathlib import Path

import numpy as np

from picotron_min.runtime.json_file import write_json


class BytesTokenizer:
    """A token is a byte of UTF-8: ids 0 to 255 are the bytes, 256 is end of text."""

    vocab_size = 257  # the largest id + 1: vocabularies can have gaps
    eos_token_id = 256  # end of text, which separates documents
    bos_token_id, adds, checksum = None, ([], []), "of bytes"  # as below

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """The ids of each text, unsigned, with no special tokens added."""
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
        whole.add_special_tokens([END_OF_TEXT[0]])
        folder.mkdir(exist_ok=True)
        whole.save(str(folder / "tokenizer.json"))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_OF_TEXT[0]}
        write_json(folder / "tokenizer_config.json", settings)


# As in public models, for tokenizers whose files do not name theirs.
END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<EOS>", "[EOS]", "<|eos|>")


class HuggingFaceTokenizer:
    """A tokenizer from a local folder or file, or the hub; no code that comes with it is run."""

    def __init__(self, name: str) -> None:
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

        source = _folder_or_file(name)
        try:
            if os.path.isfile(source):
                tokenizer = PreTrainedTokenizerFast(tokenizer_file=source)
            else:  # a folder, or on the hub
                tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
        except Exception as error:
            reason = str(error).strip().partition("\n")[0].rstrip(".: ")
            remedy = "Check its files, or spelling and network, or set dataset.tokenizer to bytes"
            raise ValueError(f"cannot load tokenizer {name!r}: {reason}. {remedy}") from error
        vocabulary = tokenizer.get_vocab()
        if tokenizer.eos_token_id is None:
            tokenizer.eos_token = next((t for t in END_OF_TEXT if t in vocabulary), None)
        if tokenizer.eos_token_id is None:
            folder = source if os.path.isdir(source) else "a folder with it as tokenizer.json"
            problem = f"tokenizer {name!r} has no end-of-text token to put between documents"
            remedy = f'{{"eos_token": "{END_OF_TEXT[0]}"}} to tokenizer_config.json in {folder}'
            special = ", ".join(tokenizer.get_added_vocab()) or "none"
            raise ValueError(f"{problem}: write {remedy}; or one of its own ({special})")
        self._tokenizer, self.eos_token_id = tokenizer, tokenizer.eos_token_id
        self.vocab_size = max(self.eos_token_id, *vocabulary.values()) + 1
        self.bos_token_id = tokenizer.bos_token_id
        rules = getattr(tokenizer, "backend_tokenizer", None)
        rules = rules.to_str() if rules else str(sorted(vocabulary.items()))
        rules += str(self.eos_token_id)
        self.checksum = f"{zlib.crc32(rules.encode()):08x}"  # to notice another one
        # Special tokens that it adds before and after a text, for its users. Training has the
        # end-of-text token before each text, so that one is not counted.
        own, all_ids = self.encode(["a"])[0].tolist(), tokenizer("a")["input_ids"]
        starts = (i for i in range(len(all_ids)) if all_ids[i : i + len(own)] == own)
        before, behind = all_ids[: (at := next(starts, 0))], all_ids[at + len(own) :]
        before = [] if before == [self.eos_token_id] else before
        self.adds = before, behind

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        # verbose would warn of documents that are longer than the model's context.
        ids = self._tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        return [np.array(row, dtype=np.uint32) for row in ids]

    def save(self, folder: Path) -> None:
        self._tokenizer.save_pretrained(folder)


Tokenizer = BytesTokenizer | HuggingFaceTokenizer


def load_tokenizer(name: str) -> Tokenizer:
    """`bytes`, a local folder, a .json file of the `tokenizers` library, or a hub id."""
    return BytesTokenizer() if name == "bytes" else HuggingFaceTokenizer(name)


def _folder_or_file(name: str) -> str:
    """A tokenizer.json is read as its folder, which has settings beside it."""
    folder, file = os.path.split(name)
    return (folder or ".") if file == "tokenizer.json" and os.path.isfile(name) else name
