"""The interpreter: what it keeps, reads and sends. That it trains right is in test_layouts.py."""

import gc
import weakref
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from picotron_min.data_parallel import GradientBuckets
from picotron_min.pipeline_parallel import my_stages
from picotron_min.pipeline_schedule import Action
from picotron_min.runtime.launch import open_communicators
from tests.core.test_checkpoint import make_config, make_training
from tests.core.test_pipeline_schedule import AFAB_IN_A_V, registered
from tests.nccl_like import nccl_like
from tests.pool import RankFailed
from tests.training import Training

SEQUENCE, EMBED = 16, 32  # of make_config


def pipeline(
    pp: int, micro_batches: int, engine: str = "1f1b", chunks: int = 1, **more
) -> Training:
    config = make_config(pp=pp, gradient_accumulation_steps=micro_batches, **more)
    layout = {"pp_engine": engine, "pp_chunks": chunks}
    distributed = config.distributed.model_copy(update=layout)
    return make_training(config.model_copy(update={"distributed": distributed}))


def test_a_rank_has_the_stages_where_its_schedule_places_them():
    with registered("afab_v", AFAB_IN_A_V):
        first, second = (
            my_stages([3, 2, 2, 1], AFAB_IN_A_V, SimpleNamespace(rank=rank, size=2))
            for rank in (0, 1)
        )
    assert first == [(range(0, 3), True, False), (range(7, 8), False, True)]
    assert second == [(range(3, 5), False, False), (range(5, 7), False, False)]


def tied_copies(steps: int) -> torch.Tensor | None:
    training = pipeline(2, 2, tied=True, dp=2, total_train_steps=20)
    for step in range(steps):
        assert not training.step(step).skipped, "a step was skipped"
    return training.parameters["model.embed_tokens.weight"].detach()


def test_both_copies_of_a_tied_embedding_stay_equal_to_the_last_bit(pool):
    first, *others = pool.run(4, tied_copies, 5)
    assert all(torch.equal(first, other) for other in others)
    (start, *_) = pool.run(4, tied_copies, 1)
    assert not torch.equal(first, start)


def reads(pp: int, chunks: int) -> int:
    training = pipeline(pp, 4, "interleaved", chunks, model={"num_hidden_layers": 8})
    read, calls = training.data.batch, []
    training.data.batch = lambda step, i: calls.append(i) or read(step, i)
    training.step(0)
    return len(calls)


def test_each_forward_reads_its_batch_without_a_message(pool):
    assert pool.run(4, reads, 4, 1) == [4] * 4
    assert pool.run(4, reads, 4, 2) == [8] * 4


class Kept:
    """A tensor that autograd keeps, and the bytes that it keeps in all, now and at most."""

    now = peak = 0

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        Kept.now += tensor.nbytes
        Kept.peak = max(Kept.peak, Kept.now)

    def __del__(self) -> None:
        Kept.now -= self.tensor.nbytes


def peak_bytes(engine: str, micro_batches: int) -> int:
    training = pipeline(2, micro_batches, engine)
    gc.collect()
    Kept.now = Kept.peak = 0
    with torch.autograd.graph.saved_tensors_hooks(Kept, lambda kept: kept.tensor):
        training.step(0)
    return Kept.peak


@pytest.mark.parametrize("engine,growth", [("afab", 4), ("1f1b", 1)])
def test_activations_grow_with_the_micro_batches_in_afab_and_not_in_1f1b(pool, engine, growth):
    two, eight = pool.run(2, peak_bytes, engine, 2), pool.run(2, peak_bytes, engine, 8)
    for rank in range(2):
        assert eight[rank] / two[rank] == pytest.approx(growth, rel=0.05)


def outputs_alive_when_backward_begins() -> int:
    """In AFAB, after eight forwards: how many of their results are still in memory."""
    training = pipeline(2, 8, "afab")
    outputs, alive = [], []
    training.chunks[0].model.register_forward_hook(
        lambda module, inputs, out: outputs.append(weakref.ref(out))
    )
    send = training.model.pipeline._send

    def count_after_send(action: Action) -> None:
        send(action)
        alive.append(sum(output() is not None for output in outputs))

    training.model.pipeline._send = count_after_send
    training.step(0)
    return max(alive)


def test_an_activation_is_let_go_once_it_is_sent(pool):
    assert pool.run(2, outputs_alive_when_backward_begins)[0] <= 1


def ledger_of_a_step(engine: str, chunks: int) -> tuple[dict, dict]:
    training = pipeline(2, 4, engine, chunks, model={"num_hidden_layers": 8})
    training.step(0)
    ledger = training.axes.pp.ledger
    return dict(ledger.calls), dict(ledger.bytes)


@pytest.mark.parametrize("engine,chunks", [("1f1b", 1), ("afab", 1), ("interleaved", 2)])
def test_a_boundary_costs_one_activation_and_one_gradient_a_micro_batch(pool, engine, chunks):
    activation = 4 * 2 * SEQUENCE * EMBED
    boundaries = 2 * chunks - 1  # each is crossed forward from one rank, backward from the other
    first, last = pool.run(2, ledger_of_a_step, engine, chunks)
    sends = [(boundaries + 1) // 2 * 4 + boundaries // 2 * 4] * 2
    for (calls, sent), expected in zip((first, last), sends, strict=True):
        assert calls["send"] == expected
        assert sent["send"] == expected * activation


def loss_of_a_tied_step(opens: bool) -> float:
    config = make_config(pp=2, dp=2, tied=True, gradient_accumulation_steps=2)
    training = make_training(config)
    with nccl_like(seconds=2.0):
        if opens:
            open_communicators(training.axes)
        return training.step(0).loss


@pytest.mark.parametrize("opens", [False, True], ids=["first use", "opened at the start"])
def test_a_pipeline_with_tied_embeddings_runs_where_first_use_blocks(pool, opens):
    assert pool.run(4, loss_of_a_tied_step, opens) == [pytest.approx(5.5, abs=0.2)] * 4


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
