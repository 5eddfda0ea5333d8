"""Multi-token prediction: the objective written out, and what transformers computes."""

import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from picotron_min.data import Batches
from picotron_min.extensions.multi_token.extension import add_prediction_layers, hidden_states
from picotron_min.extensions.multi_token.targets import DepthBatch, look_ahead
from picotron_min.extensions.settings import ModelConfig
from picotron_min.loss import IGNORE_INDEX
from picotron_min.model import Llama, rotary_table
from picotron_min.runtime.architectures import from_hf, to_hf
from picotron_min.runtime.config import Config
from picotron_min.runtime.hugging_face import find_weights, layers_left_out
from picotron_min.runtime.tokenizer import BytesTokenizer
from tests.assembled import MODEL, make_config, make_training
from tests.core.test_model import norm_in_own_dtype
from tests.rows import SHAPES

DEPTHS = MODEL.override(num_nextn_predict_layers=2, num_hidden_layers=2)
FACTOR = 0.3

Piece = tuple[Tensor, int]  # known tokens of a document, of which so many are in a row


def pieces_of(data: Batches, rows: list[int], D: int) -> Iterator[Piece]:
    """What rows from these places have of each document, and what follows there."""
    ends, S = [*getattr(data, "ends", [data.cut])], data.seq_length
    for start in rows:
        for begin, end in itertools.pairwise([0, *ends]):
            first, last = max(begin, start), min(end, start + S)
            if first < last and data.tokens[first : first + 1] != IGNORE_INDEX:  # that is padding
                known = data.tokens[first : min(end, last + 1 + D, data.cut)]
                yield torch.from_numpy(known.astype(np.int64)), last - first


def plain_model(c: ModelConfig) -> Llama:
    """With prediction layers, and nothing else around its layers."""
    model = Llama(c)
    add_prediction_layers(model)
    model.to_empty(device="cpu")
    model.tie_weights()
    return model


def states_of(model: Llama, tokens: Tensor, positions: Tensor, targets: Tensor) -> Iterable[Tensor]:
    """The hidden states of each depth."""
    rotary = rotary_table(positions, model.config)
    return hidden_states(model, tokens, rotary, targets[:-1]).chunk(len(targets))


def written_out(model: Llama, pieces: Iterable[Piece]) -> list[tuple[Tensor, int, int]]:
    """Of each depth the cross entropy, and how many targets: with the largest logit, and in all."""
    depths = 1 + model.config.num_nextn_predict_layers
    table = [(0, 0, 0)] * depths
    for known, n in pieces:
        padded = F.pad(known, (0, depths), value=IGNORE_INDEX)
        targets = torch.stack([padded[j + 1 : j + 1 + n] for j in range(depths)])
        states = states_of(model, known[None, :n], torch.arange(n), targets[:, None])
        for j, (hidden, (loss, hits, number)) in enumerate(zip(states, table, strict=True)):
            logits = hidden[0] @ model.lm_head.weight.T
            loss = loss + F.cross_entropy(logits, targets[j], reduction="sum")
            hits += (logits.argmax(-1) == targets[j]).sum().item()
            table[j] = loss, hits, number + (targets[j] >= 0).sum().item()
    return table


def compare_with_the_objective(config: Config, model_config: ModelConfig) -> None:
    training = make_training(config, model_config)
    plain = make_training(config, model_config.override(num_nextn_predict_layers=0))
    assert training.evaluate() == plain.evaluate(), "validation is of the next token alone"
    data, S, D = training.data, config.training.seq_length, model_config.num_nextn_predict_layers
    last = S * (data.num_sequences - 1)  # behind it, tokens are held out
    everything = range(data.global_batch)
    step = next(i for i in range(9) if last in data._starts(i, everything))
    pieces = pieces_of(data, data._starts(step, everything), D)
    reference = plain_model(model_config).double()
    reference.load_state_dict(training.parameters, strict=False)  # without a tied head
    (first, _, N), *others = written_out(reference, pieces)
    ((first + FACTOR / D * sum(loss for loss, *_ in others)) / N).backward()

    result = training.step(step)
    assert abs(result.loss - first / N) < 1e-12
    for j, (expected, hits, number) in enumerate(others, 1):
        assert number < N, "some targets are held out, or of other documents"
        assert abs(result.measures[f"mtp_{j}_loss"] - expected / number) < 1e-12
        assert result.measures[f"mtp_{j}_acceptance"] == hits / number
    for name, p in reference.named_parameters():
        ours = training.parameters[name].grad
        torch.testing.assert_close(ours, p.grad, rtol=0, atol=1e-12, msg=name)


