"""Design 2: how many layers each pipeline rank gets, where one rank is slower."""

from collections.abc import Iterator
from itertools import combinations
from typing import Any

from exercises.marks import Marks
from picotron_min import costs
from picotron_min.extensions.schedules.registry import build_plans
from picotron_min.extensions.schedules.simulator import simulate
from picotron_min.extensions.settings import Layout
from picotron_min.pipeline_schedule import Action, Kind, Plan
from picotron_min.runtime.public_models import PRESETS

RANKS, MICRO_BATCHES = 4, 8
MODEL, SLOW_RANK, SLOWER, NUM_LAYERS = "meta-llama/Llama-3.2-1B", 1, 4 / 3, 16
TASK = '''\
"""Design 2: the 16 layers of Llama-3.2-1B on 4 pipeline ranks, of which rank 1 is a third slower.

1F1B, 8 micro-batches, sequences of 2048 tokens. lm_head, on the last rank, costs as much as four
layers. Marks: a shorter step than with 4 layers each; than with the split that knows of no slow
rank, 5 5 5 1; at most 2% longer than the best of all.
"""

PP_LAYERS = [4, 4, 4, 4]
'''


def step_time(layers: list[int], plans: list[Plan]) -> float:
    """FLOPs, as a measure of time: forward takes a third of a stage's, backward two thirds."""
    config = PRESETS[MODEL]
    layer = sum(costs.layer_flops(config, 2048, 0).values())
    times = [number * layer for number in layers]
    times[-1] += 2 * config.vocab_size * config.hidden_size
    times[SLOW_RANK] *= SLOWER

    def time_of(rank: int, action: Action) -> float:
        return times[rank] * (2 if action.kind is Kind.BACKWARD else 1)

    return simulate(plans, time_of).makespan


def measure_layers(layers: Any) -> Marks:
    is_numbers = isinstance(layers, list) and all(type(n) is int and n > 0 for n in layers)
    if not is_numbers or len(layers) != RANKS or sum(layers) != NUM_LAYERS:
        need = f"{RANKS} numbers of at least 1 that add up to {NUM_LAYERS}"
        return Marks(0, f"PP_LAYERS = {layers}: it must be {need}")
    plans = build_plans("1f1b", RANKS, MICRO_BATCHES)
    blind = costs.layers_of_stages(PRESETS[MODEL], Layout(pp=RANKS), 2048)
    best = min(all_splits(), key=lambda split: step_time(split, plans))
    least, mine = step_time(best, plans), step_time(layers, plans)
    equal, unknowing = step_time([4] * RANKS, plans), step_time(blind, plans)
    marks = sum((mine < equal, mine < unknowing, mine <= 1.02 * least))
    lines = [f"{layers}: {mine / least:.3f} of the shortest step"]
    lines.append(f"4 each: {equal / least:.3f}; {blind}: {unknowing / least:.3f}")
    return Marks(marks, "\n".join([*lines, f"best: {best}"] if marks == 3 else lines))


def all_splits() -> Iterator[list[int]]:
    for cuts in combinations(range(1, NUM_LAYERS), RANKS - 1):
        yield [b - a for a, b in zip((0, *cuts), (*cuts, NUM_LAYERS), strict=True)]
