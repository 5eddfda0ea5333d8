"""The real training with a student's function in it, beside one with the course's own.

Both are runs of train.py, in real processes: gloo, not the simulated network. Where the same
numbers are computed in the same order, losses are the same to the last digit.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from exercises.exercise import ROOT, Exercise, load
from exercises.loading import import_with
from exercises.source import parse, solution

STEPS = 10
ROUNDING = 1e-5  # of a float32 loss, after some steps of sums in another order


def compare(exercise: Exercise, file: Path, config: dict, steps: int = STEPS) -> bool:
    """Train twice, print both losses of each step, and whether all are equal."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        print(f"{steps} steps with the course's {exercise.qualified_name} ...", flush=True)
        course, yours = Path(folder, "course"), Path(folder, "yours")
        right = _losses(exercise, "solution", config, [steps], course)
        if not right:
            print("The course's own function fails, too: the config or the course is at fault.")
            return False
        stops = stops_of(config, steps)
        halt = f", stopped and resumed after {stops[0]}" if len(stops) > 1 else ""
        print(f"{steps} steps with yours{halt} ...\n", flush=True)
        mine = _losses(exercise, str(file), config, stops, yours)
        text, is_right = judge(right, mine) if mine else ("", False)
        if not is_right:
            print("\nThe first wrong tensor, in a tiny model (docs/difference.md):\n", flush=True)
            own = Path(folder, "config.json")
            own.write_text(json.dumps(config))
            if _succeeds(exercise, str(file), own, "difference"):
                print("No tensor is wrong there: the mistake shows only with other sizes, or with")
                print("something that this comparison switches off, or one process makes it, too")
                print("(docs/difference.md).")
    if not mine:
        return False
    print("\nstep  the course's loss     yours")
    for step, (a, b) in enumerate(zip(right, mine, strict=True), 1):
        print(f"{step:4}  {a!r:20}  {b!r:20}{'' if a == b else '  differs'}")
    print(f"\n{text}")
    return is_right


def judge(right: list[float], mine: list[float]) -> tuple[str, bool]:
    """What two runs' losses have in common, and whether that is enough."""
    furthest = max(abs(a / b - 1) for a, b in zip(mine, right, strict=True))
    if not furthest:
        return f"equal to the last digit in all {len(right)} steps", True
    if furthest < ROUNDING:
        return f"the same up to rounding: they differ by at most {furthest:.1e} of the loss", True
    return f"they differ by up to {furthest:.1e} of the loss, which is more than rounding", False


def stops_of(config: dict, steps: int) -> list[int]:
    """After how many steps the student's run ends: it is stopped once, where it can resume."""
    resumes = config.get("checkpoint", {}).get("load_path") == "latest"
    return [steps // 2, steps] if resumes and steps > 1 else [steps]


def short_config(config: dict, steps: int, folder: Path) -> dict:
    """The config for its first steps alone, in another folder; what it learns stays the same."""
    from picotron_min.runtime.config_file import parse_config

    tokens = {"max_tokens": steps * parse_config(config).tokens_per_step}
    # The folder is new: what a run resumes from is its own checkpoint.
    checkpoint = {"save_dir": str(folder), "load_path": "latest"}
    training = config["training"] | tokens
    return config | {"training": training, "checkpoint": checkpoint, "logging": {}}


def _losses(
    exercise: Exercise, file: str, config: dict, stops: list[int], folder: Path
) -> list[float]:
    """Of each step; empty if a run fails.

    The first run ends after `stops[0]` steps; each of the others continues from its checkpoint.
    """
    path = folder.with_suffix(".json")
    for steps in stops:
        path.write_text(json.dumps(short_config(config, steps, folder)))
        if not _succeeds(exercise, file, path, "train"):
            return []
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [record["loss"] for record in records if "loss" in record]


def _succeeds(exercise: Exercise, file: str, config: Path, command: str) -> bool:
    """Run `main` in a process of its own, all of whose processes end here, also after Ctrl-C."""
    words = map(str, (exercise.number, file, config, command))
    # A group of processes of its own, which gets no Ctrl-C: it would print errors.
    options = {"cwd": ROOT, "start_new_session": True}
    with subprocess.Popen([sys.executable, "-m", "exercises.training", *words], **options) as run:
        try:
            return not run.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):  # all of them have ended
                os.killpg(run.pid, signal.SIGKILL)


def main(number: str, file: str, config: str, command: str) -> None:
    """Run train.py, or `difference`, with a definition from a file."""
    exercise = load(int(number))
    text = solution(exercise) if file == "solution" else Path(file).read_text()
    sys.argv = ["train.py", "--config", config]
    import_with(exercise, parse(exercise, text), Path(file))
    if command == "difference":
        from difference.__main__ import main as find

        sys.exit(find(["--config", config]))
    import train

    train.main()


if __name__ == "__main__":
    main(*sys.argv[1:])
