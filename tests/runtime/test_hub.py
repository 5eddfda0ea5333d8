"""Names on the Hugging Face hub, on machines that cannot reach it."""

import pytest
from huggingface_hub import constants

from picotron_min.runtime.hub import fetch
from picotron_min.runtime.tokenizer import load_tokenizer
from tests.runtime.test_tokenizer import save_word_tokenizer


def test_without_a_network_the_hub_is_asked_once_and_what_is_cached_is_used(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # refuses connections
    with pytest.raises(ValueError, match=r"owner/words is not a folder here, and .* network and"):
        fetch("owner/words", "config.json")
    of_model, commit = tmp_path / "models--owner--words", 40 * "a"
    (of_model / "refs").mkdir(parents=True)
    (of_model / "refs" / "main").write_text(commit)
    save_word_tokenizer(of_model / "snapshots" / commit, 9)
    assert fetch("owner/words", "config.json").name == commit
    assert load_tokenizer("owner/words").eos_token_id == 8
    assert "Retrying" not in caplog.text  # it would be for 23 seconds, for each file
