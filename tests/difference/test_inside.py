"""Your own functions: the one that makes a wrong tensor is named, and what is wrong inside."""

from functools import partial
from pathlib import Path

import pytest

from picotron_min.extensions import build
from tests.assembled import make_config
from tests.difference.changed import answer
from tests.difference.extensions import install

FILE = Path(build.__file__).parent / "yours.py"
TEXT = """
from functools import partial

import torch

from picotron_min.collectives import Conjugate, all_reduce
from picotron_min.extension import Extension


class Normed(Extension):
    def __init__(self, axes):
        self.axes, self.scale = axes, 1.0

    def wrap(self, model):
        for name, module in model.named_modules():
            if name.endswith(".mlp.down_proj"):
                module.register_forward_pre_hook(lambda _, args: self.normed(*args))
            if name.endswith(".mlp"):
                module.register_forward_hook(lambda _, args, out: out + self.added(*args))

    def normed(self, x):
        squares = x.square().sum(-1, keepdim=True)
        total = total_of(squares, self.axes.tp)
        size = x.shape[-1] * self.axes.tp.size
        return self.scale * x * (total / size).rsqrt()

    def added(self, x):
        own = torch.zeros(x.shape[-1], dtype=x.dtype)
        own[self.axes.tp.rank :: self.axes.tp.size] = 1.0
        return both_ways(copied(x, self.axes.tp) * own, self.axes.tp)

    def counts(self):
        return torch.tensor([1.0 / self.axes.tp.size / self.axes.dp.size], dtype=torch.float64)

    def updated(self, totals):
        self.scale = self.scale * (1 + totals.item())


def copied(x, axis):
    return Conjugate.apply(lambda x: x.view_as(x), partial(summed, axis=axis), x)


def both_ways(x, axis):
    return Conjugate.apply(partial(summed, axis=axis), lambda dy: dy, x)


def total_of(x, axis):
    return Conjugate.apply(partial(summed, axis=axis), partial(summed, axis=axis), x)


def summed(x, axis):
    return all_reduce(x.clone(), axis)
"""


def install_yours(right: str = "", wrong: str = "") -> None:
    assert TEXT.count(right) == 1 or not right
    names = {"__name__": "yours"}
    exec(compile(TEXT.replace(right, wrong) if right else TEXT, str(FILE), "exec"), names)
    install(names["Normed"])


def test_right_functions_of_yours_raise_no_alarm():
    code, text = answer(make_config(dp=2, tp=2), before=install_yours)
    assert code == 0 and text.startswith("ALL RIGHT"), text


PART = "squares is a part of a sum over tp; "
WRONG = {
    "a rank's size for the whole": (
        "x.shape[-1] * self.axes.tp.size",
        "x.shape[-1]",
        f"inside       extensions/yours:Normed.normed: {PART}total is what one process has; "
        "the result is 0.707107 times what one process has",
        "look at      extensions/yours:Normed.normed,",
    ),
    "no sum": (
        "total_of(squares, self.axes.tp)",
        "squares",
        f"inside       extensions/yours:Normed.normed: {PART}total is a part of a sum over tp; ",
        "look at      extensions/yours:Normed.normed,",
    ),
    "another axis": (
        "total_of(squares, self.axes.tp)",
        "total_of(squares, self.axes.dp)",
        "inside       extensions/yours:summed: x is a part of a sum over tp; "
        "the result is the sum of x over dp",
        "look at      extensions/yours:summed, extensions/yours:total_of, "
        "extensions/yours:Normed.normed,",
    ),
    "no sum in backward": (
        "return Conjugate.apply(lambda x: x.view_as(x), partial(summed, axis=axis), x)",
        "return x",
        "what your extension adds is this rank's own part of a sum over tp: the sum is missing",
        "look at      extensions/yours:copied,",
    ),
    "a copy in each rank's count": (
        "1.0 / self.axes.tp.size / self.axes.dp.size",
        "1.0",
        "inside       extensions/yours:Normed.counts: its sum over all ranks is 4 (ranks) times "
        "what one process has",
        "look at      extensions/yours:Normed.counts, extensions/yours:Normed.updated",
    ),
}


@pytest.mark.parametrize("right,wrong,said,named", WRONG.values(), ids=WRONG)
def test_the_function_that_makes_a_wrong_tensor_is_named(right, wrong, said, named):
    before = partial(install_yours, right, wrong)
    code, text = answer(make_config(dp=2, tp=2), before=before)
    assert code == 1 and said in text and named in text, text
