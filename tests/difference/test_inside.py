"""Your own functions: the one that makes a wrong tensor is named, and what is wrong inside."""

import inspect
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import train
from difference.compare import Comparison
from difference.taps import (
    BUFFERS,
    INSIDE,
    RESULT,
    Key,
    Profile,
    Record,
    buffers_of_yours,
    name_of,
    place_of,
)
from difference.tiny import trial_of
from difference.watch import Watch
from difference.yours import named
from picotron_min.data_parallel import GradientBuckets
from picotron_min.extensions import build
from picotron_min.layout import Layout
from picotron_min.mesh import build_axes
from tests.assembled import make_config
from tests.difference.changed import ROOT, answer, by_names
from tests.difference.extensions import Shrinking, install

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
            if name.endswith(".mlp.down_proj"):
                module.register_forward_pre_hook(lambda _, args: Twice.apply(*args, None))
            if name.endswith(".mlp"):
                module.register_forward_hook(lambda _, args, out: out + self.added(*args))

    def normed(self, x):
        squares = x.square().sum(-1, keepdim=True)
        total = total_of(squares, self.axes.tp)
        size = x.shape[-1] * self.axes.tp.size
        return self.scale * x * (total / size).rsqrt()

    def added(self, x):
        own = torch.zeros(x.shape[-1], dtype=x.dtype)
        first = first_of(self.axes.tp) if self.axes.tp.size > 1 else 0
        own[first :: self.axes.tp.size] = 1.0
        return both_ways(copied(x, self.axes.tp) * own, self.axes.tp)

    def counts(self):
        own = 1.0 / self.axes.tp.size / self.axes.dp.size
        seen = 7.0 / self.axes.dp.size * (self.axes.tp.rank == 0)
        return torch.tensor([own, seen], dtype=torch.float64)

    def updated(self, totals):
        self.scale = self.scale * (1 + totals[0].item())

    def measures(self, totals):
        return {"seen": totals[1].item(), "what": "only numbers are compared"}


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, nothing):
        ctx.save_for_backward(x)
        return 2 * x

    @staticmethod
    def backward(ctx, dx):
        (x,) = ctx.saved_tensors
        return 2 * dx + 0 * rounded(x, ctx="no autograd"), None


def first_of(axis):
    return axis.rank


def rounded(x, ctx):
    return x.bfloat16()


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
    names = {"__name__": "picotron_min.extensions.yours"}
    exec(compile(TEXT.replace(right, wrong) if right else TEXT, str(FILE), "exec"), names)
    install(names["Normed"])


@pytest.mark.parametrize("recompute", ["none", "full"])  # which gives saved tensors only once
def test_right_functions_of_yours_raise_no_alarm(recompute):
    code, text = answer(make_config(dp=2, tp=2, recompute=recompute), before=install_yours)
    assert code == 0 and text.startswith("ALL RIGHT"), text


SQUARES = "x.square().sum(-1, keepdim=True)"


@pytest.mark.parametrize("how", ["mean", "var"])  # of one sequence, var(0) is NaN
def test_a_function_that_mixes_sequences_is_named_though_the_ranks_agree(how):
    of_all = f"({SQUARES} + x.square().{how}(0, keepdim=True).sum(-1, keepdim=True))"
    before = partial(install_yours, SQUARES, f"rounded({of_all}, 0).double()")
    code, text = answer(make_config(dp=2), before=before)
    assert code == 1 and text.startswith("MIXED        step 1, loss: the ranks have what"), text
    names = "extensions/yours:Normed.normed, extensions/yours:Normed.wrap.<locals>.<lambda>"
    assert by_names(text).splitlines()[-1] == f"look at      {names}", (
        "not `rounded`, which gets the mixture"
    )


FORGETFUL = """
class Passed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Forgetful(Shrinking):
    def count(self, _, args, out):
        self.calls = torch.full((1,), out.shape[0], dtype=torch.float64)
        return Passed.apply(out)

    def counts(self):
        return self.calls
"""


PASSES = "return Passed.apply(out)"


def install_forgetful(ends: str) -> None:
    names = {"__name__": "picotron_min.extensions.yours", "torch": torch, "Shrinking": Shrinking}
    exec(compile(FORGETFUL.replace(PASSES, ends), str(FILE), "exec"), names)
    install(names["Forgetful"])


