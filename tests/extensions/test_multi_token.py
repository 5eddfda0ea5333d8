"""Multi-token prediction: the objective written out, and the same in every layout."""

import itertools
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

from picotron_min.data import Batches
from picotron_min.extensions.memory.recompute import apply_recompute
from picotron_min.extensions.multi_token.extension import MultiToken
from picotron_min.extensions.multi_token.targets import DepthBatch, look_ahead
from picotron_min.extensions.settings import ModelConfig, Workload
from picotron_min.loss import IGNORE_INDEX
from picotron_min.model import DecoderLayer, Llama, rotary_table
from picotron_min.pipeline_parallel import Stage, keep_stage
from picotron_min.runtime.architectures import from_hf, to_hf
from picotron_min.runtime.config import Config
from picotron_min.runtime.config_checks import resolve_model
from picotron_min.runtime.config_file import parse_config
from picotron_min.runtime.hardware import hardware_flops_per_token
from picotron_min.runtime.hugging_face import find_weights, layers_left_out
from picotron_min.runtime.tokenizer import BytesTokenizer
from tests.assembled import (
    MODEL,
    make_config,
    make_training,
)
from tests.core.test_model import norm_in_own_dtype
from tests.runtime.test_hugging_face_experts import InFloat64

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


def written_out(
    c: ModelConfig, weights: dict[str, Tensor], pieces: list[Piece]
) -> tuple[list[Tensor], list[int]]:
    """The summed cross entropy of each depth, and how many targets have the largest logit."""
    trunk, layer = Llama(c.override(num_nextn_predict_layers=0)).double(), DecoderLayer(c).double()
    trunk.lm_head = nn.Identity()
    tied, embedding = c.tie_word_embeddings, weights["model.embed_tokens.weight"]
    head, E = embedding if tied else weights["lm_head.weight"], (c.hidden_size,)
    sums, hits = ([0] * (1 + c.num_nextn_predict_layers) for _ in range(2))
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
            hits[j] += (logits.argmax(-1) == targets).sum().item()
    return sums, hits


def compare_with_the_objective(config: Config, model_config: ModelConfig) -> None:
    training = make_training(config, model_config)
    data, S, D = training.data, config.training.seq_length, model_config.num_nextn_predict_layers
    last = S * (data.num_sequences - 1)  # behind it, tokens are held out
    everything = range(data.global_batch)
    step = next(i for i in range(9) if last in data._starts(i, everything))
    pieces = pieces_of(data, data._starts(step, everything), D)
    weights = {name: p.detach().clone().requires_grad_() for name, p in training.parameters.items()}
    (first, *others), hits = written_out(model_config, weights, list(pieces))
    N = sum((data.batch(step, i).targets[0] >= 0).sum() for i in range(data.num_micro_batches))
    ((first + FACTOR / D * sum(others)) / N).backward()

    result = training.step(step)
    assert abs(result.loss - first / N) < 1e-12
    for j, expected in enumerate(others, 1):
        batches = [data.batch(step, i).targets[j] for i in range(data.num_micro_batches)]
        own = sum((targets >= 0).sum() for targets in batches)
        assert own < N, "some targets are held out, or of other documents"
        assert abs(result.measures[f"mtp_{j}_loss"] - expected / own) < 1e-12
        assert result.measures[f"mtp_{j}_acceptance"] == hits[j] / own.item()
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


def validation_losses(config: Config, model_config: ModelConfig) -> tuple[float, float]:
    ours = make_training(config, model_config)
    plain = make_training(config, model_config.override(num_nextn_predict_layers=0))
    return ours.evaluate(), plain.evaluate()


def test_validation_is_of_the_next_token_alone(pool):
    for ours, plain in pool.run(2, validation_losses, make_config(pp=2), DEPTHS):
        assert ours == plain


# transformers' own prediction layers: what goes out is what it computes, and writes text with.

GLM = DEPTHS.override(
    num_local_experts=8,
    moe_intermediate_size=16,
    scoring_func="sigmoid",
    mlp_only_layers=(0,),
    n_shared_experts=1,
)
OUT = {"llama": DEPTHS, "tied": DEPTHS.override(tie_word_embeddings=True), "glm4_moe": GLM}


def export(config: Config, model_config: ModelConfig, folder: Path) -> list[np.ndarray]:
    """The hidden states of each depth, which leave a norm."""
    training, hidden = make_training(config, model_config), []
    training.step(0)
    for name, parameter in training.parameters.items():
        if name.endswith("mlp.gate.weight"):  # newer releases load routers in float32
            parameter.data.copy_(parameter.data.float())
    training.export(folder, BytesTokenizer())
    model, batch = training.chunks[-1].model, training.data.batch(0, 0)
    norms = [m for n, m in model.named_modules() if n.endswith(("model.norm", "shared_head.norm"))]
    for norm in sorted(norms, key=lambda norm: norm is not model.model.norm):
        norm.register_forward_hook(lambda *args: hidden.append(args[-1].detach().numpy()))
    model(batch.tokens, batch.positions, batch.targets)
    return [batch.tokens.numpy(), batch.targets.numpy(), *hidden]


