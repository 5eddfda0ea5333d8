"""Plans: the search against trying everything; what is explained, written, read, calibrated."""

import functools
import itertools
import json
import random
import re
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import create_config
from picotron_min.extensions.documents.batches import DocumentBatches
from picotron_min.extensions.settings import Layout, Workload
from picotron_min.planner import calibrate, parameters
from picotron_min.planner.__main__ import build_parser, main
from picotron_min.planner.choices import Request, groups, rule_problems, schedules
from picotron_min.planner.config_files import (
    attended_length,
    config_of,
    cpu,
    fixed_choices,
    gpu_of,
)
from picotron_min.planner.explain import lines_of, why
from picotron_min.planner.memory import memory_per_rank, shares_of_ranks
from picotron_min.planner.search import TIE, options, search
from picotron_min.planner.show import plan_text
from picotron_min.planner.step_time import Prediction, predict
from picotron_min.planner.system import System
from picotron_min.planner.traffic import planned_ledger
from picotron_min.planner.uncertainty import OF_A_RUN, WIDTH, interval, is_toss_up, unlike
from picotron_min.runtime.config import Config
from picotron_min.runtime.config_checks import resolve_model
from picotron_min.runtime.config_file import load_config, parse_config
from picotron_min.runtime.hardware import GPUS
from picotron_min.runtime.public_models import find_preset
from tests.assembled import make_training

WORK = Workload(256, dtype="bfloat16")
LONG = replace(WORK, seq_length=8192)
TINY = Request(find_preset("tiny"), GPUS["H100"], gpus=8, work=WORK, global_batch=16)
LLAMA = Request(find_preset("Llama-3.1-8B"), GPUS["H100"], 8, LONG, 64, "Llama-3.1-8B")
EIGHT = find_preset("tiny").override(num_local_experts=4, num_experts_per_tok=2)
EXPERTS = replace(TINY, model_config=EIGHT, gpus=4, global_batch=4)
SMALL = {
    "dense": replace(TINY, gpus=4, global_batch=2),
    "experts": replace(EXPERTS, gpus=2, global_batch=2, work=replace(WORK, fp8=True)),
}


@functools.cache
def everything(name: str) -> list[tuple[float, int]]:
    """Seconds and bytes of every layout that can be configured, without any short cut."""
    request, found = SMALL[name], []
    for group, work in groups(request):
        for engine, numbers in schedules(request, group.pp).items():
            for chunks, kind in itertools.product(numbers, request.values("sharding", group)):
                changes = {"pp_engine": engine, "pp_chunks": chunks, "sharding": kind}
                layout = replace(group, **changes)
                if not rule_problems(request, layout, work):
                    seconds = predict(request.setting(layout, work)).step
                    found.append((seconds, request.memory(layout, work).total))
    return found


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("share", [1.0, 0.2, 0.05], ids=lambda share: f"memory {share}")
def test_the_search_finds_what_trying_everything_finds(name, share):
    every, asked = everything(name), SMALL[name]
    sizes = sorted(memory for _, memory in every)
    limit = sizes[int(share * (len(sizes) - 1))]  # so that this share of all fits
    gpu = replace(asked.gpu, memory=(limit + 1e9) / asked.fill + 1)
    asked = replace(asked, gpu=gpu)
    best = min(seconds for seconds, memory in every if memory <= asked.budget)
    found = search(asked, top=5)
    assert min(c.prediction.step for equal in found for c in equal) == best
    assert found[0][0].prediction.step <= TIE * best
    for c in (c for equal in found for c in equal):
        assert c.memory == memory_per_rank(asked.model_config, c.layout, c.workload)
        assert c.memory.total <= asked.budget and not rule_problems(asked, c.layout, c.workload)
        assert c.prediction.step == predict(asked.setting(c.layout, c.workload)).step


