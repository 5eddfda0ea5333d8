"""Best-fit packing: rows of whole documents, of every token to train on once."""

import numpy as np
import pytest
import torch

from picotron_min.extensions.documents.batches import DocumentBatches, PackedBatches, best_fit
from picotron_min.loss import IGNORE_INDEX


def slow_best_fit(lengths: list[int], S: int) -> list[list[int]]:
    """The lengths in each row, by looking at every row for every span."""
    rows = []
    for length in sorted(lengths, reverse=True):
        fits = [row for row in rows if S - sum(row) >= length]
        if not fits:
            rows.append([length])
        else:
            max(fits, key=sum).append(length)
    return rows


@pytest.mark.quick
@pytest.mark.parametrize("S", [1, 7, 24, 60])
@pytest.mark.parametrize("seed", range(5))
def test_rows_are_as_full_as_those_that_are_searched_for_one_by_one(S, seed):
    dice = np.random.default_rng(seed)
    longest = [S, max(1, S // 2), max(1, S // 5), S, S][seed]
    lengths = dice.integers(1, longest + 1, size=[1, 40, 300, 300, 5][seed])
    lengths = np.where(dice.random(len(lengths)) < 0.3, max(1, S // 3), lengths)  # many of one
    order, ends = best_fit(lengths, S)
    assert sorted(order.tolist()) == list(range(len(lengths)))
    assert ends[-1] == len(lengths) and (np.diff(ends, prepend=0) > 0).all()
    ours = [lengths[row].tolist() for row in np.split(order, ends[:-1])]
    assert max(map(sum, ours)) <= S
    # Of equally full rows any may be taken, and then they differ in what they have.
    assert sorted(map(sum, ours)) == sorted(map(sum, slow_best_fit(lengths.tolist(), S)))


SIZES = {"micro_batch_size": 2, "num_micro_batches": 2, "dp_rank": 0, "dp_size": 1}


def make_batches(lengths, kind=PackedBatches, S=8, **options):
    """Batches over a stream that counts up, so that a token is its own place."""
    ends = np.cumsum(lengths)
    return kind(np.arange(ends[-1]), ends=ends, seq_length=S, **{"seed": 1} | SIZES | options)


# In none a document, or a piece of one, begins with the last token of the first: that is padding.
LENGTHS = {
    "mixed": [8, 4, 5, 2, 19, 1, 3] * 5,
    "short": [2, *[1] * 40],
    "long": [30, 3, 3, 18],
    "each": [*range(2, 20)],
    "half empty": [5] * 19,
}


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("eval_batches", [0, 9])
def test_an_epoch_has_every_token_to_train_on_once_in_rows_of_whole_documents(
    lengths, eval_batches
):
    batches = make_batches(lengths, eval_batches=eval_batches)
    wrapped = make_batches(lengths, DocumentBatches, eval_batches=eval_batches)
    assert batches.num_eval_batches == wrapped.num_eval_batches
    for i in range(batches.num_eval_batches):  # as in a run without packing
        ours, theirs = batches.eval_batch(i, 1), wrapped.eval_batch(i, 1)
        assert ours.extra == theirs.extra and all(map(torch.equal, ours[:3], theirs[:3]))
    ends, S = np.cumsum(lengths), 8
    whole = [range(e - n, e) for n, e in zip(lengths, ends, strict=True) if e <= wrapped.cut]
    document_of = {token: tokens for tokens in whole for token in tokens}
    one = {"micro_batch_size": batches.num_sequences, "num_micro_batches": 1}
    *epoch, (documents,) = make_batches(lengths, eval_batches=eval_batches, **one).batch(0, 0)
    found = []
    for *row, parts in zip(*epoch, documents.lengths, strict=True):
        assert sum(parts) == S
        begins = np.cumsum(parts) - parts
        for begin, length in zip(begins, parts, strict=True):
            t, y, p = (x[begin : begin + length].tolist() for x in row)
            assert p == list(range(length))
            if t[0] == ends[0] - 1:  # padding, at the end of a row
                assert set(t) == {t[0]} and set(y) == {IGNORE_INDEX} and begin == begins[-1]
                continue
            assert t == list(range(t[0], t[0] + length)) and y == [*t[1:], IGNORE_INDEX]
            document = document_of[t[0]]
            assert t[-1] in document and (length == len(document) or len(document) > S)
            found += t
    assert sorted(found) == sorted(document_of), "each token once"
    assert batches.padding == pytest.approx(1 - len(found) / (S * batches.num_sequences))


def test_a_text_whose_first_document_is_too_long_is_refused():
    with pytest.raises(ValueError, match=r"has 30 tokens, and there are 27 to train"):
        make_batches([30, 6], eval_batches=1)
