"""The formulas of costs.py and memory.py for mixtures, against what torch counts and keeps."""

import itertools

import pytest

from picotron_min import costs
from picotron_min.extensions.settings import Layout, ModelConfig, Routing, Workload
from picotron_min.planner.memory import memory_per_rank, most_rows
from picotron_min.runtime.hardware import active_parameter_count
from tests.core.test_costs import EIGHT, HYBRIDS, S, build

MIXTRAL = ModelConfig(32_000, 4096, 14_336, 32, 32, 8, num_local_experts=8)


@pytest.mark.parametrize("model_config", HYBRIDS.values(), ids=HYBRIDS)
def test_parameters_are_the_models_and_a_token_uses_k_experts_of_them(model_config):
    parameters = dict(build(model_config, "none").named_parameters())
    assert costs.parameter_count(model_config) == sum(p.numel() for p in parameters.values())
    k = model_config.num_experts_per_tok
    idle = [p for n, p in parameters.items() if any(f".experts.{e}." in n for e in range(k, 8))]
    active = costs.parameter_count(model_config) - sum(p.numel() for p in idle)
    assert active_parameter_count(model_config) == active


# The most rows that a rank's experts get, to an even share: by ep, and what bounds them.
ROWS = """
8 | | 1
8 | moe_expert_rank_capacity_factor=1.5 | 1.5
8 | moe_expert_rank_capacity_factor=3.0 moe_expert_capacity_factor=2.0 | 2
2 | moe_expert_rank_capacity_factor=3.0 | 2
1 | moe_expert_capacity_factor=0.5 | 0.5
1 | moe_expert_capacity_factor=1.5 moe_pad_expert_input_to_capacity=1 | 1.5
""".strip().splitlines()


@pytest.mark.parametrize("row", ROWS)
def test_as_many_rows_are_planned_as_a_rank_can_get(row):
    ep, bounds, most = row.split("|")
    bounds = {name: float(x) for name, _, x in (word.partition("=") for word in bounds.split())}
    layout, work = Layout(dp=8, ep=int(ep)), Workload(4096, 4, routing=Routing(**bounds))
    assert most_rows(layout, work) == float(most)
    model_config = MIXTRAL.override(vocab_size=8)  # a loss needs less than a layer
    even, planned = (memory_per_rank(model_config, layout, w) for w in (Workload(4096, 4), work))
    # k numbers of a token in each of 32 layers, all in float32, and gradients in one.
    each = 2 * (32 * (5 * 14_336 + 4096) + 2 * 14_336)
    assert planned.activations - even.activations == (float(most) - 1) * 4 * 4096 * 4 * each
    assert planned[:3] == even[:3]


# The vocabulary, the layers without experts, and the size of an expert.
SPLITS = [(1, (), 16), (500, (0,), 2000), (20_000, (0, 1, 2), 16), (20_000, (1, 4), 2000)]
SPLITS += [(500, (6,), 16)]


@pytest.mark.parametrize("vocab_size,dense,inner", SPLITS)
def test_no_other_split_of_the_layers_has_a_faster_slowest_stage(vocab_size, dense, inner):
    sizes = {"mlp_only_layers": dense, "moe_intermediate_size": inner}
    model_config = EIGHT.override(vocab_size=vocab_size, num_hidden_layers=7, **sizes)
    layers = [sum(costs.layer_flops(model_config, S, i).values()) for i in range(7)]
    head = 2 * vocab_size * model_config.hidden_size

    def slowest(split) -> int:
        stops = list(itertools.accumulate(split))
        loads = [sum(layers[stop - n : stop]) for n, stop in zip(split, stops, strict=True)]
        return max([*loads[:-1], loads[-1] + head])

    for stages in (1, 2, 3, 5, 7):
        split = costs.layers_of_stages(model_config, Layout(pp=stages), S)
        assert len(split) == stages and sum(split) == 7 and min(split) >= 1
        every = (s for s in itertools.product(range(1, 8), repeat=stages) if sum(s) == 7)
        assert slowest(split) == min(map(slowest, every))
