"""Names on the Hugging Face hub, on machines that cannot reach it."""

import socket

import pytest
from huggingface_hub import constants

from picotron_min.runtime.hub import fetch
from picotron_min.runtime.tokenizer import load_tokenizer
from tests.runtime.test_tokenizer import save_word_tokenizer


def test_without_a_network_the_hub_is_asked_once_and_what_is_cached_is_used(
    tmp_path, monkeypatch, caplog
):
    server = socket.create_server(("127.0.0.1", 0))  # which never answers
    endpoint = f"http://127.0.0.1:{server.getsockname()[1]}"
    changes = {"HF_HUB_OFFLINE": False, "HF_HUB_CACHE": str(tmp_path), "ENDPOINT": endpoint}
    for name, value in (changes | {"HF_HUB_ETAG_TIMEOUT": 0.2}).items():
        monkeypatch.setattr(constants, name, value)
    only_remedy = r"^owner/words is not a folder here, .*: check spelling and network, or set data"
    with pytest.raises(ValueError, match=only_remedy):
        load_tokenizer("owner/words")
    of_model, commit = tmp_path / "models--owner--words", 40 * "a"
    (of_model / "refs").mkdir(parents=True)
    (of_model / "refs" / "main").write_text(commit)
    folder = of_model / "snapshots" / commit
    save_word_tokenizer(folder, 9)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    assert fetch("owner/words", "config.json") == folder
    assert load_tokenizer("owner/words").eos_token_id == 8
    assert "Retrying" not in caplog.text  # it would be for 23 seconds, for each file
    server.close()
