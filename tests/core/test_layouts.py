"""The central claim: N ranks train the same model as one rank.

In float64 with SGD, because looser tolerances and Adam hide wrong scales. Schedules, engines and
other choices come from where they are declared: a new one is compared without a change here.
"""

import itertools
import random
from typing import get_args

import numpy as np
import pytest

from picotron_min.context_parallel import POSITIONS
from picotron_min.extensions.schedules.registry import SCHEDULES
from picotron_min.extensions.settings import Layout, Workload
from picotron_min.runtime.config import Config
from tests import fuzz
from tests.assembled import (
    GLOBAL_BATCH,
    MODEL,
    MODELS,
    assert_trains_as_one_rank,
    make_config,
    on_one_rank,
    whole_run,
)

POWERS = (1, 2, 4, 8)
DATA = [(1, 1), (1, 3), (2, 2), (4, 3), (8, 1), (8, 3)]
TENSOR = [
    (dp, tp, model)
    for dp in POWERS
    for tp in POWERS[1:]
    for model in MODELS
    if dp * tp <= 8 and MODELS[model].num_key_value_heads % tp == 0
]


@pytest.mark.parametrize("dp,micro_batches", DATA)
def test_data_parallel_layouts_train_the_same_model_as_one_rank(pool, dp, micro_batches):
    assert_trains_as_one_rank(pool, make_config(dp, micro_batches=micro_batches), "tied")


@pytest.mark.turns(3, 7)
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["plain", "sequence"])
@pytest.mark.parametrize("dp,tp,model", TENSOR)
def test_tensor_parallel_layouts_train_the_same_model(pool, dp, tp, model, sequence_parallel):
    config = make_config(dp, tp, sequence_parallel=sequence_parallel)
    assert_trains_as_one_rank(pool, config, model)


def chunks_of(engine: str, pp: int) -> int:
    """Of a rank: one where that is allowed and more would make the model too deep."""
    schedule = SCHEDULES[engine]
    return schedule.chunks if 1 < pp < 8 or schedule.fixed_chunks else 1


# Every (dp, pp, tp) of at most 8 ranks with every engine, tied and untied. The five variants
# alternate, so that every engine meets each of them. Few sizes divide 3 micro-batches.
VARIANTS = [(2, "none"), (3, "full"), (6, "none"), (4, "selective"), (2, "full")]
PIPELINES = [
    (dp, pp, tp, engine, model)
    for pp in (2, 3, 4, 8)
    for dp, tp in itertools.product(POWERS, POWERS)
    if dp * pp * tp <= 8
    for engine in SCHEDULES
    for model in ("untied", "tied")
    if pp < 8 or not SCHEDULES[engine].splits_backward
]


@pytest.mark.turns(2, 11)
@pytest.mark.parametrize(
    "layout,variant", list(zip(PIPELINES, itertools.cycle(VARIANTS), strict=False)), ids=str
)
def test_pipelines_train_the_same_model(pool, layout, variant):
    dp, pp, tp, engine, model = layout
    micro_batches, recompute = variant
    if GLOBAL_BATCH % (dp * micro_batches):
        micro_batches = 3
    config = config_of(dp, tp, micro_batches, pp, engine, recompute, model)
    assert_trains_as_one_rank(pool, config, model)


def config_of(dp, tp, micro_batches, pp, engine, recompute, model, **context) -> Config:
    sequence = tp > 1 and recompute != "none"
    overlaps = {"sequence_parallel": sequence, "tp_overlap": sequence and model == "tied"}
    options = overlaps | {"recompute": recompute} | context
    return make_config(dp, tp, micro_batches, pp, chunks_of(engine, pp), engine, **options)


# Every (dp, pp, cp, tp) of at most 8 ranks with every engine; the other choices alternate.
CONTEXTS = [
    (dp, pp, cp, tp, cp_engine)
    for dp, pp, cp, tp in itertools.product(POWERS, (1, 2, 3, 4), (2, 3, 4, 8), POWERS)
    if dp * pp * cp * tp <= 8
    for cp_engine in POSITIONS
    if cp_engine != "ulysses" or MODEL.num_attention_heads % (cp * tp) == 0
]
CONTEXT_VARIANTS = [
    (engine, model, recompute)
    for engine in ("1f1b", "afab", "interleaved")
    for model, recompute in [("untied", "none"), ("tied", "full"), ("grouped-query", "selective")]
]


