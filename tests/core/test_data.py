"""Batches are a function of (seed, tokens seen before, micro-batch, rank)."""

import itertools

import numpy as np
import pytest
import torch

from picotron_min import data
from picotron_min.data import Batches
from picotron_min.loss import IGNORE_INDEX

pytestmark = pytest.mark.quick


def make_batches(num_tokens=203, S=4, B=2, M=3, dp_rank=0, dp_size=1, **options):
    """Batches over a stream that counts up, so that a token is its own place."""
    return Batches(
        np.arange(num_tokens, dtype=np.uint16), seq_length=S, micro_batch_size=B,
        num_micro_batches=M, dp_rank=dp_rank, dp_size=dp_size, **{"seed": 1} | options
    )  # fmt: skip


def all_ranks(dp_size, **options):
    return [make_batches(dp_rank=rank, dp_size=dp_size, **options) for rank in range(dp_size)]


def batches_of(ranks, kind, indices):
    """Those of `batch` or of `eval_batch`, in the order of their places."""
    places = itertools.product(indices, range(ranks[0].num_micro_batches), ranks)
    return [getattr(rank, kind)(index, micro_batch) for index, micro_batch, rank in places]


def sequences(ranks, *steps):
    """The numbers of the sequences of global batches."""
    first_tokens = [batch.tokens[:, 0] for batch in batches_of(ranks, "batch", steps)]
    return (torch.cat(first_tokens) // ranks[0].seq_length).tolist()


def evaluated(ranks):
    """All held-out targets that count."""
    batches = batches_of(ranks, "eval_batch", range(ranks[0].num_eval_batches))
    targets = torch.cat([batch.targets.flatten() for batch in batches])
    targets = targets[targets != IGNORE_INDEX].tolist()
    assert sum(batch.num_targets for batch in batches) == len(targets)
    return sorted(targets)


def test_targets_are_the_next_tokens():
    batch = make_batches(num_tokens=9, S=4, B=2, M=1).batch(0, 0)
    assert batch.tokens.dtype == batch.targets.dtype == torch.int64
    assert sorted(batch.tokens.tolist()) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert torch.equal(batch.targets, batch.tokens + 1)


@pytest.mark.parametrize("eval_batches", [0, 2])
@pytest.mark.parametrize("num_tokens, S", [(203, 4), (205, 4), (12, 3)])
@pytest.mark.parametrize("B, M, dp_size", [(1, 1, 1), (2, 3, 1), (3, 3, 4)])
def test_an_epoch_has_every_training_sequence_once(num_tokens, S, B, M, dp_size, eval_batches):
    ranks = all_ranks(dp_size, num_tokens=num_tokens, S=S, B=B, M=M, eval_batches=eval_batches)
    held_out = max(num_tokens // 10, S + 1) if eval_batches else 0
    N, batch = ranks[0].num_sequences, B * M * dp_size
    assert (num_tokens - held_out - 1) // S == N and ranks[0].tokens_per_step == batch * S
    # Three epochs, which begin and end in the middle of steps.
    seen = sequences(ranks, *range(3 * N // batch + 1))
    for epoch in range(3):
        assert sorted(seen[epoch * N : (epoch + 1) * N]) == list(range(N))


@pytest.mark.parametrize("num_tokens, S", [(203, 4), (501, 7), (12, 3)])
def test_no_token_of_the_held_out_text_is_ever_trained_on(num_tokens, S):
    """Whatever batch size a run was started with, and wherever and with which it is resumed."""
    trained, held_out = set(), set()
    for B, resumed in itertools.product((1, 5), ({}, {"first_step": 5, "seen_before": 9 * S})):
        batches = make_batches(num_tokens, S, B, eval_batches=100, **resumed)
        steps = range(batches.first_step, batches.first_step + 60)
        for batch in batches_of([batches], "batch", steps):
            trained |= {*batch.tokens.flatten().tolist(), *batch.targets.flatten().tolist()}
        held_out |= {*evaluated([batches])}
        # All are evaluated, since so many batches are allowed.
        assert batches.num_eval_sequences == (max(num_tokens // 10, S + 1) - 1) // S
    assert max(trained) < min(held_out) - 1 and max(held_out) >= num_tokens - S


def test_at_most_ten_million_tokens_are_held_out(monkeypatch):
    monkeypatch.setattr(data, "MOST_HELD_OUT", 50)
    assert make_batches(num_tokens=10_001, eval_batches=1000).num_eval_sequences == 49 // 4


def test_epochs_and_seeds_have_their_own_orders():
    batches = make_batches(num_tokens=25, B=6, M=1)
    assert len({tuple(sequences([batches], step)) for step in range(5)}) == 5
    assert sequences([make_batches(seed=1)], 0) != sequences([make_batches(seed=2)], 0)


def resume(batches, step, **options):
    """Batches that continue after `step` steps of others."""
    return make_batches(first_step=step, seen_before=batches.tokens_seen(step), **options)


def test_resumes_with_other_batch_sizes_see_every_sequence_of_an_epoch_once():
    part = {"num_tokens": 4 * 60 + 1, "seed": 3}
    first = make_batches(B=2, M=3, **part)  # 6 sequences a step
    second = resume(first, 4, B=5, M=1, **part)  # 5
    third = resume(second, 6, B=1, M=2, **part)  # 2
    seen = []
    for batches, steps in [(first, range(4)), (second, range(4, 6)), (third, range(6, 19))]:
        for step in steps:
            assert batches.tokens_seen(step) == 4 * len(seen)
            seen += sequences([batches], step)
    assert sorted(seen) == list(range(60))
    assert third.tokens_seen(19) == 4 * 60


def test_a_resume_with_another_sequence_length_counts_the_tokens_that_were_seen():
    longer = resume(make_batches(S=4, num_tokens=400), 5, S=8, num_tokens=400)
    assert longer.tokens_seen(5) == 5 * 24 and longer.tokens_seen(6) == 5 * 24 + 48
    order = make_batches(S=8, num_tokens=400, B=1, M=1)
    assert sequences([longer], 5)[0] == sequences([order], 5 * 24 // 8)[0]


def test_validation_is_on_the_same_sequences_in_every_layout_each_once():
    reference = evaluated([make_batches(4001, B=3, M=2, eval_batches=2)])
    assert len(set(reference)) == len(reference) == 2 * data.EVAL_BATCH * 4
    # They are a sample of all 99 sequences that are held out, not the first ones.
    assert max(reference) - min(reference) > 200
    for B, M, dp_size in [(1, 12, 1), (4, 1, 3), (16, 4, 1), (1, 1, 12)]:
        ranks = all_ranks(dp_size, num_tokens=4001, B=B, M=M, eval_batches=2, seed=B)
        assert evaluated(ranks) == reference
    batches = make_batches(num_tokens=1010, B=1, M=12, eval_batches=5)
    assert (batches.num_eval_sequences, batches.num_eval_batches) == (25, 3)  # a tenth
    assert make_batches().num_eval_sequences == make_batches().num_eval_batches == 0


def test_a_text_shorter_than_a_sequence_is_refused_with_the_numbers():
    assert make_batches(num_tokens=5).num_sequences == 1
    with pytest.raises(ValueError, match=r"4 tokens, but .* at least 1 x \(seq_length \+ 1\) = 5"):
        make_batches(num_tokens=4)
    with pytest.raises(ValueError, match=r"has 9 tokens, .* = 10 \(1 .* to train on, 1 to valid"):
        make_batches(num_tokens=9, eval_batches=1)