@pytest.mark.parametrize(
    ("ends", "other"), [(PASSES, "Passed.backward"), ("pass", "Forgetful.count")]
)
def test_a_state_that_forgets_micro_batches_is_seen_in_the_second_step(ends, other):
    before = partial(install_forgetful, ends)
    code, text = answer(make_config(micro_batches=2), before=before)
    assert code == 1 and text.startswith("MIXED        step 2, loss: the ranks have what"), text
    names = f"extensions/yours:Forgetful.counts, extensions/yours:{other}"
    assert by_names(text).splitlines()[-1] == f"look at      {names}", text


def test_a_right_state_of_micro_batches_raises_no_alarm():
    code, text = answer(make_config(micro_batches=2), before=partial(install, Shrinking))
    assert code == 0 and text.startswith("ALL RIGHT"), text


def test_it_says_where_mixing_is_not_checked():
    refusing = f"{SQUARES} if len(x) > 1 else x.of_one_sequence"
    # A loss that balances the experts of a micro-batch is meant to mix.
    of_experts = make_config(dp=2, num_local_experts=4, moe_aux_loss_coeff=0.1)
    yours = partial(install_yours, SQUARES, refusing)
    for config, before, why in (
        (of_experts, None, "moe_aux_loss_coeff balances"),
        (make_config(dp=2, tp=2), yours, "with one sequence an extension fails in the one process"),
    ):
        code, text = answer(config, before=before)
        assert code == 0 and text.startswith("ALL RIGHT"), text
        assert f"whether sequences of a micro-batch are mixed is not checked: {why}" in text


PART, CUT = "squares is a part of a sum over tp; ", "x is a rank's part along dim 2; "
WRONG = {
    "a rank's size for the whole": (
        "x.shape[-1] * self.axes.tp.size",
        "x.shape[-1]",
        f"inside       extensions/yours:Normed.normed: {PART}total is what one process has; "
        f"{CUT}the result is 0.707107 times what one process has",
        "look at      extensions/yours:Normed.normed,",
    ),
    "no sum": (
        "total_of(squares, self.axes.tp)",
        "squares",
        f"inside       extensions/yours:Normed.normed: {PART}{CUT}the result is wrong",
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
        "inside       extensions/yours:copied: what it gets is returned as it is\n"
        "look at      extensions/yours:copied,",
    ),
    "no sum in a function's backward": (
        "lambda x: x.view_as(x), partial(summed, axis=axis)",
        "lambda x: x.view_as(x), lambda dy: 2 * dy / 2",
        "inside       extensions/yours:copied: what it returns is the part whose sum is missing",
        "look at      extensions/yours:copied,",
    ),
    "what one process does not run": (
        "return axis.rank",
        "return 0",
        "FIRST WRONG  step 1, model.layers.0.mlp ",
        "look at      extensions/yours:first_of, ",
    ),
    "a copy in each rank's count": (
        "1.0 / self.axes.tp.size / self.axes.dp.size",
        "1.0",
        "inside       extensions/yours:Normed.counts: its sum over all ranks is 4 (ranks) times "
        "what one process has in number 0, and right in others",
        "look at      extensions/yours:Normed.counts, extensions/yours:Normed.wrap, ",
    ),
    "a copy in each rank's measure": (
        " * (self.axes.tp.rank == 0)",
        "",
        "FIRST WRONG  step 1, measure seen  on all ranks",
        "look at      extensions/yours:Normed.counts, extensions/yours:Normed.wrap, ",
    ),
    "a measure that is no number": (
        '"seen": totals[1].item()',
        '"seen": totals[1].item() if self.axes.tp.size == 1 else torch.nan',
        "rank 0: 1 of its 1 numbers is NaN or infinite",
        "look at      extensions/yours:Normed.counts, extensions/yours:Normed.measures",
    ),
}


@pytest.mark.parametrize("right,wrong,said,named", WRONG.values(), ids=WRONG)
def test_the_function_that_makes_a_wrong_tensor_is_named(right, wrong, said, named):
    before = partial(install_yours, right, wrong)
    code, text = answer(make_config(dp=2, tp=2), before=before)
    assert code == 1 and said in by_names(text) and named in by_names(text), text


