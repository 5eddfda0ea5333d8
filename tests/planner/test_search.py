"""The search against trying everything, and the reasons for what it finds."""

from dataclasses import replace

import pytest

from picotron_min.extensions.settings import Workload
from picotron_min.planner.choices import (
    FILL,
    LIBRARY_BYTES,
    Request,
    groups,
    rule_problems,
    variants,
)
from picotron_min.planner.config_files import config_of, fixed_choices
from picotron_min.planner.explain import EXPLAINED, what_if, why
from picotron_min.planner.search import TIE, order, search
from picotron_min.planner.step_time import predict
from picotron_min.runtime.config_file import parse_config
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
    layouts = [(at, work) for group, work in groups(asked) for at in variants(asked, group)]
    possible = [layout for layout in layouts if not rule_problems(asked, *layout)]
    every = [(predict(asked.setting(*at)).step, asked.memory(*at).total) for at in possible]
    sizes = sorted(memory for _, memory in every)
    for share in (1.0, 0.2, 0.05):  # of all that fits
        limit = sizes[int(share * (len(sizes) - 1))]
        asked = replace(asked, gpu=replace(asked.gpu, memory=(limit + LIBRARY_BYTES) / FILL + 1))
        found = search(asked, top=5)
        best = min(seconds for seconds, memory in every if memory <= asked.budget)
        assert best == min(c.prediction.step for c in found) >= found[0].prediction.step / TIE
        assert [order(c) for c in found] == sorted(order(c) for c in found)
        for c in found:
            assert c == asked.candidate(c.layout, c.workload)
            assert c.memory.total <= asked.budget


def test_a_number_of_chunks_that_does_not_fit_leaves_the_next_fastest(monkeypatch):
    asked = fixed(TINY, "pp=2,dp=1,pp_engine=interleaved,recompute=none,micro_batch_size=1")
    model_config = find_preset("tiny").override(num_hidden_layers=8)
    asked = replace(asked, model_config=model_config, gpus=2, global_batch=4)
    assert [c.layout.pp_chunks for c in search(asked)] == [4]
    monkeypatch.setattr(
        "picotron_min.planner.search.rule_problems",
        lambda request, layout, work: ["no"] * (layout.pp_chunks == 4),
    )
    assert [c.layout.pp_chunks for c in search(asked)] == [2]


def test_fixed_choices_stay_and_are_written_but_not_explained():
    asked = fixed(LLAMA, "tp=2,sequence_parallel=true,recompute=full,pp_engine=1f1b,pp=2")
    for candidate in search(asked, top=3):
        assert {name: candidate.chosen[name] for name in asked.fixed} == asked.fixed
        config = parse_config(config_of(asked, candidate))
        assert (config.layout, config.workload) == (candidate.layout, candidate.workload)
    assert not asked.fixed.keys() & {line.split()[0] for line in why(asked, candidate)}


def test_every_choice_of_the_best_layout_is_explained():
    asked = replace(LLAMA, gpus=32)
    (best,) = search(fixed(asked, "tp=4,pp=2,pp_engine=interleaved,cp=2,dp=2"), top=1)
    lines = list(why(asked, best))
    assert {line.split()[0] for line in lines} == {*EXPLAINED} - {"ep"}
    assert all(f"{name} {best.chosen[name]}, not " in "\n".join(lines) for name in ("tp", "cp"))


# The best of these choices, one of them with another value, and what is said of that.
REASONS = """
tp=1,pp=1,dp=8 | micro_batch_size=64 | it would not divide 8 GPUs, or 64 sequences
tp=1,pp=1,dp=8 | sharding=none | GB of 72.6 GB: optimizer state
tp=1,pp=1,dp=8 | ep=2 | it is not possible: model.name=
tp=1,pp=1,dp=8 | recompute=full | slower: recomputed
tp=1,pp=2,pp_engine=zb_v | pp=1 | a toss-up (
""".strip().splitlines()


@pytest.mark.parametrize("row", REASONS)
def test_a_reason_says_what_goes_wrong(row):
    choices, other, reason = row.split(" | ")
    (best,), (choice, other) = search(fixed(LLAMA, choices), top=1), *fixed_choices(other).items()
    assert reason in what_if(LLAMA, best, choice, other)