@pytest.mark.turns(2, 7)
@pytest.mark.parametrize(
    "layout,variant", list(zip(CONTEXTS, itertools.cycle(CONTEXT_VARIANTS), strict=False)), ids=str
)
def test_context_parallel_layouts_train_the_same_model(pool, layout, variant):
    dp, pp, cp, tp, cp_engine = layout
    engine, model, recompute = variant
    if MODELS[model].num_key_value_heads % tp:
        model = "untied"
    micro_batches, context = 3 if pp > 1 else 1, {"cp": cp, "cp_engine": cp_engine}
    config = config_of(dp, tp, micro_batches, pp, engine, recompute, model, **context)
    assert_trains_as_one_rank(pool, config, model)


# Whatever takes turns above: every kind of model over every axis, and every choice once. A new kind
# of model is one more line of KINDS; its parameters have names and sums of their own.
KINDS = MODELS | {
    "qk-norm": MODEL.override(qk_norm=True),
    "depths": MODEL.override(num_nextn_predict_layers=2),
    "experts": MODEL.override(
        num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, mlp_only_layers=(0,)
    ),
}
AXES = {
    "tp": {"tp": 2},
    "tp, sequence": {"tp": 2, "sequence_parallel": True},
    "pp": {"pp": 2, "micro_batches": 2},
    "cp": {"cp": 2},
}
CHOICES = {
    f"engine {name}": {"pp": 2, "micro_batches": 3, "engine": name, "chunks": chunks_of(name, 2)}
    for name in SCHEDULES
}
CHOICES |= {f"cp_engine {name}": {"cp": 2, "cp_engine": name} for name in POSITIONS}
for key, kind in {"recompute": Workload, "sharding": Layout}.items():
    names = get_args(kind.__annotations__[key])
    CHOICES |= {f"{key} {name}": {"dp": 2, "micro_batches": 2, key: name} for name in names}
EACH_ONCE = [(model, *axis) for model in KINDS for axis in AXES.items()]
EACH_ONCE += [("depths", *choice) for choice in CHOICES.items()]


@pytest.mark.parametrize(
    "model,options", [(m, o) for m, _, o in EACH_ONCE], ids=[f"{m}, {n}" for m, n, _ in EACH_ONCE]
)
def test_every_model_and_every_choice_trains_as_on_one_rank(pool, model, options):
    assert_trains_as_one_rank(pool, make_config(**options), KINDS[model])


def test_a_random_pair_trains_and_resumes_as_one_rank(pool):
    fuzz.check(pool, **fuzz.draw(random.Random(20)))


# dp, tp, pp, cp, sequence parallelism: the forms that the core has, without the extension.
SIMPLE = [(1, 2, 1, 1, False), (1, 4, 1, 1, True), (2, 2, 2, 1, True), (1, 2, 2, 2, False)]


@pytest.mark.parametrize("layout", [(2, 1, 1, 1, False), *SIMPLE], ids=str)
def test_the_simple_forms_of_the_core_train_the_same_model(pool, layout):
    dp, tp, pp, cp, sequence_parallel = layout
    config = make_config(
        dp, tp, 2, pp, sequence_parallel=sequence_parallel, cp=cp, recompute="full", overlap=False
    )
    assert_trains_as_one_rank(pool, config, "tied")


def test_the_reference_run_learns_and_clips(pool):
    reference = whole_run(pool, on_one_rank(make_config()), "untied")
    assert reference.losses[-1] < reference.losses[0]
    norm = np.sqrt(sum((gradient**2).sum() for gradient in reference.gradients.values()))
    assert min(reference.norms) > 0.5 and norm == pytest.approx(0.5, abs=1e-5)
