"""The page to play with: it shows what the trainer computes, and works in a browser."""

import json
import math
import random
import re
import shutil
import subprocess
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from picotron_min.extensions.schedules.registry import SCHEDULES, plan_on_paper
from picotron_min.extensions.schedules.simulator import peak_live
from picotron_min.pipeline_messages import inputs_of
from picotron_min.placement import part, placements
from picotron_min.planner.choices import rule_problems
from picotron_min.planner.links import ranks_of_axis
from picotron_min.planner.memory import memory_of_ranks
from picotron_min.planner.parameters import layers_of_ranks
from picotron_min.planner.traffic import planned_traffic
from picotron_min.report import explore_data as tables
from picotron_min.report.explore import main

ROOT = Path(__file__).parents[2]
PAGE, SCRIPT = ROOT / "docs/explore.html", ROOT / "picotron_min/report/explore_tables.js"
NODE, CHROMIUM = shutil.which("node"), shutil.which("chromium")
AXES, SENT = ("pp", "dp", "cp", "tp", "dp_cp", "dp_cp_tp"), ("pp", "cp", "tp", "dp_cp", "dp_cp_tp")


def random_case(of: random.Random) -> dict:
    shapes = [s for s in product(tables.SIZES, repeat=4) if math.prod(s) <= tables.MOST_RANKS]
    L = dict(zip(AXES, of.choice(shapes), strict=False))
    rank = of.randrange(math.prod(L.values()))
    L |= {"model": of.choice([*tables.MODELS]), "engine": of.choice([*SCHEDULES])}
    L |= {"m": of.choice(tables.SIZES), "zero": of.randrange(4), "sp": of.randrange(2)}
    config = tables.MODELS[L["model"]].model_config
    weights = [*tables.weights_of(config.parameter_shapes())]
    case = {"L": L, "rank": rank, "weight": of.choice(weights)}
    return case | {"layer": of.randrange(config.num_layers)}


def layout_in(L: dict):
    sizes, sp = {axis: L[axis] for axis in ("dp", "cp", "tp")}, L["tp"] * L["sp"] > 1
    sharding = tables.ZERO[L["zero"] if L["dp"] * L["cp"] > 1 else 0]
    return tables.layout_of(L["engine"], L["pp"], **sizes, sequence_parallel=sp, sharding=sharding)


