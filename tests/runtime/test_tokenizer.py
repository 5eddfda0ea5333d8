"""Tokenizers: what they make of a text, what they are refused for, and what is exported."""

import re
from pathlib import Path

import pytest

from picotron_min.runtime.hugging_face import card
from picotron_min.runtime.tokenizer import BytesTokenizer, load_tokenizer


def word_rules(words: int | dict):
    """A tokenizer of the library `tokenizers`, which can only save one file."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{i}": i for i in range(words)} if isinstance(words, int) else words
    rules = Tokenizer(models.WordLevel(words, "w0"))
    rules.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return rules


def save_word_tokenizer(folder: Path, words: int | dict, puts: str | None = None, end="w8") -> str:
    """A folder as transformers writes it; `puts` is a word put before each text."""
    from tokenizers import processors
    from transformers import PreTrainedTokenizerFast

    rules, special = word_rules(words), {"eos_token": end}
    if puts:
        front = [(puts, rules.token_to_id(puts))]
        rules.post_processor = processors.TemplateProcessing(f"{puts} $A", None, front)
        special["bos_token"] = puts
    PreTrainedTokenizerFast(tokenizer_object=rules, **special).save_pretrained(folder)
    return str(folder)


def test_the_saved_bytes_tokenizer_gives_the_bytes_back(tmp_path):
    from transformers import AutoTokenizer

    text = " \n\n\t leading, isn't it é 日本 😀 \x00\r\n" + "".join(map(chr, range(999)))
    BytesTokenizer().save(tmp_path)
    # Beside a Llama's config, as in a finished model's folder, which must not change its class.
    (tmp_path / "config.json").write_text('{"model_type": "llama", "vocab_size": 257}')
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer(text)["input_ids"]
    assert ids == list(text.encode()) == BytesTokenizer().encode([text])[0].tolist()
    assert tokenizer.decode(ids) == text
    assert (tokenizer.eos_token_id, len(tokenizer)) == (256, 257)
    assert tokenizer.decode([65, 0xFF, 66, 256], skip_special_tokens=True) == "A\ufffdB"


def test_a_tokenizer_shows_what_it_adds_and_a_checksum_of_its_rules(tmp_path):
    """BOS may be put before a text, and then also be the end of the one before."""
    given = {"plain": (9,), "bos": (9, "w7"), "same": (9, "w8"), "other": (10,)}
    plain, bos, same, other = (
        load_tokenizer(save_word_tokenizer(tmp_path / name, *how)) for name, how in given.items()
    )
    assert [t.bos_token_id for t in (plain, bos, same)] == [None, 7, 8]
    assert [t.adds for t in (plain, bos, same)] == [[], [7], []]  # the last as GPT-2's
    assert "adds ids to a text: [7]. Training did not" in card(bos) and "adds" not in card(same)
    assert load_tokenizer(str(tmp_path / "plain")).checksum == plain.checksum
    assert len({t.checksum for t in (plain, bos, other, BytesTokenizer())}) == 4


def test_the_line_that_is_asked_for_gives_a_tokenizer_its_end_of_text(tmp_path):
    word_rules({"w0": 0, "w1": 1, "<|endoftext|>": 5}).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match="in that folder") as no:
        load_tokenizer(str(tmp_path))
    line, file = re.search(r"write (\{.*\}), or its own, to (\S+) in", str(no.value)).groups()
    (tmp_path / file).write_text(line)
    tokenizer = load_tokenizer(str(tmp_path))
    assert [ids.tolist() for ids in tokenizer.encode(["w1 new w1"])] == [[1, 0, 1]]
    assert (tokenizer.eos_token_id, tokenizer.vocab_size) == (5, 6)
    tokenizer.save(tmp_path / "exported")
    assert load_tokenizer(str(tmp_path / "exported")).eos_token_id == 5


def test_a_tokenizer_that_cannot_be_read_is_refused_with_the_remedy(tmp_path):
    (tmp_path / "other.json").write_text('{"hello": 1}')
    for name in map(str, (tmp_path / "other.json", tmp_path)):
        with pytest.raises(ValueError, match=f"cannot load tokenizer '{name}': .* set dataset.tok"):
            load_tokenizer(name)
