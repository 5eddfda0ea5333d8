"""The report of a run: its page against the records, and what it reads of damaged folders."""

import json
import math
import re
import sys
from datetime import timedelta
from html import unescape
from pathlib import Path

import pytest

from picotron_min.costs import model_flops_per_token
from picotron_min.report.__main__ import main
from picotron_min.report.curves import smooth
from picotron_min.report.one_run import header, measured_peaks, schedule
from picotron_min.report.page import shown
from picotron_min.report.reading import read_run
from picotron_min.runtime.hardware import common_flops_per_token
from tests import recorded_runs
from tests.recorded_runs import write_records, write_run, write_start


def report(*folders: Path) -> str:
    out = folders[0] / "report.html"
    main([*map(str, folders), "--out", str(out)])
    return out.read_text()


def table(page: str, *head: str) -> dict[str, dict[str, str | float]]:
    """The table with these columns: its rows by their first cell, and numbers with all digits."""
    cell = re.compile(r'<t[hd](?: scope="\w+")?(?: data-value="(.*?)")?>(.*?)</t[hd]>')
    for source in re.findall(r'<table class="numbers">(.*?)</table>', page, re.DOTALL):
        names, *rows = (
            [float(number) if number else unescape(text) for number, text in cell.findall(row)]
            for row in re.findall("<tr>(.*?)</tr>", source, re.DOTALL)
        )
        if set(head) <= set(names):
            return {row[0]: dict(zip(names, row, strict=True)) for row in rows}
    raise AssertionError(f"no table has {head}")


def facts(page: str) -> dict[str, str]:
    return dict(re.findall('<tr><th scope="row">(.*?)</th><td>(.*?)</td></tr>', page))


def pictures(page: str) -> list[str]:
    return re.findall('<svg role="img" aria-label="(.*?)"', page)


def refusal(capsys, *arguments: object) -> str:
    """The message with which the command exits."""
    with pytest.raises(SystemExit) as exit_:
        main([*map(str, arguments)])
    assert exit_.value.code == 2
    return capsys.readouterr().err


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("reports") / "whole"
    write_run(path)
    return path


@pytest.fixture(scope="module")
def page(folder) -> str:
    return report(folder)


CURVES = ["loss", "learning_rate", "grad_norm", "tokens_per_second", "mfu", "mfu_common"]


def test_a_page_has_all_pictures_in_its_own_colours_and_needs_no_network(page):
    assert pictures(page) == [*CURVES, "The pipeline in time"]
    widths = re.findall(r"--width: ([\d.]+)px", page)
    assert max(map(float, widths)) <= 500 - 32, "beside the margins of a narrow window"
    assert not re.search(r"<(script|link|img|iframe)\b|@import|url\((?!#)", page)
    assert "Drafts of" not in page, "without prediction layers"
    own = re.findall(r'\bid="([^"]*)"', page)
    used = set(re.findall(r'(?:href="|url\()#([^")]*)', page))
    assert len(own) == len(set(own)) and used and used <= set(own), "of several pictures"
    drawn = re.sub(r"<style>.*?</style>", "", page, flags=re.DOTALL)
    assert not re.search("#[0-9a-fA-F]{6}", drawn), "it would not change in the dark theme"


def test_numbers_in_tables_are_those_of_the_records(folder, page):
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = {str(r["step"]): r | {"val_loss": ""} for r in records if "loss" in r}
    for record in (r for r in records if "val_loss" in r):
        steps[str(record["step"])]["val_loss"] = record["val_loss"]
    rows = table(page, "step", "grad_norm")
    assert {"1", "20"} <= rows.keys() and len(rows) == 12
    for step, row in rows.items():
        assert row == {name: steps[step][name] for name in row} | {"step": step}
    sent = table(page, "axis", "among ranks")
    assert {axis: row["measured bytes"] for axis, row in sent.items()} == steps["20"]["comm_bytes"]
    assert all(row["planned bytes"] == row["measured bytes"] for row in sent.values())
    assert sent["dp_cp"]["least of any rank"] < sent["dp_cp"]["most of any rank"]


