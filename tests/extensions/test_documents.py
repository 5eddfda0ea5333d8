"""Packed documents: nothing crosses the border of one, in any layout."""

import itertools
from unittest.mock import create_autospec

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from torch.nn.attention import varlen
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from picotron_min.context_parallel import POSITIONS, zigzag_positions
from picotron_min.extensions.documents.attention import (
    DocumentAttention,
    DocumentMask,
    VarlenAttention,
)
from picotron_min.extensions.documents.batches import DocumentBatches
from picotron_min.extensions.documents.rectangles import (
    Documents,
    rectangles,
    ring_plan,
)
from picotron_min.extensions.schedules.registry import SCHEDULES
from picotron_min.loss import IGNORE_INDEX
from picotron_min.model import FlashAttention, Llama
from picotron_min.runtime.architectures import to_hf
from tests.assembled import (
    MODEL,
    MODELS,
    assert_trains_as_one_rank,
    make_config,
    sent_in_a_step,
    whole_run,
)
from tests.core.test_model import norm_in_own_dtype
from tests.extensions.test_experts import MODELS as EXPERTS
from tests.extensions.test_experts import make_expert_config

CPU = torch.device("cpu")


def some_lengths(S: int, seed: int) -> list[int]:
    """Of documents in a row of S tokens: some of one token, some long."""
    dice = np.random.default_rng(seed)
    borders = np.flatnonzero(dice.random(S - 1) < dice.choice([0.05, 0.3, 0.8])) + 1
    return np.diff(borders, prepend=0, append=S).tolist()


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("seed", range(6))
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
            rows, columns = places[rank][queries], places[source][keys]
            seen[np.ix_(rows, columns)] += np.tril(here) if is_causal else here
    visible = np.equal.outer(document, document) & np.tri(S, dtype=bool)
    np.testing.assert_array_equal(seen, visible)


def test_a_row_that_is_not_cut_is_one_square_a_document():
    assert list(rectangles([3, 5], [0], [0], 8)) == [
        (slice(0, 3), slice(0, 3), True),
        (slice(3, 8), slice(3, 8), True),
    ]


def num_pairs(plan: tuple) -> int:
    """Pairs of a query and a key that a rank computes."""
    total = 0
    for ours, theirs, is_causal in itertools.chain(*plan):
        n, m = (some.stop - some.start for some in (ours[2], theirs[3]))
        total += n * (n + 1) // 2 if is_causal else n * m
    return total


def test_the_imbalance_of_a_ring_is_the_busiest_rank_to_the_mean():
    # Two ranks, pieces of 4: documents of 5, 2 and 9 tokens have 15 + 3 + 45 pairs. Rank 0 has two
    # squares of 10, and the last four queries see the five tokens before: 40. Rank 1 has the rest.
    batches = make_batches([5, 2, 9, 16, 1], S=16, B=2)  # its step has both rows
    plans = [ring_plan(Documents(((5, 2, 9), (16,))), rank, 2, 4) for rank in range(2)]
    assert [num_pairs(plan) for plan in plans] == [40 + 68, 23 + 68]
    assert batches.ring_imbalance(0, 2) == pytest.approx(108 / 99.5)
    assert make_batches([16, 17], S=16, B=2).ring_imbalance(0, 2) == 1, "zigzag is balanced"


def test_attention_costs_as_in_rows_of_the_documents_own_lengths():
    # Rows of 7 tokens: 2 cp need not divide them where there is no ring.
    batches = make_batches([5, 2, 7, 1], S=7, B=2)
    assert batches.attended_length(0) == pytest.approx((25 + 4 + 49) / 14)
    assert make_batches([7, 8], S=7, B=2).attended_length(0) == 7, "as without the mask"


def make_batches(lengths: list[int], S=8, positions=None, B=1) -> DocumentBatches:
    ends = np.cumsum(lengths)
    sizes = {"micro_batch_size": B, "num_micro_batches": 1, "dp_rank": 0, "dp_size": 1}
    tokens = np.arange(ends[-1])
    return DocumentBatches(tokens, ends=ends, seq_length=S, seed=0, positions=positions, **sizes)


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


@pytest.mark.parametrize("engine", POSITIONS)
def test_a_context_parallel_rank_has_its_columns_and_the_lengths_of_whole_rows(engine):
    whole = make_batches([3, 1, 6, 9])._read([0, 8])
    for rank in range(2):
        mine = POSITIONS[engine](rank, 2, 8)
        part = make_batches([3, 1, 6, 9], positions=mine)._read([0, 8])
        assert part.extra == whole.extra
        for ours, all_of_it in zip(part[:3], whole[:3], strict=True):
            assert torch.equal(ours, all_of_it[:, mine])