def test_the_quick_bound_never_exceeds_the_exact_memory():
    draw = random.Random(0)
    wide = replace(TINY, work=replace(WORK, dtype="float32", optimizer="sgd"))
    in_8_bits = (replace(r, work=replace(r.work, fp8=True)) for r in (LLAMA, EXPERTS))
    mixed = replace(EXPERTS, model_config=EIGHT.override(mlp_only_layers=(1,)))
    for request in (TINY, EXPERTS, mixed, wide, LLAMA, *in_8_bits):
        of_request = list(groups(request))
        for layout, work in draw.sample(of_request, 100 if request is EXPERTS else 12):
            every = list(options(request, layout, work))
            for least, changes in draw.sample(every, min(6, len(every))):
                at = replace(layout, **changes)
                if not rule_problems(request, at, work):
                    assert least <= request.memory(at, work).total, (at, work)


def test_a_number_of_chunks_that_does_not_fit_leaves_the_next_fastest(monkeypatch):
    model_config = find_preset("tiny").override(num_hidden_layers=8)
    fixed = fixed_choices("pp=2,dp=1,engine=interleaved,recompute=none,mbs=1")
    asked = replace(TINY, model_config=model_config, gpus=2, global_batch=4, fixed=fixed)
    assert [c.layout.pp_chunks for (c,) in search(asked)] == [4]
    monkeypatch.setattr(
        "picotron_min.planner.search.rule_problems",
        lambda request, layout, work: ["no"] * (layout.pp_chunks == 4),
    )
    assert [c.layout.pp_chunks for (c,) in search(asked)] == [3]


def test_searches_take_seconds():
    # With a row for each of its 6,144 experts the mixture took a minute.
    mixture = {"num_hidden_layers": 48, "num_local_experts": 128, "num_experts_per_tok": 8}
    large = LLAMA.model_config.override(**mixture, moe_intermediate_size=256)
    fixed = fixed_choices("tp=1,cp=1,recompute=full,mbs=1")
    for asked in (LLAMA, replace(LLAMA, model_config=large, fixed=fixed)):
        began = time.process_time()
        assert len(search(asked)) == 10
        assert time.process_time() - began < 6  # 1 to 2.5 s, depending on the processor


def test_an_expert_that_stands_for_others_changes_no_number(monkeypatch):
    mixture = EIGHT.override(mlp_only_layers=(0,), num_hidden_layers=5, num_nextn_predict_layers=1)
    grids = [{"dp": 4, "ep": 2}, {"tp": 2, "dp": 2, "pp": 2, "ep": 2, "etp": 2}, {"cp": 2}]
    work = Workload(256, optimizer="muon")

    def planned() -> list:
        parameters._table.cache_clear(), shares_of_ranks.cache_clear()
        layouts = [
            Layout(**grid, sharding=kind) for grid in grids for kind in ("none", "gradients")
        ]
        sizes = [(mixture, layout, work) for layout in layouts]
        return [(memory_per_rank(*of), planned_ledger(*of, rank=1)) for of in sizes]

    quick, whole = planned(), parameters._alike
    monkeypatch.setattr(parameters, "_alike", lambda c, ep: whole(c, 0))
    assert planned() == quick
    assert parameters._table.cache_info().misses == 6


def test_fixed_choices_stay():
    fixed = fixed_choices("tp=2,sp=true,recompute=full,mbs=1,engine=1f1b,pp=2")
    asked = replace(LLAMA, fixed=fixed)
    for c, *_ in search(asked, top=3):
        assert (c.layout.tp, c.layout.pp, c.layout.pp_engine) == (2, 2, "1f1b")
        assert c.layout.sequence_parallel and c.workload.recompute == "full"
        assert c.workload.micro_batch_size == 1
    assert "tp" not in {reason.choice for reason in why(asked, search(asked, top=1)[0][0])}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tpp=2", "use tp"),
        ("recompute=ful", "must be 'none', 'full' or 'selective'"),
        ("tp=0", "tp_size=0: must be greater than or equal to 1"),
        ("tp=" + "[" * 10**5, "must be a valid integer"),
        ("sp=2", "must be a valid boolean"),
        ("mbs=1,micro_batch_size=2", "there twice: use micro_batch_size once"),
    ],
)
def test_a_wrong_choice_is_reported_with_the_remedy(text, message):
    with pytest.raises(ValueError, match=message):
        fixed_choices(text)


