"""Query and key norms: Qwen3's dense models, and in every layout."""

import pytest
import torch
import transformers
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from picotron_min.extensions.qk_norm.extension import QkNorm
from picotron_min.extensions.settings import Layout, ModelConfig
from picotron_min.model import Llama
from picotron_min.placement import placements
from picotron_min.runtime.architectures import to_hf
from tests.assembled import assert_trains_as_one_rank, make_config
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


LAYOUTS = {  # beside those of test_layouts.py
    "tp, simple": {"tp": 4, "overlap": False},
    "sp, ring": {"tp": 2, "sequence_parallel": True, "tp_overlap": True},
    "ulysses, tp": {"cp": 2, "tp": 2, "cp_engine": "ulysses"},
    "zb_h1, tp": {"pp": 2, "tp": 2, "chunks": 1, "engine": "zb_h1", "micro_batches": 2},
    "ZeRO-1, tp": {"dp": 2, "tp": 2, "sharding": "optimizer"},
    "ZeRO-3": {"dp": 2, "sharding": "parameters", "recompute": "full"},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_trains_the_same_model(pool, layout):
    config = make_config(layers=3, **LAYOUTS[layout])
    assert_trains_as_one_rank(pool, config, SHAPE, steps=3)


def test_a_parameter_that_no_rule_knows_is_refused():
    class Ruleless(Layout):
        rules = ()

    with pytest.raises(KeyError, match=r"no rule .* knows model\.layers\.0\.self_attn\.q_norm"):
        placements(SHAPE.parameter_shapes(), Ruleless(tp=2), tied=False)


def test_a_model_that_could_not_be_exported_is_refused_before_it_trains(workplace):
    both = {"qk_norm": True, "num_local_experts": 4}  # Qwen3MoE, which no row describes
    outcome = workplace.main(workplace.config("both", model=both))
    assert outcome.code == 2 and "'qwen3' of transformers is another model" in outcome.output
    assert not workplace.folder.joinpath("runs", "both").exists()
