"""Numbers in 8 bits and their products, one process at a time; layouts: test_float8_layouts.py."""

import math
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import Tensor

from picotron_min.collectives import Ledger
from picotron_min.extensions.experts.moe import apply_moe
from picotron_min.extensions.experts.router import RoutingCounts
from picotron_min.extensions.overlap.boundary import Boundary
from picotron_min.extensions.overlap.linear import (
    WeightGradients,
    apply_copies,
    apply_queue,
    linears,
)
from picotron_min.extensions.precision.float8 import (
    E4M3,
    E5M2,
    choose_product,
    quantise,
    scaled_product,
    widened_product,
)
from picotron_min.extensions.precision.float8_linear import Float8Linear, apply_float8
from picotron_min.extensions.settings import Layout, ModelConfig, Routing, Workload
from picotron_min.model import Llama
from picotron_min.planner.activations import factors_per_token, saved_per_token
from picotron_min.planner.config_files import predicted
from picotron_min.runtime.config import ConfigError
from picotron_min.runtime.config_file import parse_config
from picotron_min.runtime.hardware import GPUS
from picotron_min.runtime.inputs import check_fp8
from picotron_min.runtime.reporter import describe
from tests.core.test_costs import saved_by_a_layer

KINDS = {E4M3: (2**-4, 2**-10), E5M2: (2**-3, 2**-17)}  # errors: relative, and where scaled is 0
DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def spread(*shape: int, size: float = 1.0, dtype=torch.float64) -> Tensor:
    """Numbers of very different sizes."""
    generator = torch.Generator().manual_seed(0)
    x, exponents = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in "xe")
    return (size * x * torch.exp(3 * exponents)).to(dtype)


@pytest.mark.parametrize("size", [1e-25, 1e-5, 1.0, 3e4, 1e30])
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


def test_products_are_those_of_the_rounded_numbers():
    x, w = spread(3, 5, 64), spread(48, 64, size=0.01)
    for kind in KINDS:
        x8, w8 = quantise(x, kind), quantise(w, E4M3)
        wide = [t.widened(torch.float64) for t in (x8, w8)]
        expected, sums = wide[0] @ wide[1].T, wide[0].abs() @ wide[1].abs().T
        for product in (scaled_product, widened_product):
            for dtype, rounding in ((torch.float32, 0), (torch.bfloat16, 2**-8)):
                y = product(x8, w8, dtype)
                assert y.dtype == dtype
                bound = 64 * 2**-24 * sums + rounding * expected.abs()
                assert ((y.double() - expected).abs() <= bound).all()
        assert torch.equal(*(p(x8, w8, torch.bfloat16) for p in (scaled_product, widened_product)))
        torch.testing.assert_close(
            widened_product(x8, w8, torch.float64), expected, rtol=0, atol=1e-13
        )
    # autocast, which is on in backward, too, would round the sums of a weight gradient.
    with torch.autocast("cpu", torch.bfloat16):
        y = widened_product(x8, w8, torch.float32)
    assert (y.double() - expected).abs().max() < 1e-5 * expected.abs().max()


def test_gpus_multiply_8_bits_and_cpus_what_they_stand_for():
    assert choose_product("cuda", torch.bfloat16) is scaled_product
    assert choose_product("cuda", torch.float32) is widened_product
    assert choose_product("cpu", torch.bfloat16) is widened_product


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_gpu_multiplies_as_a_cpu_does(kind):
    x8, w8 = quantise(spread(4, 32, 64), kind), quantise(spread(48, 64, size=0.01), E4M3)
    expected = widened_product(x8, w8, torch.float64)
    sums = x8.widened(torch.float64).abs() @ w8.widened(torch.float64).abs().T
    x8, w8 = (t._replace(bytes=t.bytes.cuda(), inverse=t.inverse.cuda()) for t in (x8, w8))
    for dtype, rounding in ((torch.float32, 0), (torch.bfloat16, 2**-8)):
        y = scaled_product(x8, w8, dtype).double().cpu()
        # Accumulators of Hopper keep about 14 bits.
        bound = 64 * 2**-13 * sums + rounding * expected.abs()
        assert ((y - expected).abs() <= bound).all()


# Linears: a model in one process.

MODEL = ModelConfig(61, 160, 96, 2, 4, 2, head_dim=48)  # no matrix has the shape of an activation
MIXTURE = ModelConfig(
    *(61, 160, 96, 2, 4, 2),
    head_dim=48,
    num_local_experts=4,
    moe_intermediate_size=112,
    n_shared_experts=1,
    moe_shared_expert_gate=True,
)
TOKENS, POSITIONS = torch.arange(128).view(2, 64) % 61, torch.arange(64)