def test_the_header_has_settings_cost_and_both_definitions_of_mfu(folder, page):
    of_page = facts(page)
    assert of_page["model"] == "tiny &lt;b&gt;&amp; co&lt;/b&gt;", "texts of a run are escaped"
    assert of_page["took"] == "10s in steps, 1s in saves" and of_page["steps"] == "20, from 1 to 20"
    assert of_page["tokens"] == "10,105"  # 500.5, 501, ... a step
    model, rows = read_run(folder).model, table(page, "mean", "FLOPs a token")
    flops = {"mfu": model_flops_per_token(model, 256)}
    flops["mfu_common"] = common_flops_per_token(model, 256)
    assert {name: row["FLOPs a token"] for name, row in rows.items()} == flops
    assert rows["mfu"]["mean"] == pytest.approx(0.3105)


def test_memory_is_the_plan_beside_the_fullest_rank_of_each_stage(page):
    rows = table(page, "pipeline rank", "activations", "planned", "measured").values()
    assert [row["measured"] for row in rows] == pytest.approx([330.0, 370.0])  # MB
    assert [row["ranks"] for row in rows] == ["0 to 3", "4 to 7"]
    for row in rows:
        names = ("weights", "gradients", "optimizer state", "activations", "loss")
        assert sum(row[name] for name in names) == pytest.approx(row["planned"])


def test_the_pipeline_is_planned_above_measured_with_both_bubbles(page):
    # Rank 1 takes 4 x 60 ms and waits for one forward and one backward of rank 0, of 30 ms. In the
    # plan actions take their means, 15 and 30 ms: 4 x 45, and one of each.
    rows = table(page, "planned bubble", "measured bubble").values()
    assert [row["planned bubble"] for row in rows] == pytest.approx([0.2, 0.2])
    assert [row["measured bubble"] for row in rows] == pytest.approx([150 / 270, 30 / 270])
    assert "planned: 225 ms, bubble 20.0%" in page and "measured: 270 ms, bubble 33.3%" in page


DAMAGED = [
    '{"step": 21, "loss": 1.0, "grad',  # a kill in the middle of a line
    "\x00\x00\udcff",
    "3",
    {"comm_bytes": {"zz": 1}},
    {"load_imbalance": "many"},
]


def test_damaged_lines_are_left_out_and_counted(tmp_path):
    config = write_run(tmp_path, logging={"trace_file": None})
    whole = json.loads((tmp_path / "metrics.jsonl").read_text().partition("\n")[0])
    with (tmp_path / "metrics.jsonl").open("a", errors="surrogateescape") as file:
        for damage in DAMAGED:
            line = damage if isinstance(damage, str) else json.dumps({**whole, "step": 21} | damage)
            file.write(f"{line}\n")
    write_records(tmp_path, config, [22])
    run = read_run(tmp_path)
    assert [record.step for record in run.steps] == [*range(1, 21), 22]
    assert f"metrics.jsonl has {len(DAMAGED)} damaged lines: left out" in run.notes[0]
    (drawn,) = schedule(run)  # without a trace the plan alone
    assert "planned: " in drawn.svg and "measured: " not in drawn.svg


def test_a_trace_that_is_damaged_or_of_another_run_is_left_out(tmp_path):
    config = write_run(tmp_path / "before")
    folder = (tmp_path / "before").rename(tmp_path / "after")  # a folder may be moved
    assert read_run(folder).trace
    trace = json.loads((folder / "trace.json").read_text())
    trace["traceEvents"].pop()
    (folder / "trace.json").write_text(json.dumps(trace))
    assert "trace.json is left out: " in read_run(folder).notes[0]
    recorded_runs.write_trace(folder, config, recorded_runs.STARTED - timedelta(hours=1))
    run = read_run(folder)
    assert run.trace is None and "began 2026-11-22T05:30" in run.notes[0]


def test_of_repeated_steps_the_later_ones_count(tmp_path):
    config = write_run(tmp_path, range(1, 16))  # killed after a checkpoint of step 10
    write_start(tmp_path, config, after_step=10)
    write_records(tmp_path, config, range(11, 14), loss=7.0, memory_gb=0.2)
    run = read_run(tmp_path)
    # Steps 14 and 15 and the validation of step 15 are of weights that were given up, too.
    assert [record.step for record in run.steps] == [*range(1, 14)]
    assert [record.loss for record in run.steps[10:]] == [7.0] * 3
    assert [record.step for record in run.evaluations] == [5, 10] and not run.notes
    assert measured_peaks(run, 4) == [200e6, None]  # the layout before may have been another
    of_page = header(run)
    assert of_page["steps"].startswith("13, from 1 to 13; 5 steps more")
    assert of_page["took"].startswith("9s in steps, 1s in saves")
    assert of_page["resumed"] == "after step 10"
    assert of_page["tokens"] == "9,078, 2,532 of them in repeated steps"  # 500.5, 501, ... a step
    write_records(tmp_path, config, range(1, 4), loss=6.0)  # another run replaces the first
    run = read_run(tmp_path)
    assert [record.loss for record in run.steps] == [6.0] * 3 == [r.loss for r in run.all_steps]
    assert run.evaluations == run.saves == []


