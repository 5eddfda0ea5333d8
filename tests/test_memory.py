"""Planned memory against the tensors that are alive in a step: on every rank, and at its peak."""

import gc
from contextlib import contextmanager

import pytest

from picotron_min.dry_run.recorder import Recorder
from picotron_min.planner.memory import memory_of_ranks
from tests.assembled import make_training
from tests.rows import lines, row

# So large that what is not planned, such as statistics of norms, is small.
SIZES = {"hidden_size": 128, "intermediate_size": 352, "moe_intermediate_size": 112}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "seq_length": 64}
SIZES |= {"micro_batches": 2, "micro_batch_size": 4, "dtype": "float32", "optimizer": "adamw"}

# How far the peak may be from the plan, and a row as in rows.py. Not planned are messages, matrices
# of a gradient that are copied into a buffer, and what routing permutes.
ROWS = """
0.01 core: dp=2 cp=2 recompute=selective
0.01 core: tp=2 sp vocab_size=4096 dtype=bfloat16
0.02 families: model=families
0.05 sharding: dp=3 sharding=optimizer dtype=bfloat16
0.07 sharding: dp=2 tp=2 sharding=gradients
0.01 sharding: dp=2 sharding=layerwise muon moments=bfloat16
0.05 schedules: pp=2 m=4 engine=interleaved layers=6 tie_word_embeddings
0.02 schedules: pp=2 m=4 engine=zb_h1 layers=4 dtype=bfloat16
0.03 experts: dp=2 tp=2 ep=2 etp=2 sharding=optimizer moe_router_force_load_balancing model=gated
0.05 experts: tp=2 ep=2 sp padded model=softmax
0.03 precision: dp=2 fp8 fp8_skip=1 sharding=parameters layers=4
0.02 post_norm: tp=2 sp dtype=bfloat16 model=post-norm
0.03 precision: pp=2 tp=2 m=4 engine=zb_h1 recompute=full fp8 layers=4 dtype=bfloat16 model=gated
0.02 multi_token: pp=2 vocab_size=2048 recompute=full model=depths
0.01 precision: dp=2 fp8_experts sharding=parameters moe_router_force_load_balancing model=softmax
"""


@contextmanager
def collected(action):
    """Around each action of a plan: a mode that sees operations leaves cycles of references."""
    gc.collect()
    yield
    gc.collect()


def measured(text: str) -> tuple[int, int, tuple]:
    """Bytes between steps and at the peak of one, and what is planned for this rank."""
    config, model_config = row(text, **SIZES)
    with Recorder("cpu") as recorder, recorder.seeing_resizes():
        training = make_training(config, model_config)
        gc.freeze()
        for step in range(2):
            training.step(step, collected)
        gc.collect()
        held = recorder.live
    planned = memory_of_ranks(model_config, config.layout, config.workload, "cpu")
    return held, recorder.peak, planned[training.axes.pp.rank]


@pytest.mark.parametrize("text", lines(ROWS))
def test_as_much_memory_is_used_as_is_planned(pool, text):
    tolerance, _, text = text.partition(" ")
    config, _ = row(text, **SIZES)
    for held, peak, planned in pool.run(config.world_size, measured, text):
        assert peak == pytest.approx(planned.total, rel=float(tolerance))
        if config.layout.sharding not in ("gradients", "parameters"):  # else buffers are planned
            assert held == pytest.approx(sum(planned[:3]), rel=0.05)