X, STEP = torch.arange(32.0).double().view(4, 8), "model.norm.weight"
YOURS = "extensions/yours"


def noted(number: int, name: str, got=None, made=None, step=0, caller="") -> list[Record]:
    """The records of a call."""
    who = f"{number}  {YOURS}:{name}{caller and f',{YOURS}:{caller}'}"
    return [
        Record(Key(step, INSIDE, f"{who} {event} {what}"), x, [], [])
        for event, what, x in (("call", "x", got), ("return", "x", got), ("return", RESULT, made))
        if x is not None
    ]


def tapped(phase: str, wrong: bool = False, step: int = 0) -> Record:
    return Record(Key(step, phase, "model.norm"), X + wrong, [], [])


def answer_of(right: list[Record], *of_ranks: list[Record], makers=None, **options) -> tuple:
    whole = {record.key: record.tensor for record in right}
    for phase in ("forward", "summed gradient", "loss", "weights"):
        whole |= {Key(step, phase, "model.norm"): X for step in (0, 1)}
    trial = trial_of(make_config(**options), steps=2, own_sizes=False)
    found, what = named(Comparison(trial, whole, of_ranks, makers or {}), "")
    return [name.partition(":")[2] for name in found], what


def names_of(*runs: list[Record], **options) -> list[str]:
    return answer_of(*runs, **options)[0]


def test_a_call_is_guilty_if_it_got_what_is_right_and_no_right_tap_follows():
    right = [*noted(0, "f", X, X), *noted(1, "g", X, X)]
    bad_f, bad_g, good = noted(0, "f", X, 3 * X), noted(1, "g", X, 3 * X), tapped("forward")
    bad = tapped("forward", wrong=True)
    assert names_of(right, [*bad_f, *bad_g, bad]) == ["f"]
    assert names_of(right, [*noted(0, "f", 2 * X, 3 * X), *bad_g, bad]) == ["g"]
    assert names_of(right, [*bad_f, good, *bad_g, bad]) == ["g"]
    infinite = X.clone()
    infinite[0, 0], infinite[1] = torch.inf, 99.0
    assert names_of(right, [*noted(0, "f", X, infinite), bad]) == ["f"]
    # What is guilty before a right tap is harmless after it, too.
    again = noted(2, "f", X, 3 * X)
    assert names_of(right, [*bad_f, good, *again, *bad_g, bad]) == ["g"]
    assert names_of(right, [bad, *bad_f]) == []


def test_a_call_that_still_runs_is_guilty_of_what_it_has_given_to_others():
    def calling(x: torch.Tensor) -> list[Record]:
        who = (
            Key(0, INSIDE, f"7  {YOURS}:f call x"),
            Key(0, INSIDE, f"8 7 {YOURS}:g,{YOURS}:f call y"),
        )
        return [Record(key, of, [], []) for key, of in zip(who, (X, x), strict=True)]

    ended = Record(Key(0, INSIDE, f"7  {YOURS}:f return x"), X, [], [])
    right, bad = [*calling(X + 1), ended], tapped("forward", wrong=True)
    assert names_of(right, [*calling(3 * X), bad, ended])[:1] == ["f"]
    assert names_of(right, [*calling(X + 1), bad, ended]) == []


def test_who_calls_a_function_that_gets_tensors_is_named_too():
    right, bad = noted(0, "f", X, X), tapped("forward", wrong=True)
    assert names_of(right, [*noted(0, "f", X, 3 * X, caller="g"), bad]) == ["f", "g"]
    assert names_of(right, [*noted(0, "f", None, 3 * X, caller="g"), bad]) == ["f"]


def test_who_made_a_part_of_a_sum_that_it_gets_is_named_too():
    right = [*noted(0, "part", X, X + 1), *noted(1, "f", X + 1, X)]
    parts = X[:, :1] * X, X + 1 - X[:, :1] * X
    ranks = [[*noted(0, "part", X, of), *noted(1, "f", of, 3 * X)] for of in parts]
    ranks = [[*of, tapped("forward", wrong=True)] for of in ranks]
    assert names_of(right, *ranks, tp=2) == ["f", "part"]


