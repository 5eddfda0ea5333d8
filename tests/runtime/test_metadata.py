"""Which checkpoints are refused before a run resumes from them, and what a resume warns of."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from picotron_min.runtime import export
from picotron_min.runtime.config import Config, Dataset
from picotron_min.runtime.config_checks import resolve_model
from picotron_min.runtime.metadata import (
    Metadata,
    metadata_of,
    read_metadata,
    read_to_resume,
    resume_warnings,
)
from tests.core.test_checkpoint import make_config

SHARD = "shard-00001-model-00001-of-00001.safetensors"
DATA = {"the text": "9 tokens, checksum 1", "the tokenizer": "checksum 2"}


def state_of(config: Config) -> dict:
    more = metadata_of(config, resolve_model(config), DATA, skipped_steps=1, tokens_seen=56)
    return {"step": 7, "files": {SHARD: 76}, **more}


def write_checkpoint(
    folder: Path, change: Callable[[dict], dict] = lambda state: state, **options
) -> Path:
    """A checkpoint as small as one can be, with something changed in its state.json."""
    folder.mkdir(parents=True)
    save_file({"x": torch.zeros(1)}, folder / SHARD)
    state = state_of(make_config(**options))
    state["files"] = {SHARD: (folder / SHARD).stat().st_size}
    (folder / "state.json").write_text(json.dumps(change(state)))
    return folder


@pytest.mark.quick
@pytest.mark.parametrize(
    "change,expected",
    [
        ("", "Invalid JSON: EOF"),
        ("{}", "step Field required; skipped_steps Field required"),
        (None, "No such file .*state.json"),
        ({"step": "six"}, 'step="six": must be a valid integer'),
        ({"step": 6}, "step is 6, unlike the folder's name"),
        ({"files": {"other.safetensors": 8}}, "No such file .*other.safetensors"),
        ({"files": {SHARD: 9}}, f"{SHARD} has .* bytes, not 9"),
        ({"config": {"model": {"dtype": "float8"}}}, "dtype=\"float8\": must be 'float32', .* or"),
        ({"steps": 7}, "steps=7: Extra inputs are not permitted"),
        ({"config": {"environment": {"HF_TOKEN": "hf_x"}}}, r"environment\.HF_TOKEN Input"),
        ({"model": {}}, "model.vocab_size Field required; .*model.hidden_size Field required"),
    ],
    ids=str,
)
def test_a_damaged_checkpoint_is_refused_with_the_one_before_it(tmp_path, change, expected):
    older = write_checkpoint(tmp_path / "step-00000001")
    changes = change if isinstance(change, dict) else {}
    newer = write_checkpoint(tmp_path / "step-00000007", lambda state: state | changes)
    if change is None:
        (newer / "state.json").unlink()
    elif not changes:
        (newer / "state.json").write_text(change)
    message = rf"^cannot use the checkpoint {newer}: .*{expected}.*: name another one in checkpoint"
    with pytest.raises(ValueError, match=rf"{message}.load_path, for example {older}$") as error:
        read_metadata(newer)
    assert "hf_x" not in str(error.value)


def test_a_folder_of_checkpoints_is_refused_with_the_latest_in_it(tmp_path):
    latest = write_checkpoint(tmp_path / "run" / "step-00000007")
    for name, remedy in {"gone": "load_path$", "run": f"for example {latest}$"}.items():
        with pytest.raises(ValueError, match=f"No such file .*{remedy}"):
            read_metadata(tmp_path / name)
    assert read_metadata(write_checkpoint(tmp_path / "best")).step == 7  # a name of one's own


EXPERTS = {"num_local_experts": 4, "mlp_only_layers": [0]}
WIDER = {"model": {"hidden_size": 64, "tie_word_embeddings": True}, "optimizer": "sgd"}
OTHER_RUNS = [
    ({}, WIDER, "hidden_size was 32 and is 64.*tie_word_embeddings was false and is true"),
    ({}, WIDER, 'optimizer was "adamw" and is "sgd".*load_path null'),
    ({"model": EXPERTS}, {}, "num_local_experts was 4 and is 0"),
    (
        {"model": EXPERTS},
        {"model": EXPERTS | {"mlp_only_layers": [1]}},
        r": mlp_only_layers was \[0\] and is \[1\]\.",
    ),
]


@pytest.mark.parametrize("saved,resumed,message", OTHER_RUNS)
def test_a_checkpoint_of_another_run_is_refused(tmp_path, saved, resumed, message):
    folder = write_checkpoint(tmp_path / "saved", **saved)
    for options, what in ((saved, None), (resumed, message)):
        config = make_config(**options)
        arguments = folder, resolve_model(config), config.training.optimizer
        if what is None:
            assert read_to_resume(*arguments).step == 7
            continue
        with pytest.raises(ValueError, match=message) as error:
            read_to_resume(*arguments)
        assert str(folder) in str(error.value) and "num_hidden_layers" not in str(error.value)


def test_an_export_refuses_a_damaged_checkpoint_with_exit_code_2(tmp_path, capsys):
    folder = write_checkpoint(tmp_path / "step-00000007", lambda state: state | {"step": 6})
    with pytest.raises(SystemExit) as end:
        export.main([str(folder), str(tmp_path / "hf")])
    assert end.value.code == 2 and not (tmp_path / "hf").exists()
    error = capsys.readouterr().err
    assert "step is 6" in error and "name another one in the argument `checkpoint`" in error


def warnings(before: Config, now: Config, data: dict = DATA, saved_data: dict = DATA) -> list[str]:
    state = state_of(before) | {"data": saved_data}
    return resume_warnings(Metadata.model_validate_json(json.dumps(state)), now, data)


# What is changed, and the warning; none where nothing changes what is learned.
CHANGES = [
    ({}, ""),
    ({"tp": 2, "micro_batch_size": 1, "gradient_accumulation_steps": 4}, ""),
    ({"max_tokens": 100, "eval_frequency": 1}, ""),
    ({"schedule": "wsd"}, 'training.schedule was "cosine" and is "wsd": from here on the new val'),
    ({"learning_rate": 0.5}, "training.learning_rate was 0.01 and is 0.5: from here on the new"),
    ({"total_train_steps": 9}, "training.total_train_steps was 6 and is 9: from here on the new"),
    ({"betas": [0.9, 0.99]}, "training.betas was [0.9, 0.95] and is [0.9, 0.99]: from here on"),
    ({"weight_decay": 0.0}, "training.weight_decay was 0.1 and is 0.0: from here on the new"),
    ({"dtype": "bfloat16"}, 'model.dtype was "float32" and is "bfloat16": from here on the new'),
    ({"dp": 2}, "sequences a step was 4 and is 8: from here on other data is seen"),
    ({"seed": 7}, "training.seed was 42 and is 7: from here on other data is seen"),
    ({"seq_length": 32}, "training.seq_length was 16 and is 32: from here on other data is seen"),
]


@pytest.mark.quick
@pytest.mark.parametrize("change,expected", CHANGES, ids=str)
def test_a_resume_warns_of_other_data_and_of_another_way_to_learn(change, expected):
    found = warnings(make_config(), make_config(**change))
    assert len(found) == bool(expected) and "".join(found).startswith(expected)


def test_a_resume_warns_of_another_text_and_another_tokenizer():
    config, moved = make_config(), "held-out text has moved, so that what was validated on may be"
    for key, meaning in {"the text": moved, "the tokenizer": "ids mean other text"}.items():
        (warning,) = warnings(config, config, DATA | {key: "checksum 3"})
        assert warning.startswith(f'{key} was "{DATA[key]}" and is "checksum 3": from here on')
        assert meaning in warning
    elsewhere = config.model_copy(update={"dataset": Dataset(name="moved.jsonl")})
    assert warnings(config, elsewhere) == []  # the same text
    (name, _) = warnings(config, elsewhere, DATA | {"the text": "other"})
    assert name.startswith('dataset.name was "stdlib" and is "moved.jsonl": from here on other')
    assert warnings(config, config, saved_data={}) == []  # of a version that noted none
