"""Design 2: how many layers each pipeline rank gets, where one rank is slower."""

from fractions import Fraction
from functools import cache
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from exercises.exercise import Dice
from exercises.marks import Marks, constant, student_of
from picotron_min import costs
from picotron_min.extensions.schedules.registry import build_plans
from picotron_min.extensions.schedules.simulator import simulate
from picotron_min.extensions.settings import Layout
from picotron_min.pipeline_schedule import Kind
from picotron_min.runtime.public_models import PRESETS

RANKS, CONFIG, NUM_LAYERS = 4, PRESETS["meta-llama/Llama-3.2-1B"], 16
plans_of = cache(build_plans)
TASK = '''\
"""Design 2: the 16 layers of Llama-3.2-1B on 4 pipeline ranks, of which one is slow.

Rank {slow_rank} takes {slower} of the others' time.
1F1B, {micro_batches} micro-batches, sequences of 2048 tokens.
lm_head, on the last rank, costs as much as four layers. Marks: a shorter step than with 4 layers
each; than with the split that knows of no slow rank, 5 5 5 1; at most 2% longer than the best.
"""

PP_LAYERS = [4, 4, 4, 4]
'''


class Pipeline(NamedTuple):
    slow_rank: int = 1
    slower: Fraction = Fraction(4, 3)
    micro_batches: int = 8


@cache
def pipeline_of(student: str | None) -> Pipeline:
    """The one of the course, or a student's own, in which all three marks can be told apart."""
    dice = Dice(f"design 2 {student}")
    while student:
        slower = Fraction(*dice.choice([(5, 4), (4, 3), (3, 2), (8, 5), (9, 5)]))
        drawn = Pipeline(dice.randrange(RANKS - 1), slower, dice.choice([6, 8, 10, 12, 16]))
        equal, unknowing, least = (step_time(split, drawn) for split in splits_to_beat(drawn))
        if equal > unknowing > 1.02 * least:
            return drawn
    return Pipeline()


@cache
def splits_to_beat(pipeline: Pipeline) -> tuple[list[int], list[int], list[int]]:
    """Equal parts, the split that knows of no slow rank, and the best of all."""
    places = combinations(range(1, NUM_LAYERS), RANKS - 1)
    splits = ([b - a for a, b in pairwise((0, *cuts, NUM_LAYERS))] for cuts in places)
    blind = costs.layers_of_stages(CONFIG, Layout(pp=RANKS), 2048)
    best = min(splits, key=lambda split: step_time(split, pipeline))
    return [NUM_LAYERS // RANKS] * RANKS, blind, best


def step_time(layers: list[int], pipeline: Pipeline) -> float:
    """FLOPs, as a measure of time: forward takes a third of a stage's, backward two thirds."""
    layer = sum(costs.layer_flops(CONFIG, 2048, 0).values())
    times = [number * layer for number in layers]
    times[-1] += 2 * CONFIG.vocab_size * CONFIG.hidden_size
    times[pipeline.slow_rank] *= float(pipeline.slower)
    cost = {Kind.FORWARD: 1, Kind.BACKWARD: 2}
    plans = plans_of("1f1b", RANKS, pipeline.micro_batches)
    return simulate(plans, lambda rank, action: times[rank] * cost[action.kind]).makespan


def task_of(student: str | None) -> str:
    return TASK.format(**pipeline_of(student)._asdict())


def measure(path: Path, _: Any) -> Marks:
    return measure_layers(constant(path, "PP_LAYERS"), student_of(path))


def measure_layers(layers: Any, student: str | None = None) -> Marks:
    is_numbers = isinstance(layers, list) and all(type(n) is int and n > 0 for n in layers)
    if not is_numbers or len(layers) != RANKS or sum(layers) != NUM_LAYERS:
        need = f"{RANKS} numbers of at least 1 that add up to {NUM_LAYERS}"
        return Marks(0, f"PP_LAYERS = {layers}: it must be {need}")
    splits = *_, blind, best = splits_to_beat(pipeline := pipeline_of(student))
    mine, equal, unknowing, least = (step_time(split, pipeline) for split in (layers, *splits))
    marks = sum((mine < equal, mine < unknowing, mine <= 1.02 * least))
    text = f"{layers}: {mine / least:.3f} of the shortest step"
    text += f"\n4 each: {equal / least:.3f}; {blind}: {unknowing / least:.3f}"
    return Marks(marks, text + f"\nbest: {best}" * (marks == 3))
