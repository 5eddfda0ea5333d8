"""train.py as its users meet it: its output, its files, its exit codes; and the one train step.

Runs are forks, see workplace.py.
"""

import itertools
import json
import math
import os
import re
import shutil
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import train
from picotron_min.data import Batch
from picotron_min.extensions.settings import Layout, Recipe
from picotron_min.loss import IGNORE_INDEX
from picotron_min.mesh import build_axes
from picotron_min.optimizer import learning_rate_at
from picotron_min.planner.traffic import planned_ledger
from picotron_min.report.reading import read_run
from picotron_min.runtime import draw
from picotron_min.runtime.config import Config
from picotron_min.runtime.config_checks import resolve_model
from picotron_min.runtime.config_file import load_config
from picotron_min.runtime.inputs import Inputs, open_text
from picotron_min.runtime.reporter import warnings_of
from picotron_min.runtime.token_file import TokenFile
from picotron_min.runtime.tokenizer import BytesTokenizer
from tests.core.test_checkpoint import State, make_config, make_training, run_steps
from tests.runtime.test_metadata import DATA, saved_by
from tests.training import Training, open_data, with_autograd
from tests.workplace import (
    ROOT,
    STANDALONE,
    STEPS,
    Outcome,
    numbers,
    torchrun,
)


@pytest.fixture(scope="module")
def first_run(workplace) -> Outcome:
    """Two processes; it saves to runs/first."""
    return workplace.main(workplace.config("first"))


def test_python_train_py_trains_and_reports(workplace, first_run):
    assert first_run.code == 0, first_run.output
    assert workplace.files("first") == [
        "hf",
        "metrics.jsonl",
        "run.jsonl",
        *(f"step-0000000{step}" for step in (2, 4, 6)),
    ]
    records, evaluation = workplace.steps("first"), workplace.evaluations("first")[-1]
    text = (workplace.folder / "text.txt").stat().st_size
    assert first_run.output.startswith("starting 2 processes, reading text.txt ...\npicotron-min\n")
    for part in (
        "random weights, seed 42",
        "adamw, learning rate 0.01 (cosine, with 2 of 6 steps to warm up)",
        "2 x cpu over gloo: dp 2 x pp 1 x cp 1 x tp 1",
        "256 tokens: 8 sequences of 32, 2 a micro-batch, 2 micro-batches a rank",
        f"text.txt, {(text + 1) / 1000:.1f}k tokens in 1 document;",
        f"step 6/6  loss {records[-1]['loss']:.4f}",
        f"loss        {records[0]['loss']:.4f} -> {records[-1]['loss']:.4f}",
        f"loss {evaluation['val_loss']:.4f} ({evaluation['bits_per_byte']:.3f} bits per byte)",
        "checkpoint  runs/first/step-00000006",
        "model       runs/first/hf",
        "report      python -m picotron_min.report runs/first",
        " FLOPs a token: matmuls, causal half of attention",
        'pipeline("text-generation", model="runs/first/hf")',
    ):
        assert part in first_run.output
    assert "mfu_common" not in first_run.output  # the metrics have it: see docs/planner.md
    assert records[0]["loss"] > 5.4 and records[-1]["loss"] < 4.5


