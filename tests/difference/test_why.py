"""Each formula gives its sentence, and with noise of 1e-6 it does not: without a layout's run."""

from functools import cache

import pytest
import torch
from torch import Tensor

from difference.compare import Compared, Comparison, here, indices_of, take
from difference.plain import train_plainly
from difference.runs import run_in_processes
from difference.taps import Key
from difference.tiny import trial_of
from difference.why import explain
from tests.assembled import make_config

Q = "model.layers.0.self_attn.q_proj.weight"
OUT = "forward", "model.layers.1.self_attn"
SUM, NORM = ("summed gradient", Q), ("gradient norm", "the step")


@cache
def both() -> Comparison:
    sizes = {"micro_batches": 2, "model": {"num_key_value_heads": 4}}
    config = make_config(dp=2, cp=2, tp=2, sequence_parallel=True, **sizes)
    trial = trial_of(config, 2, own_sizes=False)
    return Comparison(trial, *run_in_processes(train_plainly, 1, trial), [])


def right(phase: str, name: str, step: int = 0, micro_batch: int = 0, rank: int = 0) -> Compared:
    """A rank's part of a tensor, as it should be."""
    at = here(rank, both().trial.layout)
    is_activation = phase in ("forward", "gradient")
    key = Key(step, phase, name, micro_batch, at.dp) if is_activation else Key(step, phase, name)
    indices = indices_of(key, both().whole[key].shape, at, both().trial.layout, ())
    part = take(both().whole[key], indices)
    return Compared(key, at, part, part, indices, 0.0, [])


def so_far(count: int) -> Tensor:
    """The gradient of the first micro-batches of both dp ranks."""
    at = both().trial.micro_batches[count - 1]
    return take(both().whole[Key(0, "sum so far", Q, *at)], right(*SUM).indices)


# A tensor, what a rank has of it in place of `got`, and what is said then.
FORMULAS = """
OUT | 2 * got | it is 2 (dp or cp or tp or micro-batches) times what it
SUM | got / 256 | (1/tokens of the step) times what it should be
SUM | got + so_far(1) | it counts micro-batch 0 of dp 0 2 (
SUM | so_far(2) | it counts micro-batch 1 of dp 0 0 times, micro-batch 1 of dp 1 0
OUT | right(*OUT, micro_batch=1).got | it is the tensor of micro-batch 1 of dp 0
(*SUM, 1) | right(*SUM).got | it is the tensor of the step before
OUT | right(*OUT, rank=1).got | positions 0-3 are those of 12-15
OUT | got * (torch.arange(4) < 2)[:, None] | positions 2-3 are wrong, and no
SUM | got.flip(0) | rows 0-15 are those of 15 14
("forward", "tokens") | got.roll(1, 0) | sequences 0-3 are those of 3 0-2
OUT | got / 0 | NaN or infinite: 512 of its 512 numbers
OUT | 0 * got | it is zero everywhere
OUT | got[:2] | its shape is (2, 4, 32), and should be (4, 4, 32)
"""


@pytest.mark.parametrize("line", FORMULAS.strip().splitlines())
def test_a_formula_gives_its_sentence_and_noise_does_not(line):
    what, formula, said = line.split(" | ")
    one = right(*eval(what))
    wrong = eval(formula, globals() | {"got": one.got})
    assert said in explain(one._replace(got=wrong), both())
    is_formula = wrong.isfinite().all() and wrong.any() and "no" not in said.split()
    if is_formula and wrong.is_floating_point() and wrong.shape == one.got.shape:
        noise = 1e-6 * one.right.abs().max() * (1 + torch.rand_like(wrong))
        assert said not in explain(one._replace(got=wrong + noise), both())


def test_a_micro_batch_without_a_gradient_is_not_called_missing(monkeypatch):
    keys = [Key(0, "sum so far", Q, *at) for at in both().trial.micro_batches]
    monkeypatch.setitem(both().whole, keys[0], torch.zeros_like(both().whole[keys[0]]))
    said = explain(right(*SUM)._replace(got=so_far(2)), both())
    assert "micro-batch 0" not in said and "micro-batch 1 of dp 0 0 times" in said


def test_parts_of_ranks_whose_sum_is_right_are_own_parts(monkeypatch):
    whole, ranks = right(*NORM), [at for at in both().ranks if not at.tp]
    shares = zip(ranks, (0.1, 0.7, 0.7, 0.1), strict=True)  # of a norm the squares add up
    ones = [whole._replace(at=at, got=share * whole.got) for at, share in shares]
    monkeypatch.setattr(both(), "first", ones)
    said = "it is this rank's own part of a sum over dp and cp: the sum is missing"
    assert {explain(one, both()) for one in ones} == {said}


def test_every_tensor_that_is_wrong_gets_a_sentence(monkeypatch):
    keys = [k for k in both().whole if k.step == k.micro_batch == k.dp == 0]
    for key in (key for key in keys if key.phase not in ("sum so far", "cuts")):
        one = right(*key[1:3], rank=3)
        monkeypatch.setattr(both(), "first", [one := one._replace(got=one.got + 1)])
        assert explain(one, both())