def test_every_choice_of_the_best_layout_is_explained():
    asked = replace(LLAMA, gpus=32, fixed=fixed_choices("tp=4,pp=2,engine=interleaved,cp=2"))
    best = search(asked, top=1)[0][0]
    asked = replace(asked, fixed={})
    reasons = list(why(asked, best))
    explained = {"tp", "cp", "pp", "sharding", "recompute", "micro_batch_size"}
    explained |= {"sequence_parallel", "cp_engine", "pp_engine", "pp_chunks"}
    assert {reason.choice for reason in reasons} == explained
    before, parts = vars(best.layout) | vars(best.workload), best.prediction.parts
    for reason in (reason for reason in reasons if reason.candidate):
        there = reason.candidate
        names = vars(there.layout) | vars(there.workload)
        assert names[reason.choice] == reason.other
        same = explained - {reason.choice}
        if there.layout.pp == 1:  # without a pipeline there is no schedule
            same -= {"pp_engine", "pp_chunks"}
        if reason.choice == "pp_engine":
            same -= {"pp_chunks"}
        assert all(names[name] == before[name] for name in same)
        work = there.layout.dp * there.workload.micro_batch_size
        assert work * there.workload.num_micro_batches == asked.global_batch
        assert there.layout.world_size == asked.gpus
        if "need" in reason.text:
            assert there.memory.total > asked.budget
            assert f"{there.memory.total / 1e9:.1f} GB of" in reason.text
        elif "slower" in reason.text:
            slower = there.prediction.step / best.prediction.step - 1
            assert f"{slower:.1%} slower" in reason.text and slower >= WIDTH * OF_A_RUN
            part, _, numbers = reason.text.split(": ")[1].partition(" ")
            took = float(numbers.split(" s ->")[0])
            assert took == pytest.approx(parts.get(part, 0), rel=0.006)
    text = "\n".join(lines_of(reasons))
    assert "tp 4, not 2:" in text and "sequence parallelism on, not off:" in text
    shown = plan_text(asked, [[best]])
    assert text.splitlines()[0] in shown
    joules, tokens = 32 * 700 * best.prediction.step, 64 * 8192
    assert f"energy: at most {joules / 1e3:.3g} kJ a step (32 GPUs x 700 W x " in shown
    assert f" s), {1e3 * joules / tokens:.3g} mJ a token\n" in shown and all(
        gpu.watts for gpu in GPUS.values()
    )
    assert all(f"{n:<11}{s:>10.4g} s" in shown for n, s in parts.items() if s > 0)


def test_rows_of_a_table_differ_in_what_they_print_and_are_in_its_order():
    asked = replace(LLAMA, gpus=64, global_batch=512)
    found = search(asked, top=6)
    text = plan_text(asked, found)
    head, *lines = text.splitlines()[: text.splitlines().index("")]
    rows = [line for line in lines if re.match(r"[ ~]+\d+s? ", line)]
    numbers = [line[head.index("micro-batches") + 13 :].split() for line in rows]
    assert len({tuple(row) for row in numbers}) == len(rows) == 6
    steps = [float(row[0]) for row in numbers]
    assert steps[1:] == sorted(steps[1:])
    assert steps[0] <= TIE * min(steps)
    equal = [c.layout.cp for c in found[1]]
    assert len(equal) > 1 and f"     = cp {equal[1]} dp {64 // equal[1]} micro-batch" in text
    assert "s: sequence parallelism, u: Ulysses, 1 x 4: " in text
    assert "No GPU has run this code yet" in text and "also the micro-batch)" in text


# The command.


