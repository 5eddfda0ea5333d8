"""What is said of a call of yours: each formula gives its sentence, and noise of 1e-6 does not."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from difference.algebra import scaled_by_parts
from difference.calls import TOTAL
from difference.compare import Comparison
from difference.formulas import Wrong, moved, somewhere
from difference.taps import INSIDE, NUMBERS, RESULT, Key, Record, numbers_of
from difference.tiny import trial_of
from difference.yours import named
from tests.assembled import make_config

torch.manual_seed(0)
X, A, B, MORE = (torch.rand(4, 8, dtype=torch.float64) + 0.5 for _ in range(4))
NORM, YOURS = "model.norm", "extensions/yours"


def noted(number: int, name: str, event: str, **values: Tensor) -> list[Record]:
    who = f"{number}  {YOURS}:{name} {event}"
    names = {"result": RESULT, "self_x": "self.x"}
    keys = {of: Key(0, INSIDE, f"{who} {names.get(of, of)}") for of in values}
    return [Record(keys[of], value, [], []) for of, value in values.items()]


def call(name: str, got: dict[str, Tensor], **made: Tensor) -> list[Record]:
    number = {"f": 0, "Yours.counts": 1}[name]
    return [*noted(number, name, "call", **got), *noted(number, name, "return", **got | made)]


def said(right: list[Record], *of_ranks: list[Record], **options) -> str:
    """What is said, of a function that is named."""
    whole = {record.key: record.tensor for record in right}
    whole |= {Key(0, phase, NORM): X for phase in ("forward", "weights")}
    trial = trial_of(make_config(**options), steps=1, own_sizes=False)
    good, bad = (Record(Key(0, phase, NORM), X, [], []) for phase in ("forward", "weights"))
    bad = bad._replace(tensor=X + 1)
    names, what = named(Comparison(trial, whole, [[good, *of, bad] for of in of_ranks]), "")
    assert names or not what
    return what


def of_results(right: Tensor, *of_ranks: Tensor, axis: str = "tp") -> str:
    """What is said of a function that each rank gives X and that makes these."""
    ranks = [call("f", {"x": X}, result=made) for made in of_ranks]
    return said(call("f", {"x": X}, result=right), *ranks, **{axis: len(ranks)})


CASES = {
    "a mean of its own": ((A + B) / 2, A, B, "own part of a mean over tp"),
    "a maximum": (torch.maximum(A, B), A, B, "own part of a maximum over tp"),
    "a norm": ((A * A + B * B).sqrt(), A, B, "own part of a root of a sum of squares over tp"),
    "an RMS": (((A * A + B * B) / 2).sqrt(), A, B, "own part of a root mean square over tp"),
    "divided by its own mean": (  # by 1.25 and 0.75
        *(A, A / 1.25, A / 0.75),
        "is 0.8 times what one process has: what divides it is this rank's own part of a mean",
    ),
    "twice added": (X + A, X + 2 * A, X + 2 * A, "what is added to x is 2 (tp) times what one"),
    "a wrong size under a root": (
        (A + 0.1).rsqrt(),
        *2 * ((2 * A + 0.1).rsqrt(),),
        "is wrong: its power -2 is 2 (tp) times what one process has, and a constant",
    ),
    "a wrong size beside another summand": (
        A + 1,
        *2 * (2 * A + 1,),
        "is wrong: it is 2 (tp) times what one process has, and a constant",
    ),
}


@pytest.mark.parametrize("right,first,second,sentence", CASES.values(), ids=CASES)
def test_what_a_function_makes_is_explained(right, first, second, sentence):
    assert sentence in of_results(right, first, second)
    noise = 1e-6 * torch.randn_like(right)
    assert sentence not in of_results(right, first + noise, second + noise)


def test_what_each_rank_adds_to_its_part_of_a_sum_is_said():
    right, sentence = call("f", {"x": X}, result=X + A), "what is added to x, summed over tp, is 2 "
    parts = (X - B, B)
    assert sentence in said(right, *(call("f", {"x": x}, result=x + A) for x in parts), tp=2)
    right_one, one = call("f", {"x": X[:1, 0]}, result=A[:1, 0]), X[:1, 0] / 2
    ranks = [call("f", {"x": one}, result=0.7 * A[:1, 0]) for _ in parts]
    assert "what is added" not in said(right_one, *ranks, tp=2)  # any factor fits one number
    ranks = [call("f", {"x": x}, result=x + A + 1e-6 * MORE) for x in parts]
    assert sentence not in said(right, *ranks, tp=2)
    given = {"x": parts[0], "y": B}, {"x": parts[1]}
    ranks = [call("f", got, result=MORE) for got in given]
    assert "the result is wrong" in said(call("f", {"x": X, "y": B}, result=A), *ranks, tp=2)


def test_another_ranks_part_is_told_from_an_own_one():
    right, halves = call("f", {"x": X}, result=A), A.chunk(2)
    ranks = [call("f", {"x": X}, result=halves[0]) for _ in (0, 1)]
    assert "the result is the part of rank 0" in said(right, *ranks, tp=2)
    ranks[1] = call("f", {"x": X}, result=halves[1])
    assert "part of rank" not in said(right, *ranks, tp=2)
    ranks += [ranks[1], ranks[1]]  # of dp 1, whose tp 0 has tp 1's half: dp 1 has it if sharded
    assert "the result is the part of rank 1" in said(right, *ranks, dp=2, tp=2)
    assert not said(right, *ranks, dp=2, tp=2, sharding="parameters")


def test_equal_numbers_on_each_rank_are_no_parts_of_a_sum():
    ones = torch.ones(8, dtype=torch.float64)
    assert "the result is 0.5 (1/tp) times" in of_results(ones, ones / 2, ones / 2)
    assert not of_results(ones[:1], ones[:1] / 2, ones[:1] / 2)  # such as a count
    assert "root" not in of_results(ones, *2 * (ones / 2**0.5,))


def test_of_two_ranks_one_of_which_has_all_nothing_is_a_maximum():
    both = (torch.maximum(A, 2 * A), A, 2 * A)
    assert "maximum" not in of_results(*both)
    first, second = A.clone(), A.clone()
    first[0], second[1] = 0, 0
    assert "maximum" not in of_results(A, first, second)


def test_stages_with_unlike_numbers_of_layers_have_parts_of_one_mean():
    layers = {0: (0, 1), 1: (2,)}  # of pp 2
    right = call("f", {"x": X}, result=(2 * A + B) / 3)
    ranks = [call("f", {"x": X}, result=made) for made in (A, B)]
    for rank, of in layers.items():
        keys = [Key(0, "forward", f"model.layers.{i}") for i in of]
        ranks[rank] = [*(Record(key, X, [], []) for key in keys), *ranks[rank]]
        right += [Record(key, X, [], []) for key in keys]
    assert "the result is this rank's own part of a mean over pp" in said(right, *ranks, pp=2)


def test_what_an_object_keeps_is_blamed_only_if_it_was_right_before():
    right = call("f", {"self_x": A}, self_x=A, result=X)
    right[1:2] = noted(0, "f", "return", self_x=B)
    for before, is_said in ((A, True), (MORE, False)):
        mine = [*noted(0, "f", "call", self_x=before), *noted(0, "f", "return", self_x=2 * B)]
        assert ("self.x is 2 (tp) times" in said(right, mine, mine, tp=2)) == is_said
        mine += noted(0, "f", "return", result=2 * X)  # by a call that was given nothing wrong
        assert "the result is 2 (tp) times" in said(right, mine, mine, tp=2)


TABLE = torch.rand(2, 40, dtype=torch.float64)  # of 2 layers
NUMBERS_OF = torch.tensor([1.5, 2.0, 3.7, 2.0], dtype=torch.float64)


def test_whose_numbers_a_sum_lacks_is_said():
    tables = NUMBERS_OF, 10 * NUMBERS_OF.flip(0) + 1
    right = call("Yours.counts", {}, result=sum(tables))
    ranks = [call("Yours.counts", {}, table=t, result=t * (i == 0)) for i, t in enumerate(tables)]
    sentence = "its sum over all ranks lacks table of dp 1 (rank 1)"
    assert said(right, *ranks, dp=2) == sentence
    ranks[1] = call("Yours.counts", {}, table=tables[1], result=1e-6 * tables[1])
    assert sentence not in said(right, *ranks, dp=2)


def wrong(got: Tensor, variable: str = TOTAL) -> Wrong:
    both = Comparison(trial_of(make_config(tp=2), 1, own_sizes=False), {})
    inside = SimpleNamespace(both=both, num_layers={2})
    right = NUMBERS_OF if len(got) == 4 else TABLE.flatten()
    return Wrong(got, right, right, variable, None, None, inside)


def test_numbers_in_the_place_of_others_are_said():
    got = torch.tensor([1.5 + 3.7, 4.0, 0, 0], dtype=torch.float64)
    assert moved(wrong(got)) == "is wrong: number 0 is the sum of 0 and 2 in one process"
    assert moved(wrong(NUMBERS_OF.roll(1))) == "is wrong: number 1 is 0 in one process"
    assert not moved(wrong(got + 1e-6))
    got = torch.stack([TABLE.sum(0), TABLE[0] * 0]).flatten()
    assert moved(wrong(got)) == "is wrong: layer 0 is the sum of 0 and 1 in one process"
    # Twice a number is no sum of it and an equal one.
    assert not moved(wrong(torch.tensor([1.5, 4.0, 3.7, 4.0], dtype=torch.float64)))


def test_which_numbers_are_wrong_is_said_where_one_factor_tells_it():
    half, zeros, odd = (NUMBERS_OF.clone() for _ in range(3))
    half[1], zeros[2:], odd[1] = 1, 0, 0.7
    said = "is 0.5 (1/tp) times what one process has in number 1, and right in others"
    assert somewhere(wrong(half, "x")) == said
    assert somewhere(wrong(odd, "x")) == ""  # of one number any factor fits
    assert somewhere(wrong(zeros, "x")) == ""  # they can be other ranks' numbers
    assert somewhere(wrong(zeros)) == "is 0 in numbers 2-3, and right in others"


def test_factors_that_are_parts_of_one_are_told_apart():
    assert scaled_by_parts([1.25, 0.75]) == "what multiplies it is this rank's own part of a mean"
    assert scaled_by_parts([0.6, 0.8]).endswith(
        "multiplies it is this rank's own part of a root of a sum of squares"
    )
    assert scaled_by_parts([4.0, 4 / 3]) == "what divides it is this rank's own part of a sum"
    assert not scaled_by_parts([2.0, 2.0]) and not scaled_by_parts([1.25, 0.7500001])


class Numbered(nn.Module):
    def __init__(self, number: int, forward) -> None:
        super().__init__()
        self.number, self.forward = number, forward


def layers(*numbers: int) -> nn.Module:
    """Modules that keep these numbers themselves, given to a function, and in a closure."""

    def scaled(x: Tensor, number: int) -> Tensor:
        return x * number

    def closed(number: int):
        return lambda x: x * number

    model = nn.Module()
    model.model = nn.Module()
    model.model.layers = nn.ModuleList()
    for number in numbers:
        model.model.layers.append(Numbered(number, closed(number)))
        model.model.layers[-1].later = partial(scaled, number=number)
    return model


def test_the_number_of_another_layer_is_said():
    right = {Key(0, NUMBERS, name): n for name, n in numbers_of(layers(0, 1, 2)).items()}
    assert len(right) == 9 and all(str(int(n)) == k.name.split(".")[2][0] for k, n in right.items())
    wrong = [Record(Key(0, NUMBERS, n), x, [], []) for n, x in numbers_of(layers(0, 1, 0)).items()]
    whole = [Record(key, number, [], []) for key, number in right.items()]
    mine = call("f", {"x": X}, result=X)
    found = said([*whole, *mine], [*wrong, *mine])
    assert "number of Numbered in model.layers.2 is 0, and 2 in one process" in found
    assert not said([*whole, *mine], [*whole, *mine])
