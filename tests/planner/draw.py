"""Draws docs/planner.svg, predicted speeds above published ones with their 90% intervals.

python -m tests.planner.draw
"""

from pathlib import Path

from matplotlib import pyplot

from picotron_min.planner.validate import read_runs

FILES = [Path("tests", name) for name in ("published_runs.csv", "published_runs_2.csv")]


def main() -> None:
    runs = [run for file in FILES for run in read_runs(file) if run.use == "counted"]
    pyplot.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "planner"}  # the same each time
    _, axes = pyplot.subplots(figsize=(7, 7))
    for kind in sorted({run.kind for run in runs}):
        of_kind = [run for run in runs if run.kind == kind]
        measured, predicted = zip(*((r.measured, r.predicted) for r in of_kind), strict=True)
        bars = [(r.predicted - r.interval[0], r.interval[1] - r.predicted) for r in of_kind]
        bars = [*zip(*bars, strict=True)]
        axes.errorbar(measured, predicted, bars, fmt="o", ms=3, elinewidth=0.5, label=kind)
    axes.axline((10, 10), (1e5, 1e5), color="grey", linewidth=0.5)
    axes.loglog()
    axes.set(xlabel="published tokens/s of a GPU", ylabel="predicted, with 90% intervals")
    axes.legend()
    pyplot.savefig("docs/planner.svg", bbox_inches="tight", metadata={"Date": None})


if __name__ == "__main__":
    main()
