"""Bug hunts: a changed course trains, nothing crashes, and one statement is wrong. Which?

The change exists in memory only. `hunt N` prints symptoms, measured now; `hunt N --run dp=1,cp=2`
measures any layout of up to 4 ranks, `hunt N --difference dp=1,cp=2` names the first wrong tensor
in it; `hunt N --answer FILE:FUNCTION` takes an answer.
"""

import contextlib
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from exercises import progress
from exercises.exercise import ROOT, Case
from exercises.hunt_sheets import SHEETS

if TYPE_CHECKING:
    from picotron_min.runtime.config import Config

STEPS = 20
AXES = "dp", "pp", "cp", "tp"
RUN = {"dp": 1, "pp": 1, "cp": 1, "tp": 1, "micro_batches": 1, "optimizer": "sgd"}
RUN |= {"lr": 0.5, "grad_clip": 0.0}
SHAPE = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 29}


class Hunt(NamedTuple):
    """A change of one statement, and runs that show it."""

    file: str
    function: str  # its qualified name: the answer
    story: str
    runs: tuple[str, ...]  # the first one is right
    hints: tuple[str, ...]
    found: str  # the explanation, once it is found
    old: str  # once in the file
    new: str


def _hunt_of(sheet: str) -> Hunt:
    place, story, runs, *marked = re.sub(r"\n  (?=\S)", " ", sheet.strip("\n")).splitlines()
    by = {sign: [line[2:] for line in marked if line[0] == sign] for sign in "?!-+"}
    texts = by["!"][0], "\n".join(by["-"]), "\n".join(by["+"])
    return Hunt(*place.split(":"), story, tuple(runs.split()), tuple(by["?"]), *texts)


HUNTS = dict(zip((1, 2, 3, 4, 6, 7), map(_hunt_of, SHEETS.split("\n\n")), strict=True))
ANSWER = "picotron_min/FILE.py:FUNCTION"


class Symptoms(NamedTuple):
    """What was measured in a run."""

    losses: list[float]
    norm: float  # of the gradient, in step 1
    sent: dict[str, int]  # bytes of rank 0 in a step, by axis
    apart: float  # the largest difference between weights that ranks should share


def parse_run(text: str) -> dict[str, Any]:
    """The settings of a run; ValueError with what is possible."""
    run = dict(RUN)
    for word in filter(None, text.split(",")):
        key, _, value = word.partition("=")
        if key not in run or not value:
            raise ValueError(f"{word!r} is not a setting: use some of {', '.join(RUN)}, as dp=2")
        run[key] = type(RUN[key])(value)
    if (size := math.prod(run[axis] for axis in AXES)) > 4:
        raise ValueError(f"{text} needs {size} ranks: use at most 4")
    is_model = run["tp"] <= 2 and run["pp"] <= 2 and run["optimizer"] in ("sgd", "adamw")
    if not is_model or 4 % (run["dp"] * run["micro_batches"]):
        fits = "tp and pp of at most 2, dp x micro_batches of 1, 2 or 4, optimizer sgd or adamw"
        raise ValueError(f"{text} does not fit the tiny model: use {fits}")
    return run