def build(
    config: ModelConfig, dtype: torch.dtype, queue=None, skip: int = 0, compiles: bool = False
) -> Llama:
    torch.manual_seed(0)
    model, queue = Llama(config), WeightGradients() if queue is None else queue
    apply_moe(model, Routing(), RoutingCounts(config, torch.device("cpu")))
    alone = SimpleNamespace(size=1, share=0.0, ledger=Ledger())
    apply_queue(model, queue)
    model.boundary, options = Boundary(alone, queue), {"fp8_skip": skip, "compile": compiles}
    name = str(dtype).removeprefix("torch.")
    apply_float8(model, Workload(64, dtype=name, fp8=True, **options), "cpu")
    apply_copies(model, dtype) if dtype == torch.bfloat16 else model.to(dtype)
    for linear in linears(model).values():
        linear.weight.grad = torch.zeros_like(linear.weight)
        linear.refresh()
    return model


def run(model: Llama, dtype: torch.dtype) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        loss = model(TOKENS, POSITIONS, TOKENS)
        loss.backward()
    return loss


def in_8_bits(model: Llama) -> list[str]:
    return [name for name, x in linears(model).items() if isinstance(x, Float8Linear)]


def test_only_linears_of_the_middle_layers_are_in_8_bits():
    names = in_8_bits(build(MODEL.override(num_hidden_layers=4), torch.float32, skip=1))
    assert {name.split(".")[2] for name in names} == {"1", "2"} and len(names) == 2 * 7
    names = in_8_bits(build(MIXTURE, torch.float32))
    assert [n for n in names if ".experts." in n or "gate." in n or n.endswith("_gate")] == []
    assert len(names) == 2 * 7, "with those of the shared experts"


def test_weights_are_rounded_once_and_copied_nowhere():
    model = build(MODEL, torch.bfloat16)
    with mock.patch(
        "picotron_min.extensions.precision.float8_linear.quantise", side_effect=AssertionError
    ):
        for _ in range(2):  # two micro-batches
            run(model, torch.bfloat16)
    for name, linear in linears(model).items():
        assert linear.copy is None and linear.weight.dtype == torch.float32
        rows, columns = linear.rows, linear.columns
        assert torch.equal(rows.bytes.T, columns.bytes) and columns.bytes.is_contiguous()
        assert torch.equal(rows.bytes, quantise(linear.weight.detach().bfloat16(), E4M3).bytes)
        assert linear.weight.grad.dtype == torch.float32 and linear.weight.grad.any(), name
        with torch.no_grad():
            linear.weight *= 3
        linear.refresh()
        assert torch.equal(linear.rows.bytes.T, linear.columns.bytes)
        assert linear.rows.inverse in (2 * rows.inverse, 4 * rows.inverse)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("config", [MODEL, MIXTURE], ids=["dense", "mixture"])
def test_a_layer_keeps_as_many_bytes_as_planned(config, dtype):
    measured = saved_by_a_layer(
        lambda n: build(config.override(num_hidden_layers=n), getattr(torch, dtype)), dtype
    )
    planned = saved_per_token(config, dtype, "none", Layout(), 0, fp8=True)
    assert planned == pytest.approx(measured, rel=0.01)


@pytest.mark.parametrize("config", [MODEL, MIXTURE], ids=["dense", "mixture"])
def test_factors_of_weight_gradients_wait_in_8_bits(config):
    left = []
    for layers in (2, 3):
        queue = WeightGradients()
        queue.split = True
        model = build(config.override(num_hidden_layers=layers), torch.bfloat16, queue)
        run(model, torch.bfloat16)
        factors = [t for of, *pair in queue if isinstance(of, Float8Linear) for t in pair]
        storages = {factor.bytes.untyped_storage() for factor in factors}
        left.append(sum({s.data_ptr(): s.nbytes() for s in storages}.values()))
    planned = factors_per_token(config, "bfloat16", Layout(), 0, fp8=True)
    if config.num_local_experts:  # of the two that a token is sent to
        planned -= 2 * 2 * (2 * config.hidden_size + 3 * config.moe_intermediate_size)
    assert (left[1] - left[0]) / TOKENS.numel() == planned


