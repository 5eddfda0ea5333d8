"""Documents in rows: nothing crosses the border of one. Layouts are in test_layouts.py."""

from copy import deepcopy

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen

from picotron_min.context_parallel import zigzag_positions
from picotron_min.extensions.documents.attention import DocumentMask, VarlenAttention
from picotron_min.extensions.documents.batches import DocumentBatches
from picotron_min.extensions.documents.rectangles import Documents, ring_plan
from picotron_min.loss import IGNORE_INDEX
from picotron_min.model import Llama
from tests.assembled import MODEL


def some_lengths(S: int, seed: int) -> list[int]:
    """Of documents in a row of S tokens: some of one token, some long."""
    dice = np.random.default_rng(seed)
    borders = np.flatnonzero(dice.random(S - 1) < dice.choice([0.05, 0.3, 0.8])) + 1
    return np.diff(borders, prepend=0, append=S).tolist()


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("seed", range(3))
def test_the_rectangles_of_all_ranks_have_each_visible_pair_once(size, seed):
    S = 48
    lengths, width = some_lengths(S, seed), S // (2 * size)
    document = np.repeat(np.arange(len(lengths)), lengths)
    seen = np.zeros((S, S), int)
    places = [zigzag_positions(rank, size, S).numpy() for rank in range(size)]
    for rank in range(size):
        plan = ring_plan(Documents((tuple(lengths),)), rank, size, width)
        squares = [r.is_causal for r in plan[rank]]
        assert squares == sorted(squares, reverse=True), "every query is in a square at first"
        for source, (ours, theirs, is_causal) in ((s, r) for s in range(size) for r in plan[s]):
            queries, keys = ours[2], theirs[3]
            here = np.ones((queries.stop - queries.start, keys.stop - keys.start), int)
            assert here.size, "torch's kernel crashes on none"
            rows, columns = places[rank][queries], places[source][keys]
            seen[np.ix_(rows, columns)] += np.tril(here) if is_causal else here
    visible = np.equal.outer(document, document) & np.tri(S, dtype=bool)
    np.testing.assert_array_equal(seen, visible)


def test_attention_costs_as_in_rows_of_the_documents_own_lengths():
    # Rows of 7 tokens: 2 cp need not divide them where there is no ring.
    batches = make_batches([5, 2, 7, 1], S=7, B=2)
    assert batches.attended_length(0) == pytest.approx((25 + 4 + 49) / 14)


def make_batches(lengths: list[int], S=8, positions=None, B=1) -> DocumentBatches:
    ends = np.cumsum(lengths)
    sizes = {"micro_batch_size": B, "num_micro_batches": 1, "dp_rank": 0, "dp_size": 1}
    tokens = np.arange(ends[-1])
    return DocumentBatches(tokens, ends=ends, seq_length=S, seed=0, positions=positions, **sizes)


@pytest.mark.quick
def test_positions_begin_anew_and_the_end_of_a_document_has_no_target():
    batch = make_batches([3, 1, 6, 9])._read([0, 8, 2])
    assert batch.positions.tolist() == [
        [0, 1, 2, 0, 0, 1, 2, 3],  # 3, 1, and four tokens of 6
        [0, 1, 0, 1, 2, 3, 4, 5],  # the rest of the 6, and six of 9
        [0, 0, 0, 1, 2, 3, 4, 5],  # the last of 3, the 1, and all of the 6, to the row's end
    ]
    no = IGNORE_INDEX
    assert batch.targets.tolist() == [
        [1, 2, no, no, 5, 6, 7, 8],
        [9, no, 11, 12, 13, 14, 15, 16],
        [no, no, 5, 6, 7, 8, 9, no],
    ]
    assert batch.extra == (Documents(((3, 1, 4), (2, 6), (1, 1, 6))),)
    assert batch.num_targets == 18


def test_loss_and_gradients_are_those_of_each_document_alone():
    config = MODEL.override(num_hidden_layers=2, num_key_value_heads=2)
    plain = Llama(config).double()
    ours = deepcopy(plain)
    DocumentMask(torch.device("cpu")).connect(ours, {})
    rows = [some_lengths(24, 5), *[some_lengths(24, 105)] * 2]  # two of them alike
    tokens = torch.randint(61, (3, 25), generator=torch.Generator().manual_seed(5))
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in rows])
    targets, expected = tokens[:, 1:].clone(), 0.0
    for b, lengths in enumerate(rows):
        targets[b, np.cumsum(lengths) - 1] = IGNORE_INDEX
        pieces = zip(*(x.split(lengths) for x in (tokens[b, :-1], targets[b])), strict=True)
        expected += sum(plain(t[None], torch.arange(len(t)), y[None]) for t, y in pieces)
    loss = ours(tokens[:, :-1], positions, targets, Documents(tuple(map(tuple, rows))))
    loss.backward()
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    for (name, p), q in zip(ours.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=0, atol=1e-12, msg=name)


def test_the_kernel_for_gpus_is_called_by_the_signature_of_each_torch(monkeypatch):
    def of_2_11(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size):
        assert window_size == (-1, 0)  # causal
        return query

    def of_2_13(*args, window_size, enable_gqa=False, **options):
        assert enable_gqa, "refused: there are fewer key heads"
        return of_2_11(*args, window_size=window_size, **options)

    monkeypatch.setattr(Tensor, "pin_memory", lambda self: self)
    documents = Documents(((9, 7), (16,)))
    q, kv = torch.randn(2, 4, 16, 8), torch.randn(2, 2, 16, 8)
    for kernel in (of_2_11, of_2_13):  # the dry run calls this torch's
        monkeypatch.setattr(varlen, "varlen_attn", kernel)
        assert torch.equal(VarlenAttention()(q, kv, kv, documents), q)