def config_of(run: dict[str, Any]) -> "Config":
    """The config of a run with 4 sequences a step, in any layout."""
    from picotron_min.runtime.config_file import parse_config

    sizes = {f"{axis}_size": run[axis] for axis in AXES} | {"use_cpu": True}
    recipe = {"optimizer": run["optimizer"], "learning_rate": run["lr"], "weight_decay": 0.0}
    recipe |= {"grad_clip": run["grad_clip"] or None, "seq_length": 16}
    recipe |= {"gradient_accumulation_steps": run["micro_batches"]}
    recipe |= {"micro_batch_size": 4 // (run["dp"] * run["micro_batches"])}
    return parse_config({"distributed": sizes, "training": recipe})


def measure(hunt: Hunt, runs: tuple[str, ...], steps: int = STEPS) -> Iterator[Symptoms]:
    """Train a tiny model with a hunt's change, on simulated ranks, in each layout of `runs`."""
    from exercises.loading import Course
    from exercises.ranks import run_case
    from exercises.simulated_dist import simulated

    with simulated(), _changed(hunt):
        for run in map(parse_run, runs):
            case = Case(math.prod(run[axis] for axis in AXES), config=config_of(run), steps=steps)
            records = run_case(Course(), case, _train, Path("none"))
            first, apart = {}, 0.0  # between parts with the same name and place in the whole
            for key, weight in (item for r in records for item in r.values["weights"].items()):
                apart = max(apart, (first.setdefault(key, weight) - weight).abs().max().item())
            found = records[0].values
            yield Symptoms(found["losses"], found["norm"], found["sent"], apart)


@contextlib.contextmanager
def _changed(hunt: Hunt) -> Iterator[None]:
    """Within, the course is imported anew, with a hunt's change."""
    from exercises.loading import fresh_modules, import_edited

    with fresh_modules():
        import_edited(ROOT / hunt.file, hunt.old, hunt.new)
        yield


def _train(rank, case: Case) -> dict[str, Any]:
    import numpy as np

    from difference.runs import build
    from difference.tiny import Text, Trial

    settings, of, exact = rank.course.settings, case.config, {"dtype": "float64"}
    # In float64, where layouts of a right course differ by rounding alone.
    work, recipe = replace(of.workload, **exact), replace(of.recipe, **exact, fused=False)
    text = np.arange(4000) ** 2 % SHAPE["vocab_size"]  # which can be learned
    trial = Trial(settings.ModelConfig(**SHAPE), of.layout, work, recipe, 0, case.steps, 30.0)
    run = build(trial, Text(text, np.array([len(text)])))
    model, ranks, step = run.model, run.model.axes.ranks, rank.course.train.train_step
    for axis in model.axes:
        axis.ledger.take_bytes()
    results = [step(run, 0)]
    sent = {axis.name: axis.ledger.take_bytes() for axis in model.axes}
    results += [step(run, i) for i in range(1, case.steps)]
    parts = {n: [ranks[cut.axis] for cut in model.placements[n].cuts] for n in model.parameters}
    return {
        "losses": [result.loss for result in results],
        "norm": results[0].grad_norm,
        "sent": {name: number for name, number in sent.items() if number},
        "weights": {(n, *parts[n]): p.detach().clone() for n, p in model.parameters.items()},
    }


def hunt(number: int, run: str | None, difference: str | None, answer: str | None) -> int:
    """A course with one wrong statement: find it from its symptoms."""
    parse_run(run or "")  # which may refuse it
    if number not in HUNTS:
        raise ValueError(f"there is no hunt {number}: use one of {', '.join(map(str, HUNTS))}")
    change = HUNTS[number]
    if answer is not None:
        return _take_answer(number, change, answer)
    if difference is not None:
        return first_wrong(change, difference)
    print(f"{change.story}\n\nIt trains now, which takes up to half a minute.\n", flush=True)
    for line in table(change, (run,) if run else change.runs):
        print(line, flush=True)
    own = f"python -m exercises hunt {number}"
    print(f"\nMeasure others:  {own} --run dp=2,tp=2")
    print(f"First wrong tensor:  {own} --difference dp=2,tp=2")
    print(f"Answer:  {own} --answer {ANSWER}")
    print("(a wrong answer counts as a hint, which it prints)")
    return 0


def first_wrong(hunt: Hunt, text: str) -> int:
    """What `python -m difference` says of a layout with a hunt's change; its exit code."""
    run = parse_run(text)
    with _changed(hunt):
        from difference.report import run as compare
        from difference.tiny import trial_of

        return compare(trial_of(config_of(run), steps=2, own_sizes=False))


def _take_answer(number: int, hunt: Hunt, answer: str) -> int:
    near, key = judge(hunt, answer), f"hunt {number}"
    if near == "right":
        progress.update(key, passed=True)
        hints = progress.read(key)["hints"]
        print(f"Right, with {hints} of {len(hunt.hints)} hints. {hunt.found}")
        return 0
    print("The right file." if near == "file" else "No.")
    print(progress.next_hint(key, hunt.hints)[-1])
    return 1


def table(hunt: Hunt, runs: tuple[str, ...]) -> Iterator[str]:
    """The measured symptoms, a line a run."""
    width, shown = max(map(len, runs)), (1, 2, STEPS)
    head = "  ".join(f"{f'loss {step}':>9}" for step in shown)
    yield f"{'run':{width}}  {head}  grad_norm 1  ranks differ  bytes rank 0 sends in step 1"
    for text, found in zip(runs, measure(hunt, runs), strict=True):
        losses = "  ".join(f"{found.losses[step - 1]:9.6f}" for step in shown)
        sent = ", ".join(f"{axis} {size}" for axis, size in found.sent.items()) or "none"
        yield f"{text:{width}}  {losses}  {found.norm:11.6f}  {found.apart:12.2g}  {sent}"
    yield "\nranks differ: the largest difference between weights that should be equal on all ranks"


def judge(hunt: Hunt, answer: str) -> str:
    """right, file or wrong: whether FILE:FUNCTION names the function that is wrong."""
    file, _, name = answer.rpartition(":")
    if not [*(ROOT / "picotron_min").rglob(Path(file).name), *ROOT.glob(file)]:
        raise ValueError(f"{answer} is no place: answer as picotron_min/mesh.py:build_axes")
    if not f"/{hunt.file}".endswith(f"/{file}"):
        return "wrong"
    name = name.rpartition(" ")[2]  # behind a line, as `difference` prints it
    return "right" if f".{hunt.function}".endswith(f".{name}") else "file"
