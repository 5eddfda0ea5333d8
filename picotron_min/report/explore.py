"""One page to play with layouts, which opens anywhere, without a network.

python -m picotron_min.report.explore --out docs/explore.html

    explore_data.py      what the trainer computes, for every layout of the page
    explore_tables.js    looks it up
    explore_ranks.js     the bar, and who has what
    explore_time.js      the step in time, the ring, memory and bytes, questions
    explore.html         words, and how all looks
"""

import argparse
import json
import math
from pathlib import Path

from picotron_min.extensions.settings import Layout
from picotron_min.planner.choices import Request
from picotron_min.report import explore_data as tables
from picotron_min.runtime.hardware import GPUS
from picotron_min.runtime.public_models import find_preset


def page_data() -> dict[str, object]:
    data = {"axes": Layout().grids[0].axes, "sizes": tables.SIZES, "most": tables.MOST_RANKS}
    data |= {"gpu": "H100", "capacity": _capacity(), "schedules": tables.schedules()}
    models = {name: _model(name) for name in tables.WORKLOADS}
    return data | {"rings": tables.rings(), "models": models}


def _capacity() -> float:
    """Bytes of an H100 that the planner lets a plan use."""
    model = "Llama-3.1-8B"
    return Request(find_preset(model), GPUS["H100"], 1, tables.WORKLOADS[model][0], 1).budget


def _model(name: str) -> dict[str, object]:
    config, (work, _) = find_preset(name), tables.WORKLOADS[name]
    shapes = config.parameter_shapes()
    about = (
        f"{sum(map(math.prod, shapes.values())):,} parameters, {work.dtype}, "
        f"{work.micro_batch_size} x {work.seq_length} tokens a micro-batch"
    )
    found = {"about": about, "layers": config.num_layers, "placed": tables.placed(name)}
    found["shapes"] = {short: shapes[full] for short, full in tables.weights_of(name).items()}
    return found | tables.costs(name)


def page() -> str:
    """The whole document: scripts and data take the places that explore.html has for them."""
    folder = Path(__file__).parent
    text = (folder / "explore.html").read_text()
    files = (folder / f"explore_{part}.js" for part in ("tables", "ranks", "time"))
    text = text.replace("/*scripts*/", "".join(file.read_text() for file in files))
    # A "<" of the data must not end the script that it stands in.
    data = json.dumps(page_data(), separators=(",", ":")).replace("<", "\\u003c")
    return text.replace("/*data*/", data)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m picotron_min.report.explore")
    parser.add_argument("--out", type=Path, default=Path("docs/explore.html"))
    out = parser.parse_args(arguments).out
    out.write_text(page())
    print(f"wrote {out}: {out.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
