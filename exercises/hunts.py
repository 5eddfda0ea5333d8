"""Bug hunts: a changed course trains, nothing crashes, and one statement is wrong. Which?

The change exists in memory only. `hunt N` prints symptoms, measured now; `hunt N --run dp=1,cp=2`
measures any layout of up to 4 ranks; `hunt N --answer picotron_min/FILE.py:LINE` takes an answer.
"""

import argparse
import ast
import math
import re
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from exercises import progress
from exercises.exercise import FOLDER
from exercises.marks import check_drawn_for
from exercises.sealed import sealed, text_of

ROOT = FOLDER.parent
STEPS = 20
RUN = {"dp": 1, "pp": 1, "cp": 1, "tp": 1, "micro_batches": 1, "optimizer": "sgd"}
RUN |= {"lr": 0.5, "grad_clip": 0.0, "sequence_parallel": 0}


class Hunt(NamedTuple):
    """A change of one statement, and runs that show it."""

    file: str
    story: str
    runs: tuple[str, ...]  # the first one is right
    hints: tuple[str, ...]
    found: str  # the explanation, once it is found
    old: str  # once in the file; any of its lines is the answer
    new: str
    is_drawn: bool = False  # then `old` is a whole function


# File, story, runs, hints, explanation, change; one hunt after the other. Each of these statements
# could be the wrong one: from the symptoms alone none stands out.
SHEETS = """
picotron_min/placement.py
A user reports that context parallelism learns worse. Data parallelism is fine.
dp=1,cp=1 dp=2,cp=1 dp=1,cp=2
? Ranks that should have the same weights have different ones. What makes them equal after a step?
? Their gradients are not summed over all ranks that see other tokens. Where is it decided over
  which axis they are?
? The placement table gives each parameter its axes: picotron_min/placement.py.
! Matrices' gradients were summed over dp, and not over dp x cp: context-parallel ranks see other
  tokens, too.
- return Placement(cuts, ("dp_cp",), sums=("dp_cp",), is_hidden_matrix=True)
+ return Placement(cuts, ("dp_cp",), sums=("dp",), is_hidden_matrix=True)

picotron_min/optimizer.py
With gradient clipping, tensor parallelism trains a little differently. Without, it is exact.
tp=1,grad_clip=0.5 tp=2,grad_clip=0.5 tp=2
? The loss of step 1 is right, and so are the gradients. What else does clipping need?
? Some parameters count twice in the gradient norm. Which ones do all tp ranks hold?
? Only one of the ranks that hold the same part may count it: measure_gradient.
! What all tp ranks hold, the weights of norms, counted once on each of them.
- if all(ranks[axis] == 0 for axis in placements[name].copies)
+ if all(ranks[axis] == 0 for axis in placements[name].copies[:1])

train.py
With gradient accumulation SGD needs a smaller learning rate. AdamW does not.
micro_batches=1,lr=0.05 micro_batches=4,lr=0.05 micro_batches=1,lr=0.2
  micro_batches=1,optimizer=adamw,lr=0.01 micro_batches=4,optimizer=adamw,lr=0.01
? Compare 4 micro-batches with 1 micro-batch at 4 times the rate. What does AdamW do with a gradient
  that is 4 times too large?
? Gradients are sums over all tokens of the step, and are divided once. Where?
? In the step itself: train_step in train.py.
! The gradient was multiplied by the number of micro-batches. AdamW divides by the gradient's size,
  and hides it.
- gradients.scale(clip / num_targets)
+ gradients.scale(run.batches.num_micro_batches * clip / num_targets)

picotron_min/initialise.py
With tensor parallelism the loss is another one from the first step on. Pipelines train exactly.
tp=1 pp=2 tp=2
? The loss of step 1 differs already, before anything was trained.
? The ranks begin with weights that do not make up the matrices of one rank.
? Compare the parts that two tp ranks draw: picotron_min/initialise.py.
! All tp ranks began with the same part of every matrix: the model had half of its rank.
- whole = initial_weight(name, shapes[name], seed, std)  # one tensor at a time
-         mine = part(whole.shape, placements[name].owned, axes.ranks, axes.sizes)
-         parameter.data.copy_(whole[mine])
+ parameter.data.copy_(initial_weight(name, tuple(parameter.shape), seed, std))
"""


def _hunt_of(sheet: str) -> Hunt:
    file, story, runs, *marked = re.sub(r"\n  (?=\S)", " ", sheet.strip("\n")).splitlines()
    by = {sign: [line[2:] for line in marked if line[0] == sign] for sign in "?!-+"}
    texts = by["!"][0], "\n".join(by["-"]), "\n".join(by["+"])
    return Hunt(file, story, tuple(runs.split()), tuple(by["?"]), *texts)