@pytest.mark.parametrize("kind", OUT)
def test_transformers_computes_and_writes_with_the_prediction_layers(
    pool, tmp_path, monkeypatch, kind
):
    from transformers import AutoModelForCausalLM
    from transformers.modeling_layers import MtpModel
    from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeRMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    c, folder = OUT[kind].override(vocab_size=257), tmp_path / "hf"
    ((tokens, targets, *ours),) = pool.run(1, export, make_config(), c, folder)
    load = partial(AutoModelForCausalLM.from_pretrained, folder, experts_implementation="eager")
    theirs = load(dtype=torch.float64)
    theirs._keys_to_ignore_on_load_unexpected = [r"model\.layers\.[23]\..*"]
    theirs.model.rotary_emb.float()
    further = MtpModel.from_pretrained(theirs)
    for module in [*theirs.modules(), *further.modules()]:
        if hasattr(module, "e_score_correction_bias"):
            module.double()
    for norm in (LlamaRMSNorm, Glm4MoeRMSNorm):
        monkeypatch.setattr(norm, "forward", norm_in_own_dtype)
    with InFloat64(), torch.no_grad():
        h = theirs.model(torch.from_numpy(tokens)).last_hidden_state
        for j, expected in enumerate(ours):
            if j > 0:
                ids, places = torch.from_numpy(targets[j - 1]).clamp(min=0), torch.arange(16)[None]
                h = further.forward_layer(j - 1, h, places, None, input_ids=ids)
            torch.testing.assert_close(torch.from_numpy(expected), h, rtol=0, atol=1e-12)
    monkeypatch.undo()
    model, start = load(dtype=torch.float32), torch.tensor([[1, 2, 3]])
    model._keys_to_ignore_on_load_unexpected = theirs._keys_to_ignore_on_load_unexpected
    plain, drafted = (
        model.generate(start, max_new_tokens=20, do_sample=False, use_mtp=use)
        for use in (False, True)
    )
    assert plain.tolist() == drafted.tolist()


def write_folder(folder: Path, model_config: ModelConfig, **more: Tensor) -> str:
    folder.mkdir()
    tensors = {name: torch.ones(shape) for name, shape in model_config.parameter_shapes().items()}
    save_file(tensors | more, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(to_hf(model_config)))
    return str(folder)


def test_files_may_have_other_prediction_layers_or_repeat_an_end(tmp_path):
    fewer = DEPTHS.override(num_nextn_predict_layers=0)
    assert from_hf(to_hf(DEPTHS)) == DEPTHS and "num_mtp_layers" not in to_hf(fewer)
    glm = {key: value for key, value in to_hf(GLM).items() if "nextn" not in key}
    assert from_hf(glm).num_nextn_predict_layers == 1, "as transformers takes an absent key"
    with_depths = write_folder(tmp_path / "with", DEPTHS)
    assert find_weights(with_depths, fewer, set())
    assert layers_left_out(Path(with_depths), fewer) == range(2, 4)
    with pytest.raises(ValueError, match=r"layers\.2\.eh_proj\.weight is absent there"):
        find_weights(write_folder(tmp_path / "without", fewer), DEPTHS, set())
    name = "model.layers.2.shared_head.head.weight"
    same = write_folder(tmp_path / "same", DEPTHS, **{name: torch.ones(61, 32)})
    assert find_weights(same, DEPTHS, set())
    other = write_folder(tmp_path / "other", DEPTHS, **{name: torch.zeros(61, 32)})
    with pytest.raises(ValueError, match=f"{name} differs from lm_head.weight"):
        find_weights(other, DEPTHS, set())


QK_NORMED_EXPERTS = {"num_local_experts": 4, "scoring_func": "sigmoid", "qk_norm": True}


@pytest.mark.parametrize(
    "model,factor,message",
    [
        ({"num_local_experts": 4}, 0.1, '"softmax" is no .* set scoring_func to "sigmoid", or num'),
        ({"qk_norm": True}, 0.1, "qk_norm=true is no model of transformers: set qk_norm to false"),
        (QK_NORMED_EXPERTS, 0.1, "qk_norm=true is no .*: set qk_norm to false, or num_nextn"),
        ({}, 0, "factor=0 leaves .*=1 untrained: raise it, or num_nextn_predict_layers to 0"),
        ({"mtp_num_layers": 1}, 0.1, "not known: did you mean model.num_nextn_predict_layers"),
    ],
    ids=str,
)
def test_what_no_model_of_transformers_computes_is_refused(model, factor, message):
    raw = make_config(mtp_loss_scaling_factor=float(factor)).model_dump(by_alias=True)
    raw["model"] |= {"num_nextn_predict_layers": 1, "vocab_size": 257} | model
    with pytest.raises(ValueError, match=message):
        resolve_model(parse_config(raw))


# Costs: FLOPs and memory, against what torch counts; what is sent is in test_planner_traffic.py.

GQA = ModelConfig(512, 128, 352, 3, 4, 2, num_nextn_predict_layers=1)


def stage_of(c: ModelConfig, recompute: str, stage: Stage) -> Llama:
    model, extension = Llama(c), MultiToken(c, Workload(1024), torch.device("cpu"))
    keep_stage(model, stage)
    extension.swap(model)
    model.to_empty(device="cpu")
    model.tie_weights()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
        parameter.grad = torch.zeros_like(parameter)
    extension.connect(model, {})
    apply_recompute(model, recompute)
    return model


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_hardware_flops_are_what_torch_counts(recompute):
    model = stage_of(GQA, recompute, Stage(range(4), True, True))
    tokens, targets = torch.randint(512, (2, 64)), torch.randint(512, (2, 2, 64))
    with FlopCounterMode(display=False) as counter:
        model(tokens, torch.arange(64), targets).backward()
    # torch's counter does not know attention on a CPU: that term vanishes at length 0
    assert hardware_flops_per_token(GQA, 0, recompute) * 2 * 64 == counter.get_total_flops()
