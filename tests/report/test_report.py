"""The report of a run, as data and as a page; test_report_browser.py opens it."""

import json
import math
import re
import subprocess
import sys
from datetime import timedelta
from html.parser import HTMLParser
from pathlib import Path

import pytest

from picotron_min.report.__main__ import NO_MATPLOTLIB, main
from picotron_min.report.curves import smooth
from picotron_min.report.one_run import header, measured_peaks
from picotron_min.report.page import shown
from picotron_min.report.reading import read_run
from tests import recorded_runs
from tests.recorded_runs import write_records, write_run, write_start


class Page(HTMLParser):
    """What a report shows: its tables, by the words above them, its pictures and its text."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.source, self.tables, self.pictures = source, [], []
        self.text, self.open = "", []
        self.feed(self.source)
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list) -> None:
        values = dict(attrs)
        if tag not in ("meta", "img"):
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append([values.get("data-value"), ""])
        elif tag == "svg" and values.get("role") == "img":
            self.pictures.append(values["aria-label"])

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
        if self.open and self.open[-1] in ("td", "th"):
            self.tables[-1][-1][-1][1] += data

    def rows(self, *head: str) -> dict[str, dict[str, tuple[float | None, str]]]:
        """The table with these columns: its rows by their first cell."""
        table = next(t for t in self.tables if set(head) <= {text for _, text in t[0]})
        names, rows = [text for _, text in table[0]], {}
        for row in table[1:]:
            cells = [(value and float(value), text) for value, text in row]
            rows[row[0][1]] = dict(zip(names, cells, strict=True))
        return rows

    def facts(self) -> dict[str, str]:
        """The first table, of names and texts."""
        return {row[0][1]: row[1][1] for row in self.tables[0]}


def report(*folders: Path, out: Path | None = None) -> Page:
    main([*map(str, folders), *(["--out", str(out)] if out else [])])
    return Page((out or folders[0] / "report.html").read_text())


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("reports") / "whole"
    write_run(path)
    return path


@pytest.fixture(scope="module")
def page(folder) -> Page:
    return report(folder)


CURVES = ["loss", "learning_rate", "grad_norm", "tokens_per_second", "mfu", "mfu_common"]


def test_a_report_has_all_pictures_and_needs_no_network(page):
    assert page.pictures == [*CURVES, "The pipeline in time"]
    widths = [float(width) for width in re.findall(r"--width: ([\d.]+)px", page.source)]
    assert len(widths) == 7 and max(widths) <= 500 - 32, "beside the margins of a narrow window"
    # Names of XML, and nothing that a browser would fetch.
    assert set(re.findall(r"https?://[^\s\"<>]*", page.source)) <= {
        "http://www.w3.org/1999/xlink",
        "http://www.w3.org/2000/svg",
    }
    assert not re.search(r"<(script|link|img|iframe)\b|@import|url\((?!#)", page.source)
    assert "default-src 'none'" in page.source


def test_pictures_have_their_own_identifiers_and_the_colours_of_the_page(page):
    own = re.findall(r'\bid="([^"]*)"', page.source)
    used = set(re.findall(r'(?:href="|url\()#([^")]*)', page.source))
    assert len(own) == len(set(own)) and used and used <= set(own)
    drawn = re.sub(r"<style>.*?</style>", "", page.source, flags=re.DOTALL)
    assert set(re.findall(r"#[0-9a-fA-F]{6}\b", drawn)) == set()
    defined = set(re.findall(r"(--[\w-]+):", page.source))
    assert set(re.findall(r"var\((--[\w-]+)\)", page.source)) <= defined
    assert page.source.count("prefers-color-scheme: dark") == 1


def test_numbers_in_tables_are_those_of_the_records(folder, page):
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = {str(r["step"]): r for r in records if "loss" in r}
    losses = {str(r["step"]): r["val_loss"] for r in records if "val_loss" in r}
    rows = page.rows("step", "grad_norm")
    assert {"1", "20"} <= rows.keys() and len(rows) == 12
    for step, row in rows.items():
        for name, (value, text) in row.items():
            if name == "val_loss":
                assert value == losses.get(step)
            elif name != "step":
                assert value == steps[step][name]
                assert float(text.replace(",", "")) == pytest.approx(value, rel=1e-4)
    sent = page.rows("axis", "measured bytes", "among ranks")
    measured = {axis: row["measured bytes"][0] for axis, row in sent.items()}
    assert measured == steps["20"]["comm_bytes"]
    assert all(row["planned bytes"] == row["measured bytes"] for row in sent.values())
    assert sent["dp_cp"]["among ranks"][1] == "0, 2"
    rows = page.rows("collective", "least of any rank")["dp_cp"]  # the last: a reduction
    assert rows["planned bytes"] == rows["bytes"] and rows["calls"][0] > 0


def test_the_header_has_settings_cost_and_both_definitions_of_mfu(page):
    facts = page.facts()
    assert facts["model"] == "tiny <b>& co</b>"  # escaped in the source
    assert facts["device"] == "Some CPU, gloo" and facts["versions"] == "torch 2.13.0"
    assert facts["started"] == "2026-11-22 06:30 UTC" and facts["steps"] == "20, from 1 to 20"
    assert facts["took"].startswith("10s in steps, 1s in saves")
    tokens = sum(0.5 * (1000 + step) for step in range(1, 21))
    assert facts["tokens"] == f"{tokens:,.0f}"
    rows = page.rows("mean", "FLOPs a token")
    assert rows["mfu"]["mean"][0] == pytest.approx(0.3105)
    assert rows["mfu_common"]["mean"][0] == pytest.approx(0.4105)
    # By hand: 6 x the parameters of matmuls, and half of 12 L Q D S; then all parameters and pairs.
    layer = 128 * (128 + 2 * 64 + 128) + 3 * 128 * 384
    matmuls, attention = 4 * layer + 257 * 128, 12 * 4 * 128 * 256
    both = 257 * 128 + 9 * 128  # the embedding, and the norms
    assert rows["mfu"]["FLOPs a token"][0] == 6 * matmuls + attention // 2
    assert rows["mfu_common"]["FLOPs a token"][0] == 6 * (matmuls + both) + attention
    assert facts["FLOPs"].startswith(f"{tokens * (6 * matmuls + attention // 2):.3g}")


def test_memory_is_the_plan_beside_the_fullest_rank_of_each_stage(page):
    rows = page.rows("pipeline rank", "activations", "planned", "measured")
    assert [row["measured"][0] for row in rows.values()] == pytest.approx([330.0, 370.0])  # MB
    assert [row["layers"][1] for row in rows.values()] == ["0 to 1", "2 to 3"]
    assert [row["ranks"][1] for row in rows.values()] == ["0 to 3", "4 to 7"]
    for row in rows.values():
        names = ("weights", "gradients", "optimizer state", "activations", "loss")
        assert sum(row[name][0] for name in names) == pytest.approx(row["planned"][0])


def test_the_pipeline_is_planned_above_measured_with_both_bubbles(page):
    # Rank 1 takes 4 x 60 ms and waits for one forward and one backward of rank 0, of 30 ms. In the
    # plan actions take their means, 15 and 30 ms: 4 x 45, and one of each.
    rows = page.rows("planned bubble", "measured bubble").values()
    assert [row["planned bubble"][0] for row in rows] == pytest.approx([0.2, 0.2])
    assert [row["measured bubble"][0] for row in rows] == pytest.approx([150 / 270, 30 / 270])
    assert "planned: 225 ms, bubble 20.0%" in page.text
    assert "measured: 270 ms, bubble 33.3%" in page.text


DAMAGED = [
    '{"step": 21, "loss": 1.0, "grad',  # a kill in the middle of a line
    "\x00\x00\udcff",
    "[" * 5000,
    '{"step": 21}',
    "3",
    {"step": 10**30},
    {"loss": 10**400},
    {"comm_bytes": {"zz": 1}},
    {"step_seconds": -1},
    {"watts": "many"},
]


def test_damaged_lines_are_left_out_and_counted(tmp_path):
    config = write_run(tmp_path)
    whole = json.loads((tmp_path / "metrics.jsonl").read_text().partition("\n")[0])
    with (tmp_path / "metrics.jsonl").open("a", errors="surrogateescape") as file:
        for damage in DAMAGED:
            line = damage if isinstance(damage, str) else json.dumps({**whole, "step": 21} | damage)
            file.write(f"{line}\n")
    write_records(tmp_path, config, [22])
    run = read_run(tmp_path)
    assert [record.step for record in run.steps] == [*range(1, 21), 22]
    assert f"metrics.jsonl has {len(DAMAGED)} damaged lines: left out" in run.notes[0]


def test_damage_is_reported_on_the_page_and_on_the_terminal(tmp_path, capsys):
    write_run(tmp_path, logging={"trace_file": None})
    for name in ("metrics.jsonl", "run.jsonl"):
        with (tmp_path / name).open("a") as file:
            file.write('{"start": {"at": "cut o')
    page, out = report(tmp_path), capsys.readouterr()
    assert out.out == f"wrote {tmp_path / 'report.html'}\n"
    for name in ("metrics.jsonl", "run.jsonl"):
        assert f"{name} has 1 damaged line: left out" in page.text
        assert f"{name} has 1 damaged line: left out" in out.err
    # And without a trace the pipeline's plan is drawn alone.
    assert page.pictures[-1] == "The pipeline in time" and "measured:" not in page.text
    assert "Set logging.trace_file" in page.text


def test_without_a_pipeline_or_a_readable_start_sections_are_left_out(tmp_path):
    write_run(tmp_path, distributed={"dp_size": 2})
    assert read_run(tmp_path).trace and "The pipeline" not in report(tmp_path).text
    log = tmp_path / "run.jsonl"
    log.write_text(log.read_text()[100:])
    assert "has no settings: only" in report(tmp_path).text


def test_a_trace_that_is_damaged_or_of_another_run_is_left_out(tmp_path):
    config = write_run(tmp_path)
    path = tmp_path / "trace.json"
    trace = json.loads(path.read_text())
    trace["traceEvents"].pop()
    for damaged in (json.dumps(trace), "{}"):
        path.write_text(damaged)
        assert "trace.json is left out: " in read_run(tmp_path).notes[0]
    for hours, began in ((-1, "05:30"), (2, "08:30")):  # earlier, or in the same place later
        of_other = recorded_runs.STARTED + timedelta(hours=hours)
        recorded_runs.write_trace(tmp_path, config, of_other)
        run = read_run(tmp_path)
        assert run.trace is None
        assert f"it is of another run, that began 2026-11-22T{began}" in run.notes[0]


def test_of_repeated_steps_the_later_ones_count(tmp_path):
    config = write_run(tmp_path, range(1, 16))  # killed after a checkpoint of step 10
    write_start(tmp_path, config, after_step=10)
    write_records(tmp_path, config, range(11, 14), loss=7.0)
    run = read_run(tmp_path)
    # Steps 14 and 15 and the validation of step 15 are of weights that were given up, too.
    assert [record.step for record in run.steps] == [*range(1, 14)]
    assert [record.loss for record in run.steps[10:]] == [7.0] * 3
    assert [record.step for record in run.evaluations] == [5, 10]
    assert len(run.all_steps) == 18 and not run.notes
    assert run.ranks is None  # of the start before: the layout may be another
    facts = header(run).facts
    assert facts["steps"] == "13, from 1 to 13; 5 steps more, after which it resumed from before"
    assert facts["took"].startswith("9s in steps, 1s in saves")
    assert facts["resumed"] == "after step 10"
    tokens = [sum(0.5 * (1000 + step) for step in steps) for steps in (range(1, 16), range(11, 14))]
    repeated = 0.5 * sum(1000 + step for step in range(11, 16))
    assert facts["tokens"] == f"{sum(tokens):,.0f}, {repeated:,.0f} of them in repeated steps"


def test_another_run_in_the_same_file_replaces_the_first(tmp_path):
    config = write_run(tmp_path, range(1, 16))
    write_records(tmp_path, config, range(1, 4), loss=7.0)
    run = read_run(tmp_path)
    assert [record.loss for record in run.steps] == [7.0] * 3 == [r.loss for r in run.all_steps]
    assert run.evaluations == run.saves == []


def test_a_single_step_and_numbers_that_were_not_finite_are_drawn(tmp_path):
    config = recorded_runs.config_of(tmp_path, {"distributed": {"dp_size": 1}})
    write_start(tmp_path, config)
    nothing = {"mfu": None, "mfu_common": None}
    write_records(tmp_path, config, [1], loss=math.nan, grad_norm=math.inf, **nothing)
    page = report(tmp_path)
    assert page.pictures == ["learning_rate", "tokens_per_second"]
    (row,) = page.rows("step", "grad_norm").values()
    assert row["loss"] == row["mfu"] == row["grad_norm"] == (None, "n/a")
    assert "What ranks send" not in page.text, "a single rank sends nothing"
    assert page.rows("mean", "FLOPs a token")["mfu"]["mean"] == (None, "n/a")


def test_what_some_runs_record_is_drawn_for_them(tmp_path):
    config = recorded_runs.config_of(tmp_path, {})
    energy = {"joules": 51.2, "watts": 102.4}
    extra = {"mtp_1_loss": 2.5, "load_imbalance": 1.5, "dropped_per_layer": [0.0], "z_loss": None}
    write_records(tmp_path, config, [1, 2], measures=extra | energy)
    page = report(tmp_path)
    assert page.pictures == [*CURVES, "watts", "load_imbalance", "joules", "mtp_1_loss"]
    assert "only metrics.jsonl is shown" in page.text
    tokens = 0.5 * (1001 + 1002)
    assert page.facts()["energy"] == f"0.10 kJ, {102.4 / tokens:.3g} J a token, in all steps"
    rows = page.rows("step", "joules")
    assert [row["joules"][0] for row in rows.values()] == [51.2, 51.2]
    (tmp_path / "partly").mkdir()
    write_records(tmp_path / "partly", config, [1], measures=energy)
    write_records(tmp_path / "partly", config, [2])
    assert read_run(tmp_path / "partly").joules is None, "not of a part of the steps"


def test_a_folder_that_was_moved_still_has_its_files(tmp_path):
    write_run(tmp_path / "before")
    run = read_run((tmp_path / "before").rename(tmp_path / "after"))
    assert run.trace and len(run.steps) == 20 and not run.notes


def test_a_folder_without_a_run_is_the_users_mistake(tmp_path, capsys):
    for folder in (tmp_path / "missing", tmp_path):
        assert "metrics.jsonl does not exist: name the check" in refusal(capsys, folder)
    for metrics in ('{"step": 0, "save_seconds": 1}\n', "\x00\n"):
        (tmp_path / "metrics.jsonl").write_text(metrics)
        assert "has no record of a step" in refusal(capsys, tmp_path)
    assert not (tmp_path / "report.html").exists()


def refusal(capsys, *arguments: object) -> str:
    """The message with which the command exits."""
    with pytest.raises(SystemExit) as exit_:
        main([*map(str, arguments)])
    assert exit_.value.code == 2
    return capsys.readouterr().err


def test_without_matplotlib_the_command_that_installs_it_is_printed(folder, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert refusal(capsys, folder) == NO_MATPLOTLIB + "\n"
    assert 'pip install -e ".[report]"' in NO_MATPLOTLIB


def test_a_report_does_not_wait_for_torch():
    modules = ", ".join(f"picotron_min.report.{name}" for name in ("one_run", "compare"))
    command = [sys.executable, "-c", f"import sys, {modules}; sys.exit('torch' in sys.modules)"]
    assert subprocess.run(command, cwd=Path(__file__).parents[2]).returncode == 0


def test_a_page_that_cannot_be_written_is_reported(folder, page, tmp_path, capsys):
    out = tmp_path / "no folder" / "report.html"
    assert "no folder" in refusal(capsys, folder, "--out", out)
    main([str(folder)])  # its own page may be made again
    error = refusal(capsys, folder, "--out", folder / "metrics.jsonl")
    assert "exists and is not a report" in error and len(read_run(folder).steps) == 20


def test_several_folders_are_compared_in_a_table_and_a_plot(folder, tmp_path):
    other = tmp_path / "other"
    write_run(other, training={"learning_rate": 0.001, "gradient_accumulation_steps": 8})
    page = report(folder, other, out=tmp_path / "compared.html")
    assert page.pictures == ["loss"] and "run 2" in page.text
    rows = page.rows("run", "folder")
    for row, name, changed in zip(rows.values(), (folder, other), (4, 8), strict=True):
        run, tokens = read_run(name), 20 * 2 * 8 * changed * 256
        assert row["folder"][1] == str(name)
        results = {key: row[key][0] for key in ("steps", "tokens", "seconds", "loss", "val_loss")}
        last = run.evaluations[-1].val_loss
        assert [*results.values()] == [20, tokens, run.seconds, run.steps[-1].loss, last]
        assert row["training.gradient_accumulation_steps"][1] == str(changed)
    assert [row["training.learning_rate"][1] for row in rows.values()] == ["0.0003", "0.001"]
    assert {"training.seed", "joules", "checkpoint.save_dir"}.isdisjoint(rows["1"])


def test_validation_of_other_sequences_is_not_compared_in_silence(folder, tmp_path):
    note = "The runs differ in training.eval_batches: their val_loss does not compare"
    for name, training in (("more", {"eval_batches": 8}), ("same", {"seed": 7})):
        write_run(tmp_path / name, training={"gradient_accumulation_steps": 4} | training)
        text = report(folder, tmp_path / name, out=tmp_path / "compared.html").text
        assert (note in text) is (name == "more")


def test_numbers_are_shown_with_five_digits():
    numbers = None, "text", 1234567, 12345.67, 2.0, 0.000123456, 1.2345678
    assert [*map(shown, numbers)] == [
        *("n/a", "text", "1,234,567", "12,346", "2", "0.00012346", "1.2346"),
    ]


def test_smoothing_by_halves():
    assert smooth([2.0] * 7) == [2.0] * 7
    assert smooth([0.0, 3.0]) == pytest.approx([0.0, 2.0])  # weights 1/2 and 1
    assert smooth([None, 1.0, None, 4.0]) == pytest.approx([None, 1.0, 1.0, 3.0])  # 1/2 and 1


def test_peaks_of_an_earlier_layout_do_not_count(tmp_path):
    config = write_run(tmp_path)
    records = tmp_path / "metrics.jsonl"
    first, *rest = records.read_text().splitlines()
    records.write_text("\n".join([json.dumps(json.loads(first) | {"memory_gb": 99.0}), *rest]))
    assert measured_peaks(read_run(tmp_path), 4) == [99e9, pytest.approx(370e6)]
    write_start(tmp_path, config, after_step=10)
    assert measured_peaks(read_run(tmp_path), 4) == [300e6, None], "stage 1 is not measured again"
