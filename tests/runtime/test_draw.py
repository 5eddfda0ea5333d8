"""The drawing of plans, and the command for it."""

import re

import pytest

from picotron_min import pipeline_schedule
from picotron_min.extensions.schedules.registry import SCHEDULES, build_plans, plan_on_paper
from picotron_min.extensions.schedules.simulator import simulate
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
    *_, timeline = plan_on_paper(engine, 4, 40)
    lines = draw.draw(timeline, width=60).splitlines()
    assert len(lines) == 4 and max(map(len, lines)) <= 60


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--stages 0", "0 ranks x 8 micro-batches x 1 chunks: draw at least one"),
        ("--engine 1f1b --chunks 2", "1f1b has 1 chunk a rank, not 2: use 1, or"),
    ],
)
def test_bad_input_is_reported_with_exit_code_2(arguments, message, capsys):
    with pytest.raises(SystemExit) as exit:
        draw.main(arguments.split())
    assert exit.value.code == 2
    assert message in capsys.readouterr().err
