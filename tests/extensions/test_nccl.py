"""Steps where communication waits as NCCL's does, and what shares its order with what."""

import numpy as np
import pytest
import torch

from picotron_min.collectives import start_receive, start_send
from picotron_min.extensions.settings import Layout
from picotron_min.mesh import build_axes
from picotron_min.runtime.launch import open_communicators
from tests.assembled import MODELS, make_config, make_training
from tests.extensions.test_experts import MODELS as EXPERTS
from tests.extensions.test_experts import make_expert_config
from tests.nccl_like import nccl_like
from tests.pool import RankFailed

PIPELINE = {"pp": 2, "micro_batches": 3}
RING = {"sequence_parallel": True, "tp_overlap": True}
STEPS = {  # four ranks
    "optimizer": ("tied", {"dp": 2, "sharding": "optimizer", **PIPELINE}),
    "parameters": ("tied", {"dp": 2, "sharding": "parameters", **PIPELINE}),
    "layerwise": ("untied", {"dp": 2, "sharding": "layerwise", "tp": 2}),
    "gradients": ("untied", {"dp": 2, "sharding": "gradients", "cp": 2}),
    "1f1b": ("tied", {"pp": 4, "micro_batches": 6}),
    "interleaved": ("tied", {"pp": 4, "chunks": 2, "engine": "interleaved", "micro_batches": 6}),
    "zb_h1": ("untied", {"tp": 2, "engine": "zb_h1", **PIPELINE, **RING}),
    "zb_v": ("tied", {"cp": 2, "chunks": 2, "engine": "zb_v", **PIPELINE}),
    "experts": ("gated", {"dp": 4, "ep": 2}),
}


def step_as_with_nccl(name: str, eagerly: bool) -> float:
    model, sizes = STEPS[name]
    config = (make_expert_config if model in EXPERTS else make_config)(**sizes)
    training = make_training(config, (MODELS | EXPERTS)[model])
    with nccl_like(eagerly=eagerly):
        return training.step(0).loss


@pytest.mark.parametrize("eagerly", [False, True], ids=["pairs", "one stream"])
@pytest.mark.parametrize("name", STEPS)
def test_no_step_stalls_where_communication_waits_as_nccls_does(pool, name, eagerly):
    losses = pool.run(4, step_as_with_nccl, name, eagerly)
    assert losses == [pytest.approx(np.log(61), abs=0.3)] * 4


def send_past_a_receive(eagerly: bool) -> None:
    """Rank 1 receives from rank 0, which sends only when rank 2 has what rank 1 sends next."""
    axes = build_axes(torch.device("cpu"), Layout(pp=3))
    axis = axes.pp
    x = torch.zeros(1)
    with nccl_like(seconds=1.0, eagerly=eagerly):
        open_communicators(axes)
        works = {
            0: lambda: [start_receive(x, axis, 2), start_send(x, axis, 1)],
            1: lambda: [start_receive(x, axis, 0), start_send(x, axis, 2)],
            2: lambda: [start_receive(x, axis, 1), start_send(x, axis, 0)],
        }[axis.rank]()
        for work in works:
            work.wait()


def test_a_receive_holds_up_no_send_to_another_rank_unless_groups_connect_eagerly(pool):
    pool.run(3, send_past_a_receive, False)
    with pytest.raises(RankFailed, match="waits to end message"):
        pool.run(3, send_past_a_receive, True)


def axes_with_one_group(layout: Layout) -> list[set[str]]:
    of_group = {}
    for axis in build_axes(torch.device("cpu"), layout):
        if axis.size > 1:
            of_group.setdefault(id(axis.group), set()).add(axis.name)
    return list(of_group.values())


@pytest.mark.parametrize(
    "layout,expected",
    [
        (Layout(dp=2), [{"dp", "dp_cp", "dp_cp_tp", "world", "edp", "edp_etp"}]),
        (Layout(cp=2), [{"cp", "cp_tp"}, {"dp_cp", "dp_cp_tp", "world", "edp", "edp_etp"}]),
        (Layout(tp=2), [{"tp", "cp_tp"}, {"dp_cp_tp", "world", "edp", "edp_etp"}]),
    ],
    ids=["dp", "cp", "tp"],
)
def test_gradients_hold_up_no_activations(pool, layout, expected):
    """They are reduced while backward runs, and what uses one group is done one by one."""
    assert pool.run(2, axes_with_one_group, layout)[0] == expected