def test_rows_and_their_order_are_those_without_the_mask():
    from picotron_min.data import Batches

    masked = make_batches([5] * 20, B=3)
    plain = Batches(
        masked.tokens, seq_length=8, seed=0, micro_batch_size=3, num_micro_batches=1, dp_rank=0,
        dp_size=1,
    )  # fmt: skip
    for step in range(6):
        assert torch.equal(masked.batch(step, 0).tokens, plain.batch(step, 0).tokens)


def masked_llama(kind: str, heads: int) -> tuple[Llama, torch.nn.Module]:
    """Ours with the extension, and theirs with the same weights."""
    config = MODEL.override(num_hidden_layers=2, num_key_value_heads=heads)
    torch.manual_seed(0)
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**to_hf(config))).double()
    ours = Llama(config).double()
    ours.load_state_dict(theirs.state_dict())
    if kind == "mask":
        DocumentMask(CPU).connect(ours, {})
    return ours, theirs


def packed(seed: int) -> tuple[list[list[int]], Tensor, Tensor, Tensor]:
    """Lengths of documents in rows, two of them alike, their tokens, positions and targets."""
    rows = [some_lengths(24, seed), *[some_lengths(24, seed + 100)] * 2]
    tokens = torch.randint(61, (3, 25), generator=torch.Generator().manual_seed(seed))
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in rows])
    targets = tokens[:, 1:].clone()
    for row, lengths in enumerate(rows):
        targets[row, np.cumsum(lengths) - 1] = IGNORE_INDEX
    return rows, tokens[:, :-1], positions, targets


def test_rows_alike_are_attended_together():
    shapes = []

    def attention(q, k, v):
        shapes.append((len(q), q.shape[2]))
        return q + k + v

    q, k, v = torch.randn(3, 5, 2, 8, 4)
    documents = Documents(((3, 5), (3, 5), (8,), (8,), (3, 5)))
    out = DocumentAttention(attention)(q, k, v, documents)
    assert shapes == [(2, 3), (2, 5), (2, 8), (1, 3), (1, 5)] and out.equal(q + k + v)


def loss_of_theirs(model, tokens: Tensor, targets: Tensor, **more) -> Tensor:
    logits = model(tokens, **more).logits
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


@pytest.mark.parametrize("alone", [True, False], ids=["documents alone", "position_ids"])
@pytest.mark.parametrize("heads", [8, 2], ids=["multi-head", "grouped-query"])
def test_loss_and_gradients_equal_transformers(heads, alone, monkeypatch):
    monkeypatch.setattr(LlamaRMSNorm, "forward", norm_in_own_dtype)
    ours, theirs = masked_llama("mask", heads)
    rows, tokens, positions, targets = packed(seed=5)
    documents = Documents(tuple(map(tuple, rows)))
    loss = ours(tokens, positions, targets, documents)
    loss.backward()
    if alone:  # each document by itself, from position 0
        expected = sum(
            loss_of_theirs(theirs, t[None], y[None])
            for b, row in enumerate(rows)
            for t, y in zip(tokens[b].split(row), targets[b].split(row), strict=True)
        )
    else:  # rows one by one: its mask is made for a single packed row
        expected = sum(
            loss_of_theirs(theirs, t[None], y[None], position_ids=p[None], use_cache=False)
            for t, y, p in zip(tokens, targets, positions, strict=True)
        )
    expected.backward()
    assert abs(loss - expected) < 1e-12 * expected
    gradients = {name: p.grad for name, p in theirs.named_parameters()}
    for name, parameter in ours.named_parameters():
        error = (parameter.grad - gradients[name]).abs().max()
        assert error < 1e-12 * max(1.0, gradients[name].abs().max()), name
    assert abs(masked_llama("none", heads)[0](tokens, positions, targets) - loss) > 1e-3


def test_a_row_that_is_one_document_is_the_row_without_the_mask_to_the_last_bit():
    q, k, v = torch.randn(3, 2, 4, 16, 8, dtype=torch.float64).unbind()
    documents = Documents(((16,), (16,)))
    assert torch.equal(
        DocumentAttention(FlashAttention())(q, k, v, documents), FlashAttention()(q, k, v)
    )