def test_what_wrote_what_an_object_keeps_is_named_too():
    right, bad = noted(0, "Yours.f", X, X), tapped("forward", wrong=True)
    built = Record(Key(0, "initial", STEP), X, [f"{YOURS}:Yours.weights_changed"], [])
    mine = [built, *noted(0, "Yours.f", X, 3 * X), bad]
    whole = [*right, built]
    assert names_of(whole, mine) == ["Yours.f", "Yours.weights_changed"]
    assert names_of(whole, [built._replace(ran=[]), *mine[1:]]) == ["Yours.f"]


def test_what_made_or_connected_an_object_is_named_too():
    right, bad = noted(0, "Yours.f", X, X), tapped("forward", wrong=True)
    ran = [f"{YOURS}:Yours.swap", f"{YOURS}:Yours.connect", f"{YOURS}:Own.__init__"]
    built = Record(Key(0, "initial", STEP), X, ran, [])
    for name, maker, found in (
        ("Part.f", "Yours.swap", ["Part.f", "Yours.swap"]),
        ("Part.f", "", ["Part.f"]),
        ("Own.f", "", ["Own.f", "Own.__init__"]),  # nothing has written to it since
        ("f", "Yours.swap", ["f", "Part.g", "Yours.swap"]),  # of the one that calls it
    ):
        caller = "Part.g" if name == "f" else ""
        makers = {f"{YOURS}:Part": f"{YOURS}:{maker}"} if maker else {}
        right, mine = (noted(0, name, X, c * X, caller=caller) for c in (1, 3))
        assert names_of([*right, built], [built, *mine, bad], makers=makers) == found
    # What is a part of a mean over ranks may have got a wrong axis.
    means = [[built, *noted(0, "Part.f", X, of), bad] for of in (X + 1, X - 1)]
    right, makers = noted(0, "Part.f", X, X), {f"{YOURS}:Part": f"{YOURS}:Yours.swap"}
    found = names_of([*right, built], *means, makers=makers, tp=2)
    assert found == ["Part.f", "Yours.connect"]


def test_of_two_calls_the_inner_one_is_named_first():
    right = [*noted(0, "g", X, X, caller="f"), *noted(1, "f", X, X)]
    inner, outer = noted(0, "g", X, 3 * X, caller="f"), noted(1, "f", X, 3 * X)
    mine = [*inner, tapped("forward"), *outer, tapped("summed gradient", wrong=True)]
    assert names_of(right, mine) == ["g", "f"]


def test_a_variable_of_a_stages_last_layer_is_not_judged():
    right = [*noted(0, "Yours.updated", X, X)]
    ranks = [[*noted(0, "Yours.updated", X, of), tapped("forward", True, step=1)] for of in (X, X)]
    for of, is_judged in ((X, False), (2 * X, True)):
        for rank, last in ((0, 2 * X), (1, of)):
            ranks[rank][2] = ranks[rank][2]._replace(tensor=last)
        assert names_of(right, *ranks, pp=2) == ["Yours.updated"] * is_judged


def test_a_part_may_be_given_to_what_makes_a_maximum_of_it():
    def calling(x: torch.Tensor, result: torch.Tensor) -> list[Record]:
        inner = f"8 7 {YOURS}:highest,{YOURS}:f"
        names = f"7  {YOURS}:f call y", f"{inner} call x", f"{inner} return {RESULT}"
        names += (f"7  {YOURS}:f return {RESULT}",)
        tensors = X, x, result, result
        return [Record(Key(0, INSIDE, n), t, [], []) for n, t in zip(names, tensors, strict=True)]

    right, parts = calling(X + 1, X + 1), [(X + 1).where(i == X % 2, 0.5) for i in (0, 1)]
    ranks = [[*calling(x, X + 1), tapped("forward", True)] for x in parts]
    assert names_of(right, *ranks, tp=2) == []
    ranks = [[*calling(x, x), tapped("forward", True)] for x in parts]
    assert names_of(right, *ranks, tp=2)[:1] == ["highest"]


