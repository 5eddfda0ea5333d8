"""Which checkpoints are refused before a run resumes from them, and what a resume warns of."""

import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest

from picotron_min.runtime.config import Config
from picotron_min.runtime.config_checks import resolve_model
from picotron_min.runtime.metadata import (
    Metadata,
    read_metadata,
    read_to_resume,
    resume_warnings,
)
from tests.core.test_checkpoint import make_config

SHARD = "shard-00001-model-00001-of-00001.safetensors"
DATA = {"the text": "9 tokens, checksum 1", "the tokenizer": "checksum 2"}


def state_of(config: Config, /, **changes) -> str:
    state = {"step": 7, "skipped_steps": 1, "tokens_seen": 56, "files": {SHARD: 76}, "data": DATA}
    state |= {"model": asdict(resolve_model(config)), "config": config.model_dump(by_alias=True)}
    return json.dumps(state | changes)


def write_checkpoint(folder: Path, state: str = state_of(make_config())) -> Path:
    """A checkpoint as small as one can be."""
    folder.mkdir(parents=True)
    (folder / SHARD).write_bytes(bytes(76))
    (folder / "state.json").write_text(state)
    return folder


# What is in state.json, and what is reported of it.
DAMAGED = [
    ("", "Invalid JSON: EOF"),
    ({"files": {"other.safetensors": 8}}, "No such file .*other.safetensors"),
    ({"files": {SHARD: 9}}, f"{SHARD} has 76 bytes, not 9"),
    ({"config": {"environment": {"HF_TOKEN": "hf_x"}}}, r"environment\.HF_TOKEN Input"),
    ({"model": {}}, "model.vocab_size Field required; .*model.hidden_size Field required"),
]


@pytest.mark.quick
@pytest.mark.parametrize("changes,expected", DAMAGED, ids=str)
def test_a_damaged_checkpoint_is_refused_with_the_remedy(tmp_path, changes, expected):
    state = state_of(make_config(), **changes) if changes else ""
    folder = write_checkpoint(tmp_path / "step-00000007", state)
    message = rf"^cannot use the checkpoint {folder}: .*{expected}.*: name another folder step-"
    with pytest.raises(ValueError, match=message) as error:
        read_metadata(folder)
    assert "hf_x" not in str(error.value)


def test_a_mistyped_latest_and_a_folder_of_checkpoints_are_refused(tmp_path):
    write_checkpoint(tmp_path / "run" / "step-00000007")
    for name in ("latset", "run"):
        with pytest.raises(ValueError, match=r"No such file .* step-.* or move this one away$"):
            read_metadata(tmp_path / name)


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    experts = {"model": {"num_local_experts": 4, "mlp_only_layers": [0]}}
    saved, tied = make_config(**experts), make_config(tied=True)
    folder = write_checkpoint(tmp_path / "saved", state_of(saved))
    assert read_to_resume(folder, resolve_model(saved), "adamw").step == 7
    message = (
        "tie_word_embeddings was false and is true; num_local_experts was 4 and is 0; "
        r'mlp_only_layers was \[0\] and is \[\]; optimizer was "adamw" and is "sgd"\. Set them as'
    )
    with pytest.raises(ValueError, match=f"{folder} is of another run: .*{message}.*load_path nul"):
        read_to_resume(folder, resolve_model(tied), "sgd")


# What is changed, of the config and of what was read, and the warning; none where the data and what
# is learned from it stay the same.
CHANGES = [
    ({"tp": 2, "micro_batch_size": 1, "gradient_accumulation_steps": 4}, {}, ""),
    ({"text_column": "body"}, {}, ""),  # of the same text
    ({"schedule": "wsd"}, {}, 'schedule was "cosine" and is "wsd": from here on the new value'),
    ({"dp": 2}, {}, "sequences a step was 4 and is 8: from here on other data is seen"),
    ({"seed": 7}, {}, "training.seed was 42 and is 7: from here on other data is seen"),
    ({}, {"the text": "x"}, 'was "9 tokens, checksum 1" and is "x": .*held-out text has moved'),
    ({}, {"the tokenizer": "x"}, "from here on ids mean other text"),
]


@pytest.mark.quick
@pytest.mark.parametrize("keys,data,expected", CHANGES, ids=str)
def test_a_resume_warns_of_other_data_and_of_another_way_to_learn(keys, data, expected):
    before = Metadata.model_validate_json(state_of(make_config()))
    found = resume_warnings(before, make_config(**keys), DATA | data)
    assert len(found) == bool(expected) and re.search(expected, "".join(found))
    before = before.model_copy(update={"data": {}})  # of a version that noted none
    assert len(resume_warnings(before, make_config(**keys), DATA | data)) == bool(expected and keys)
