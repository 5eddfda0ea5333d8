"""Multi-token prediction: the objective written out, and the same in every layout."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from picotron_min.data import Batch, Batches
from picotron_min.extensions.documents.packing import PADDING
from picotron_min.extensions.multi_token.batches import DepthBatch, look_ahead
from picotron_min.extensions.settings import ModelConfig
from picotron_min.loss import IGNORE_INDEX
from picotron_min.model import DecoderLayer, Llama, rotary_table
from picotron_min.runtime.config import Config
from tests.assembled import MODEL, assert_trains_as_one_rank, make_config, make_training

DEPTHS = MODEL.override(num_nextn_predict_layers=2, num_hidden_layers=2)
FACTOR = 0.3

Piece = tuple[Tensor, int]  # known tokens of a document, of which so many are in a row


def pieces_of(data: Batches, rows: list[int], D: int) -> Iterator[Piece]:
    """What rows from these places have of each document, and what follows there."""
    ends, S = [*getattr(data, "ends", [data.cut])], data.seq_length
    is_padding = getattr(data, "moved", np.zeros(len(ends))) == PADDING
    for start in rows:
        for begin, end, padded in zip([0, *ends], ends, is_padding, strict=False):
            first, last = max(begin, start), min(end, start + S)
            if first < last and not padded:
                known = data.tokens[first : min(end, last + 1 + D, data.cut)]
                yield torch.from_numpy(known.astype(np.int64)), last - first


def written_out(c: ModelConfig, weights: dict[str, Tensor], pieces: list[Piece]) -> list[Tensor]:
    """The summed cross entropy of each depth."""
    trunk, layer = Llama(c.override(num_nextn_predict_layers=0)).double(), DecoderLayer(c).double()
    trunk.lm_head = nn.Identity()
    tied, embedding = c.tie_word_embeddings, weights["model.embed_tokens.weight"]
    head, E = embedding if tied else weights["lm_head.weight"], (c.hidden_size,)
    sums = [0.0] * (1 + c.num_nextn_predict_layers)
    for known, n in pieces:
        positions = torch.arange(n)
        own = {name: weights[name] for name, _ in trunk.named_parameters()}
        h = functional_call(trunk, own, (known[None, :n], positions))
        for j in range(len(sums)):
            if j > 0:
                prefix = f"model.layers.{c.num_hidden_layers + j - 1}."
                own = {k.removeprefix(prefix): w for k, w in weights.items() if prefix in k}
                of = {k: own.pop(f"{k}.weight") for k in ("enorm", "hnorm", "shared_head.norm")}
                projection = own.pop("eh_proj.weight")
                # What follows the known tokens must not matter: any id will do.
                ids = F.pad(known, (0, j), value=5)[j : j + n]
                e = F.rms_norm(F.embedding(ids[None], embedding), E, of["enorm"], c.rms_norm_eps)
                h = F.rms_norm(h, E, of["hnorm"], c.rms_norm_eps)
                h = torch.cat([e, h], dim=-1) @ projection.T
                h = functional_call(layer, own, (h, rotary_table(positions, c)))
                h = F.rms_norm(h, E, of["shared_head.norm"], c.rms_norm_eps)
            targets = known[j + 1 : j + 1 + n]
            logits = h[0, : len(targets)] @ head.T
            sums[j] = sums[j] + F.cross_entropy(logits, targets, reduction="sum")
    return sums


def compare_with_the_objective(config: Config, model_config: ModelConfig) -> None:
    training = make_training(config, model_config)
    data, S, D = training.data, config.training.seq_length, model_config.num_nextn_predict_layers
    last = S * (data.num_sequences - 1)  # behind it, tokens are held out
    everything = range(data.global_batch)
    step = next(i for i in range(9) if last in data._starts(i, everything))
    pieces = pieces_of(data, data._starts(step, everything), D)
    weights = {name: p.detach().clone().requires_grad_() for name, p in training.parameters.items()}
    first, *others = written_out(model_config, weights, list(pieces))
    N = sum((data.batch(step, i).targets[0] >= 0).sum() for i in range(data.num_micro_batches))
    ((first + FACTOR / D * sum(others)) / N).backward()

    result = training.step(step)
    assert abs(result.loss - first / N) < 1e-12
    for j, expected in enumerate(others, 1):
        batches = [data.batch(step, i).targets[j] for i in range(data.num_micro_batches)]
        own = sum((targets >= 0).sum() for targets in batches)
        assert own < N, "some targets are held out, or of other documents"
        assert abs(result.measures[f"mtp_{j}_loss"] - expected / own) < 1e-12
    for name, parameter in training.parameters.items():
        torch.testing.assert_close(parameter.grad, weights[name].grad, rtol=0, atol=1e-12, msg=name)


APART = {"document_mask": True}
TEXTS = {"one text": {}, "documents apart": APART, "packed": APART | {"packing": "bfd"}}


@pytest.mark.parametrize(
    "tied,text", [(False, "one text"), (True, "documents apart"), (False, "packed")]
)
def test_losses_and_gradients_are_those_of_the_objective_written_out(pool, tied, text):
    config = make_config(
        micro_batches=2,
        **TEXTS[text],
        mtp_loss_scaling_factor=FACTOR,
        grad_clip=None,
        weight_decay=0.0,
    )
    model_config = DEPTHS.override(tie_word_embeddings=tied)
    pool.run(1, compare_with_the_objective, config, model_config)


def test_targets_are_read_further_and_none_is_behind_an_end_or_padding(monkeypatch):
    sizes = {"micro_batch_size": 3, "num_micro_batches": 1, "dp_rank": 0, "dp_size": 1}
    batches = Batches(np.arange(13), seq_length=4, seed=0, positions=torch.tensor([0, 3]), **sizes)
    order = np.argsort([batches._starts(0, [i]) for i in range(3)], axis=0).flatten()
    read = batches._read

    def padded(starts: list[int]) -> Batch:  # as of a row that ends with padding
        batch = read(starts)
        batch.targets[batch.targets == 8] = IGNORE_INDEX
        return batch

    batches._read, no = padded, IGNORE_INDEX
    look_ahead(batches, 2, ends=np.array([7, 13]))
    batch = batches.batch(0, 0)
    assert batch.targets[:, order].tolist() == [
        [[1, 4], [5, no], [9, 12]],
        [[2, 5], [6, no], [10, no]],
        [[3, 6], [no, no], [11, no]],
    ]
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: self)
    moved = batch.to(torch.device("meta"))  # as to a GPU
    assert batch.num_targets == 5 and type(moved) is DepthBatch


def validation_losses(config: Config, model_config: ModelConfig) -> tuple[float, float]:
    ours = make_training(config, model_config)
    plain = make_training(config, model_config.override(num_nextn_predict_layers=0))
    return ours.evaluate(), plain.evaluate()


def test_validation_is_of_the_next_token_alone(pool):
    for ours, plain in pool.run(2, validation_losses, make_config(pp=2), DEPTHS):
        assert ours == plain


V = {"engine": "zb_v", "chunks": 2, "pp": 2, "micro_batches": 2}


# Beside the cases in test_layouts.py: a tied embedding and its copy, and one that two stages share.
@pytest.mark.parametrize(
    "tied,layout",
    [
        (True, {"pp": 2, "micro_batches": 3}),
        (False, {"dp": 2, "pp": 2, "micro_batches": 2, "sharding": "parameters"}),
        (True, V),
        (False, V | {"dp": 2, "sharding": "parameters"}),
        (True, {"pp": 2, "cp": 2, "tp": 2, "sequence_parallel": True, "document_mask": True}),
        (False, {"dp": 2, "tp": 2, "overlap": False}),
    ],
    ids=str,
)
def test_n_ranks_equal_one(pool, tied, layout):
    config = make_config(**layout)
    assert_trains_as_one_rank(pool, config, DEPTHS.override(tie_word_embeddings=tied))