def test_an_update_and_what_it_reads_have_not_made_the_loss():
    for name in ("Yours.updated", "Yours.counts"):  # whose sum an update reads first
        right = [*noted(0, name, X, X), *noted(1, "f", X, X)]
        for caller, found in (("", ["f"]), (name, [])):
            late = [*noted(0, name, X, 3 * X), *noted(1, "f", X, 3 * X, caller=caller)]
            assert names_of(right, [*late, tapped("loss", wrong=True)]) == found


def test_plain_tensors_of_a_module_are_noted_as_its_buffers_are():
    module, model = torch.nn.Linear(1, 1), torch.nn.Module()
    model.layer, module.scale, module.count = module, torch.ones(1), torch.ones(1, dtype=int)
    module.register_buffer("bias_of", torch.zeros(1))
    assert {*buffers_of_yours([model])} == {"layer.scale", "layer.bias_of"}


def test_what_is_noted_can_be_freed():
    weight = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    notes = SimpleNamespace(at=Key(0, "", ""), write=lambda key, tensor, ran: tensor.numpy())
    Watch(notes)("call", f"{YOURS}:f", {"weight": weight})
    weight.untyped_storage().resize_(0)  # as sharding does


def test_what_counts_is_named_behind_the_counts():
    for caller, more in (("", []), ("f", ["f"])):  # and what may give it something wrong
        note = [*noted(2, "Yours.wait", X), *noted(0, "Yours.note", X, caller=caller)]
        right = [*note, *noted(1, "Yours.counts", None, X)]
        mine = [*note, *noted(1, "Yours.counts", None, 3 * X)]
        named = ["Yours.counts", "Yours.note", *more, "Yours.__init__"]
        assert names_of(right, [*mine, tapped("forward", wrong=True)]) == named
    mine[4:4] = noted(0, "Yours.note", None, X)  # it returns something
    assert names_of(right, [*mine, tapped("forward", wrong=True)]) == named[:1]


@pytest.mark.parametrize(
    ("name", "got", "made", "axis", "first"),
    [
        ("updated", (2 * X, 2 * X), (X + 1, X + 2), "tp", "updated"),
        ("updated", (2 * X, 2 * X), (X + 1, X + 1), "tp", "counts"),
        ("updated", (2 * X, 3 * X), (X + 1, X + 2), "tp", "counts"),
        ("updated", (2 * X, 2 * X), (X[:2], X[:2] + 1), "tp", "counts"),  # a part of the whole
        ("updated", (2 * X, 2 * X), (X + 1, X + 2), "pp", "counts"),
        ("updated", (2 * X, 2 * X), (2 * X, 2 * X.flip(0)), "tp", "counts"),  # parts of it
        ("updated", (None, None), (X + 1, X + 2), "tp", "counts"),
        ("other", (2 * X, 2 * X), (X + 1, X + 2), "tp", "counts"),
    ],
)
def test_an_update_that_is_unlike_on_ranks_is_named_before_its_sums(name, got, made, axis, first):
    right = [*noted(0, "Yours.counts", None, X), *noted(1, f"Yours.{name}", X, X + 1)]
    ranks = [  # counts add up to 2 X, which the update may expect
        [
            *noted(0, "Yours.counts", None, X),
            *noted(1, f"Yours.{name}", *of_rank),
            tapped("forward", wrong=True, step=1),
        ]
        for of_rank in zip(got, made, strict=True)
    ]
    found, what = answer_of(right, *ranks, **{axis: 2})
    assert found[0] == f"Yours.{first}"
    unlike = f"{RESULT} is not the same on all ranks of a stage, though what it gets is"
    assert (what == unlike) == (first == "updated"), what


def test_a_comprehension_is_a_part_of_the_function_around_it():
    code = "def f(x):\n    return sum(2 * y for y in [3 * z for z in x])"
    names, profile = {}, Profile()
    exec(compile(code, str(FILE), "exec"), names)
    seen = []
    profile.watch = lambda event, name, values: seen.append((event, name))
    sys.setprofile(profile.event)
    try:
        names["f"](X)
    finally:
        sys.setprofile(None)
    assert seen == [("call", f"{YOURS}:f"), ("return", f"{YOURS}:f")]


