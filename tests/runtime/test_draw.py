"""The drawing of plans and of what runs measured, and the command for it."""

import json
import re
from pathlib import Path

import pytest

from picotron_min import pipeline_schedule
from picotron_min.extensions.schedules.registry import SCHEDULES, build_plans, plan_on_paper
from picotron_min.extensions.schedules.simulator import Span, simulate
from picotron_min.pipeline_schedule import bubble
from picotron_min.runtime import draw


@pytest.mark.quick
def test_the_drawing_is_the_one_in_the_docstring():
    for engine in ("afab", "1f1b"):
        for line in draw.draw(simulate(build_plans(engine, 2, 4)), width=40).splitlines():
            assert f"    {line}" in pipeline_schedule.__doc__


def test_the_command_prints_drawing_and_formulas(capsys):
    draw.main(["--engine", "1f1b", "--stages", "4", "--microbatches", "8"])
    out = capsys.readouterr().out
    assert "rank 0  F0F1F2F3····" in out and "(p-1) / (m + p-1)" in out
    assert re.search(r"rank 0 +27.3% +27.3% +4 +4\n", out)


@pytest.mark.parametrize("engine", SCHEDULES)
def test_a_drawing_is_never_wider_than_asked(engine):
    *_, timeline = plan_on_paper(engine, 4, 101)
    lines = draw.draw(timeline, width=60).splitlines()
    assert len(lines) == 4 and max(map(len, lines)) <= 60


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--stages 0", "0 ranks x 8 micro-batches x 1 chunks: draw at least one"),
        ("--engine 1f1b --chunks 2", "1f1b has 1 chunk a rank, not 2: use 1, or"),
        ("--trace nowhere.json", "No such file"),
        ("--trace t.json --engine afab", "not allowed with argument"),
    ],
)
def test_bad_input_is_reported_with_exit_code_2(arguments, message, capsys):
    with pytest.raises(SystemExit) as exit:
        draw.main(arguments.split())
    assert exit.value.code == 2
    assert message in capsys.readouterr().err


def write_trace(path: Path, spans: list[Span], engine: str) -> None:
    """A trace in which steps 6 and 7 are alike; one unit of the spans is 1 ms."""
    events = [
        {"name": str(action), "ts": 1e6 * step + 1000 * start, "dur": 1000 * (end - start)}
        | {"pid": rank}
        | {"args": {"step": step, "chunk": action.chunk, "micro_batch": action.micro_batch}}
        for step in (7, 6)
        for rank, action, start, end in spans
    ]
    about = {"pp_engine": engine, "run_began": None}
    path.write_text(json.dumps({"traceEvents": events, "otherData": about}))


def test_a_trace_is_drawn_under_its_plan(tmp_path, capsys):
    engine, chunks = "interleaved", 2
    plans = build_plans(engine, 4, 8, chunks)
    slow = simulate(plans, send_time=1.0)
    write_trace(tmp_path / "t.json", slow.spans, engine)
    draw.main(["--trace", str(tmp_path / "t.json")])
    out = capsys.readouterr().out
    ideal, figure = simulate(plans).makespan, f"bubble {bubble(4, 8, chunks):.1%}\n"
    assert f"planned, {engine}, step 8: {ideal:.2f} ms, {figure}" in out
    assert f"measured, {engine}, step 8: {slow.makespan:.2f} ms" in out
    assert f"{slow.makespan - ideal:+.2f} ms from the plan" in out


def test_a_file_that_is_no_trace_is_refused(tmp_path):
    (tmp_path / "t.json").write_text("{")
    with pytest.raises(ValueError, match=r"t\.json is not a trace of a pipeline: Expecting"):
        draw.read_trace(str(tmp_path / "t.json"))
    second_rank = [span for span in simulate(build_plans("1f1b", 2, 4)).spans if span.rank]
    write_trace(tmp_path / "t.json", second_rank, "1f1b")
    with pytest.raises(ValueError, match="rank 0: 'F0' is missing"):
        draw.read_trace(str(tmp_path / "t.json"))
