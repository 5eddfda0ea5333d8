"""The search against trying everything, and the reasons for what it finds."""

import random
from dataclasses import replace
from itertools import product

import pytest

from picotron_min.extensions.settings import Workload
from picotron_min.planner.choices import FILL, Request, groups, rule_problems, schedules
from picotron_min.planner.config_files import fixed_choices
from picotron_min.planner.explain import EXPLAINED, why
from picotron_min.planner.search import TIE, options, search
from picotron_min.planner.show import plan_text
from picotron_min.planner.step_time import predict
from picotron_min.planner.uncertainty import OF_A_RUN, WIDTH
from picotron_min.runtime.hardware import GPUS
from picotron_min.runtime.public_models import find_preset

WORK = Workload(256, dtype="bfloat16")
LONG = replace(WORK, seq_length=8192)
TINY = Request(find_preset("tiny"), GPUS["H100"], gpus=4, work=WORK, global_batch=2)
LLAMA = Request(find_preset("Llama-3.1-8B"), GPUS["H100"], 8, LONG, 64, "Llama-3.1-8B")
MIXTURE = find_preset("tiny").override(num_local_experts=4, num_experts_per_tok=2)
EXPERTS = replace(TINY, model_config=MIXTURE, gpus=2, work=replace(WORK, fp8=True))


def fixed(request: Request, text: str) -> Request:
    return replace(request, fixed=fixed_choices(text))


@pytest.mark.parametrize("asked", [TINY, EXPERTS], ids=["dense", "experts"])
def test_the_search_finds_what_trying_everything_finds(asked):
    every = []
    for group, work in groups(asked):
        for engine, numbers in schedules(asked, group.pp).items():
            for chunks, kind in product(numbers, asked.values("sharding", group)):
                at = replace(group, pp_engine=engine, pp_chunks=chunks, sharding=kind)
                if not rule_problems(asked, at, work):
                    seconds = predict(asked.setting(at, work)).step
                    every.append((seconds, asked.memory(at, work).total))
    sizes = sorted(memory for _, memory in every)
    for share in (1.0, 0.2, 0.05):  # of all that fits
        limit = sizes[int(share * (len(sizes) - 1))]
        asked = replace(asked, gpu=replace(asked.gpu, memory=(limit + 1e9) / FILL + 1))
        found = search(asked, top=5)
        best = min(seconds for seconds, memory in every if memory <= asked.budget)
        assert min(c.prediction.step for c in found) == best
        assert found[0].prediction.step <= TIE * best
        for c in found:
            exact = asked.candidate(c.layout, c.workload)
            assert c == exact and c.memory.total <= asked.budget


BOUNDS = {
    "dense": TINY,
    "experts": EXPERTS,
    "mixed": replace(EXPERTS, model_config=MIXTURE.override(mlp_only_layers=(1,)), gpus=4),
    "sgd": replace(TINY, work=replace(WORK, dtype="float32", optimizer="sgd")),
    "8 bits": replace(LLAMA, work=replace(LONG, fp8=True)),
}


@pytest.mark.parametrize("name", BOUNDS)
def test_the_quick_bound_never_exceeds_the_exact_memory(name):
    draw, request, seen = random.Random(0), BOUNDS[name], 0
    for layout, work in draw.sample(list(groups(request)), 12):
        every = list(options(request, layout, work))
        for least, changes in draw.sample(every, min(6, len(every))):
            at = replace(layout, **changes)
            if not rule_problems(request, at, work):
                assert least <= request.memory(at, work).total, (at, work)
                seen += 1
    assert seen > 5


def test_a_number_of_chunks_that_does_not_fit_leaves_the_next_fastest(monkeypatch):
    asked = fixed(TINY, "pp=2,dp=1,pp_engine=interleaved,recompute=none,micro_batch_size=1")
    model_config = find_preset("tiny").override(num_hidden_layers=8)
    asked = replace(asked, model_config=model_config, gpus=2, global_batch=4)
    assert [c.layout.pp_chunks for c in search(asked)] == [4]
    monkeypatch.setattr(
        "picotron_min.planner.search.rule_problems",
        lambda request, layout, work: ["no"] * (layout.pp_chunks == 4),
    )
    assert [c.layout.pp_chunks for c in search(asked)] == [3]


def test_fixed_choices_stay_and_are_not_explained():
    asked = fixed(LLAMA, "tp=2,sequence_parallel=true,recompute=full,pp_engine=1f1b,pp=2")
    found = search(asked, top=3)
    chosen = [{name: c.chosen[name] for name in asked.fixed} for c in found]
    assert chosen == [asked.fixed] * 3
    assert not asked.fixed.keys() & {reason.choice for reason in why(asked, found[0])}


def test_every_choice_of_the_best_layout_is_explained():
    asked = replace(LLAMA, gpus=32)
    (best,) = search(fixed(asked, "tp=4,pp=2,pp_engine=interleaved,cp=2"), top=1)
    reasons = list(why(asked, best))
    assert {reason.choice for reason in reasons} == {*EXPLAINED} - {"ep"}
    shown = " ".join(plan_text(asked, [best]).split())
    assert all(reason.text in shown for reason in reasons)
    for reason in (reason for reason in reasons if reason.candidate):
        there = reason.candidate
        assert there.chosen[reason.choice] == reason.other
        slower = there.prediction.step / best.prediction.step - 1
        if there.memory.total > asked.budget:
            assert f"need {there.memory.total / 1e9:.1f} GB of" in reason.text
        elif "toss-up" not in reason.text:
            assert f"{slower:.1%} slower" in reason.text and slower >= WIDTH * OF_A_RUN


def test_the_first_has_fewest_axes_of_the_fastest_and_the_others_are_in_order():
    steps = [c.prediction.step for c in search(replace(LLAMA, gpus=64, global_batch=512), top=6)]
    assert len(steps) == 6 and steps[1:] == sorted(steps[1:]) and steps[0] <= TIE * min(steps)