def test_rounding_is_compiled_for_every_shape():
    """Of each linear's input and gradient, in training and evaluation; here they are ten."""
    torch._dynamo.reset()
    shape = MODEL.override(num_hidden_layers=1, num_attention_heads=8, head_dim=8)
    eager = partial(torch.compile, backend="eager")
    with mock.patch.object(torch, "compile", side_effect=eager) as compile:
        model = build(shape, torch.float32, compiles=True)

    def train_and_evaluate() -> None:
        with torch._dynamo.config.patch(recompile_limit=8, fail_on_recompile_limit_hit=True):
            run(model, torch.float32)
            with torch.no_grad():
                model(TOKENS, POSITIONS, TOKENS)

    # A GPU's backward runs in a thread that has settings of its own.
    ThreadPoolExecutor(1).submit(train_and_evaluate).result()
    assert compile.call_count == 1


# Checks.

SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"num_hidden_layers": 4, "intermediate_size": 160}
PROBLEMS = {
    "all skipped": ({"fp8_skip": 2}, {"use_cpu": True}, {},
        "fp8_skip=2 leaves no layer of num_hidden_layers=4 in FP8: use at most 1, or fp8=false"),
    "a narrow MLP": ({"intermediate_size": 168}, {"tp_size": 2}, {},
        "fp8=true needs multiples of 16 on GPUs, and intermediate_size=168 / tp_size=2 = 84: "
        "change it, or set fp8 to false"),
    "few tokens": ({}, {"cp_size": 2}, {"micro_batch_size": 1, "seq_length": 24},
        "fp8=true needs multiples of 16 on GPUs, and micro_batch_size=1 x seq_length=24 / "
        "cp_size=2 = 12: change it, or set fp8 to false"),
    "not bfloat16": ({"dtype": "float32"}, {}, {},
        'fp8=true multiplies in 8 bits on GPUs only with dtype="bfloat16", not "float32": set '
        "that, or fp8 to false, or use_cpu to true to try it"),
    "on a CPU anything": ({"intermediate_size": 168, "dtype": "float64"},
        {"tp_size": 2, "use_cpu": True}, {},
        None),
}  # fmt: skip


@pytest.mark.parametrize("name", PROBLEMS)
def test_what_does_not_fit_is_refused_with_numbers_and_remedy(name):
    model, distributed, training, problem = PROBLEMS[name]
    model = SIZES | {"fp8": True, "dtype": "bfloat16"} | model
    raw = {"model": model, "distributed": distributed, "training": training}
    if problem is None:
        parse_config(raw)
        return
    with pytest.raises(ConfigError) as error:
        parse_config(raw)
    assert problem in error.value.problems


def test_old_gpus_are_refused():
    config = parse_config({"model": {"fp8": True, "dtype": "bfloat16"}})
    gpu = torch.device("cuda", 0)
    with mock.patch("torch.cuda.get_device_capability") as capability:
        capability.return_value = (8, 0)
        with pytest.raises(ValueError, match=r"capability 8\.9 or more, not 8\.0"):
            check_fp8(config, gpu)
        check_fp8(config, torch.device("cpu"))
        for capability.return_value in ((8, 9), (9, 0)):
            check_fp8(config, gpu)


def test_8_bits_are_planned_where_a_gpu_has_them():
    steps = []
    for model in ({}, {"fp8": True, "fp8_skip": 1}, {"fp8": True}):
        config = parse_config({"model": model | {"name": "Llama-3.1-8B", "dtype": "bfloat16"}})
        steps.append(predicted(config, GPUS["H100"])[1].prediction.step)
    assert steps == sorted(steps, reverse=True) and len(set(steps)) == 3
    with pytest.raises(ValueError, match="A100-80GB does not multiply in 8 bits: use H100"):
        predicted(config, GPUS["A100-80GB"])


@pytest.mark.parametrize("fp8", [False, True])
def test_the_header_of_a_run_names_it_and_says_why_it_is_on_a_cpu(fp8):
    config = parse_config({"model": {"fp8": fp8}, "distributed": {"use_cpu": fp8}})
    batches = SimpleNamespace(tokens_per_step=8, global_batch=1, num_eval_sequences=0)
    text = SimpleNamespace(tokens=range(64), num_documents=1)
    here = {"device": torch.device("cpu"), "backend": "gloo", "start": None, "meters": ()}
    inputs = {"config": config, "model_config": MODEL, "batches": batches, "text": text} | here
    header = describe(SimpleNamespace(**inputs))
    assert header["model"].endswith(" in float32, linears in FP8" if fp8 else " in float32")
    device = "cpu" if fp8 else "cpu (torch finds no GPU)"
    assert header["layout"].startswith(f"1 x {device} over gloo: ")
