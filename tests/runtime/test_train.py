"""train.py as its users meet it: its output, its files, its exit codes; and the one train step.

Runs are forks, see workplace.py.
"""

import itertools
import json
import math
import os
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import train
from picotron_min.checkpoint import training_tensors
from picotron_min.data import Batch
from picotron_min.loss import IGNORE_INDEX
from picotron_min.planner.traffic import planned_ledger
from picotron_min.report.reading import read_run
from picotron_min.runtime.config import Config
from picotron_min.runtime.config_checks import resolve_model
from picotron_min.runtime.reporter import warnings_of
from picotron_min.runtime.token_file import TokenFile
from tests.assembled import MODEL, make_config, make_training
from tests.runtime.test_hugging_face_experts import tensors_of
from tests.training import Training, with_autograd
from tests.workplace import ROOT, Outcome


@pytest.fixture(scope="module")
def first_run(workplace) -> Outcome:
    """Two processes; it saves to runs/first."""
    return workplace.main(workplace.config("first"))


def test_python_train_py_trains_and_reports(workplace, first_run):
    assert first_run.code == 0, first_run.output
    saved = [f"step-0000000{step}" for step in (2, 4, 6)]
    assert workplace.files("first") == ["hf", "metrics.jsonl", "run.jsonl", *saved]
    records, evaluation = workplace.steps("first"), workplace.evaluations("first")[-1]
    assert first_run.output.startswith("starting 2 processes, reading text.txt ...\npicotron-min\n")
    for part in (
        "random weights, seed 42",
        "0.01 (cosine, with 2 of 6 steps to warm up)",
        "2 x cpu over gloo: dp 2 x pp 1 x cp 1 x tp 1",
        "256 tokens: 8 sequences of 32, 2 a micro-batch, 2 micro-batches a rank",
        f"step 6/6  loss {records[-1]['loss']:.4f}",
        f"loss {evaluation['val_loss']:.4f} ({evaluation['bits_per_byte']:.3f} bits per byte)",
        "checkpoint  runs/first/step-00000006",
    ):
        assert part in first_run.output
    assert records[0]["loss"] > 5.4 and records[-1]["loss"] < 4.5


def test_the_records_of_a_run_are_complete(workplace, first_run):
    records, evaluations = workplace.steps("first"), workplace.evaluations("first")
    saves = [record["step"] for record in workplace.metrics("first") if "save_seconds" in record]
    assert saves == [2, 4, 6] and [record["step"] for record in evaluations] == [3, 6]
    assert [(r["step"], r["tokens"]) for r in records] == [(s, s * 256) for s in range(1, 7)]
    for record in records:
        assert record["tokens_per_second"] * record["step_seconds"] == pytest.approx(256)
        assert record["tokens_per_second_per_device"] == record["tokens_per_second"] / 2
        assert 0 < record["mfu"] == record["hfu"] < record["mfu_common"] < 1
        assert 0.1 < record["memory_gb"] < 4
    bits = evaluations[1]["val_loss"] / math.log(2)
    num_bytes = (workplace.folder / "text.txt").stat().st_size
    assert evaluations[1]["bits_per_byte"] == pytest.approx(bits * (1 + 1 / num_bytes), rel=1e-12)


def test_the_finished_model_has_the_reported_validation_loss(
    workplace, first_run, monkeypatch, capsys
):
    code = re.search(r"```python\n(.*?)```", (ROOT / "docs/planner.md").read_text(), re.DOTALL)[1]
    monkeypatch.chdir(workplace.folder)
    exec(code.replace("config.json", "first.json").replace("checkpoints/tiny", "runs/first"), {})
    reported = workplace.evaluations("first")[-1]["val_loss"]
    assert float(capsys.readouterr().out) == pytest.approx(reported, abs=1e-5)


def test_a_checkpoint_becomes_a_model_without_a_step(workplace, first_run):
    checkpoint = {"load_path": "runs/first/step-00000006"}
    config = workplace.config("model", training={"max_tokens": 1}, checkpoint=checkpoint)
    code, output, _ = workplace.main(config)
    assert code == 0 and workplace.metrics("model") == []
    assert "resumed from runs/first/step-00000006" in output and "hf" in output
    assert "picotron_min.report" not in output, "there is nothing to report"
    first, model = (tensors_of(workplace.folder / f"runs/{run}/hf") for run in ("first", "model"))
    torch.testing.assert_close(model, first, rtol=0, atol=0)


def test_a_model_that_transformers_lacks_trains_without_an_export(workplace):
    """It leaves a trace, and what each rank has sent."""
    trace = workplace.folder / "trace.json"
    config = workplace.config(
        "own",
        distributed={"pp_size": 2, "dp_size": 1},
        training={"gradient_accumulation_steps": 3},
        model={"qk_norm": True, "qkv_bias": True},
        checkpoint={"load_path": "latest"},
        logging={"trace_file": str(trace)},
    )
    code, output, _ = workplace.main(config)
    assert code == 0 and "no model of transformers is like it" in output
    assert "Done" in output and "pipeline(" not in output
    assert "step-00000006" in workplace.files("own") and "hf" not in workplace.files("own")
    events = json.loads(trace.read_text())["traceEvents"]
    assert len(events) == 3 * 2 * 2 * 3  # steps, ranks, directions, micro-batches
    run = read_run(workplace.folder / "runs/own")
    assert run.trace.step == 4 and not run.notes, "the report knows its own trace"
    assert run.ranks.step == 2
    for rank, measured in enumerate(run.ranks.ranks):  # of the records, only rank 0
        sent = {(a, c): n.bytes for a, by in measured.sent.items() for c, n in by.items()}
        planned = planned_ledger(run.model, run.config.layout, run.config.workload, rank)
        assert sent == {key: round(n) for key, n in planned.items()}


