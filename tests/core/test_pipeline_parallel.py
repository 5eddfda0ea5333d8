"""The interpreter: what it keeps, reads and sends. That it trains right is in test_layouts.py."""

import weakref
from types import SimpleNamespace
from unittest import mock

import pytest

from picotron_min.data_parallel import GradientBuckets
from picotron_min.extensions.schedules.registry import SCHEDULES
from picotron_min.pipeline_parallel import my_stages
from picotron_min.pipeline_schedule import Action
from picotron_min.runtime.launch import open_communicators
from tests.assembled import make_training
from tests.nccl_like import nccl_like
from tests.pool import RankFailed
from tests.rows import row
from tests.training import Training


def pipeline(text: str) -> Training:
    return make_training(*row(f"core: {text}"))


def test_a_rank_has_the_stages_where_its_schedule_places_them():
    first, second = (
        my_stages([3, 2, 2, 1], SCHEDULES["zb_v"], SimpleNamespace(rank=rank, size=2))
        for rank in (0, 1)
    )
    assert first == [(range(0, 3), True, False), (range(7, 8), False, True)]
    assert second == [(range(3, 5), False, False), (range(5, 7), False, False)]


def reads(text: str) -> int:
    training = pipeline(text)
    read, calls = training.data.batch, []
    training.data.batch = lambda step, i: calls.append(i) or read(step, i)
    training.step(0)
    return len(calls)


def test_each_forward_reads_its_batch_without_a_message(pool):
    assert pool.run(4, reads, "pp=4 m=4") == [4] * 4
    assert pool.run(2, reads, "pp=2 m=4 engine=interleaved") == [8] * 2


def outputs_alive_when_backward_begins() -> int:
    """In AFAB, after eight forwards: how many of their results are still in memory."""
    training = pipeline("pp=2 m=8 engine=afab")
    outputs, alive = [], []
    training.chunks[0].model.register_forward_hook(
        lambda module, inputs, out: outputs.append(weakref.ref(out))
    )
    interpreter = training.model.pipeline
    send = interpreter._send

    def count_after_send(action: Action) -> None:
        send(action)
        alive.append(sum(output() is not None for output in outputs))

    interpreter._send = count_after_send
    training.step(0)
    assert not (interpreter.live or interpreter.arriving or interpreter.leaving), "after a step"
    return max(alive)


def test_an_activation_is_let_go_once_it_is_sent(pool):
    assert pool.run(2, outputs_alive_when_backward_begins)[0] <= 1


def loss_of_a_tied_step(opens: bool) -> float:
    training = pipeline("dp=2 pp=2 m=2 model=tied")
    with nccl_like(seconds=2.0):
        if opens:
            open_communicators(training.axes)
        return training.step(0).loss


@pytest.mark.parametrize("opens", [False, True], ids=["first use", "opened at the start"])
def test_a_pipeline_with_tied_embeddings_runs_where_first_use_blocks(pool, opens):
    assert pool.run(4, loss_of_a_tied_step, opens) == [pytest.approx(4.1, abs=0.2)] * 4


def sum_the_ends_during_backward() -> None:
    start = GradientBuckets._start_complete_buckets

    def start_and_wait(buckets: GradientBuckets) -> None:
        start(buckets)
        if len(buckets.works) == len(buckets.buckets):
            buckets.wait()

    with mock.patch.object(GradientBuckets, "_start_complete_buckets", start_and_wait):
        loss_of_a_tied_step(opens=False)


def test_where_first_use_blocks_the_ends_must_not_be_summed_during_a_backward(pool):
    """The last stage would wait for the first before it has sent the gradient to it."""
    with pytest.raises(RankFailed, match="waits to open collectives"):
        pool.run(4, sum_the_ends_during_backward)
