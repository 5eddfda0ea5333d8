"""Weights in Hugging Face's form: which folders a run refuses to start from, and why."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from picotron_min.extensions.settings import ModelConfig
from picotron_min.runtime.architectures import all_shapes, our_name, to_hf
from picotron_min.runtime.hugging_face import find_weights

LLAMA = ModelConfig(257, 32, 48, 2, 4, 4)
TIED = LLAMA.override(tie_word_embeddings=True)
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@pytest.fixture
def write(tmp_path):
    """A folder of a model, with other tensors, or without those that are None."""

    def write(model_config=LLAMA, tensors=(), **config) -> str:
        shapes = all_shapes(model_config).items()
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
        f"{q} is (5, 32) there, and (32, 32) here",
        f"{up} is absent there, and (48, 32) here",
        "model.norm.weight is of dtype I32 (readable: F64, F32, BF16, F16) there, and (32,) here",
        "model.layers.7.mlp.up_proj.weight is (2,) there, and absent here",
    ]
    assert "rms_norm_eps" not in refusal(folder, given=["rms_norm_eps"])
    assert re.search(r"\nand \d+ more$", refusal(folder, LLAMA.override(num_hidden_layers=6)))


EXPERTS = LLAMA.override(num_local_experts=4, moe_intermediate_size=16)


def test_a_number_that_no_shape_shows_must_be_the_same_if_it_has_a_meaning(write):
    theirs = LLAMA.override(no_rope_layers=(1, 0))
    message = "no_rope_layers is (1, 0) there, and () here"
    assert message in refusal(write(theirs), LLAMA)
    assert find_weights(write(theirs), LLAMA, {"no_rope_layers"})
    # The size of experts where there are none, and of an MLP that no layer has.
    dense = LLAMA.override(moe_intermediate_size=16, max_position_embeddings=9)
    for theirs, ours in ((LLAMA, dense), (EXPERTS, EXPERTS.override(intermediate_size=99))):
        assert find_weights(write(theirs), ours, set())


def test_tensors_are_named_as_in_the_files_and_belong_to_one_file(write):
    prefix = "model.layers.1.block_sparse_moe."
    first, router = f"{prefix}experts.0.w1.weight", f"{prefix}gate.weight"
    folder = Path(write(EXPERTS, {our_name(first): None}))
    assert f"{first} is absent there, and (16, 32) here" in refusal(str(folder), EXPERTS)
    save_file({router: torch.ones(4, 32)}, folder / "other.safetensors")
    message = "other.safetensors is in another file, too: keep one"
    assert f"{router} of {folder}/{message}" in refusal(str(folder), EXPERTS)


def test_a_tied_model_takes_a_head_that_equals_its_embedding_and_no_other(write):
    head = torch.ones(257, 32)
    assert find_weights(write(TIED, {HEAD: head}), TIED, set())
    head[3, 3] = 2
    differs = refusal(write(TIED, {HEAD: head}), TIED)
    assert f"{HEAD} differs from {EMBEDDING}" in differs and "tie_word_embeddings to f" in differs
    untied = refusal(write(TIED), given=["tie_word_embeddings"])
    assert f"{HEAD} is absent there" in untied
    assert "without lm_head set model.tie_word_embeddings to true" in untied


def test_folders_without_weights_and_damaged_files_are_refused(write, tmp_path):
    folder, path = write(), tmp_path / "model.safetensors"
    path.write_bytes(b"garbage" * 100)
    assert refusal(folder).startswith(f"cannot read {path}: ")
    (tmp_path / "config.json").unlink()  # as a checkpoint
    for name in (folder, str(path)):
        assert "is no folder with config.json and .safetensors" in refusal(name)
