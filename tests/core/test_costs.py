"""The formulas of costs.py against what torch counts in the real model."""

import itertools
from functools import partial
from typing import get_args

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from picotron_min import costs
from picotron_min.extensions.experts.moe import apply_moe
from picotron_min.extensions.experts.router import RoutingCounts
from picotron_min.extensions.memory.extension import apply_recompute
from picotron_min.extensions.multi_token.extension import MultiToken, add_prediction_layers
from picotron_min.extensions.settings import Layout, ModelConfig, Routing, Workload
from picotron_min.model import Llama
from picotron_min.runtime.hardware import hardware_flops_per_token
from picotron_min.runtime.public_models import PRESETS

GQA = ModelConfig(512, 128, 352, 2, 4, 2)
RECOMPUTE = get_args(Workload.__annotations__["recompute"])
DEPTHS = GQA.override(num_nextn_predict_layers=1)
SHAPES = {"gqa": GQA, "depths": DEPTHS, "tied": PRESETS["tiny"]}
EIGHT = GQA.override(moe_intermediate_size=112, num_local_experts=8)
MIXTURES = {
    "softmax": EIGHT,
    "gated": EIGHT.override(n_shared_experts=1, moe_shared_expert_gate=True),
    "sigmoid": EIGHT.override(scoring_func="sigmoid", n_shared_experts=2, num_experts_per_tok=3),
}
HYBRIDS = {
    name: c.override(mlp_only_layers=(0,), num_hidden_layers=3) for name, c in MIXTURES.items()
}
B, S = 2, 64


def build(model_config: ModelConfig, recompute: str) -> Llama:
    model, tally = Llama(model_config), RoutingCounts(model_config, torch.device("cpu"))
    apply_moe(model, Routing(), tally)
    if model_config.num_nextn_predict_layers:
        add_prediction_layers(model)
        model.to_empty(device="cpu")
        MultiToken(model_config, Workload(S), torch.device("cpu")).connect(model, {})
    for bias in model.buffers():
        bias.zero_()
    apply_recompute(model, recompute, context=tally.paused)
    return model


def batch(model_config: ModelConfig) -> tuple[Tensor, Tensor, Tensor]:
    tokens = torch.randint(model_config.vocab_size, (B, S))
    D = model_config.num_nextn_predict_layers
    return tokens, torch.arange(S), tokens.expand(1 + D, B, S) if D else tokens


ALL = SHAPES | HYBRIDS


@pytest.mark.parametrize(
    "name,recompute", [*itertools.product(ALL, ["none"]), *zip(ALL, RECOMPUTE[1:] * 3, strict=True)]
)
def test_hardware_flops_are_what_torch_counts(name, recompute):
    model_config = ALL[name]
    model = build(model_config, recompute)
    with FlopCounterMode(display=False) as counter:
        model(*batch(model_config)).backward()
    # torch's counter does not know attention on a CPU: that term vanishes at length 0
    planned = hardware_flops_per_token(model_config, 0, recompute) * B * S
    again = 0
    if model_config.num_local_experts and recompute == "full":
        # The last product of experts that are computed one by one.
        again = 2 * B * S * costs.layer_flops(model_config, 0, layer=1)["down"]
    assert planned <= counter.get_total_flops() <= planned + again


def test_attention_costs_half_of_the_written_out_products():
    at_once = costs.model_flops_per_token(GQA, S) - costs.model_flops_per_token(GQA, 0)
    q = torch.randn(1, GQA.num_attention_heads, S, GQA.head_dim, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        ((q @ q.mT) @ q).sum().backward()
    assert at_once * S == GQA.num_hidden_layers * counter.get_total_flops() / 2
    for recompute in ("selective", "full"):  # a third forward on top of the 1 + 2
        more = hardware_flops_per_token(GQA, S, recompute)
        more -= hardware_flops_per_token(GQA, 0, recompute)
        assert more * 3 == at_once * 4


@pytest.mark.parametrize("half", ["attention_shapes", "mlp_shapes"])
def test_a_matrix_without_a_formula_is_refused(half, monkeypatch):
    """Its FLOPs would be missing in MFU and in plans, and nobody would see it."""
    known, more = getattr(ModelConfig, half), {"self_attn.memory": (8, 128)}
    monkeypatch.setattr(ModelConfig, half, lambda *args: known(*args) | more)
    model_config = GQA.override(rope_theta=1e6)  # what was checked is not checked again
    for flops in (costs.model_flops_per_token, partial(costs.layers_of_stages, layout=Layout(2))):
        with pytest.raises(ValueError, match=r"layer 0 has .* parameters in matrices, and the"):
            flops(model_config, seq_length=S)
    more["self_attn.memory"] = (8,)  # a vector costs nothing
    assert costs.model_flops_per_token(GQA.override(rope_theta=1e5), S)