PACKED = {"document_mask": True, "packing": "bfd"}


@pytest.mark.parametrize("tied,text", [(True, {}), (False, PACKED)], ids=["tied", "packed"])
def test_losses_and_gradients_are_those_of_the_objective_written_out(pool, tied, text):
    quiet = {"grad_clip": None, "weight_decay": 0.0}
    config = make_config(micro_batches=2, mtp_loss_scaling_factor=FACTOR, **text, **quiet)
    pool.run(1, compare_with_the_objective, config, DEPTHS.override(tie_word_embeddings=tied))


@pytest.mark.quick
def test_targets_are_read_further_and_none_is_behind_an_end(monkeypatch):
    sizes = {"micro_batch_size": 3, "num_micro_batches": 1, "dp_rank": 0, "dp_size": 1}
    batches = Batches(np.arange(13), seq_length=4, seed=0, positions=torch.tensor([0, 3]), **sizes)
    order = np.argsort([batches._starts(0, [i]) for i in range(3)], axis=0).flatten()
    look_ahead(batches, 2, ends=np.array([7, 13]))
    batch, no = batches.batch(0, 0), IGNORE_INDEX
    assert batch.targets[:, order].tolist() == [
        [[1, 4], [5, 8], [9, 12]],
        [[2, 5], [6, 9], [10, no]],
        [[3, 6], [no, 10], [11, no]],
    ]
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: self)
    moved = batch.to(torch.device("meta"))  # as to a GPU
    assert batch.num_targets == 6 and type(moved) is DepthBatch


def export(config: Config, model_config: ModelConfig, folder: Path) -> list[Tensor]:
    """A batch, and its hidden states of each depth."""
    training = make_training(config, model_config)
    training.step(0)
    training.export(folder, BytesTokenizer())
    model, batch = training.chunks[-1].model, training.data.batch(0, 0)
    with torch.no_grad():
        states = states_of(model, batch.tokens, batch.positions, batch.targets)
    return [batch.tokens, batch.targets, *states]


def test_the_prediction_layers_of_transformers_compute_the_same(pool, tmp_path, monkeypatch):
    from transformers import AutoModelForCausalLM
    from transformers.modeling_layers import MtpModel
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    c = DEPTHS.override(vocab_size=257)
    ((tokens, targets, *ours),) = pool.run(1, export, make_config(), c, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    theirs._keys_to_ignore_on_load_unexpected = [r"model\.layers\.[23]\..*"]
    theirs.model.rotary_emb.float()
    further = MtpModel.from_pretrained(theirs)
    monkeypatch.setattr(LlamaRMSNorm, "forward", norm_in_own_dtype)
    with torch.no_grad():
        h = theirs.model(tokens).last_hidden_state
        for j, expected in enumerate(ours):
            if j > 0:
                ids, places = targets[j - 1].clamp(min=0), torch.arange(16)[None]
                h = further.forward_layer(j - 1, h, places, None, input_ids=ids)
            torch.testing.assert_close(expected, h, rtol=0, atol=1e-12)


def test_files_may_have_more_prediction_layers(tmp_path):
    fewer = DEPTHS.override(num_nextn_predict_layers=0)
    assert from_hf(to_hf(DEPTHS)) == DEPTHS and "num_mtp_layers" not in to_hf(fewer)
    glm = {key: value for key, value in to_hf(SHAPES["sigmoid"]).items() if "nextn" not in key}
    assert from_hf(glm).num_nextn_predict_layers == 1, "as transformers takes an absent key"
    tensors = {name: torch.ones(shape) for name, shape in DEPTHS.parameter_shapes().items()}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(to_hf(DEPTHS)))
    assert find_weights(str(tmp_path), fewer, set())
    assert layers_left_out(tmp_path, fewer) == range(2, 4)
