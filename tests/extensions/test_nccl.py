"""Steps where communication waits as NCCL's does, and what shares its order with what."""

import numpy as np
import pytest
import torch

from picotron_min.collectives import start_receive, start_send
from picotron_min.extensions.settings import Layout
from picotron_min.mesh import build_axes
from picotron_min.runtime.launch import open_communicators
from tests.assembled import make_training
from tests.nccl_like import nccl_like
from tests.pool import RankFailed
from tests.rows import lines, row

STEPS = """
sharding: dp=2 pp=2 m=3 sharding=optimizer model=tied
sharding: dp=2 pp=2 m=3 sharding=parameters model=tied
sharding: dp=2 tp=2 sp sharding=layerwise
sharding: dp=2 cp=2 sharding=gradients
schedules: pp=4 m=6 model=tied
schedules: pp=4 m=6 engine=interleaved model=tied
schedules: pp=2 tp=2 m=3 engine=zb_h1 sp tp_overlap
schedules: pp=2 cp=2 m=3 engine=zb_v model=tied
experts: dp=4 ep=2 model=gated
"""


def step_as_with_nccl(text: str, eagerly: bool) -> float:
    training = make_training(*row(text))
    with nccl_like(eagerly=eagerly):
        return training.step(0).loss


@pytest.mark.parametrize("eagerly", [False, True], ids=["pairs", "one stream"])
@pytest.mark.parametrize("text", lines(STEPS))
def test_no_step_stalls_where_communication_waits_as_nccls_does(pool, text, eagerly):
    losses = pool.run(4, step_as_with_nccl, text, eagerly)
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


def test_gradients_hold_up_no_activations(pool):
    """They are reduced while backward runs, and what uses one group is done one by one."""
    for_activations, *others = pool.run(2, axes_with_one_group, Layout(tp=2))[0]
    assert for_activations == {"tp", "cp_tp"}
    assert others == [{"dp_cp_tp", "world", "edp", "edp_etp"}]