def plan(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


ASKED = ("--model", "tiny", "--gpu", "cpu", "--cores", 2, "--gpus", 4, "--seq_length", 32)
ASKED += ("--global_batch", 8)


def trained(configs: list[Config]) -> list[list[float]]:
    losses = []
    for config in configs:
        training = make_training(config, resolve_model(config))
        losses.append([training.step(step).loss for step in range(2)])
    return losses


def test_the_ten_best_layouts_are_written_and_train(pool, tmp_path, capsys):
    hardware = tmp_path / "hardware.json"
    hardware.write_text("{}")
    assert plan(*ASKED, "--json", "--hardware", hardware) == 0
    best = json.loads(capsys.readouterr().out)
    assert len(best) == 10
    configs = []
    for i, numbers in enumerate(best):
        choices, path = numbers["choices"], tmp_path / str(i) / "config.json"
        fixed = ",".join(f"{name}={json.dumps(v).strip(chr(34))}" for name, v in choices.items())
        written = plan(*ASKED, "--fix", fixed, "--write", path, "--hardware", hardware)
        error = capsys.readouterr().err
        assert written == 0 and "nothing" not in error
        assert "yours to add are dataset.name, training.learning_rate" in error
        config = load_config(path)
        layout = vars(config.layout) | vars(config.workload)
        assert {name: layout[name] for name in choices} == choices
        configs.append(config)
    assert len({str(config.layout) + str(config.workload) for config in configs}) == 10
    losses = pool.run(4, trained, configs)[0]
    assert all(first == pytest.approx(losses[0][0], rel=1e-5) for first, _ in losses)
    assert all(second == pytest.approx(losses[0][1], rel=1e-4) for _, second in losses)


def test_documents_shorten_the_attention_that_is_planned(tmp_path, capsys):
    # Documents of 8, 32 and 56 tokens; rows of 32 cut the second into 24 + 8, the third 24 + 32.
    (tmp_path / "documents.bin").write_bytes(np.array([8, 40, 96]).tobytes())
    masked, packed = (
        parse_config({"dataset": {"document_mask": True} | keys, "training": {"seq_length": 32}})
        for keys in ({}, {"packing": "bfd"})
    )
    length = attended_length(tmp_path, masked)
    assert length == attended_length(tmp_path / "documents.bin", masked)
    assert length == pytest.approx((8**2 + 24**2 + 8**2 + 24**2 + 32**2) / 96)
    assert attended_length(tmp_path, packed) == (8**2 + 32**2 + 32**2 + 24**2) / 96
    sizes = {"micro_batch_size": 3, "num_micro_batches": 1, "dp_rank": 0, "dp_size": 1}
    ends = np.array([8, 40, 97])  # one token more, which the last row predicts
    batches = DocumentBatches(np.arange(97), seq_length=32, seed=0, ends=ends, **sizes)
    assert length == pytest.approx(batches.attended_length(0)), "of all three rows"
    asked = (*ASKED, "--top", 1, "--fix", "tp=1,dp=4", "--json")
    config = tmp_path / "config.json"

    def planned(*arguments: object) -> dict:
        assert plan(*arguments) == 0
        numbers = json.loads(capsys.readouterr().out)
        return numbers[0] if isinstance(numbers, list) else numbers

    whole, apart = planned(*asked), planned(*asked, "--documents", tmp_path, "--write", config)
    ratio = apart["parts"]["attention"] / whole["parts"]["attention"]
    assert ratio == pytest.approx(length / 32)
    assert apart["mfu"] < whole["mfu"] * whole["step_seconds"] / apart["step_seconds"]
    # The config has the mask, and without the file the planner says what it takes for granted.
    same = planned("--config", config, "--cores", 2, "--documents", tmp_path, "--json")
    assert same["step_seconds"] == pytest.approx(apart["step_seconds"])
    assert plan("--config", config, "--cores", 2) == 0
    text = capsys.readouterr().out
    assert "Planned for one document a row: --documents FILE" in text
    assert " memory " in text and "NVLink" not in text and "without torch itself" in text


@pytest.mark.parametrize("damage", [b"", b"1234", np.array([8, 8]).tobytes()], ids=repr)
def test_damaged_documents_are_refused(tmp_path, capsys, damage):
    (tmp_path / "documents.bin").write_bytes(damage)
    assert plan(*ASKED, "--documents", tmp_path) == 2
    assert "is no documents.bin: name one in a folder of" in capsys.readouterr().err


def test_nothing_fits(capsys):
    asked = ("--model", "Llama-3.1-8B", "--gpus", 2, "--seq_length", 4096, "--global_batch", 8)
    assert plan(*asked, "--gpu", "RTX-4090") == 2
    error = capsys.readouterr().err
    assert "the smallest layout needs" in error and "GB (24 x 0.92 - 1 for libraries)" in error
    assert error.strip().endswith("use 8 GPUs")
    assert plan(*asked, "--gpus", 8, "--fix", "sharding=none,dp=8") == 2
    assert "leave sharding out of --fix" in capsys.readouterr().err
    assert plan("--model", "tiny", "--gpus", 7, "--seq_length", 64, "--global_batch", 3) == 2
    assert "use another --gpus or --global_batch" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--gpus", 8), "--model --seq_length --global_batch missing"),
        ((*ASKED, "--gpu", "H1000"), "--gpu H1000 is not known"),
        ((*ASKED, "--model", "owner/model"), "download it and name its folder"),
        ((*ASKED, "--seq_length", 4096), "seq_length=4096 is above max_position_embeddings=2048"),
        ((*ASKED[:2], *ASKED[6:], "--gpu", "L4", "--dtype", "float64"), "no peak for float64"),
        ((*ASKED, "--gpu", "L4"), "--cores: not used for L4"),
        ((*ASKED, "--network", 100, "--gpus_per_node", 2), "--gpus_per_node: not used for a CPU"),
        (("--config", "config.json", "--gpu", "L4"), "--gpu L4: not used for config.json, which"),
        ((*ASKED, "--write", "docs"), "docs: Is a directory: name another file"),
        ((*ASKED, "--hardware", "docs"), "--hardware docs is no file: write it with"),
        (("--config", "config.json", "--documents", "docs"), "not used without dataset.document_"),
        (("--calibrate", "config.json"), "give pairs"),
        (("--config", "missing.json"), "missing.json"),
        (("--config", "config.json", "--model", "tiny"), "--model: not used with --config"),
        (("--config", "config.json", "--metrics", "docs"), "docs: Is a directory: name another"),
        (("--metrics", "m.jsonl"), "--metrics: not used without --config"),
        (("--validate", "README.md"), "row 1 is not a run as in tests/published_runs.csv"),
    ],
)
def test_mistakes_are_reported_with_the_remedy(arguments, message, capsys):
    assert plan(*arguments) == 2
    assert message in capsys.readouterr().err


