"""Results against what they should be: the first difference, and what all have in common."""

import pytest
import torch

from exercises.compare import SumOf, first_difference, patterns

# What is there, what should be, and what is said: of lists, dicts and tensors.
DIFFERENCES = """
[1, 2] -> [1, 2, 3] -> is [1, 2], should be [1, 2, 3]
{"a": 1} -> {"b": 1} -> is [a], should be [b]
2.5 -> 2.25 -> is 2.5, should be 2.25
1 + 1e-9 -> 1.0 -> is 1.000000001, should be 1
None -> zeros(2) -> is None, should be a tensor [2] of float32
zeros(3) -> zeros(2) -> is a tensor [3] of float32, should be a tensor [2] of float32
[ones(2), ones(2)] -> [ones(2), zeros(2)] -> [1, 0] is 1, should be 0
float("nan") -> float("nan") -> None
1.0 -> 1 + 1e-11 -> None
"""


@pytest.mark.quick
@pytest.mark.parametrize("line", DIFFERENCES.strip().splitlines())
def test_the_first_difference_is_shown_with_its_place(line):
    *values, text = line.split(" -> ")
    got, right = (eval(value, {"zeros": torch.zeros, "ones": torch.ones}) for value in values)
    found = first_difference([{"x": got}], [{"x": right}])
    assert found is None if text == "None" else text in found, found


# By the numbers that two ranks have, a and b, where they should have A and B.
KINDS = """
2 * A, 2 * B -> large: cp
A / 2, B / 2 -> small: cp
1.5 * A, 1.5 * B -> none
0 * A, 0 * B -> zero
A / 0 - A / 0, B -> nan
A.T, B.T -> transposed
A.flip(0), B.flip(0) -> reordered
B, A -> next
C, B -> part
A + C, B -> none
A * (1 + 1e-9), B -> none
A.tolist(), B.tolist() -> none
"""


@pytest.mark.quick
@pytest.mark.parametrize("line", KINDS.strip().splitlines())
def test_what_all_wrong_numbers_have_in_common_is_said(line):
    call, kind = line.split(" -> ")
    numbers = torch.linspace(0.3, 2.1, 18).double().view(2, 3, 3).exp()
    C, D = numbers.sin()
    A = SumOf([C, D])
    got = eval(call, {"A": torch.Tensor(A), "B": numbers[1], "C": C})
    found = dict(patterns({"cp": 2}, [{"x": one} for one in got], [{"x": A}, {"x": numbers[1]}]))
    assert kind in found if kind != "none" else not found, found
