"""Muon against torch.optim.Muon, over tensor-parallel parts, in every layout, and resumed."""

import math
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from picotron_min.extensions.optimizers.muon import Matrices, Muon, orthogonalise
from picotron_min.extensions.optimizers.whole_matrices import Batch
from picotron_min.extensions.settings import Recipe
from picotron_min.optimizer import build_optimizer
from picotron_min.runtime.config import Config
from tests import assembled
from tests.assembled import assert_trains_as_one_rank
from tests.core.test_costs import GQA, planned
from tests.extensions.test_experts import MODELS, make_expert_config

SHAPES = [(24, 8), (8, 24), (16, 16), (6, 1)]


def whole(parameter: nn.Parameter) -> Matrices:
    everything = tuple(slice(0, length) for length in parameter.shape)
    return Matrices(Batch(parameter.shape, ["its name"], "", [everything]), [parameter], None)


RECIPE = Recipe("muon", 0.02, weight_decay=0.1, momentum=0.9, dtype="bfloat16")


def test_updates_in_bfloat16_are_torchs_bit_for_bit():
    generator = torch.Generator().manual_seed(3)
    draws = [[torch.randn(shape, generator=generator) for shape in SHAPES] for _ in range(6)]
    options = {"weight_decay": RECIPE.weight_decay, "momentum": RECIPE.momentum}

    def ours(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return Muon([whole(p) for p in parameters], build_optimizer([], RECIPE), RECIPE)

    def theirs(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        lr = RECIPE.learning_rate
        return torch.optim.Muon(parameters, lr, adjust_lr_fn="match_rms_adamw", **options)

    results = []
    for optimizer_of in (ours, theirs):
        parameters = [nn.Parameter(weight.clone()) for weight in draws[0]]
        optimizer = optimizer_of(parameters)
        for gradients in draws[1:]:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient.clone()
            optimizer.step()
        results.append(parameters)
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_only_what_is_kept_of_the_momentum_is_rounded():
    recipe = replace(RECIPE, moments="bfloat16", dtype="float32")
    weight = nn.Parameter(torch.randn(6, 4))
    optimizer, mu = Muon([whole(weight)], build_optimizer([], recipe), recipe), recipe.momentum
    kept, expected = torch.zeros(6, 4), weight.detach().clone()
    for _ in range(4):
        weight.grad = torch.randn(6, 4)
        optimizer.step()
        average = kept.lerp(weight.grad, 1 - mu)
        kept = average.bfloat16().float()
        direction = orthogonalise(weight.grad.lerp(average, mu))
        expected.mul_(1 - 0.02 * 0.1).add_(direction, alpha=-0.02 * 0.2 * math.sqrt(6))
        assert torch.equal(weight, expected)
    assert torch.equal(optimizer.state[weight]["momentum_buffer"], average.bfloat16())


MUON = {"optimizer": "muon", "learning_rate": 0.02, "betas": [0.8, 0.9], "momentum": 0.9}


def make_config(dp=1, pp=1, cp=1, tp=1, **options) -> Config:
    micro_batches = options.pop("micro_batches", 3 if pp > 1 else 1)
    options = {"sequence_parallel": tp > 1, **MUON, **options}
    return assembled.make_config(dp, tp, micro_batches, pp, cp=cp, **options)


def distance_to_torch(config: Config, model: str) -> tuple[float, int]:
    """Of the weights after three steps from those that torch's optimizers make of the gradients."""
    training = assembled.make_training(config, model)

    def whole(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        parts = training.parts_of_whole({n: t.contiguous() for n, t in tensors.items()})
        return {name: part.full_tensor().clone() for name, part in parts.items()}

    weights = whole({name: p.data for name, p in training.parameters.items()})
    reference = {name: nn.Parameter(weight.clone()) for name, weight in weights.items()}
    t, hidden = config.training, [p for n, p in reference.items() if "_proj" in n]
    options = {"weight_decay": t.weight_decay, "momentum": t.momentum}
    others = [
        {"params": [p for n, p in reference.items() if "embed" in n or "lm_head" in n]},
        {"params": [p for n, p in reference.items() if "norm" in n], "weight_decay": 0.0},
    ]
    muon = torch.optim.Muon(hidden, t.learning_rate, adjust_lr_fn="match_rms_adamw", **options)
    adamw = torch.optim.AdamW(others, t.learning_rate, t.betas, weight_decay=t.weight_decay)
    for step in range(3):
        training.step(step)
        for name, gradient in whole({n: p.grad for n, p in training.parameters.items()}).items():
            reference[name].grad = gradient
        # torch's iterates in bfloat16, whatever its parameters are; within this, as they are.
        with mock.patch.object(Tensor, "bfloat16", Tensor.clone):
            muon.step()
        adamw.step()
    after = whole({name: p.data for name, p in training.parameters.items()})
    moved = [(after[name] - weights[name]).abs().max().item() for name in after]
    assert min(moved) > 1e-3, "every parameter is trained"
    return max((after[name] - p).abs().max().item() for name, p in reference.items()), len(hidden)


@pytest.mark.parametrize("dp,tp,model", [(1, 1, "untied"), (1, 2, "tied"), (3, 1, "untied")])
def test_training_with_muon_is_training_with_torchs(pool, dp, tp, model):
    for distance, num_hidden in pool.run(dp * tp, distance_to_torch, make_config(dp, tp=tp), model):
        assert distance < 1e-12 and num_hidden == 2 * 7


LAYOUTS = [
    {"dp": 2, "micro_batches": 3},
    {"dp": 2, "tp": 2, "sharding": "optimizer"},
    {"dp": 4, "recompute": "full"},
    {"tp": 2, "sequence_parallel": False},
    {"tp": 4},
    {"cp": 2, "tp": 2},
    {"dp": 2, "cp": 2, "cp_engine": "ulysses"},
    {"pp": 2, "engine": "interleaved", "chunks": 2},
    {"dp": 2, "pp": 2, "tp": 2, "recompute": "selective"},
    {"pp": 2, "cp": 2, "tp": 2, "engine": "afab"},
]


@pytest.mark.turns(3, 7)
@pytest.mark.parametrize("model", ["untied", "tied"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_layouts_train_the_same_model_with_muon(pool, layout, model):
    assert_trains_as_one_rank(pool, make_config(**layout), model, steps=3)


@pytest.mark.parametrize("sharding", ["none", "optimizer"])
def test_parts_of_experts_are_made_whole_too(pool, sharding):
    """Two ranks have parts of an expert without sharding, else four."""
    layout = {"dp": 2, "tp": 4, "ep": 2, "etp": 2, "sharding": sharding}
    runs = [
        assembled.whole_run(pool, make_expert_config(**options, **MUON), MODELS["softmax"], 3)
        for options in ({}, layout)
    ]
    assembled.assert_same(*runs)


def test_a_rank_without_rows_orthogonalises_nonetheless(pool):
    """6 rows of gate_proj and up_proj over 8 ranks, of which the last two have none."""
    model_config = assembled.MODEL.override(intermediate_size=6)
    config = make_config(8, sharding="optimizer", model={"intermediate_size": 6})
    assert_trains_as_one_rank(pool, config, model_config)


def exchanged_in_a_step(config: Config) -> dict[str, float]:
    training = assembled.make_training(config, assembled.MODEL)
    training.step(0)
    return {axis.name: axis.ledger.bytes["exchange"] for axis in training.axes}


@pytest.mark.parametrize("sharding,axis,n", [("none", "tp", 2), ("optimizer", "dp_cp_tp", 4)])
def test_a_rank_sends_its_part_there_and_gets_it_back(pool, sharding, axis, n):
    shapes = assembled.MODEL.override(num_hidden_layers=4).parameter_shapes()
    hidden = sum(math.prod(shape) for name, shape in shapes.items() if "_proj" in name)
    config = make_config(2, tp=2, sharding=sharding, layers=4)  # matrices of each kind fill batches
    each_way = 8 * hidden / n * (n - 1) / n  # float64
    for sent in pool.run(4, exchanged_in_a_step, config):
        assert {name: bytes for name, bytes in sent.items() if bytes} == {axis: 2 * each_way}


def test_muon_needs_one_state_a_hidden_matrix():
    memory, adamw = (planned(GQA, seq_length=64, tp=2, optimizer=o) for o in ("muon", "adamw"))
    hidden = GQA.num_hidden_layers * (128 * (128 + 64 + 64 + 128) + 3 * 128 * 352)
    assert adamw.optimizer_state - memory.optimizer_state == 4 * hidden / 2


def test_a_rank_that_has_no_matrix_still_steps():
    norm = nn.Parameter(torch.ones(4))
    norm.grad = torch.ones(4)
    optimizer = Muon([], build_optimizer([norm], RECIPE), RECIPE)
    for group in optimizer.param_groups:
        group["lr"] = 0.5  # as a step does: all groups are reached
    optimizer.step()
    torch.testing.assert_close(norm.detach(), torch.full((4,), 0.5))