def test_an_error_of_no_file_names_none(monkeypatch, capsys):
    def report(runs: list) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("picotron_min.planner.validate.report", report)
    assert plan("--validate", "tests/published_runs.csv") == 2
    assert capsys.readouterr().err == "error: [Errno 28] No space left on device\n"


def test_a_speed_has_an_interval_and_near_layouts_are_a_toss_up(capsys):
    asked = ("--model", "Llama-3.1-8B", "--gpus", 8, "--seq_length", 8192, "--global_batch", 64)
    both = {}
    for precision in ("bf16", "fp8"):
        assert plan(*asked, "--precision", precision, "--json") == 0
        both[precision] = json.loads(capsys.readouterr().out)
    first, *others = both["bf16"]
    low, high = first["interval"]
    speed = first["tokens_per_second_per_device"]
    assert 0.8 < low / speed < 1 < high / speed < 1.25
    assert low * high == pytest.approx(speed**2)
    assert both["fp8"][0]["step_seconds"] < first["step_seconds"]
    assert both["fp8"][0]["parts"]["matmuls"] < first["parts"]["matmuls"]
    assert plan(*asked) == 0
    text = capsys.readouterr().out
    near = [o["step_seconds"] / first["step_seconds"] < 1.1 for o in others]
    assert text.count("\n~ ") == sum(near) > 0, "all that are close"
    assert "a toss-up (+" in text and f"{low:,.0f}-{high:,.0f}" in text
    assert plan(*asked, "--gpu", "L40S", "--fix", "recompute=full") == 0
    wider = capsys.readouterr().out
    assert "It is twice as wide here: no run was on L40S in bfloat16" in wider
    # What two layouts have in common cancels; a part that one alone has does not.
    same = Prediction({"matmuls": 1.0, "tp": 0.0}, 1.0)
    assert is_toss_up(same, Prediction({"matmuls": 1.10}, 1.1))
    assert not is_toss_up(same, Prediction({"matmuls": 1.12}, 1.1))
    assert is_toss_up(same, Prediction({"matmuls": 1.0, "tp": 0.12}, 1.1))
    mixture = LLAMA.model_config.override(num_local_experts=8, num_experts_per_tok=2)
    at = LLAMA.setting(Layout(), Workload(8192, dtype="bfloat16"))
    assert not unlike(at)
    assert "not validated for experts of size" in unlike(replace(at, model_config=mixture))
    other = replace(at, gpu=GPUS["L40S"])
    once, twice = (interval(1.0, same, setting)[1] for setting in (at, other))
    assert twice == pytest.approx(once**2)