@pytest.mark.parametrize("accepts", [True, False], ids=["torch 2.13", "torch 2.11"])
def test_the_kernel_for_gpus_is_called_by_its_signature(monkeypatch, accepts):
    def of_2_11(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size):
        assert window_size == (-1, 0)  # causal
        return query

    def of_2_13(*args, window_size, enable_gqa=False, **options):
        assert enable_gqa, "refused: there are fewer key heads"
        return of_2_11(*args, window_size=window_size, **options)

    of_this_torch = create_autospec(varlen.varlen_attn, side_effect=lambda query, *_, **__: query)
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: self)
    documents = Documents(((9, 7), (16,)))
    q, kv = torch.randn(2, 4, 16, 8), torch.randn(2, 2, 16, 8)
    for kernel in (of_2_13 if accepts else of_2_11, of_this_torch):
        monkeypatch.setattr(varlen, "varlen_attn", kernel)
        assert torch.equal(VarlenAttention()(q, kv, kv, documents), q)
    assert of_this_torch.called


def test_a_batch_moves_its_tensors_alone(monkeypatch):
    batch = make_batches([3, 6])._read([0])
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: self)
    moved = batch.to(torch.device("meta"))
    assert [x.device.type for x in moved[:3]] == ["meta"] * 3 and moved.extra == batch.extra


# Every kind of layout with the mask; a schedule, a model, a recomputation and a packing alternate.
LAYOUTS = [
    {"dp": dp, "pp": pp, "cp": cp, "tp": tp, "cp_engine": cp_engine}
    for dp, pp, cp, tp in itertools.product((1, 2), (1, 2, 3, 4), (1, 2, 3, 4, 8), (1, 2, 4))
    if 1 < dp * pp * cp * tp <= 8
    for cp_engine in (POSITIONS if cp > 1 else ["ring"])
    if cp_engine == "ring" or 8 % (cp * tp) == 0
]
CHOICES = [
    (engine, model, recompute)
    for engine in SCHEDULES
    for model, recompute in [("untied", "none"), ("tied", "full"), ("grouped-query", "selective")]
]

PACKINGS = ("wrapped", "bfd")


@pytest.mark.turns(1, 4)
@pytest.mark.parametrize(
    "layout,choice,packing",
    list(zip(LAYOUTS, itertools.cycle(CHOICES), itertools.cycle(PACKINGS), strict=False)),
    ids=str,
)
def test_n_ranks_equal_one_with_the_mask(pool, layout, choice, packing):
    engine, model, recompute = choice
    if MODELS[model].num_key_value_heads % layout["tp"]:
        model = "untied"
    config = make_config(
        **layout,
        micro_batches=3 if layout["pp"] > 1 else 1,
        engine=engine if layout["pp"] > 1 else "1f1b",
        chunks=SCHEDULES[engine].chunks if layout["pp"] > 1 else 1,
        sequence_parallel=layout["tp"] > 1 and recompute != "none",
        recompute=recompute,
        document_mask=True,
        packing=packing,
    )
    assert_trains_as_one_rank(pool, config, model)


@pytest.mark.parametrize(
    "choice",
    [
        {"dp": 2, "sharding": "optimizer"},
        {"dp": 2, "pp": 2, "sharding": "parameters"},
        {"pp": 2, "layers": 4, "offload": 1},
        {"pp": 2, "use_flash_attention": False},
    ],
    ids=str,
)
def test_other_choices_train_the_same_with_the_mask(pool, choice):
    config = make_config(**choice, cp=2, micro_batches=2, document_mask=True)
    assert_trains_as_one_rank(pool, config, "tied")


@pytest.mark.parametrize("dp,pp", [(2, 1), (1, 2)])
def test_experts_train_the_same_with_the_mask(pool, dp, pp):
    layout = {"dp": dp, "pp": pp, "cp": 2, "ep": 2}
    config = make_expert_config(**layout, micro_batches=2, document_mask=True)
    assert_trains_as_one_rank(pool, config, EXPERTS["gated"])


@pytest.mark.parametrize("engine", POSITIONS)
def test_every_axis_sends_the_bytes_that_it_sends_without_the_mask(pool, engine):
    plain, masked = (
        pool.run(2, sent_in_a_step, make_config(cp=2, cp_engine=engine, document_mask=mask), MODEL)
        for mask in (False, True)
    )
    assert plain == masked and plain[0]["cp"]


def test_mask_and_packing_change_what_is_trained(pool):
    keys = {"document_mask": True}
    plain, *others = (
        whole_run(pool, make_config(**more), "tied").losses[0]
        for more in ({}, keys, keys | {"packing": "bfd"})
    )
    assert min(abs(np.diff([plain, *others]))) > 1e-4
