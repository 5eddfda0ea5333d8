"""Weights in Hugging Face's form: which folders a run refuses to start from, and why."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from picotron_min.extensions.settings import ModelConfig
from picotron_min.runtime.architectures import to_hf
from picotron_min.runtime.hugging_face import find_weights

LLAMA = ModelConfig(257, 32, 48, 2, 4, 4)
TIED = LLAMA.override(tie_word_embeddings=True)
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@pytest.fixture
def write(tmp_path):
    """A folder of a model, with other tensors, or without those that are None."""

    def write(model_config=LLAMA, tensors=(), **config) -> str:
        shapes = model_config.parameter_shapes().items()
        found = {name: torch.ones(shape) for name, shape in shapes} | dict(tensors)
        found = {name: tensor for name, tensor in found.items() if tensor is not None}
        save_file(found, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text(json.dumps(to_hf(model_config) | config))
        return str(tmp_path)

    return write


def refusal(folder: str, model_config: ModelConfig = LLAMA, given=()) -> str:
    with pytest.raises(ValueError) as error:
        find_weights(folder, model_config, {*given})
    return str(error.value)


@pytest.mark.quick
def test_the_first_five_mistakes_in_weights_are_reported_at_once(write):
    q, up = (f"model.layers.0.{n}.weight" for n in ("self_attn.q_proj", "mlp.up_proj"))
    changes = {q: torch.zeros(5, 32), up: None, "model.layers.7.mlp.up_proj.weight": torch.zeros(2)}
    changes["model.norm.weight"] = torch.zeros(32, dtype=torch.int32)
    changes["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)  # of old versions
    changes["model.layers.0.mlp.shared_experts.up_proj.weight"] = torch.zeros(0, 32)  # without any
    folder = write(tensors=changes, rms_norm_eps=0.1)
    first, *lines = refusal(folder).splitlines()
    assert "Does model.name fit it?" in first
    assert lines == [
        "rms_norm_eps is 0.1 there, and 1e-05 here",
        f"{up} is absent there, and (48, 32) here",
        f"{q} is (5, 32) there, and (32, 32) here",
        "model.layers.7.mlp.up_proj.weight is (2,) there, and absent here",
        "model.norm.weight is of dtype I32 (readable: F64, F32, BF16, F16) there, and (32,) here",
    ]
    assert "rms_norm_eps" not in refusal(folder, given=["rms_norm_eps"])
    assert re.search(r"\nand \d+ more$", refusal(folder, LLAMA.override(num_hidden_layers=6)))


def test_a_tied_model_takes_a_head_that_equals_its_embedding_and_no_other(write):
    head = torch.ones(257, 32)
    assert find_weights(write(TIED, {HEAD: head}), TIED, set())
    head[3, 3] = 2
    differs = refusal(write(TIED, {HEAD: head}), TIED)
    assert f"{HEAD} differs from {EMBEDDING}" in differs and "tie_word_embeddings to f" in differs
    untied = refusal(write(TIED), given=["tie_word_embeddings"])
    assert f"{HEAD} is absent there" in untied
    assert "without lm_head set model.tie_word_embeddings to true" in untied


@pytest.mark.parametrize(
    "content,expected",
    [
        ("[1]", "must hold one object"),
        ('{"a": ', "Expecting value: line 1"),
        ('{"model_type": "gpt2"}', "model_type='gpt2' is not supported"),
    ],
)
def test_an_unusable_config_beside_weights_is_refused_with_its_path(write, content, expected):
    folder = write()
    (path := Path(folder, "config.json")).write_text(content)
    message = refusal(folder)
    assert message.startswith(f"model.weights: {path}: ") and expected in message


def test_folders_without_weights_and_damaged_files_are_refused(tmp_path):
    folder, path = str(tmp_path), tmp_path / "model.safetensors"
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04")
    assert "is no folder with .safetensors files" in refusal(folder)
    for content in (b"", b"garbage" * 100):
        path.write_bytes(content)
        assert refusal(folder).startswith(f"cannot read {path}: ")
    assert "model.safetensors is no folder with" in refusal(str(path))
    (tmp_path / "state.json").touch()
    command = f"python -m picotron_min.runtime.export {folder} FOLDER"
    assert f"is a checkpoint: export it first, with  {command}" in refusal(folder)


def test_an_export_is_a_command_that_reports_a_mistake():
    command = [sys.executable, "-m", "picotron_min.runtime.export", "nowhere", "other"]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 2 and "cannot use the checkpoint nowhere: " in done.stderr