HUNTS = {number: _hunt_of(sheet) for number, sheet in enumerate(SHEETS.split("\n\n"), 1)}
DRAWN = len(HUNTS) + 1  # another one for each student: drawn.py
SHEET = '''\
"""Hunt {number}: name the wrong function, and say how the symptoms led you to it."""

ANSWER = "picotron_min/FILE.py:FUNCTION"
REASON = ""
STUDENT = {student!r}
'''


def hunt_of(number: int, student: str | None) -> Hunt:
    """A hunt by its number; ValueError if there is none."""
    if number == DRAWN and student:
        from exercises.drawn import drawn_hunt

        return drawn_hunt(student)
    if number == DRAWN:
        raise ValueError(f"hunt {DRAWN} is drawn for each student: add --student NAME")
    if number not in HUNTS:
        numbers = ", ".join(map(str, (*HUNTS, DRAWN)))
        raise ValueError(f"there is no hunt {number}: use one of {numbers}")
    return HUNTS[number]


class Symptoms(NamedTuple):
    """What was measured in a run."""

    losses: list[float]
    norm: float  # of the gradient, in step 1
    sent: dict[str, int]  # bytes of rank 0 in a step, by axis
    apart: float  # the largest difference between weights that ranks should share

    def distance(self, right: "Symptoms") -> float:
        """How far the numbers are from the right ones; bytes do not count."""
        pairs = zip((*self.losses, self.norm), (*right.losses, right.norm), strict=True)
        far = max(abs(a / b - 1) for a, b in pairs)
        return 1.0 if far != far else max(far, self.apart)


def parse_run(text: str) -> dict[str, Any]:
    """The settings of a run; ValueError with what is possible."""
    run = dict(RUN)
    for word in filter(None, text.split(",")):
        key, _, value = word.partition("=")
        if key not in run or not value:
            raise ValueError(f"{word!r} is not a setting: use some of {', '.join(RUN)}, as dp=2")
        run[key] = type(RUN[key])(value)
    size = math.prod(run[axis] for axis in ("dp", "pp", "cp", "tp"))
    if size > 4:
        raise ValueError(f"{text} needs {size} ranks: use at most 4")
    if run["tp"] > 2 or run["pp"] > 2:
        raise ValueError("the model has 2 key-value heads and 2 layers: use tp and pp of at most 2")
    if run["optimizer"] not in ("sgd", "adamw"):
        raise ValueError(f"optimizer={run['optimizer']}: use sgd or adamw")
    if 4 % (run["dp"] * run["micro_batches"]):
        raise ValueError("a step has 4 sequences: dp x micro_batches must divide 4")
    return run


def measure(hunt: Hunt | None, text: str, steps: int = STEPS) -> Symptoms:
    """Train a tiny model with a hunt's change, or with none."""
    from exercises.exercise import Case
    from exercises.loading import Course, edited, fresh_modules
    from exercises.ranks import run_case
    from exercises.simulated_dist import simulated

    run = parse_run(text)
    size = math.prod(run[axis] for axis in ("dp", "pp", "cp", "tp"))

    def on_rank(rank, case) -> dict:
        return _train(rank, run, steps)

    change = edited(ROOT / hunt.file, hunt.old, hunt.new) if hunt else nullcontext()
    with simulated(), fresh_modules(), change:
        records = run_case(Course(), Case(size), on_rank, Path("none"))
    first = records[0].values
    return Symptoms(first["losses"], first["norm"], first["sent"], _apart(records))


def _train(rank, run: dict, steps: int) -> dict[str, Any]:
    from exercises.tiny import tiny_run

    axes = {axis: run[axis] for axis in ("dp", "pp", "cp", "tp")}
    layout = rank.course.settings.Layout(**axes, sequence_parallel=bool(run["sequence_parallel"]))
    recipe = {"optimizer": run["optimizer"], "learning_rate": run["lr"]}
    recipe["grad_clip"] = run["grad_clip"] or None
    trained = tiny_run(rank, layout, num_micro_batches=run["micro_batches"], **recipe)
    for axis in trained.model.axes:
        axis.ledger.take_bytes()
    results = [rank.course.train.train_step(trained, 0)]
    sent = {axis.name: axis.ledger.take_bytes() for axis in trained.model.axes}
    results += [rank.course.train.train_step(trained, step) for step in range(1, steps)]
    model = trained.model
    ranks = model.axes.ranks
    parts = {n: [ranks[cut.axis] for cut in model.placements[n].cuts] for n in model.parameters}
    return {
        "losses": [result.loss for result in results],
        "norm": results[0].grad_norm,
        "sent": {name: number for name, number in sent.items() if number},
        "weights": {(n, *parts[n]): p.detach().clone() for n, p in model.parameters.items()},
    }


def _apart(records) -> float:
    """Between parts with the same name and place in the whole, on any two ranks."""
    first, largest = {}, 0.0
    for record in records:
        for key, weight in record.values["weights"].items():
            other = first.setdefault(key, weight)
            largest = max(largest, (other - weight).abs().max().item())
    return largest


