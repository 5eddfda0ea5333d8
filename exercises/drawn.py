"""What is drawn for a student: hunt 5, and the numbers of designs 2 and 3, by their name alone.

Hunt 5 is a known mistake of some exercise that trains without a crash, right in one layout and
wrong in another. Mistakes are tried in an order that depends on the student's name.
"""

import math
import textwrap
from functools import cache
from pathlib import Path

from exercises.exercise import ROOT, Dice, Exercise, Mistake
from exercises.hunts import Hunt, Symptoms, measure
from exercises.source import find, solution, target_in

LAYOUTS = ("dp=1", "dp=2", "tp=2", "cp=2", "pp=2", "micro_batches=4", "tp=2,grad_clip=0.5")
STEPS = 2  # of a trial
SHOWN = 4  # layouts
TRIED = 2  # mistakes of an exercise, before the next exercise


@cache
def drawn_hunt(student: str) -> Hunt:
    """The hunt of a student; takes some seconds."""
    rights = [measure(None, run, STEPS) for run in LAYOUTS]
    # Of all exercises, also where a class has only some.
    paths = sorted((ROOT / "exercises").rglob("e[0-9][0-9]_*.py"), key=lambda path: path.name)
    trained = [exercise for path in paths if is_run(exercise := Exercise(path))]
    dice = Dice(f"hunt {student}")
    dice.shuffle(trained)
    for exercise in trained:
        for mistake in dice.sample(exercise.mistakes, TRIED):
            hunt = _hunt_of(exercise, mistake)
            if runs := _runs_that_show(hunt, rights):
                return hunt._replace(runs=runs)
    raise ValueError("no known mistake can be seen in a run: draw with another name")


def is_run(exercise: Exercise) -> bool:
    """Whether runs of hunts, which use no other extension, run the function."""
    module = exercise.source_module
    return not exercise.no_training and (".extensions." not in module or ".overlap." in module)


def _hunt_of(exercise: Exercise, mistake: Mistake) -> Hunt:
    target, name = find(exercise), exercise.qualified_name.rpartition(".")[2]
    wrong = target_in(mistake.apply(solution(exercise)), name, target.path)
    margin = " " * target.node.col_offset
    old, new = (textwrap.indent(text.rstrip(), margin) for text in (target.text, wrong.text))
    file = target.path.relative_to(ROOT).as_posix()
    hints = ("Compare the layouts that are wrong: what do they have in common, and others lack?",)
    hints += f"It is in the folder {Path(file).parent}/.", f"It is in {file}."
    story = "A function is wrong in one of the ways in which such functions are wrong. Which one?"
    return Hunt(file, story, (), hints, mistake.sentence, old, new)


def _runs_that_show(hunt: Hunt, rights: list[Symptoms]) -> tuple[str, ...]:
    """Some layouts, right ones first; none if one rank is wrong, all are right, or one crashes."""
    right, wrong = [], []
    for run, expected in zip(LAYOUTS, rights, strict=True):
        try:
            found = measure(hunt, run, STEPS)
        except Exception:  # whatever a wrong version raises: it is no hunt then
            return ()
        if not all(map(math.isfinite, (*found.losses, found.norm))):
            return ()  # a longer run would end with an error
        distance = found.distance(expected)
        if 1e-9 <= distance <= 1e-4:
            return ()  # too little to be seen
        (wrong if distance > 1e-4 else right).append(run)
        if not right:
            return ()
    return (*right[:2], *wrong[: SHOWN - 2]) if wrong else ()
