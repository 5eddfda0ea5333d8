"""Query and key norms: Qwen3's dense models. Layouts are in test_layouts.py."""

import pytest
import torch
import transformers
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from picotron_min.extensions.qk_norm.extension import QkNorm
from picotron_min.extensions.settings import Layout, ModelConfig
from picotron_min.model import Llama
from picotron_min.placement import placements
from picotron_min.runtime.architectures import to_hf
from tests.core.test_model import assert_computes_the_same, norm_in_own_dtype

SHAPE = ModelConfig(61, 32, 48, 8, 8, 4, head_dim=12, qk_norm=True)


def normed_llama(config: ModelConfig) -> Llama:
    torch.manual_seed(0)
    model, extension = Llama(config).double(), QkNorm()
    extension.swap(model)
    model.to_empty(device="cpu")
    model.tie_weights()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=0.1, std=0.2)
    extension.connect(model, {})
    return model


@pytest.mark.parametrize("tied", [False, True])
def test_logits_and_gradients_equal_transformers(tied, monkeypatch):
    monkeypatch.setattr(Qwen3RMSNorm, "forward", norm_in_own_dtype)
    config = SHAPE.override(tie_word_embeddings=tied, num_hidden_layers=2)
    ours, there = normed_llama(config), transformers.Qwen3Config(**to_hf(config))
    assert_computes_the_same(ours, transformers.Qwen3ForCausalLM(there).double(), 1e-12)


def test_a_parameter_that_no_rule_knows_is_refused():
    class Ruleless(Layout):
        rules = ()

    with pytest.raises(KeyError, match=r"no rule .* knows model\.layers\.0\.self_attn\.q_norm"):
        placements(SHAPE.parameter_shapes(), Ruleless(tp=2), tied=False)
