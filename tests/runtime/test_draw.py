"""The drawing of plans and of what runs measured, and the command for it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from picotron_min import pipeline_schedule
from picotron_min.extensions.schedules.registry import SCHEDULES, build_plans
from picotron_min.extensions.schedules.simulator import Span, simulate
from picotron_min.pipeline_schedule import bubble
from picotron_min.runtime import draw

ROOT = Path(__file__).parents[2]


def test_the_drawing_is_the_one_in_the_docstring():
    for engine in ("afab", "1f1b"):
        for line in draw.draw(simulate(build_plans(engine, 2, 4)), width=40).splitlines():
            assert f"    {line}" in pipeline_schedule.__doc__


def test_the_command_prints_drawing_and_formulas_without_torch():
    command = [sys.executable, "-X", "importtime", "-m", "picotron_min.runtime.draw"]
    command += ["--engine", "1f1b", "--stages", "4", "--microbatches", "8"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0
    assert "rank 0  F0F1F2F3····" in result.stdout
    assert re.search(r"rank 0 +27.3% +27.3% +4 +4\n", result.stdout)
    assert "(p-1) / (m + p-1)" in result.stdout
    loaded = {line.split("|")[-1].strip().split(".")[0] for line in result.stderr.splitlines()}
    assert "picotron_min" in loaded
    assert not loaded & {"torch", "numpy", "pydantic"}


def test_a_reader_that_stops_early_is_no_error():
    read, write = os.pipe()
    os.close(read)  # as `| head` does, when it has seen enough
    with os.fdopen(write, "wb") as pipe:
        command = [sys.executable, "-m", "picotron_min.runtime.draw"]
        result = subprocess.run(command, stdout=pipe, stderr=subprocess.PIPE, cwd=ROOT)
    assert (result.returncode, result.stderr) == (0, b"")


@pytest.mark.parametrize("engine", SCHEDULES)
@pytest.mark.parametrize("m", [8, 11, 101])
def test_a_drawing_that_is_too_narrow_names_the_width_that_it_needs(engine, m, capsys):
    sizes = ["--engine", engine, "--microbatches", str(m)]
    draw.main([*sizes, "--width", "60"])
    needed = re.search("60 columns are too few .* --width (.*) [|] less", capsys.readouterr().out)
    for columns, is_enough in ((int(needed[1]), True), (int(needed[1]) - 1, False)):
        draw.main([*sizes, "--width", str(columns)])
        out = capsys.readouterr().out
        assert ("columns are too few" in out) is not is_enough
        drawn = "\n".join(re.findall(r"^rank \d  (.*[·═].*)$", out, flags=re.MULTILINE))
        assert max(map(len, drawn.splitlines())) <= columns - len("rank 0  ")
        letters = "FfBb" if SCHEDULES[engine].chunks > 1 else "FB"
        names = [f"{letter}{i}" for letter in letters for i in range(m)]
        times = [len(re.findall(rf"{name}(?!\d)", drawn)) for name in names]
        assert (times == [4] * len(names)) is is_enough  # each on each of 4 ranks


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--stages 0", "0 ranks x 8 micro-batches x 1 chunks: draw at least one of each"),
        ("--microbatches 0", "4 ranks x 0 micro-batches x 1 chunks: draw at"),
        ("--microbatches few", "invalid int value: 'few'"),
        ("--engine 1f1b --chunks 2", "1f1b has 1 chunk a rank, not 2: use 1, or engine afab"),
        ("--trace nowhere.json", "error: nowhere.json: No such file or directory"),
        ("--trace t.json --stages 2", "--trace contains its own plan"),
    ],
)
def test_bad_input_is_reported_with_exit_code_2(arguments, message, capsys):
    with pytest.raises(SystemExit) as exit:
        draw.main(arguments.split())
    assert exit.value.code == 2
    assert message in capsys.readouterr().err


def write_trace(path: Path, spans: list[Span], **other_data: str) -> None:
    """A trace in which steps 6 and 7 are alike; one unit of the spans is 1 ms."""
    events = [
        {
            "name": str(s.action), "ph": "X", "ts": 1e6 * step + 1000 * s.start, "tid": 0,
            "dur": 1000 * (s.end - s.start), "pid": s.rank,
            "args": {"step": step, "chunk": s.action.chunk, "micro_batch": s.action.micro_batch},
        }
        for step in (7, 6) for s in spans if s.action.peer is None
    ]  # fmt: skip
    events.append({"name": "optimizer"})
    path.write_text(json.dumps({"traceEvents": events, "otherData": other_data}))


def test_a_trace_is_drawn_under_its_plan(tmp_path, capsys):
    engine, chunks = "interleaved", 2
    plans = build_plans(engine, 4, 8, chunks)
    slow = simulate(plans, send_time=1.0)
    write_trace(tmp_path / "t.json", slow.spans, pp_engine=engine)
    draw.main(["--trace", str(tmp_path / "t.json")])
    out = capsys.readouterr().out
    ideal = simulate(plans).makespan
    assert f"planned, {engine}, step 8: {ideal:.2f} ms" in out
    assert f"measured, {engine}, step 8: {slow.makespan:.2f} ms" in out
    busy = 8 * chunks * 3
    figures = rf"rank 2 +{bubble(4, 8, chunks):.1%} +{slow.bubble(2):.1%} +{busy:.2f} ms\n"
    assert re.search(figures, out)


def event(name: str, begins: str) -> str:
    of = '"args": {"micro_batch": 0, "chunk": 0, "step": 1}'
    return f'{{"name": "{name}", "ts": {begins}, "dur": 1, "pid": 0, {of}}}'


@pytest.mark.parametrize(
    "content, message",
    [
        ("{", "is not a trace of a pipeline: JSONDecodeError"),
        (f'{{"traceEvents": [{event("F0", "NaN")}]}}', "ValueError('F0 is at no time')"),
        (f'{{"traceEvents": [{event("F0", "1e400")}]}}', "ValueError('F0 is at no time')"),
        (f'{{"traceEvents": [{event("", "1")}]}}', "is not a trace of a pipeline: IndexError"),
        ('{"otherData": {"pp_engine": "x"}}', "is not a trace of a pipeline: KeyError('x')"),
        (
            '{"traceEvents": [{"name": "F0", "ph": "X", "ts": 1, "dur": 2, "pid": 1,'
            ' "args": {"step": 1, "chunk": 0, "micro_batch": 0}}]}',
            "ranks [1]: it must have all ranks of one pipeline, counted from 0",
        ),
        (
            '{"traceEvents": [{"name": "B0", "ph": "X", "ts": 1, "dur": 2, "pid": 0,'
            ' "args": {"step": 1, "chunk": 0, "micro_batch": 0}}]}',
            "rank 0: 'F0' is missing",
        ),
    ],
)
def test_a_file_that_is_no_trace_is_refused(content, message, tmp_path, capsys):
    path = tmp_path / "t.json"
    path.write_text(content)
    with pytest.raises(SystemExit) as exit:
        draw.main(["--trace", str(path)])
    assert exit.value.code == 2
    assert message in capsys.readouterr().err
