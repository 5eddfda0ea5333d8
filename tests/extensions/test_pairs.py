"""Pairs of runs that differ in one choice: equal to the last bit, or but for a rounding.

All else that layouts train is compared to 1e-10 in tests/test_layouts.py. Rows are as there.
"""

import functools
from unittest import mock

import numpy as np
import pytest

from picotron_min.extensions.memory import offload
from picotron_min.extensions.memory.offload import HostMemory
from picotron_min.runtime.config import Config
from tests.assembled import Run, assert_same, train_briefly, whole_run
from tests.rows import lines, row

# What both runs have | the first | the second. Where sums are in the same order, to the last bit:
EXACT = """\
sharding: m=3 dtype=float32 grad_clip=null | dp=2 sharding=optimizer | dp=2
sharding: m=3 dtype=bfloat16 grad_clip=null | dp=2 sharding=layerwise | dp=2
sharding: dtype=bfloat16 grad_clip=null | dp=2 sharding=gradients | dp=2
sharding: dtype=float32 grad_clip=null model=tied | dp=2 sharding=parameters | dp=2
precision: dp=2 fp8 layers=3 dtype=bfloat16 grad_clip=null | sharding=parameters |
schedules: dp=2 pp=2 m=3 dtype=bfloat16 sharding=parameters model=softmax | engine=zb_h1 |
experts: dtype=float32 grad_clip=null model=softmax | dp=2 sharding=parameters | dp=2
memory: pp=2 m=3 engine=zb_v layers=8 | offload=1 |
memory: dp=2 ep=2 m=2 sharding=parameters recompute=selective layers=3 model=gated | offload=2 |
"""

# Sums in another order may round a moment to the next number: 1/256 of an update. Parts of rows
# that etp ranks round are as many in both runs.
ROUNDED = """\
optimizers: adamw moments=bfloat16 layers=3 | dp=2 tp=2 |
optimizers: muon moments=bfloat16 layers=3 | pp=2 cp=2 m=2 |
precision: etp=2 fp8_experts model=softmax | dp=2 sharding=parameters | cp=2
"""

START_IN = HostMemory.start_in
TOLERANCES = [(EXACT, 0.0), (ROUNDED, 1e-4)]


def train_so_that_all_is_offloaded(config: Config, *run) -> Run:
    start_in = mock.patch.object(HostMemory, "start_in", autospec=True, side_effect=START_IN)
    with mock.patch.object(offload, "LEAST_OFFLOAD", 1), start_in as come_back:  # also small ones
        result = train_briefly(config, *run)
    assert come_back.called == bool(config.model.offload)
    return result


@functools.cache
def trained(pool, text: str) -> Run:
    return whole_run(pool, *row(text), 2, train_so_that_all_is_offloaded, atol=1e-10)


@pytest.mark.parametrize(
    "text,atol", [(text, atol) for table, atol in TOLERANCES for text in lines(table)], ids=str
)
def test_both_runs_train_the_same_model(pool, text, atol):
    shared, *sides = text.split("|")
    ours, theirs = (trained(pool, f"{shared}{side}") for side in sides)
    if not atol:  # of norms, ranks add the squares of their own parts
        np.testing.assert_allclose(ours.norms, theirs.norms, rtol=1e-6)
        ours = ours._replace(norms=theirs.norms, gradients=theirs.gradients)
    assert_same(ours, theirs, atol)
