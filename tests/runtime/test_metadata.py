"""Which checkpoints are refused before a run resumes from them, and what a resume warns of."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from picotron_min.runtime import export, hugging_face
from picotron_min.runtime.config import Config, Dataset
from picotron_min.runtime.config_checks import resolve_model
from picotron_min.runtime.metadata import (
    Metadata,
    metadata_of,
    read_metadata,
    read_to_resume,
    resume_warnings,
)
from tests.core.test_checkpoint import make_config, saves

SHARD = "shard-00001-model-00001-of-00001.safetensors"
DATA = {"the text": "9 tokens, checksum 1", "the tokenizer": "checksum 2"}


def write_checkpoint(
    folder: Path, change: Callable[[dict], dict] = lambda state: state, **options
) -> Path:
    """A checkpoint as small as one can be, with something changed in its state.json."""
    folder.mkdir()
    save_file({"x": torch.zeros(1)}, folder / SHARD)
    config = make_config(**options)
    state = {"step": 7, "files": {SHARD: (folder / SHARD).stat().st_size}}
    state |= metadata_of(config, resolve_model(config), DATA, skipped_steps=1, tokens_seen=56)
    (folder / "state.json").write_text(json.dumps(change(state)))
    return folder


@pytest.mark.parametrize("shard", ["shard-00001", "shard-00002"])
@pytest.mark.parametrize(
    "damage,expected",
    [
        ("gone", "{0} is missing"),
        ("cut", "{0} has 2000 bytes, not"),
        ("garbage", ".*{0} is damaged, or not a safetensors file"),
    ],
)
def test_a_checkpoint_without_a_part_is_refused(pool, tmp_path, shard, damage, expected):
    config = make_config(tp=2)
    pool.run(2, saves, tmp_path, 0, 2, config)
    older, newer = tmp_path / "step-00000001", tmp_path / "step-00000002"
    (path,) = newer.glob(f"{shard}*")
    content = path.read_bytes()
    path.unlink()
    if damage != "gone":
        path.write_bytes(content[:2000] if damage == "cut" else content[::-1])
    assert read_to_resume(older, resolve_model(config), "adamw").step == 1
    message = rf"cannot use the checkpoint {newer}: {expected.format(path.name)}.*{older} is the"
    with pytest.raises(ValueError, match=message):
        read_to_resume(newer, resolve_model(config), "adamw")


def test_a_folder_that_is_no_checkpoint_is_refused_with_what_it_is(tmp_path):
    for name in ("run", "hf"):
        (tmp_path / name).mkdir()
    write_checkpoint(tmp_path / "run" / "step-00000007")
    (tmp_path / "hf" / "config.json").touch()
    inside = "it has no state.json. Name .*step-00000007 is the latest in it"
    for name, problem in {"gone": "no such folder", "hf": "model.weights", "run": inside}.items():
        with pytest.raises(ValueError, match=problem):
            read_metadata(tmp_path / name)


@pytest.mark.parametrize(
    "change,expected",
    [
        ("", "state.json: Invalid JSON: EOF"),
        ("[" * 10**5, "state.json: Invalid JSON: recursion limit"),
        ("[]", r"state.json: \[\]: must be"),
        ("{}", "state.json: step Field required; state.json: skipped_steps Field required"),
        (None, "it has no state.json"),
        ({"step": "six"}, 'state.json: step="six": must be a valid integer'),
        ({"step": -3}, "step=-3: must be greater than or equal to 0"),
        ({"step": 6}, "state.json: step is 6, unlike the folder's name"),
        ({"tokens_seen": 10**30}, "tokens_seen=10+: must be"),
        ({"files": {}}, "files={}: "),
        ({"files": {"other.safetensors": 8}}, rf"files lacks {SHARD}; other.* is missing"),
        ({"config": {"model": {"dtype": "float8"}}}, "dtype=\"float8\": must be 'float32', .* or"),
        ({"steps": 7}, "state.json: steps=7: Extra inputs are not permitted"),
        (
            {"config": {"environment": {"HF_TOKEN": "hf_x"}}},
            r"environment\.HF_TOKEN Input",
        ),
        ({"model": {}}, "model.vocab_size Field required; .*model.hidden_size Field required"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_damaged_state_is_refused_with_the_remedy(tmp_path, change, expected):
    older, newer = tmp_path / "step-00000001", tmp_path / "step-00000007"
    older.mkdir()
    (older / "state.json").touch()
    if isinstance(change, dict):
        write_checkpoint(newer, lambda state: state | change)
    else:
        write_checkpoint(newer)
        (newer / "state.json").unlink() if change is None else (
            (newer / "state.json").write_text(change)
        )
    message = rf"^cannot use the checkpoint {newer}: .*{expected}.*\. Name another one in"
    with pytest.raises(ValueError, match=message) as error:
        read_metadata(newer)
    assert f" checkpoint.load_path: {older} is the one before it" in str(error.value)


def test_a_checkpoint_may_have_a_name_of_the_users_choice(tmp_path):
    assert read_metadata(write_checkpoint(tmp_path / "best")).step == 7
    assert read_metadata(write_checkpoint(tmp_path / "step-00000007")).skipped_steps == 1


def test_a_file_that_cannot_be_read_is_not_called_damaged(tmp_path, monkeypatch):
    folder = write_checkpoint(tmp_path / "step-00000007")

    def stale(*args, **kwargs):
        raise PermissionError("Permission denied (os error 13)")

    monkeypatch.setattr(hugging_face, "safe_open", stale)
    with pytest.raises(ValueError) as error:
        read_metadata(folder)
    assert f"cannot read {folder / SHARD}: Permission denied (os error 13)" in str(error.value)
    assert "damaged" not in str(error.value)


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    folder, model_config = write_checkpoint(tmp_path / "saved"), resolve_model(make_config())
    assert read_to_resume(folder, model_config, "adamw").step == 7
    wider = model_config.override(hidden_size=64, tie_word_embeddings=True)
    with pytest.raises(ValueError) as error:
        read_to_resume(folder, wider, "sgd")
    for part in (
        str(folder),
        "hidden_size was 32 and is 64",
        "tie_word_embeddings was false and is true",
        'optimizer was "adamw" and is "sgd"',
        "load_path null",
    ):
        assert part in str(error.value)
    assert "num_hidden_layers" not in str(error.value)


def test_an_export_refuses_a_damaged_checkpoint_with_exit_code_2(tmp_path, capsys):
    folder = write_checkpoint(tmp_path / "step-00000007", lambda state: state | {"step": 6})
    with pytest.raises(SystemExit) as end:
        export.main([str(folder), str(tmp_path / "hf")])
    assert end.value.code == 2 and not (tmp_path / "hf").exists()
    error = capsys.readouterr().err
    assert "step is 6" in error and "Name another one in the argument `checkpoint`" in error
    assert "load_path" not in error


def saved_by(config: Config) -> Metadata:
    metadata = metadata_of(config, resolve_model(config), DATA, skipped_steps=0, tokens_seen=24)
    state = {"step": 3, "files": {SHARD: 8}, **metadata}
    return Metadata.model_validate_json(json.dumps(state))


def test_a_resume_with_the_same_config_warns_of_nothing():
    assert resume_warnings(saved_by(make_config()), make_config(), DATA) == []
    other_layout = make_config(tp=2, micro_batch_size=1, gradient_accumulation_steps=4)
    assert resume_warnings(saved_by(make_config()), other_layout, DATA) == []
    stops_earlier = make_config(max_tokens=100, eval_frequency=1)
    assert resume_warnings(saved_by(make_config()), stops_earlier, DATA) == []


EXPERTS = {"num_local_experts": 4, "mlp_only_layers": [0]}


def test_a_checkpoint_of_another_mixture_is_refused(tmp_path):
    config = make_config(model=EXPERTS)
    folder = write_checkpoint(tmp_path / "saved", model=EXPERTS)
    assert read_to_resume(folder, resolve_model(config), "adamw").step == 7
    other = resolve_model(
        make_config(model=EXPERTS | {"num_local_experts": 8, "mlp_only_layers": [1]})
    )
    with pytest.raises(ValueError) as error:
        read_to_resume(folder, other, "adamw")
    assert "num_local_experts was 4 and is 8; mlp_only_layers was [0] and is [1]" in str(
        error.value
    )
    with pytest.raises(ValueError, match="num_local_experts was 4 and is 0"):
        read_to_resume(folder, resolve_model(make_config()), "adamw")


@pytest.mark.parametrize(
    "change,expected",
    [
        ({"schedule": "wsd"}, 'training.schedule was "cosine" and is "wsd": from'),
        ({"learning_rate": 0.5}, "training.learning_rate was 0.01 and is 0.5: from"),
        ({"total_train_steps": 9}, "training.total_train_steps was 6 and is 9: from"),
        ({"betas": [0.9, 0.99]}, "training.betas was [0.9, 0.95] and is [0.9, 0.99]: from"),
        ({"weight_decay": 0.0}, "training.weight_decay was 0.1 and is 0.0: from"),
        ({"dtype": "bfloat16"}, 'model.dtype was "float32" and is "bfloat16": from'),
        ({"micro_batch_size": 4}, "sequences a step was 4 and is 8: from here on other data"),
        ({"dp": 2}, "sequences a step was 4 and is 8: from here on other data is seen"),
        ({"seed": 7}, "training.seed was 42 and is 7: from here on other data is seen"),
        ({"seq_length": 32}, "training.seq_length was 16 and is 32: from here on other data"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_resume_warns_of_other_data_and_of_another_way_to_learn(change, expected):
    (warning,) = resume_warnings(saved_by(make_config()), make_config(**change), DATA)
    assert warning.startswith(expected)


def test_a_resume_warns_of_another_text_and_another_tokenizer():
    config, moved = make_config(), "held-out text has moved, so that what was validated on may be"
    for key, meaning in {"the text": moved, "the tokenizer": "ids mean other text"}.items():
        (warning,) = resume_warnings(saved_by(config), config, DATA | {key: "checksum 3"})
        assert warning.startswith(f'{key} was "{DATA[key]}" and is "checksum 3": from here on')
        assert meaning in warning
    elsewhere = config.model_copy(update={"dataset": Dataset(name="moved.jsonl")})
    assert resume_warnings(saved_by(config), elsewhere, DATA) == []
    (name, _) = resume_warnings(saved_by(config), elsewhere, DATA | {"the text": "other"})
    assert name.startswith('dataset.name was "stdlib" and is "moved.jsonl": from here on other')
    older = saved_by(config).model_copy(update={"data": {}})  # of a version that noted none
    assert resume_warnings(older, config, DATA) == []