def computed_by_the_trainer(L: dict, rank: int, weight: str, layer: int) -> dict:
    name, layout = L["model"], layout_in(L)
    config, device = tables.MODELS[name].model_config, "cuda"
    work = replace(tables.MODELS[name].work, num_micro_batches=L["m"])
    shapes = config.parameter_shapes()
    full = tables.weights_of(shapes)[weight].replace(".0.", f".{layer}.")
    of = placements(shapes, layout, tied=False)[full]
    rows = {axis: ranks_of_axis(layout, axis, rank) for axis in AXES}
    at = {axis: row.index(rank) for axis, row in rows.items()}
    parts = [part(shapes[full], cuts, at, layout.axis_sizes) for cuts in (of.cuts, of.owned)]
    stages = layers_of_ranks(config, layout, work.seq_length)[at["pp"]]
    ends = {"embed_tokens": any(stage.start == 0 for stage in stages)}
    ends |= dict.fromkeys(("norm", "lm_head"), any(s.stop == config.num_layers for s in stages))
    has = ends.get(weight, any(layer in stage for stage in stages))
    firsts = range(0, layout.world_size, layout.world_size // layout.pp)
    like = [planned_traffic(config, layout, work, rank % firsts.step + first) for first in firsts]
    _, plans, timeline = plan_on_paper(L["engine"], L["pp"], L["m"])
    starts = {span[:2]: span.start for span in timeline.spans}
    uses = inputs_of(plans, SCHEDULES[L["engine"]].place).items()
    pairs = [(made, used) for used, inputs in uses for made in inputs if made[0] != used[0]]
    return {
        "sum": ranks_of_axis(layout, of.sums[0], rank),
        "parts": [[[s.start, s.stop] for s in slices] for slices in parts],
        "has": has,
        "memory": [[*row] for row in memory_of_ranks(config, layout, work, device)],
        "sent": [[sent.get(axis, 0) for axis in SENT] for sent in like],
        "messages": sorted([m[0], starts[m], to[0], starts[to]] for m, to in pairs),
        "peaks": [peak_live(plan) for plan in plans],
    }


FOUND = """
const { data, cases, sent } = JSON.parse(require("fs").readFileSync(0));
const T = require(process.argv[1]).lookups(data);
console.log(JSON.stringify(cases.map(({ L, rank, weight, layer }) => {
  if (T.refusal(L)) return T.refusal(L);
  const { cuts, sum, owned } = T.placed(L, weight), { actions } = T.plan(L);
  return {
    sum: T.row(L, sum, rank), has: T.has(L, rank, weight, layer), memory: T.memory(L),
    parts: [cuts, owned].map(of => T.part(L, weight, rank, of)),
    sent: T.traffic(L, T.place(L, rank).tp).map(of => sent.map(axis => of[axis])),
    messages: actions.flatMap((of, pp) =>
      of.flatMap(a => a.to ? [[pp, a.start, +a.to, a.used]] : [])),
    peaks: T.plan(L).live,
  };
})));
"""


@pytest.mark.skipif(not NODE, reason="needs node")
def test_the_script_finds_what_the_trainer_computes(number=40):
    data, of = re.search(r'id="data">(.*?)</script>', PAGE.read_text())[1], random.Random(7)
    cases = [random_case(of) for _ in range(number)]
    given = {"data": json.loads(data), "cases": cases, "sent": SENT}
    command = [NODE, "-e", FOUND, str(SCRIPT)]
    done = subprocess.run(command, input=json.dumps(given), capture_output=True, text=True)
    fit = 0
    for case, found in zip(cases, json.loads(done.stdout), strict=True):
        model = tables.MODELS[case["L"]["model"]]
        if why := rule_problems(model, layout_in(case["L"]), model.work):
            assert found in why, case
            continue
        fit += 1
        for name, value in computed_by_the_trainer(**case).items():
            assert found[name] == value, f"{name} of {case}"
    assert fit > number / 3


def test_the_page_is_one_small_file_that_the_course_links_back_to():
    page, course = PAGE.read_text(), (ROOT / "docs/course.md").read_text()
    assert len(page.encode()) < 200_000 and "default-src 'none'" in page, "it may load nothing"
    assert re.findall('https?://[^"]*', page) == ["http://www.w3.org/2000/svg"]
    files = re.findall(r'href="(\.\./picotron_min/\w+\.py)"', page)
    assert len(files) == 6 and all(f"({file})" in course for file in files)


@pytest.mark.slow
def test_the_committed_page_is_what_the_command_writes(tmp_path):
    main(["--out", str(tmp_path / "page.html")])
    written, renew = (tmp_path / "page.html").read_text(), "python -m picotron_min.report.explore"
    assert written == PAGE.read_text(), f"renew it: {renew}"


@pytest.mark.skipif(not CHROMIUM, reason="needs chromium")
def test_the_page_works_with_keys_in_a_narrow_window(tmp_path):
    use = (ROOT / "tests/report/explore_page.js").read_text()
    page = tmp_path / "page.html"
    page.write_text(PAGE.read_text().replace("</body>", f"<script>{use}</script></body>"))
    options = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking"
    options += " --window-size=500,6000 --blink-settings=preferredColorScheme=1"
    options += f" --user-data-dir={tmp_path} --dump-dom file://{page}"
    done = subprocess.run([CHROMIUM, *options.split()], capture_output=True, text=True, timeout=60)
    assert re.search("<title>(.*?)</title>", done.stdout)[1] == "[]"