def test_what_is_noted_all_at_once_does_not_acquit():
    right = [*noted(0, "f", X, X)]
    ends = [tapped("loss"), tapped("weights", wrong=True)]
    assert names_of(right, [*noted(0, "f", X, 3 * X), *ends]) == ["f"]
    # Of weights, what ran before the gradients were summed is not to blame.
    old = [*noted(0, "f", X, 3 * X), tapped("summed gradient"), *ends]
    assert names_of(right, old) == []


def test_in_a_later_step_what_ran_before_it_is_to_blame_first():
    right = [*noted(0, "update", X, X), *noted(1, "reader", X, X, step=1)]
    reader, bad = noted(1, "reader", X, 3 * X, step=1), tapped("forward", True, step=1)
    assert names_of(right, [*noted(0, "update", X, X), *reader, bad]) == ["reader"]
    assert names_of(right, [*noted(0, "update", X, 3 * X), *reader, bad]) == ["update"]


@pytest.mark.parametrize(
    "sizes,columns",
    [
        ({"cp": 2, "cp_engine": "ring"}, [0, 1, 6, 7]),
        ({"cp": 2, "cp_engine": "ulysses"}, [0, 1, 2, 3]),
        ({"cp": 2, "tp": 2, "sequence_parallel": True}, [0, 1]),
    ],
)
def test_the_positions_of_a_rank_are_a_part(sizes, columns):
    right, bad = [*noted(0, "f", X, X)], tapped("forward", wrong=True)
    others = [[]] * (sizes["cp"] * sizes.get("tp", 1) - 1)
    mine, other = X[:, columns], X[:, [0, 1, 4, 5][-len(columns) :]]
    assert names_of(right, [*noted(0, "f", X, mine), bad], *others, **sizes) == []
    assert names_of(right, [*noted(0, "f", X, other), bad], *others, **sizes) == ["f"]


@pytest.mark.parametrize(
    "factors,said",
    [
        ((3, 3), ""),
        ((3 * X[1, :4] + 0.5, 3 * X[1, 4:] - 0.5), "as if a mean were of each rank's own part"),
        ((3 * X[1, :4] + 0.5, 3 * X[1, 4:] - 0.6), "b of rank 0 is not what one process has"),
        ((7 * X[0] + 1, 3), "b of rank 0 is what one process has of model.layers.1.b, after"),
        ((1, 1), "model.layers.0.b of rank 0 is as it was before, after step 1"),
        ((2.5, 3.5), "this rank's own part of a mean over tp"),
        ((0.5, 2.5), ""),  # of a sum: such as a count, before it is added up
        ((0, 3), "b of rank 0 is not what one process has"),
    ],
)
def test_how_a_buffer_is_wrong_is_told(factors, said):
    def kept(step: int, factor: float | torch.Tensor) -> Record:
        mine = factor * X[1] if isinstance(factor, int | float) else factor
        return Record(Key(step, BUFFERS, "model.layers.0.b"), mine, [], [])

    right = [*noted(0, "f", X, X), kept(-1, 1), kept(0, 3)]
    runs = [
        [*noted(0, "f", X, X), kept(-1, 1), kept(0, factor), tapped("forward", True, step=1)]
        for factor in factors
    ]
    whole = {record.key: record.tensor for record in right} | {Key(1, "forward", "model.norm"): X}
    whole[Key(0, BUFFERS, "model.layers.1.b")] = 7 * X[0] + 1
    trial = trial_of(make_config(tp=2), steps=2, own_sizes=False)
    what = named(Comparison(trial, whole, runs), "")[1]
    assert said in what and bool(said) == bool(what)


def test_a_place_is_the_line_of_a_definition():
    for code in (build_axes, GradientBuckets.wait, train.train_step):
        file = Path(inspect.getsourcefile(code)).relative_to(ROOT)
        line = inspect.getsourcelines(code)[1]
        assert place_of(name_of(code)) == f"{file}:{line} {code.__qualname__}"
    made = inspect.getsourcelines(Layout)[1] + 1  # below the decorator, which has made `__init__`
    assert place_of("layout:Layout.__init__") == f"picotron_min/layout.py:{made} Layout.__init__"
    assert place_of("extensions/yours:f") == "extensions/yours:f", "a file that is not there"
