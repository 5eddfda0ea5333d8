"""Kinds of attention that published models have: each as transformers computes it.

Layouts are in test_layouts.py, and files in runtime/test_public_models.py.
"""

from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
import transformers

from picotron_min.extensions.settings import FAMILIES, Layout, ModelConfig
from picotron_min.initialise import initial_std, initial_weight
from picotron_min.model import Llama
from picotron_min.placement import placements
from picotron_min.planner import activations
from picotron_min.runtime.architectures import to_hf
from tests.core.test_model import assert_computes_the_same, norm_in_own_dtype

SHAPE = ModelConfig(61, 32, 48, 4, 8, 4, head_dim=12)
KINDS = {
    "qk_norm": {"qk_norm": True},
    "qkv_bias": {"qkv_bias": True},
    "no_rope": {"no_rope_layers": (1, 0, 0, 1)},
    "post_norm": {"post_norm": True},
}
SHAPES = {kind: SHAPE.override(**numbers) for kind, numbers in KINDS.items()}


def llama_with(kind: str, config: ModelConfig) -> Llama:
    torch.manual_seed(0)
    module = import_module(f"picotron_min.extensions.{kind}.extension")
    of_run = {"post_norm": lambda: module.PostNorm(SimpleNamespace(size=1))}
    make = of_run.get(kind) or getattr(module, FAMILIES[kind].extension)
    model, extension = Llama(config).double(), make()
    extension.swap(model)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=0.1, std=0.2)
    extension.connect(model, {})
    extension.wrap(model)
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_gradients_equal_transformers(kind, monkeypatch):
    config = SHAPES[kind]
    theirs = transformers.AutoConfig.for_model(**to_hf(config) | {"pad_token_id": None})
    theirs = transformers.AutoModelForCausalLM.from_config(theirs).double()
    monkeypatch.setattr(type(theirs.model.norm), "forward", norm_in_own_dtype)
    assert_computes_the_same(llama_with(kind, config), theirs, 1e-12)


def test_a_parameter_that_no_rule_knows_is_refused():
    class Ruleless(Layout):
        rules = ()

    with pytest.raises(KeyError, match=r"no rule .* knows model\.layers\.0\.self_attn\.q_norm"):
        placements(SHAPES["qk_norm"].parameter_shapes(), Ruleless(tp=2), tied=False)


def test_a_parameter_whose_memory_is_not_planned_is_refused(monkeypatch):
    monkeypatch.setattr(activations, "KNOWN", activations.KNOWN - {"q_bias"})
    activations._refuse_unknown.cache_clear()
    with pytest.raises(ValueError, match=r"what .*q_bias keeps .* is not planned"):
        activations.saved_per_token(SHAPES["qkv_bias"], "float32", "none", Layout(), 0)


def test_norms_start_at_one_and_biases_at_zero():
    shapes = SHAPES["qkv_bias"].parameter_shapes() | SHAPES["qk_norm"].parameter_shapes()
    vectors = {name: shape for name, shape in shapes.items() if len(shape) == 1}
    for name, shape in vectors.items():
        weight = initial_weight(name, shape, 42, initial_std(name, 4))
        assert torch.equal(weight, torch.full(shape, 0.0 if "bias" in name else 1.0)), name
    assert len(vectors) == 4 * (2 + 3 + 2) + 1


def test_norms_of_all_heads_and_of_each_are_not_combined():
    with pytest.raises(ValueError, match="qk_norm of each: set one to false"):
        SHAPE.override(post_norm=True, qk_norm=True)


def test_layers_without_rotary_embedding_fit_the_model():
    assert SHAPES["no_rope"].rope_free == {1, 2}
    assert SHAPE.override(no_rope_layers=(1,) * 4) == SHAPE
    assert SHAPE.override(no_rope_layers=[0, 1] * 5).no_rope_layers == (0, 1, 0, 1)
    last = SHAPE.override(no_rope_layers=(1, 1, 1, 0))
    fewer = last.override(num_hidden_layers=3)
    assert fewer == SHAPE.override(num_hidden_layers=3)
    assert fewer.override(num_hidden_layers=4) == last
    with pytest.raises(
        ValueError, match="no_rope_layers has 3 numbers for 4 layers in all: give one"
    ):
        SHAPE.override(no_rope_layers=(1, 1, 0))
    with pytest.raises(ValueError, match="no_rope_layers has 4: use 1 for rotary"):
        SHAPE.override(no_rope_layers=(4,) * 4)