def test_a_step_that_was_not_finite_is_drawn_with_what_else_it_has(tmp_path, capsys):
    config = recorded_runs.config_of(tmp_path, {})
    nothing = {"loss": math.nan, "grad_norm": math.inf, "mfu": None, "mfu_common": None}
    measures = {"load_imbalance": 1.5, "dropped_per_layer": [0.0], "z_loss": None}
    measures |= {f"mtp_{j}_acceptance": p for j, p in enumerate([0.75, 0.5, 0.625], 1)}
    write_records(tmp_path, config, [1], measures=measures, **nothing)
    page = report(tmp_path)
    assert pictures(page)[:3] == ["learning_rate", "tokens_per_second", "load_imbalance"]
    (row,) = table(page, "step", "grad_norm").values()
    assert row["loss"] == row["mfu"] == row["grad_norm"] == "n/a"
    # By hand, depth by depth: 1 + 3/4 + (1/4 to 1/2) + (0 to 1/2).
    assert "makes 2 to 2.75 tokens" in page
    for seen in (page, capsys.readouterr().err):
        assert "only metrics.jsonl is shown" in seen and "What ranks send" not in seen


def test_a_folder_without_a_run_is_the_users_mistake(tmp_path, capsys):
    assert "metrics.jsonl does not exist: name the check" in refusal(capsys, tmp_path / "missing")
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "save_seconds": 1}\n')
    assert "has no record of a step" in refusal(capsys, tmp_path)


def test_a_report_that_cannot_be_written_says_why(folder, capsys, monkeypatch):
    refused = refusal(capsys, folder, "--out", folder / "metrics.jsonl")
    assert "exists and is not a report" in refused and len(read_run(folder).steps) == 20
    with monkeypatch.context() as patched:
        patched.setattr("picotron_min.report.one_run.report", lambda run: "<!DOCTYPE html>")
        for out, why in (("missing/page.html", "No such file"), ("/dev/full", "No space left")):
            assert f"{out} cannot be written: {why}" in refusal(capsys, folder, "--out", out)
    monkeypatch.setitem(sys.modules, "picotron_min.report.one_run", None)
    assert 'pip install -e ".[report]"' in refusal(capsys, folder)


def test_several_folders_are_compared_in_a_table_and_a_plot(folder, tmp_path):
    changed = {"learning_rate": 0.001, "gradient_accumulation_steps": 8, "eval_batches": 8}
    write_run(tmp_path, training=changed)
    page = report(tmp_path, folder)
    assert pictures(page) == ["loss"] and "run 2" in page
    rows = table(page, "run", "folder").values()
    for row, name, accumulated in zip(rows, (tmp_path, folder), (8, 4), strict=True):
        run, tokens = read_run(name), 20 * 2 * 8 * accumulated * 256
        results = [row[key] for key in ("folder", "tokens", "seconds", "val_loss")]
        assert results == [str(name), tokens, run.seconds, run.evaluations[-1].val_loss]
        assert row["training.gradient_accumulation_steps"] == str(accumulated)
        assert {"training.seed", "checkpoint.save_dir"}.isdisjoint(row)
    assert "differ in training.eval_batches: their val_loss does not compare" in page


@pytest.mark.quick
def test_numbers_are_shown_with_five_digits():
    numbers = None, 1234567, 12345.67, 2.0, 0.000123456, 1.2345678
    assert " ".join(map(shown, numbers)) == "n/a 1,234,567 12,346 2 0.00012346 1.2346"


@pytest.mark.quick
def test_smoothing_by_halves():
    assert smooth([None, 1.0, None, 4.0]) == pytest.approx([None, 1.0, 1.0, 3.0])  # 1/2 and 1
