"""How evenly experts are used: the metrics of a step, and the console's words."""

from dataclasses import replace

import pytest
import torch

from picotron_min.extensions.experts.extension import Experts
from picotron_min.extensions.settings import Layout, ModelConfig, Routing, Workload
from tests.runtime.test_console import started
from tests.runtime.test_metrics import RECORD

MODEL = ModelConfig(61, 32, 48, 3, 4, 4, num_local_experts=4, mlp_only_layers=(1,))
OFF = Routing(moe_seq_aux_loss_coeff=0.0)


LOSSES = {
    "seq_aux": "seq_load_balancing_loss",
    "aux": "load_balancing_loss",
    "global_aux": "global_load_balancing_loss",
    "z": "z_loss",
}


@pytest.mark.parametrize("coefficient", LOSSES)
def test_measures_are_means_over_tokens_and_over_layers_with_experts(coefficient):
    routing = replace(OFF, **{f"moe_{coefficient}_loss_coeff": 0.1})
    experts = Experts(MODEL, Layout(ep=2), Workload(8, routing=routing), None, torch.device("cpu"))
    tally = experts.tally  # of each layer the tokens of each expert, then the other columns
    tally.table[:, :4] = torch.tensor([(10, 6, 2, 2), (0, 0, 0, 0), (3, 3, 3, 3)])
    for layer, total, dropped in ((0, 15, 0), (2, 10, 8)):  # the layer between has no experts
        for name, number in {"tokens": 10, "dropped": dropped}.items():
            tally.add(layer, name, number)
        for name in LOSSES.values():
            tally.add(layer, name, total)
    expected = {name: [None] * 3 for name in LOSSES.values()}
    expected[LOSSES[coefficient]] = [1.5, None, 1]  # the others have no coefficient
    expected |= {"load_imbalance": [2, None, 1], "dropped": [0, None, 0.4]}
    expected["rank_imbalance"] = [16 / 10, None, 6 / 10]
    per_layer = {f"{name}_per_layer": values for name, values in expected.items()}
    means = {n: None if v == [None] * 3 else (v[0] + v[2]) / 2 for n, v in expected.items()}
    assert experts.measures(experts.counts()) == per_layer | means


def test_the_console_shows_further_tokens_the_imbalance_and_what_is_dropped():
    console, out = started(1, 1)
    measures = {"mtp_1_loss": 3.5, "load_imbalance": 2.5, "dropped": 0.0415}
    console.step(replace(RECORD, measures=measures))
    assert "mtp_1_loss 3.5 load_imbalance 2.5 dropped 0.0415 " in " ".join(out.getvalue().split())
