"""Batches are a function of (seed, step, micro-batch, rank)."""

import numpy as np
import pytest
import torch

from picotron_min.data import Batches
from picotron_min.loss import IGNORE_INDEX


def make_batches(num_tokens=203, S=4, B=2, M=3, dp_rank=0, dp_size=1, **options):
    """Batches over a stream that counts up, so that a token tells where it comes from."""
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
    targets = []
    for index in range(ranks[0].num_eval_batches):
        for micro_batch in range(ranks[0].num_micro_batches):
            for rank in ranks:
                targets += rank.eval_batch(index, micro_batch).targets.flatten().tolist()
    return sorted(target for target in targets if target != IGNORE_INDEX)


def test_targets_are_the_next_tokens():
    batch = make_batches(num_tokens=9, S=4, B=2, M=1).batch(0, 0)
    assert batch.tokens.dtype == batch.targets.dtype == batch.positions.dtype == torch.int64
    assert sorted(batch.tokens.tolist()) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert torch.equal(batch.targets, batch.tokens + 1)
    assert batch.positions.tolist() == [0, 1, 2, 3]
    assert batch.tokens.is_contiguous() and batch.targets.is_contiguous()


@pytest.mark.parametrize("eval_batches", [0, 1, 2])
@pytest.mark.parametrize("num_tokens, S", [(203, 4), (204, 4), (205, 4), (101, 7), (12, 3)])
@pytest.mark.parametrize("B, M, dp_size", [(1, 1, 1), (2, 3, 1), (1, 2, 3), (5, 1, 2), (3, 3, 4)])
def test_an_epoch_has_every_sequence_once_and_none_that_is_held_out(
    num_tokens, S, B, M, dp_size, eval_batches
):
    ranks = all_ranks(dp_size, num_tokens=num_tokens, S=S, B=B, M=M, eval_batches=eval_batches)
    N = ranks[0].num_sequences
    held_out = {target // S for target in eval_targets(ranks) if target % S}
    assert len(held_out) == ranks[0].num_eval_sequences
    assert N + len(held_out) == (num_tokens - 1) // S
    expected = sorted(set(range((num_tokens - 1) // S)) - held_out)
    assert ranks[0].tokens_per_step == B * M * dp_size * S
    dealt = []
    while len(dealt) < 3 * N:  # three epochs, begun and ended in the middle of steps
        dealt += step_sequences(ranks, step=len(dealt) // ranks[0].global_batch)
    for epoch in range(3):
        assert sorted(dealt[epoch * N : (epoch + 1) * N]) == expected


def test_epochs_and_seeds_have_their_own_orders():
    first_epoch = [step_sequences([make_batches(seed=seed)], 0) for seed in (1, 2)]
    batches = make_batches(num_tokens=25, B=6, M=1)
    assert first_epoch[0] != first_epoch[1]
    assert len({tuple(step_sequences([batches], step)) for step in range(5)}) == 5


def test_every_layout_trains_on_the_same_sequences_in_a_step():
    layouts = [(12, 1, 1), (1, 12, 1), (1, 1, 12), (2, 3, 2), (3, 2, 2), (1, 3, 4)]
    for step in (0, 3, 20):
        dealt = [
            sorted(step_sequences(all_ranks(dp, B=B, M=M, eval_batches=1), step))
            for B, M, dp in layouts
        ]
        assert all(sequences == dealt[0] for sequences in dealt)


def test_a_batch_depends_on_the_step_alone_so_resuming_needs_nothing_else():
    ran = make_batches(num_tokens=50)
    for step in range(40):
        ran.batch(step, 0)
    resumed = make_batches(num_tokens=50)
    for step in (40, 3):
        assert torch.equal(ran.batch(step, 1).tokens, resumed.batch(step, 1).tokens)


def test_the_order_of_an_epoch_is_drawn_once(monkeypatch):
    batches = make_batches(num_tokens=201, B=5, M=1)  # 50 sequences, 5 a step
    drawn = []
    draw = np.random.default_rng
    monkeypatch.setattr(np.random, "default_rng", lambda key: (drawn.append(key), draw(key))[1])
    for step in range(25):
        batches.batch(step, 0)
    assert drawn == [(1, 0), (1, 1), (1, 2)]


def test_validation_counts_every_held_out_token_once_in_every_layout():
    reference = None
    for (
        B,
        M,
        dp_size,
    ) in [(1, 12, 1), (4, 1, 3), (2, 3, 2), (1, 1, 12)]:
        ranks = all_ranks(dp_size, num_tokens=1001, B=B, M=M, eval_batches=5, seed=B)
        assert (ranks[0].num_eval_sequences, ranks[0].num_eval_batches) == (25, 3)  # a tenth
        targets = eval_targets(ranks)
        assert len(set(targets)) == len(targets) == 25 * 4
        reference = reference or targets
        assert targets == reference


def test_validation_is_as_many_batches_as_asked_for_if_the_text_is_long_enough():
    batches = make_batches(num_tokens=4001, B=3, M=2, eval_batches=2)
    assert (batches.num_eval_sequences, batches.num_eval_batches) == (12, 2)
    assert (make_batches().num_eval_sequences, make_batches().num_eval_batches) == (0, 0)
    assert make_batches(num_tokens=9, eval_batches=1).num_eval_sequences == 1


def test_context_parallel_ranks_hold_their_columns_of_the_same_rows():
    whole = make_batches(eval_batches=1)
    part = make_batches(eval_batches=1, positions=torch.tensor([0, 3]))
    for batch, columns in [
        (whole.batch(5, 2), part.batch(5, 2)),
        (whole.eval_batch(0, 0), part.eval_batch(0, 0)),
    ]:
        assert columns.positions.tolist() == [0, 3]
        assert torch.equal(columns.tokens, batch.tokens[:, [0, 3]])
        assert torch.equal(columns.targets, batch.targets[:, [0, 3]])
        assert columns.tokens.is_contiguous()


def test_a_text_shorter_than_a_sequence_is_refused_with_the_numbers():
    assert make_batches(num_tokens=5).num_sequences == 1
    with pytest.raises(ValueError, match=r"has 4 tokens, but .* at least 1 x seq_length \+ 1 = 5"):
        make_batches(num_tokens=4)
    with pytest.raises(ValueError, match=r"has 8 tokens, .* = 9 \(1 .* to train on, 1 to valid"):
        make_batches(num_tokens=8, eval_batches=1)
