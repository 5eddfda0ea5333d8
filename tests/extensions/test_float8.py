"""Numbers in 8 bits and their products; what does not fit is refused."""

import math
import re
from unittest import mock

import pytest
import torch
from torch import Tensor

from picotron_min.extensions.precision.float8 import (
    E4M3,
    E5M2,
    choose_product,
    quantise,
    scaled_product,
    widened_product,
)
from picotron_min.runtime.config import ConfigError
from picotron_min.runtime.inputs import check_fp8
from tests.rows import lines, options_of
from tests.training import SHAPE, config_of

KINDS = {E4M3: (2**-4, 2**-10), E5M2: (2**-3, 2**-17)}  # errors: relative, and where scaled is 0
DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def spread(*shape: int, size: float = 1.0, dtype=torch.float64) -> Tensor:
    """Numbers of very different sizes."""
    generator = torch.Generator().manual_seed(0)
    x, exponents = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in "xe")
    return (size * x * torch.exp(3 * exponents)).to(dtype)


@pytest.mark.parametrize("size", [1e-25, 1.0, 1e30])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_rounding_is_as_exact_as_the_format(kind, dtype, size):
    x = spread(2000, size=size, dtype=dtype)
    x8 = quantise(x, kind)
    relative, absolute = KINDS[kind]
    bound = torch.maximum(relative * x.double().abs(), absolute * x8.inverse.double())
    errors = (x8.widened(torch.float64) - x.double()).abs() / bound
    assert 0.8 < errors.max() <= 1
    # What they stand for is exact in bfloat16, too, and rounding it again changes nothing.
    again = quantise(x8.widened(torch.bfloat16), kind)
    assert torch.equal(again.widened(torch.float64), x8.widened(torch.float64))


@pytest.mark.quick
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_no_scaled_number_exceeds_the_format_and_zeros_stay_zeros(kind):
    top = torch.finfo(kind).max
    for k in range(-20, 20):  # a ratio just below a power of two, which log2 rounds up
        amax = torch.nextafter(torch.tensor(top / 2.0**k), torch.tensor(math.inf))
        assert amax.double() / quantise(amax.expand(16), kind).inverse.double() <= top
    assert not quantise(torch.zeros(16), kind).widened(torch.float64).any()


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_single_number_that_is_not_finite_makes_the_product_nan(kind, bad):
    x, w = torch.ones(4, 16), quantise(torch.ones(16, 16), E4M3)
    x[2, 3] = bad
    for product in (scaled_product, widened_product):
        for dtype in (torch.bfloat16, torch.float32):
            assert product(quantise(x, kind), w, dtype).isnan().all()


def test_a_rank_without_numbers_takes_part_in_the_maximum():
    asked = []

    def maximum(amax: Tensor) -> Tensor:
        asked.append(amax.item())
        return torch.tensor(7.0)  # another rank's

    empty = quantise(torch.empty(0, 16), E4M3, maximum)
    assert asked == [0.0] and empty.inverse == 1 / 64 and empty.bytes.shape == (0, 16)
    assert quantise(torch.full((16,), math.nan), E4M3, maximum).inverse == 1 / 64
    assert asked[1] == math.inf, "a maximum over ranks may lose a NaN, but no inf"


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_products_are_those_of_the_rounded_numbers(kind):
    x8, w8 = quantise(spread(3, 5, 64), kind), quantise(spread(48, 64, size=0.01), E4M3)
    wide = [t.widened(torch.float64) for t in (x8, w8)]
    exact, sums = wide[0] @ wide[1].T, wide[0].abs() @ wide[1].abs().T
    for dtype, rounding in {torch.float32: 0, torch.bfloat16: 2**-8}.items():
        ys = [scaled_product(x8, w8, dtype)]
        # autocast, which is on in backward, too, would round the sums of a weight gradient.
        with torch.autocast("cpu", torch.bfloat16):
            ys.append(widened_product(x8, w8, dtype))
        for y in ys:
            bound = 64 * 2**-24 * sums + rounding * exact.abs()
            assert y.dtype == dtype and ((y.double() - exact).abs() <= bound).all()
    assert torch.equal(*ys)
    ours = widened_product(x8, w8, torch.float64)
    torch.testing.assert_close(ours, exact, rtol=0, atol=1e-13)


def test_gpus_multiply_8_bits_and_cpus_what_they_stand_for():
    assert choose_product("cuda", torch.bfloat16) is scaled_product
    assert choose_product("cuda", torch.float32) is widened_product
    assert choose_product("cpu", torch.bfloat16) is widened_product


WIDE = {"hidden_size": 64, "num_hidden_layers": 4, "intermediate_size": 160, "fp8": True}
PROBLEMS = """
fp8_skip=2 use_cpu | leaves no layer of num_hidden_layers=4 in FP8: use at
tp=2 intermediate_size=168 | intermediate_size=168 / tp_size=2 = 84: change it
cp=2 micro_batch_size=1 seq_length=24 | seq_length=24 / cp_size=2 = 12: change
dtype=float32 | only with dtype="bfloat16", not "float32": set that, or fp8
fp8=false fp8_experts | has no experts, but fp8_experts=true: set num_local_experts
fp8=false fp8_experts num_local_experts=4 moe_intermediate_size=24 | / etp_size=1 = 24: change it
fp8=false fp8_experts num_local_experts=4 fp8_skip=2 use_cpu | at most 1, or set fp8
"""


@pytest.mark.parametrize("text", lines(PROBLEMS))
def test_what_does_not_fit_is_refused_with_numbers_and_remedy(text):
    words, _, message = text.partition(" | ")
    with pytest.raises(ConfigError, match=re.escape(message)):
        config_of(**SHAPE | WIDE | {"dtype": "bfloat16"} | options_of(words))


@pytest.mark.parametrize("key", ["fp8", "fp8_experts"])
def test_old_gpus_are_refused(key):
    config = config_of(**{key: True}, dtype="bfloat16", num_local_experts=4)
    gpu = torch.device("cuda", 0)
    with mock.patch("torch.cuda.get_device_capability") as capability:
        capability.return_value = (8, 0)
        with pytest.raises(ValueError, match=r"capability 8\.9 or more, not 8\.0"):
            check_fp8(config, gpu)
        check_fp8(config, torch.device("cpu"))
        for capability.return_value in ((8, 9), (9, 0)):
            check_fp8(config, gpu)
