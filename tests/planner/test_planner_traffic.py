"""The planner's traffic against the ledgers of real steps: equal on every rank."""

import pytest

from picotron_min.planner.traffic import planned_ledger, planned_traffic
from picotron_min.runtime.reporter import take_bytes
from tests.assembled import make_training
from tests.rows import lines, row

# Five layers are unequal on four stages. A V has both ends on one rank.
ROWS = """
overlap: tp=4 sp tp_overlap recompute=selective
core: dp=2 tp=2 sp recompute=full dtype=bfloat16
core: cp=4 tp=2 sp
core: cp=4 ulysses recompute=full model=grouped-query
core: cp=2 mask
core: pp=2 tp=2 sp engine=afab m=4 recompute=full model=tied
core: pp=2 tp=2 sp m=4 recompute=full layers=5 model=tied
sharding: dp=2 tp=2 sharding=optimizer m=3 model=tied
sharding: dp=2 cp=2 sharding=gradients m=3 dtype=bfloat16
sharding: dp=2 tp=2 sp sharding=parameters dtype=bfloat16 model=tied
sharding: dp=2 pp=2 sharding=parameters recompute=full m=3 model=tied
sharding: dp=2 pp=2 cp=2 sharding=optimizer m=3 model=tied
optimizers: dp=3 tp=2 sharding=layerwise muon dtype=bfloat16
optimizers: dp=2 tp=2 sharding=gradients m=3 muon dtype=bfloat16 model=grouped-query
optimizers: dp=4 tp=2 ep=2 etp=2 padded sharding=optimizer muon model=sigmoid
experts: dp=2 ep=2 padded global_aux model=softmax
experts: tp=2 dp=2 ep=2 etp=2 padded recompute=full model=gated
experts: tp=2 cp=2 ep=4 sp padded recompute=full model=softmax
experts: dp=2 ep=2 num_experts_per_tok=8 model=softmax
experts: dp=4 tp=2 ep=2 etp=2 allgather sharding=parameters recompute=full model=gated
multi_token: dp=2 pp=2 tp=2 sp m=2 recompute=full dtype=bfloat16 model=depths
multi_token: dp=2 pp=2 engine=zb_v m=4 sharding=parameters model=depths
post_norm: tp=2 sp recompute=selective dtype=bfloat16 model=post-norm
post_norm: tp=2 cp=2 pp=2 m=2 recompute=full model=post-norm
schedules: pp=2 tp=2 sp engine=interleaved m=4 recompute=full layers=5 model=tied
schedules: pp=2 tp=2 sp engine=zb_h1 m=4 recompute=full layers=5 model=tied
schedules: dp=2 pp=2 engine=zb_v m=4 sharding=gradients layers=5 model=tied
precision: tp=2 sp dtype=bfloat16 fp8 fp8_skip=1 layers=3 tp_overlap recompute=selective
precision: tp=2 sp ep=2 padded dtype=bfloat16 fp8 recompute=full model=gated
"""


def sent_in_a_step(text: str) -> tuple[dict, dict, dict]:
    """Bytes by axis; bytes and calls by axis and collective, where there are any."""
    training = make_training(*row(text))
    training.step(0)
    kinds = [(axis, kind) for axis in training.axes for kind, n in axis.ledger.bytes.items() if n]
    sent = {(axis.name, kind): axis.ledger.bytes[kind] for axis, kind in kinds}
    calls = {(axis.name, kind): axis.ledger.calls[kind] for axis, kind in kinds}
    return take_bytes(training.axes), sent, calls


@pytest.mark.parametrize("text", lines(ROWS))
def test_planned_traffic_is_what_a_step_sends(pool, text):
    config, model = row(text)
    sizes = model, config.layout, config.workload
    for rank, (by_axis, *ledger) in enumerate(pool.run(config.world_size, sent_in_a_step, text)):
        assert planned_traffic(*sizes, rank) == by_axis, rank
        planned = planned_ledger(*sizes, rank)
        sent = {kind: n for kind, n in planned.items() if n}
        assert [sent, {kind: planned.calls[kind] for kind in sent}] == [
            pytest.approx(x) for x in ledger
        ]
