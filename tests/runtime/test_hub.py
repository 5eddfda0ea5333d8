"""Names on the Hugging Face hub, on machines that cannot reach it."""

import os
import socket

import pytest

from picotron_min.runtime import export, launch
from picotron_min.runtime.config import Config
from picotron_min.runtime.config_checks import uses_hub
from picotron_min.runtime.hub import hub_answers
from tests.runtime.test_metadata import write_checkpoint

PROXIES = [f"{scheme}_proxy" for scheme in ("http", "https", "all")]


@pytest.fixture
def listening(monkeypatch):
    """A socket that accepts connections, and no proxy."""
    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def test_the_hub_answers_if_its_host_accepts_a_connection(listening):
    endpoint = f"http://127.0.0.1:{listening.getsockname()[1]}/mirror"
    assert hub_answers(endpoint)
    listening.close()
    assert not hub_answers(endpoint)


@pytest.mark.parametrize(
    "endpoint", ["http://localhost:port", "http://localhost:99999", "http://[x"]
)
def test_an_endpoint_that_is_no_address_is_refused(listening, endpoint):
    with pytest.raises(ValueError, match=r"^HF_ENDPOINT=http.* is no address: "):
        hub_answers(endpoint)


def test_behind_a_proxy_the_hub_is_taken_to_answer(listening, monkeypatch):
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:1")
    assert hub_answers("https://huggingface.invalid")


@pytest.mark.parametrize(
    "sections, expected",
    [
        ({}, False),
        ({"model": {"name": "HuggingFaceTB/SmolLM-135M"}}, True),  # a preset, and its tokenizer
        ({"model": {"name": "SmolLM-135M"}, "dataset": {"tokenizer": "bytes"}}, False),
        ({"model": {"name": "owner/other"}}, True),
        ({"model": {"weights": "HuggingFaceTB/SmolLM-135M"}}, True),
        ({"dataset": {"tokenizer": "owner/tokenizer"}}, True),
        ({"dataset": {"name": "owner/text"}}, True),
        ({"dataset": {"name": "./owner/text.txt"}}, False),
    ],
)
def test_the_hub_is_looked_for_only_if_a_name_is_on_it(sections, expected):
    assert uses_hub(Config(**sections)) is expected


def keep_away_from_hub() -> None:
    for name in [*PROXIES, *map(str.upper, PROXIES), "HF_HUB_OFFLINE"]:
        os.environ.pop(name, None)
    os.environ["HF_ENDPOINT"] = "http://127.0.0.1:9"  # refuses connections


@pytest.mark.parametrize(
    "section, key, message",
    [
        (
            "model",
            "name",
            "model.name=owner/nothing: owner/nothing is not a folder here",
        ),
        ("dataset", "tokenizer", "cannot load tokenizer 'owner/nothing': "),
        ("dataset", "name", "cannot read dataset 'owner/nothing': "),
    ],
)
def test_without_a_network_a_hub_name_is_refused_at_once(workplace, section, key, message):
    config = workplace.config("offline", **{section: {key: "owner/nothing"}})
    outcome = workplace.main(config, keep_away_from_hub)
    assert outcome.code == 2 and message in outcome.output
    assert "Retrying" not in outcome.output  # it would be for 23 seconds, or twice as long


def test_an_export_looks_for_the_hub_too(tmp_path, monkeypatch):
    def change(state: dict) -> dict:
        state["config"]["dataset"]["tokenizer"] = "owner/nothing"
        return state

    folder, asked = write_checkpoint(tmp_path / "step-00000007", change), []
    monkeypatch.setattr(launch, "hub_answers", lambda endpoint: asked.append(endpoint))
    with pytest.raises(SystemExit):
        export.main([str(folder), str(tmp_path / "hf")])
    assert len(asked) == 1