def command(given: argparse.Namespace) -> int:
    """What `python -m exercises hunt` does; the exit code."""
    number, run = given.number, given.run
    parse_run(run or "")  # which may refuse it
    hunt = hunt_of(number, given.student)
    if given.answer is not None:
        return _take_answer(number, hunt, given.answer)
    path = FOLDER / f"hunt_{number}.py"
    check_drawn_for(given.student, path)
    print(f"{hunt.story}\n\nIt trains now, which takes up to half a minute.\n", flush=True)
    for line in table(hunt, (run,) if run else hunt.runs):
        print(line, flush=True)
    student = f" --student {given.student}" if given.student else ""
    print(f"\nMeasure others:  python -m exercises hunt {number}{student} --run dp=2,tp=2")
    print(f"Answer:  python -m exercises hunt {number}{student} --answer picotron_min/FILE.py:LINE")
    print("(a wrong answer counts as a hint, which it prints; a function's name will do for LINE)")
    if not path.exists():
        path.write_text(SHEET.format(number=number, student=given.student))
    print(f"To hand it in, write the answer and your reason into {path}")
    return 0


def _take_answer(number: int, hunt: Hunt, answer: str) -> int:
    key, near = f"hunt {number}", judge(hunt, answer)
    before = progress.read(key)
    # Where bodies are missing, and of a drawn hunt, no statement can be named.
    if near == "right" or (near == "function" and (hunt.is_drawn or sealed())):
        progress.update(key, passed=True)
        hints = before["hints"]
        print(f"Right, after {hints} hint{'s' * (hints != 1)}. {hunt.found}")
        return 0
    hints = min(len(hunt.hints), before["hints"] + 1)
    progress.update(key, tries=before["tries"] + 1, hints=hints)
    print({"function": "The right function.", "file": "The right file."}.get(near, "No."))
    print(f"hint {hints} of {len(hunt.hints)}: {hunt.hints[hints - 1]}")
    return 1


def table(hunt: Hunt | None, runs: tuple[str, ...]) -> Iterator[str]:
    """The measured symptoms, a line a run."""
    shown = [1, 2, STEPS]
    head = "  ".join(f"{f'loss {step}':>9}" for step in shown)
    width = max(map(len, runs))
    yield f"{'run':{width}}  {head}  grad_norm 1  ranks differ  bytes rank 0 sends in step 1"
    for text in runs:
        found = measure(hunt, text)
        losses = "  ".join(f"{found.losses[step - 1]:9.6f}" for step in shown)
        sent = ", ".join(f"{axis} {size}" for axis, size in found.sent.items()) or "none"
        yield f"{text:{width}}  {losses}  {found.norm:11.6f}  {found.apart:12.2g}  {sent}"
    yield "\nranks differ: the largest difference between weights that should be equal on all ranks"


def judge(hunt: Hunt, answer: str) -> str:
    """right, function, file or wrong: how near FILE:LINE or FILE:FUNCTION is to the change."""
    file, _, place = answer.rpartition(":")
    if not (ROOT / file).is_file():
        raise ValueError(f"{answer} is no place: answer as picotron_min/mesh.py:12")
    shown, whole = (ROOT / file).read_text(), text_of(ROOT / hunt.file)
    if place.isdecimal() and not 1 <= int(place) <= (length := len(shown.splitlines())):
        raise ValueError(f"{answer} is no line: {file} has {length}")
    if Path(file) != Path(hunt.file):
        return "wrong"
    assert whole.count(hunt.old) == 1, f"{hunt.old!r} must be there once"
    before, first = whole[: whole.index(hunt.old)], hunt.old.lstrip().partition("\n")[0]
    lines = [*range(before.count("\n") + 1, before.count("\n") + hunt.old.count("\n") + 2)]
    if first.startswith("@"):  # a decorator is before its function
        lines = lines[1:]
    name, statement = _around(whole, lines[0])
    if not place.isdecimal():
        is_near = name.endswith(f".{place}") or f".{place}".startswith(f"{name}.")
        return "function" if is_near else "file"
    last = max(statement.end_lineno, lines[-1])
    if shown == whole and statement.lineno <= int(place) <= last:
        return "right"
    is_near = f"{_around(shown, int(place))[0]}.".startswith(f"{name}.")
    return "function" if is_near else "file"


def _around(source: str, line: int) -> tuple[str, ast.stmt]:
    """The name of the function that a line is in, after a dot, and the innermost statement."""
    name, statement = "", ast.Pass(lineno=0, end_lineno=0)
    # What is in a statement is walked through after it.
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.stmt) and node.lineno <= line <= node.end_lineno:
            statement = node
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                name += f".{node.name}"
    return name, statement