def test_another_code_base_is_planned_by_its_properties(tmp_path, capsys):
    system, asked = tmp_path / "system.json", ["--model", "Llama-3.1-8B", "--gpus", 8]
    asked += ["--seq_length", 8192, "--global_batch", 64, "--json", "--fix", "tp=8,recompute=full"]
    parts = []
    for properties in ({}, {"tp_messages": [7, 7], "attention_kernel": "cudnn"}):
        system.write_text(json.dumps(properties))
        assert plan(*asked, "--system", system) == 0
        parts.append(json.loads(capsys.readouterr().out)[0]["parts"])
    plain, other = parts
    assert other["tp"] > plain["tp"] and other["attention"] < plain["attention"]
    for properties, message in {
        "[]": "must hold one object",
        '{"overlaps": "tp"}': "has other keys than precision,",
        '{"overlap": "pp"}': "overlap=\"pp\": must be 'none', 'tp' or 'ep'",
    }.items():
        system.write_text(properties)
        assert plan(*asked, "--system", system) == 2
        assert message in capsys.readouterr().err


def test_the_memory_of_a_tiny_model_is_shown(capsys):
    assert plan(*ASKED, "--top", 1) == 0
    shown = capsys.readouterr().out.splitlines()
    needed = float(shown[1].split()[-2])
    assert 0.001 < needed < 0.1
    assert f"memory {needed:.3g} GB of" in "\n".join(shown)


def test_another_file_is_not_overwritten(tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text("{}")
    assert plan(*ASKED, "--write", path) == 2
    assert "already there and differs" in capsys.readouterr().err
    assert path.read_text() == "{}"


AXES = {"tp": 1000, "pp": 0, "dp_cp": 10, "world": 1}  # of config.json


def write_metrics(path: Path, seconds: float, sent: dict[str, int] = AXES) -> Path:
    record = {"comm_bytes": sent, "memory_gb": 0.5}
    times = [9.0] * 5 + [seconds] * 6
    lines = [json.dumps(record | {"step": i + 1, "step_seconds": t}) for i, t in enumerate(times)]
    path.write_text("\n".join([*lines, '{"step": 11, "val_loss": 2.0}', '{"step": 12, "ste']))
    return path


def test_a_config_is_predicted_beside_what_it_measured(tmp_path, capsys):
    metrics = write_metrics(tmp_path / "metrics.jsonl", 0.25)
    (tmp_path / "hardware.json").write_text("{}")
    at = ("--cores", 2, "--hardware", tmp_path / "hardware.json")
    assert plan("--config", "config.json", "--metrics", metrics, *at) == 0
    text = capsys.readouterr().out
    step = next(line for line in text.splitlines() if line.startswith("step, s"))
    assert step.split()[3] == "0.25"
    assert "bytes over tp" in text and "rough: see --calibrate" in text


DAMAGE = ["0", "-1.0", "NaN", "1e999", '"0.25"', "[0.25]", "[" * 10**5, "null", "true"]


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda text: text[:8])
def test_damaged_steps_and_calibrations_are_not_used(tmp_path, capsys, damage):
    metrics = write_metrics(tmp_path / "metrics.jsonl", 0.25)
    metrics.write_text(
        metrics.read_text().replace('"step_seconds": 0.25', f'"step_seconds": {damage}')
    )
    assert plan("--config", "config.json", "--metrics", metrics) == 2
    error = capsys.readouterr().err
    assert "has 5 steps, and the first 5 warm up: train at least 6" in error
    (tmp_path / "hardware.json").write_text(f'{{"cpu": {{"latency": {damage}}}}}')
    assert plan("--config", "config.json", "--hardware", tmp_path / "hardware.json") == 2
    assert "delete it, calibrate again" in capsys.readouterr().err


