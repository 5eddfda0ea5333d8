"""How evenly experts are used: the metrics of a step, the console's words, and a run."""

from dataclasses import replace

import pytest
import torch

from picotron_min.extensions.experts.balance import measure_balance
from picotron_min.extensions.experts.router import RoutingCounts
from picotron_min.extensions.settings import ModelConfig, Routing
from tests.runtime.test_console import started
from tests.runtime.test_metrics import RECORD

MODEL = ModelConfig(61, 32, 48, 3, 4, 4, num_local_experts=4, mlp_only_layers=(1,))
OFF = Routing(moe_seq_aux_loss_coeff=0.0)


def table(*rows: tuple) -> torch.Tensor:
    """A row a layer: (the tokens of each expert, then the other columns by name)."""
    tally = RoutingCounts(MODEL, torch.device("cpu"))
    for layer, (counts, columns) in enumerate(rows):
        tally.table[layer, :4] = torch.tensor(counts)
        for name, value in columns.items():
            tally.add(layer, name, torch.tensor(float(value)))
    return tally.table


LOSSES = {
    "seq_aux": "seq_load_balancing_loss",
    "aux": "load_balancing_loss",
    "global_aux": "global_load_balancing_loss",
    "z": "z_loss",
}


@pytest.mark.parametrize("coefficient", LOSSES)
def test_measures_are_means_over_tokens_and_over_layers_with_experts(coefficient):
    routed = table(
        ((10, 6, 2, 2), {"tokens": 10} | dict.fromkeys(LOSSES.values(), 15)),
        ((0, 0, 0, 0), {}),  # without experts
        ((3, 3, 3, 3), {"tokens": 10, "dropped": 8} | dict.fromkeys(LOSSES.values(), 10)),
    )
    expected = {name: [None] * 3 for name in LOSSES.values()}
    expected[LOSSES[coefficient]] = [1.5, None, 1]  # the others have no coefficient
    expected |= {"load_imbalance": [2, None, 1], "dropped": [0, None, 0.4]}
    expected["rank_imbalance"] = [16 / 10, None, 6 / 10]
    per_layer = {f"{name}_per_layer": values for name, values in expected.items()}
    means = {n: None if v == [None] * 3 else (v[0] + v[2]) / 2 for n, v in expected.items()}
    routing = replace(OFF, **{f"moe_{coefficient}_loss_coeff": 0.1})
    assert measure_balance(routed, MODEL, routing, 2) == per_layer | means


def test_the_console_shows_further_tokens_the_imbalance_and_what_is_dropped():
    console, out = started(1, 2)
    for step, imbalance, dropped in ((1, 2.5, 0.0415), (2, 1.255, 0.0)):
        measures = {"mtp_1_loss": 3.5, "load_imbalance": imbalance, "dropped": dropped}
        console.step(replace(RECORD, step=step, loss=3.0, measures=measures))
    text = " ".join(out.getvalue().split())
    assert "mtp_1_loss 3.5 load_imbalance 2.5 dropped 0.0415 1.23M" in text
    assert text.count("dropped") == 1 and "load_imbalance 1.255" in text


def test_too_many_rows_on_a_rank_are_the_one_error_of_all_ranks(workplace):
    """Of two ranks the second gets the rows of all tokens, twice as many as planned."""
    one_each = {"num_local_experts": 2, "num_experts_per_tok": 1, "norm_topk_prob": False}
    config = workplace.config(
        "full",
        distributed={"ep_size": 2},
        model=one_each | {"moe_intermediate_size": 16, "mlp_only_layers": [0]},
        training={"moe_router_force_biased": -30.0, "moe_expert_rank_capacity_factor": 1.9},
    )
    stopped = workplace.main(config)
    assert stopped.code == 1 and stopped.seconds < 30
    message = "layer 1: the experts of rank 1 get 128 rows, above 1.9 x 64, the planned rows (moe_e"
    assert stopped.output.count(message) == stopped.output.count("in step 1") == 1
    assert "Traceback" not in stopped.output, stopped.output
