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


def step_sequences(ranks, step):
    """The numbers of the sequences of a global batch, in the order of their places."""
    sequences = []
    for micro_batch in range(ranks[0].num_micro_batches):
        for rank in ranks:
            sequences += (rank.batch(step, micro_batch).tokens[:, 0] // rank.seq_length).tolist()
    return sequences


def eval_targets(ranks):
    """All held-out targets that count, over all ranks, batches and micro-batches."""
    targets, num_targets = [], 0
    for index in range(ranks[0].num_eval_batches):
        for micro_batch in range(ranks[0].num_micro_batches):
            for rank in ranks:
                batch = rank.eval_batch(index, micro_batch)
                targets += batch.targets.flatten().tolist()
                num_targets += batch.num_targets
    targets = sorted(target for target in targets if target != IGNORE_INDEX)
    assert num_targets == len(targets)
    return targets


def test_targets_are_the_next_tokens():
    batch = make_batches(num_tokens=9, S=4, B=2, M=1).batch(0, 0)
    assert batch.tokens.dtype == batch.targets.dtype == torch.int64
    assert sorted(batch.tokens.tolist()) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert torch.equal(batch.targets, batch.tokens + 1)


@pytest.mark.parametrize("eval_batches", [0, 2])
@pytest.mark.parametrize("num_tokens, S", [(203, 4), (205, 4), (101, 7), (12, 3)])
@pytest.mark.parametrize("B, M, dp_size", [(1, 1, 1), (2, 3, 1), (5, 1, 2), (3, 3, 4)])
def test_an_epoch_has_every_training_sequence_once(num_tokens, S, B, M, dp_size, eval_batches):
    ranks = all_ranks(dp_size, num_tokens=num_tokens, S=S, B=B, M=M, eval_batches=eval_batches)
    held_out = max(num_tokens // 10, S + 1) if eval_batches else 0
    N = ranks[0].num_sequences
    assert (num_tokens - held_out - 1) // S == N
    assert ranks[0].tokens_per_step == B * M * dp_size * S
    seen = []
    while len(seen) < 3 * N:  # three epochs, which begin and end in the middle of steps
        seen += step_sequences(ranks, step=len(seen) // ranks[0].global_batch)
    for epoch in range(3):
        assert sorted(seen[epoch * N : (epoch + 1) * N]) == list(range(N))


def trained_tokens(batches):
    """All tokens that are read in these steps, as inputs or targets."""
    steps = range(batches.first_step, batches.first_step + 60)
    read = [batches.batch(step, i) for step in steps for i in range(batches.num_micro_batches)]
    return set(torch.cat([t.flatten() for batch in read for t in batch[:2]]).tolist())


def held_out_tokens(batches):
    """All tokens that are read to evaluate, as inputs or targets."""
    targets = eval_targets([batches])
    return set(targets) | {target - 1 for target in targets}


@pytest.mark.parametrize("num_tokens, S", [(203, 4), (501, 7), (12, 3)])
def test_no_token_of_the_held_out_text_is_ever_trained_on(num_tokens, S):
    """Whatever batch size a run was started with, and wherever and with which it is resumed."""
    trained, held_out = set(), set()
    for B, seed, resume in itertools.product(
        (1, 5), (0, 7), ({}, {"first_step": 5, "seen_before": 9 * S})
    ):
        batches = make_batches(num_tokens, S, B, seed=seed, eval_batches=100, **resume)
        trained |= trained_tokens(batches)
        held_out |= held_out_tokens(batches)
        # All are evaluated, since so many batches are allowed.
        assert batches.num_eval_sequences == (max(num_tokens // 10, S + 1) - 1) // S
    assert len(held_out) > S and trained
    assert max(trained) < min(held_out)
    assert max(held_out) >= num_tokens - S


def test_at_most_ten_million_tokens_are_held_out(monkeypatch):
    monkeypatch.setattr(data, "MOST_HELD_OUT", 50)
    batches = make_batches(num_tokens=10_001, eval_batches=1000)
    assert min(held_out_tokens(batches)) == 10_001 - 50
    assert batches.num_eval_sequences == 49 // 4


def test_epochs_and_seeds_have_their_own_orders_each_drawn_once(monkeypatch):
    batches, drawn = make_batches(num_tokens=25, B=6, M=1), []
    draw = np.random.default_rng
    monkeypatch.setattr(np.random, "default_rng", lambda key: (drawn.append(key), draw(key))[1])
    assert len({tuple(step_sequences([batches], step)) for step in range(5)}) == 5
    assert drawn == [(1, epoch) for epoch in range(5)]
    first, second = (step_sequences([make_batches(seed=seed)], 0) for seed in (1, 2))
    assert first != second


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
            seen += step_sequences([batches], step)
    assert sorted(seen) == list(range(60))
    assert third.tokens_seen(19) == 4 * 60


def test_a_resume_with_another_sequence_length_counts_the_tokens_that_were_seen():
    longer = resume(make_batches(S=4, num_tokens=400), 5, S=8, num_tokens=400)
    assert longer.tokens_seen(5) == 5 * 24 and longer.tokens_seen(6) == 5 * 24 + 48
    order = make_batches(S=8, num_tokens=400, B=1, M=1)
    assert step_sequences([longer], 5)[0] == step_sequences([order], 5 * 24 // 8)[0]


def test_validation_is_on_the_same_sequences_in_every_layout_each_once():
    reference = eval_targets([make_batches(4001, B=3, M=2, eval_batches=2)])
    assert len(set(reference)) == len(reference) == 2 * data.EVAL_BATCH * 4
    # They are a sample of all 99 sequences that are held out, not the first ones.
    assert max(reference) - min(reference) > 200
    for B, M, dp_size in [(1, 12, 1), (4, 1, 3), (16, 4, 1), (1, 1, 12)]:
        ranks = all_ranks(dp_size, num_tokens=4001, B=B, M=M, eval_batches=2, seed=B)
        assert eval_targets(ranks) == reference
    batches = make_batches(num_tokens=1010, B=1, M=12, eval_batches=5)
    assert (batches.num_eval_sequences, batches.num_eval_batches) == (25, 3)  # a tenth
    assert make_batches().num_eval_sequences == make_batches().num_eval_batches == 0


def test_a_text_shorter_than_a_sequence_is_refused_with_the_numbers():
    assert make_batches(num_tokens=5).num_sequences == 1
    with pytest.raises(ValueError, match=r"4 tokens, but .* at least 1 x \(seq_length \+ 1\) = 5"):
        make_batches(num_tokens=4)
    with pytest.raises(ValueError, match=r"has 9 tokens, .* = 10 \(1 .* to train on, 1 to valid"):
        make_batches(num_tokens=9, eval_batches=1)