def test_steps_before_a_resume_are_another_layouts(tmp_path, capsys):
    metrics = write_metrics(tmp_path / "metrics.jsonl", 0.25)
    at = ("--config", "config.json", "--metrics", metrics)
    (tmp_path / "run.jsonl").write_text('{"start": {"after_step": 0}}\n')
    assert plan(*at) == 0
    with (tmp_path / "run.jsonl").open("a") as file:
        file.write('{"start": {"after_step": 8}}\n')
    assert plan(*at) == 2
    assert "has 3 steps after step 8, where the run resumed" in capsys.readouterr().err


def test_metrics_of_another_layout_are_refused(tmp_path, capsys):
    metrics = write_metrics(tmp_path / "metrics.jsonl", 0.25, {"pp": 7})
    assert plan("--config", "config.json", "--metrics", metrics) == 2
    assert "the axes pp; the config's are dp_cp" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flag,value,why",
    [
        ("--network", "0", "not above 0"),
        ("--fill", "92", "is a share"),
        ("--global_batch", "4194304", "counts sequences, not tokens"),
        ("--gpus", "9" * 18, "at most 1048576"),
        ("--cores", "two", "invalid"),
    ],
)
def test_numbers_that_cannot_be_meant_are_refused(capsys, flag, value, why):
    with pytest.raises(SystemExit) as exit_:
        plan(flag, value)
    assert exit_.value.code == 2 and why in capsys.readouterr().err


# Calibration.

ALONE = Layout()


def observed(gpu, layout=ALONE, seq_length=2048, fp8=False, system=None) -> calibrate.Observation:
    """What a machine that is exactly as `gpu` would measure."""
    work = Workload(seq_length, 1, 4, "bfloat16", fp8=fp8)
    request = replace(LLAMA, gpu=gpu, model_config=find_preset("Llama-3.2-1B"), system=system)
    seconds = predict(request.setting(layout, work)).step
    return calibrate.Observation(replace(request.setting(layout, work), gpu=GPUS["H100"]), seconds)


def test_calibration_finds_what_a_machine_reaches():
    real = replace(
        GPUS["H100"], matmul_share=0.5, attention_share=0.2, link_share=0.3, latency=2e-4
    )
    alone = replace(GPUS["H100"], matmul_share=0.5)
    one = calibrate.calibrate([observed(alone)])
    assert one == {"matmul_share": pytest.approx(0.5)}
    narrow = replace(alone, float8_share=0.4)
    assert calibrate.calibrate([observed(narrow, fp8=True), observed(narrow)]) == pytest.approx(
        {"matmul_share": 0.5, "float8_share": 0.4}, rel=0.01
    )
    two = calibrate.calibrate([observed(real), observed(real, seq_length=8192)])
    assert two == pytest.approx({"matmul_share": 0.5, "attention_share": 0.2}, rel=0.01)
    tp = [Layout(tp=2), Layout(tp=8, sequence_parallel=True)]
    runs = [observed(real), observed(real, seq_length=8192), *(observed(real, x) for x in tp)]
    all_four = calibrate.calibrate(runs)
    assert {*all_four} == {*calibrate.CALIBRATED} - {"float8_share"}
    assert max(map(abs, calibrate.errors_of(runs, all_four))) < 0.01
    assert all_four["matmul_share"] == pytest.approx(0.5, rel=0.02)