@pytest.mark.turns(1, 3)
@pytest.mark.parametrize("cp_engine", ["ring", "ulysses"])
def test_the_four_axes_together_train_the_same_model(workplace, first_run, cp_engine):
    layout = {"dp_size": 1, "pp_size": 2, "cp_size": 2, "tp_size": 2, "cp_engine": cp_engine}
    half = {"gradient_accumulation_steps": 4, "max_tokens": STEPS // 2 * 256}
    outcome = workplace.main(workplace.config("four", distributed=layout, training=half))
    assert outcome.code == 0, outcome.output
    assert "8 x cpu over gloo: dp 1 x pp 2 x cp 2 x tp 2, 1f1b\n" in outcome.output
    for name in ("loss", "grad_norm"):
        ours, expected = ([r[name] for r in workplace.steps(run)] for run in ("four", "first"))
        assert ours == pytest.approx(expected[: STEPS // 2], rel=1e-4)
    ours, expected = (workplace.evaluations(run)[0] for run in ("four", "first"))
    assert (ours["step"], ours["val_loss"]) == (3, pytest.approx(expected["val_loss"], rel=1e-4))
    # What every rank sent; the records of the steps are of rank 0 alone.
    run = read_run(workplace.folder / "runs/four")
    sizes = run.model, run.config.layout, run.config.workload
    assert not run.notes and len(run.ranks.ranks) == 8 and run.ranks.step == 2
    for rank, measured in enumerate(run.ranks.ranks):
        planned = planned_ledger(*sizes, rank)
        sent = {(a, c): n.bytes for a, by in measured.sent.items() for c, n in by.items()}
        assert sent == {key: round(number) for key, number in planned.items()}
    mine = run.ranks.ranks[0].sent.items()
    by_axis = {axis: sum(n.bytes for n in by.values()) for axis, by in mine}
    assert by_axis == run.steps[-1].comm_bytes


def losses_without_train_py(folder: Path, path: str) -> tuple[list, list]:
    """The results of a config's steps and evaluations, without train.py's loop."""
    os.chdir(folder)
    config = load_config(path)
    axes = build_axes(torch.device("cpu"), Layout(dp=2))
    model_config = resolve_model(config)
    data = open_data(config, open_text(config, BytesTokenizer(), 257), axes.dp.rank)
    training = Training(config, model_config, axes, torch.device("cpu"), data)
    steps, evaluations = [], []
    for step in range(STEPS):
        steps.append(tuple(training.step(step)[:3]))
        if step % 3 == 2:
            evaluations.append(training.evaluate())
    return steps, evaluations


def test_the_metrics_are_complete_and_to_the_last_digit(pool, workplace, first_run):
    records, evaluations = workplace.steps("first"), workplace.evaluations("first")
    saves = [record for record in workplace.metrics("first") if "save_seconds" in record]
    assert len(workplace.metrics("first")) == len(records) + len(evaluations) + len(saves)
    assert [record["step"] for record in saves] == [2, 4, 6]
    names = "step loss grad_norm learning_rate tokens tokens_per_second"
    names += " tokens_per_second_per_device mfu mfu_common hfu step_seconds memory_gb comm_bytes"
    for step, record in enumerate(records, 1):
        assert record.keys() == set(names.split())
        assert record["step"] == step and record["tokens"] == step * 8 * 32
        seconds, speed = record["step_seconds"], record["tokens_per_second"]
        assert speed * seconds == pytest.approx(8 * 32)
        assert record["tokens_per_second_per_device"] == speed / 2
        assert 0 < record["mfu"] == record["hfu"] < 1 and 0.1 < record["memory_gb"] < 4
    expected = pool.run(2, losses_without_train_py, workplace.folder, "first.json")
    for steps, val_losses in expected:
        assert [(r["loss"], r["grad_norm"], r["learning_rate"]) for r in records] == steps
        assert [r["val_loss"] for r in evaluations] == val_losses
    tokens_per_byte = 1 + 1 / (workplace.folder / "text.txt").stat().st_size
    assert [record["step"] for record in evaluations] == [3, 6]
    for record in evaluations:
        bits = record["val_loss"] / math.log(2) * tokens_per_byte
        assert record["bits_per_byte"] == pytest.approx(bits, rel=1e-12)


def test_the_finished_model_has_the_reported_validation_loss(
    workplace, first_run, monkeypatch, capsys
):
    code = re.search(r"```python\n(.*?)```", (ROOT / "docs/planner.md").read_text(), re.DOTALL)[1]
    monkeypatch.chdir(workplace.folder)
    exec(code.replace("config.json", "first.json").replace("checkpoints/tiny", "runs/first"), {})
    reported = workplace.evaluations("first")[-1]["val_loss"]
    assert float(capsys.readouterr().out) == pytest.approx(reported, abs=1e-5)


def test_a_run_resumed_at_its_latest_checkpoint_is_the_unbroken_run(workplace, first_run):
    latest = {"save_frequency": 2, "load_path": "latest", "save_dir": "runs/resumed"}
    config = workplace.config("resumed", checkpoint=latest)
    resumed = workplace.folder / "runs/resumed"
    for step in (2, 4):
        name = f"step-0000000{step}"
        shutil.copytree(workplace.folder / "runs/first" / name, resumed / name)
    (resumed / "metrics.jsonl").write_text('{"step": 4}\n')
    outcome = workplace.main(config)
    assert outcome.code == 0, outcome.output
    assert f"resumed from {Path('runs/resumed/step-00000004')}" in outcome.output
    assert numbers(workplace.steps("resumed")) == numbers(workplace.steps("first"))[4:]
    assert workplace.metrics("resumed")[0] == {"step": 4}
    assert workplace.evaluations("resumed") == workplace.evaluations("first")[1:]

    done = workplace.main(config)  # there is nothing left to do
    assert done.code == 0, done.output
    assert len(workplace.steps("resumed")) == 2
    assert "model       runs/resumed/hf" in done.output
    files = ["step-00000002", "step-00000004", "step-00000006"]
    assert workplace.files("resumed") == ["hf", "metrics.jsonl", "run.jsonl", *files]


def test_the_same_command_twice_keeps_the_first_run(workplace):
    training = {"max_tokens": 600, "total_train_steps": 200, "warmup_steps": 0}
    config = workplace.config("twice", distributed={"dp_size": 1}, training=training)
    for run in (1, 2):
        outcome = workplace.main(config)
        assert outcome.code == 0, outcome.output
        moved = "runs/twice held an earlier run: it is now in runs/twice/earlier-1"
        assert (moved in outcome.output) is (run == 2)
    earlier = workplace.folder / "runs/twice/earlier-1"
    assert sorted(path.name for path in earlier.iterdir()) == [
        name for name in workplace.files("twice") if name != "earlier-1"
    ]
    assert numbers(workplace.steps("twice/earlier-1")) == numbers(workplace.steps("twice"))

    # 128 tokens a step: 600 are reached in the fifth. The schedule does not see it.
    records = workplace.steps("twice")
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5]
    assert [record["step"] for record in workplace.evaluations("twice")] == [3, 5]
    assert "step-00000005" in workplace.files("twice")
    assert records[0]["comm_bytes"] == {}
    for step, record in enumerate(records):
        assert record["learning_rate"] == learning_rate_at(
            step, Recipe(learning_rate=0.01, schedule="cosine", total_train_steps=200)
        )


@pytest.mark.parametrize(
    "first,seen,tokens,last",
    [(0, 0, 24, 2), (0, 0, 25, 3), (10, 240, 240, 10), (10, 240, 241, 11), (0, 0, 9999, 200)],
)
def test_max_tokens_is_reached_after_the_steps_that_see_so_many(first, seen, tokens, last):
    config = Config(training={"max_tokens": tokens})
    batches = SimpleNamespace(seen_before=seen, tokens_per_step=12)
    started = SimpleNamespace(config=config, first_step=first, batches=batches)
    assert Inputs.last_step.fget(started) == last


@pytest.mark.parametrize(
    "first,last,sections,expected",
    [
        (6, 8, {"logging": {"trace_file": "t.json"}}, "trace_file stays empty: it records steps 9"),
        (6, 9, {"logging": {"trace_file": "t.json"}}, None),
        (6, 6, {}, "no step is left: runs/step-00000006 has 6 of 6; its model is exported"),
        (6, 9, {"training": {"seed": 7}}, "training.seed was 42 and is 7: from here on other data"),
        (6, 9, {"distributed": {"sequence_parallel": True}}, "sequence_parallel=true changes noth"),
    ],
)
def test_a_resumed_run_warns_of_what_is_other_than_expected(first, last, sections, expected):
    config, start = Config(**sections), Path("runs/step-00000006")
    same = {"config": config, "metadata": saved_by(Config()), "model_config": resolve_model(config)}
    text = TokenFile(np.zeros(99, np.uint16), None, 1)
    same |= {"weights": None, "start": start, "data": DATA, "text": text}
    same |= {"batches": SimpleNamespace(num_sequences=9, global_batch=8)}
    warnings = list(warnings_of(SimpleNamespace(first_step=first, last_step=last, **same)))
    assert len(warnings) == (expected is not None)
    assert not expected or warnings[0].startswith(expected)


def test_what_is_odd_about_a_text_is_said(workplace):
    (workplace.folder / "odd").mkdir()
    lines = "".join(json.dumps({"text": "the cat " * 13}) + "\n" for _ in range(2))
    (workplace.folder / "odd/a.jsonl").write_text(lines)
    (workplace.folder / "odd/README.md").touch()
    outcome = workplace.main(workplace.config("odd", dataset={"name": "odd"}))
    assert outcome.code == 0, outcome.output
    few = "the text has 5 sequences to train on: each step of 8 sequences repeats some"
    assert f"warning: {few}\n" in outcome.output
    assert re.search(
        r"warning: 1 file of dataset.name not read \(.*\): README.md\n", outcome.output
    )


def test_torchrun_with_the_wrong_number_of_processes_prints_the_right_command(workplace):
    config = workplace.config("wrong", distributed={"dp_size": 3})
    wrong_run = workplace.main(config, partial(torchrun, *STANDALONE, "--nproc_per_node", "2"))
    assert wrong_run.code != 0
    assert "this config needs 3 processes" in wrong_run.output and "with 2" in wrong_run.output
    assert wrong_run.output.count("torchrun --nproc_per_node 3 train.py --config wrong.json") == 1
    assert "(What follows is torchrun's own report. The reason is above.)" in wrong_run.output
    assert not (workplace.folder / "runs/wrong").exists()


def test_a_trace_of_the_pipeline_is_drawn_under_its_plan(workplace, capsys):
    trace = workplace.folder / "trace.json"
    config = workplace.config(
        "traced",
        distributed={"pp_size": 2, "dp_size": 1},
        training={"gradient_accumulation_steps": 3, "total_train_steps": 5},
        logging={"trace_file": str(trace)},
    )
    assert workplace.main(config).code == 0
    events = json.loads(trace.read_text())["traceEvents"]
    assert len(events) == 3 * 2 * 2 * 3  # steps, ranks, directions, micro-batches
    assert {event["args"]["step"] for event in events} == {2, 3, 4}
    draw.main(["--trace", str(trace)])
    drawn = capsys.readouterr().out
    assert "rank 1" in drawn and "bubble" in drawn
    run = read_run(workplace.folder / "runs/traced")
    assert run.trace and not run.notes, "the report knows its own trace"


def gradients_are_not_finite(after: int) -> None:
    measure, steps = train.measure_gradient, itertools.count()
    nan = torch.tensor([math.nan, 1.0])
    train.measure_gradient = lambda *args: measure(*args) * (nan if next(steps) >= after else 1)


@pytest.mark.parametrize(
    "finite,message",
    [
        (0, "not finite in the first 3 steps, before any weight was changed"),
        (2, "not finite in 3 steps in a row, up to step 5: the run has diverged. Resume from a"),
    ],
)
def test_a_run_that_diverges_stops_with_the_remedy(workplace, finite, message):
    name = f"diverges after {finite}"
    config = workplace.config(name, distributed={"dp_size": 1})
    outcome = workplace.main(config, partial(gradients_are_not_finite, finite))
    assert outcome.code == 1
    for step in (finite + 1, finite + 2):
        assert f"step {step} changed nothing: its gradient is not finite" in outcome.output
    assert outcome.output.count(message) == 1
    # Not from the checkpoint after step 4: it would end in the same way.
    assert "with checkpoint.load_path latest" not in outcome.output
    saved = [file for file in workplace.files(name) if file.startswith("step-")]
    assert saved == (["step-00000002"] if finite == 2 else []), "a skipped step was saved"
    norms = [record["grad_norm"] for record in workplace.steps(name)]
    assert norms[finite:] == [None, None] and None not in norms[:finite]


def test_a_run_whose_steps_were_all_skipped_exports_nothing(workplace):
    config = workplace.config("skipped", training={"total_train_steps": 2, "warmup_steps": 0})
    outcome = workplace.main(config, partial(gradients_are_not_finite, 0))
    assert outcome.code == 1 and "Done" not in outcome.output
    assert "not finite in any step, so that nothing was learned: no model is" in outcome.output
    assert workplace.files("skipped") == ["metrics.jsonl", "run.jsonl"]


def test_a_model_whose_weights_are_not_finite_is_not_exported(workplace):
    def train_to(step: int) -> Outcome:
        sections = {"training": {"total_train_steps": step}, "checkpoint": {"load_path": "latest"}}
        return workplace.main(workplace.config("nan", distributed={"dp_size": 1}, **sections))

    assert train_to(step=4).code == 0
    folder = workplace.folder / "runs/nan"
    for path in folder.glob("step-00000004/*.safetensors"):
        tensors = load_file(path)
        tensors["model.norm.weight"].fill_(math.nan)
        with safe_open(path, "pt") as file:
            save_file(tensors, path, file.metadata())
    shutil.rmtree(folder / "hf")
    for step in (4, 5):  # with no step left, and with one, which is skipped
        outcome = train_to(step)
        assert outcome.code == 1 and "Done" not in outcome.output, outcome.output
        assert outcome.output.count("the weights are not finite: no model is written") == 1
        assert not (folder / "hf").exists()


def wandb_is_a_stand_in() -> None:
    def init(**options) -> SimpleNamespace:
        print(f"wandb has id {options['id']}, resume {options['resume']}")
        return SimpleNamespace(log=lambda *_, **__: None, finish=lambda: print("wandb's summary"))

    settings = SimpleNamespace(settings=SimpleNamespace(mode="offline"))
    sys.modules["wandb"] = SimpleNamespace(setup=lambda: settings, init=init)


def test_wandb_has_one_id_over_interruptions_and_its_summary_before_ours(workplace):
    sections = {"distributed": {"dp_size": 1}, "logging": {"use_wandb": True}}
    sections["training"], ids = {"total_train_steps": 3}, []
    for part in ("new", "resumed", "other"):
        load_path = {"load_path": "latest" if part == "resumed" else None}
        config = workplace.config("wandb", checkpoint=load_path, **sections)
        outcome = workplace.main(config, wandb_is_a_stand_in)
        assert outcome.code == 0, outcome.output
        assert outcome.output.index("wandb's summary") < outcome.output.index("Done\n")
        assert outcome.output.count("wandb's summary") == 1
        ids += re.findall(r"wandb has id (\w+), resume allow", outcome.output)
    assert len(ids) == 3 and ids[0] == ids[1] != ids[2]


def check_skipped_steps(optimizer: str) -> None:
    training = make_training(make_config(dp=2, optimizer=optimizer))
    run_steps(training, range(2), bad_step=None)
    before = State(training)
    for step in (2, 3):
        (result,) = run_steps(training, range(step, step + 1), bad_step=step)
        assert result.skipped and not math.isfinite(result.grad_norm)
        assert math.isfinite(result.loss)
        State(training).assert_equal(before)
    assert training.skipped.total == 2
    (result,) = run_steps(training, range(4, 5), bad_step=None)
    assert not result.skipped and math.isfinite(result.grad_norm)
    with pytest.raises(AssertionError):
        State(training).assert_equal(before)
    run_steps(training, range(2), bad_step=0)
    run_steps(training, range(2, 3), bad_step=2)
    with pytest.raises(FloatingPointError, match="3 steps in a row, up to step 5"):
        for step in (3, 4):
            run_steps(training, range(step, step + 1), bad_step=step)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_step_with_a_bad_gradient_on_one_rank_changes_nothing_anywhere(pool, optimizer):
    pool.run(2, check_skipped_steps, optimizer)


def ignore_most_targets(training: Training) -> set[int]:
    """Ignore all targets of some sequences, few of others; return the counts that are left."""
    batch, counts = training.data.batch, set()

    def masked(step: int, micro_batch: int) -> Batch:
        whole = batch(step, micro_batch)
        ignored = whole.positions >= whole.tokens[:, :1] % 17
        targets = whole.targets.masked_fill(ignored, IGNORE_INDEX)
        counts.add((targets != IGNORE_INDEX).sum().item())
        return whole._replace(targets=targets)

    training.data.batch = masked
    return counts


def check_steps_against_the_textbook() -> None:
    """Compare our step with the plainest one: one batch, the mean loss, SGD written out."""
    sizes = {"optimizer": "sgd", "learning_rate": 0.5, "grad_clip": 0.3, "weight_decay": 0.1}
    config = make_config(dtype="float64", **sizes)
    training, model = make_training(config), with_autograd(make_training(config).chunks[0].model)
    ignore_most_targets(training)
    clipped = []
    for step, rate in enumerate((0.25, 0.5, 0.5, (1 + math.sqrt(0.5)) / 4)):
        batches = [training.data.batch(step, micro_batch) for micro_batch in range(2)]
        tokens, targets = (torch.cat([batch[i] for batch in batches]) for i in range(2))
        logits = model(tokens, torch.arange(16)).flatten(0, 1)
        loss = F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORE_INDEX)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        norm = math.sqrt(sum(gradient.square().sum() for gradient in gradients))
        clip = min(1.0, 0.3 / norm)
        clipped.append(clip < 1)
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            decay = 0.1 if parameter.ndim == 2 else 0.0
            parameter.data -= rate * (clip * gradient + decay * parameter.data)

        result = training.step(step)
        assert result[:4] == pytest.approx((loss.item(), norm, rate, False), rel=0, abs=1e-6)
        for ours, theirs in zip(training.parameters.values(), model.parameters(), strict=True):
            # 1e-6: clipping divides by norm + 1e-6, as torch does.
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
    assert any(clipped)


def test_a_step_equals_the_textbooks(pool):
    pool.run(1, check_steps_against_the_textbook)


def steps_with_ignored_targets(config: Config) -> tuple[list, dict, set]:
    training = make_training(config)
    counts = ignore_most_targets(training)
    results = [training.step(step)[:2] for step in range(3)]
    return results, {name: p.detach() for name, p in training.parameters.items()}, counts


@pytest.mark.parametrize("dp,micro_batches", [(1, 4), (2, 2), (4, 1), (4, 2), (8, 1)])
def test_ignored_targets_count_nothing_wherever_they_are(pool, dp, micro_batches):
    def config(dp, micro_batches):
        sizes = {"micro_batch_size": 8 // dp // micro_batches}
        sizes["gradient_accumulation_steps"] = micro_batches
        steps = {"optimizer": "sgd", "learning_rate": 0.5}
        return make_config(dp=dp, dtype="float64", **sizes, **steps)

    ((results, weights, _),) = pool.run(1, steps_with_ignored_targets, config(1, 1))
    counts = set()
    for other_results, other_weights, other_counts in pool.run(
        dp, steps_with_ignored_targets, config(dp, micro_batches)
    ):
        np.testing.assert_allclose(other_results, results, rtol=0, atol=1e-10)
        for name, weight in weights.items():
            torch.testing.assert_close(other_weights[name], weight, rtol=0, atol=1e-10)
        counts |= other_counts
    assert len(counts) > 2, "the targets are spread evenly, so this test proves nothing"


def check_evaluation() -> None:
    training = make_training(make_config(dp=2))
    training.step(0)
    before = State(training)
    gradients = {name: p.grad.clone() for name, p in training.parameters.items()}
    outputs = []
    model = training.chunks[0].model
    model.register_forward_hook(lambda module, inputs, loss: outputs.append(loss))
    loss = training.evaluate()
    assert loss == training.evaluate()
    assert outputs and not any(output.requires_grad for output in outputs)
    State(training).assert_equal(before)
    for name, parameter in training.parameters.items():
        assert torch.equal(parameter.grad, gradients[name])
    assert not training.step(1).skipped  # evaluation leaves training as it was


def test_evaluation_keeps_no_graph_and_changes_nothing(pool):
    pool.run(2, check_evaluation)