def test_a_run_warns_of_what_is_other_than_expected():
    text = TokenFile(np.zeros(99, np.uint16), None, 1)
    config = Config.model_validate({"logging": {"log_energy": True}})  # as older files may have
    inputs = SimpleNamespace(
        config=config,
        metadata=None,
        weights=None,
        model_config=resolve_model(config),
        text=text._replace(not_read=("README.md",)),
        batches=SimpleNamespace(num_sequences=5, global_batch=8),
        start=Path("runs/step-00000006"),
        first_step=6,
        last_step=6,
    )
    parts = (
        "log_energy=true has no effect",
        "1 file of",
        "5 sequences to",
        "step-00000006 has 6 of 6",
    )
    for warning, part in zip(warnings_of(inputs), parts, strict=True):
        assert part in warning


def under_torchrun_as_one_of_two() -> None:
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}


def test_torchrun_with_the_wrong_number_of_processes_prints_the_right_command(workplace):
    config = workplace.config("wrong", distributed={"dp_size": 3})
    code, output, _ = workplace.main(config, under_torchrun_as_one_of_two)
    command = "torchrun --nproc_per_node 3 train.py --config wrong.json"
    assert code == 2 and output.count(f"with 2: run  {command}") == 1
    assert not (workplace.folder / "runs/wrong").exists()


def later_gradients_are_not_finite() -> None:
    measure, steps = train.measure_gradient, itertools.count()
    nan = torch.tensor([math.nan, 1.0])
    train.measure_gradient = lambda *args: measure(*args) * (nan if next(steps) >= 2 else 1)


def test_a_run_that_diverges_stops_with_the_remedy_and_saves_nothing_more(workplace):
    config = workplace.config("diverges", distributed={"dp_size": 1})
    code, output, _ = workplace.main(config, later_gradients_are_not_finite)
    reason = "in a row, up to step 5: the run has diverged. Resume from a"
    assert code == 1 and output.count(reason) == 1 and "Done" not in output
    assert "step 4 changed nothing: its gradient is not" in output
    # Not from the checkpoint after step 4: it would end in the same way.
    assert "with checkpoint.load_path latest" not in output
    assert workplace.files("diverges") == ["metrics.jsonl", "run.jsonl", "step-00000002"]
    finite = [record["grad_norm"] is not None for record in workplace.steps("diverges")]
    assert finite == [True, True, False, False]


def state_of(training: Training) -> dict[str, torch.Tensor]:
    parts = training.parameters, training.model.buffers, training.optimizer
    return {name: tensor.clone() for name, tensor in training_tensors(*parts).items()}


def check_skipped_steps(folder: Path) -> None:
    training = make_training(make_config(dp=2, optimizer="adamw"), MODEL)
    weight = [*training.parameters.values()][-1]
    training.step(0)
    before = state_of(training)
    hook = weight.register_hook(lambda g: g * (math.nan if dist.get_rank() == 1 else 1))
    for step in (1, 2):
        result = training.step(step)
        assert result.skipped and not math.isfinite(result.grad_norm)
        assert math.isfinite(result.loss)
        torch.testing.assert_close(state_of(training), before, rtol=0, atol=0)
    training.skipped.has_learned = False  # as if these were the first
    with pytest.raises(FloatingPointError, match="so that nothing was learned: no model is"):
        training.saver.export(folder)
    hook.remove()
    assert not training.step(3).skipped and training.skipped.total == 2
    with pytest.raises(AssertionError):
        torch.testing.assert_close(state_of(training), before)


def test_a_step_with_a_bad_gradient_on_one_rank_changes_nothing_anywhere(pool, tmp_path):
    pool.run(2, check_skipped_steps, tmp_path / "hf")


def ignore_most_targets(training: Training) -> None:
    """All of some sequences, few of others."""
    batch = training.data.batch

    def masked(step: int, micro_batch: int) -> Batch:
        whole = batch(step, micro_batch)
        ignored = whole.positions >= whole.tokens[:, :1] % 17
        return whole._replace(targets=whole.targets.masked_fill(ignored, IGNORE_INDEX))

    training.data.batch = masked


def check_steps_against_the_textbook() -> None:
    """Compare our step with the plainest one: one batch, the mean loss, SGD written out."""
    rates = {"schedule": "cosine", "warmup_steps": 2, "total_train_steps": 6}
    config = make_config(micro_batches=2, grad_clip=0.3, weight_decay=0.1, **rates)
    training, other = make_training(config, MODEL), make_training(config, MODEL)
    model = with_autograd(other.chunks[0].model)
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