def test_calibration_sees_properties_of_a_code_base(tmp_path, capsys):
    layouts = [ALONE, Layout(tp=8), Layout(tp=2, sequence_parallel=True), Layout(dp=8)]
    layouts += [Layout(dp=8, sharding="parameters"), Layout(dp=4, tp=2, sharding="optimizer")]
    slow = replace(GPUS["H100"], link_share=0.2, matmul_share=0.6)
    runs = [observed(slow, layout, system=System(reduces="step")) for layout in layouts]
    guessed = [run.having(reduces="micro-batch") for run in runs]
    assert calibrate.properties(guessed) == {"reduces": "step"}
    assert calibrate.properties(guessed[-3:]) == {}, "as many numbers as runs"
    runs = [observed(slow, layout, system=System(hides_gathers=True)) for layout in layouts]
    guessed = [run.having(hides_gathers=False) for run in runs]
    assert calibrate.properties(guessed) == {}, "errors are within the error of a run"
    metrics, system = write_metrics(tmp_path / "m.jsonl", 0.5), tmp_path / "system.json"
    system.write_text('{"gradient_bytes": 2}')
    at = ("--cores", 2, "--hardware", tmp_path / "hardware.json", "--system", system)
    assert plan("--calibrate", "config.json", metrics, *at) == 0
    assert "nothing new; these runs do not show is_fused, hides_tp," in capsys.readouterr().out
    assert json.loads(system.read_text()) == {"gradient_bytes": 2}


def test_what_was_found_is_written_and_read(tmp_path, capsys):
    metrics, hardware = write_metrics(tmp_path / "m.jsonl", 0.5), tmp_path / "hardware.json"
    at = ("--cores", 2, "--hardware", hardware)
    assert plan("--calibrate", "config.json", metrics, *at) == 0
    out = capsys.readouterr().out
    assert "matmul_share" in out and out.count("as it was") == 4
    assert "config.json: fitted, as many unknowns as runs, " in out
    assert plan("--config", "config.json", "--json", *at) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["step_seconds"] == pytest.approx(0.5)
    assert f"{hardware} is used: what --calibrate found of cpu" in shown.err
    flags = build_parser().parse_args(["--hardware", str(hardware)])
    assert gpu_of(flags, "H100", 8) == GPUS["H100"], "of another device"
    hardware.write_text("[1]")
    assert plan("--config", "config.json", *at) == 2
    assert "delete it, calibrate again" in capsys.readouterr().err


def test_ranks_share_the_cores_of_a_cpu():
    one, two, four = (cpu(cores=2, ranks=n) for n in (1, 2, 4))
    assert two.peaks["float32"] == 2 * four.peaks["float32"] and two.hbm == 2 * four.hbm
    assert one.peaks == two.peaks


def test_a_new_config_shows_the_step_that_the_planner_predicts(tmp_path, capsys):
    shape = ["--model_name", "Llama-3.2-1B", "--dp", "8", "--seq_len", "2048", "--gpu", "A100-80GB"]
    run = ["--out_dir", str(tmp_path), "--exp_name", "a", "--dtype", "bfloat16"]
    assert create_config.main([*run, *shape]) == 0
    printed = capsys.readouterr().out
    assert plan("--config", tmp_path / "a/config.json", "--gpu", "A100-80GB", "--json") == 0
    step = json.loads(capsys.readouterr().out)["step_seconds"]
    assert f"predicted step   {step:.3g} s" in printed and "on A100-80GB" in printed
    assert "assumed" not in printed
    assert create_config.main([*run, *shape[:-2]]) == 0
    printed = capsys.readouterr().out
    assert "on H100: see" in printed
    assert " in nine of ten runs. No GPU has run this code yet: times rest on" in printed
    assert "  H100 is assumed: name another with --gpu, or add --use_cpu\n" in printed
    assert create_config.main([*run, *shape, "--use_cpu", "--force"]) == 0
    assert "predicted" not in capsys.readouterr().out


def test_a_written_config_has_what_was_asked_for():
    asked = replace(TINY, work=replace(WORK, compile=True))
    raw = config_of(asked, search(asked, top=1)[0][0])
    assert raw["model"]["compile"] and raw["model"]["dtype"] == "bfloat16"
    batch = raw["distributed"]["dp_size"] * raw["training"]["micro_batch_size"]
    assert batch * raw["training"]["gradient_accumulation_steps"] == TINY.global_batch
