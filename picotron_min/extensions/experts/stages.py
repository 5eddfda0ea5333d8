"""Stages: a pipeline over layers that cost differently, some with experts and some without."""

from bisect import bisect_left


def split_unequal(layers: list[int], head: int, stages: int) -> list[int]:
    """The split of layers with these FLOPs, some without experts, whose slowest stage is fastest.

    From the last stage on, each takes what fits below a limit, the lowest with which all layers
    find a place. The first stage, which keeps the most micro-batches alive, has what is left.
    """

    def fill(limit: int) -> list[int]:  # empty: it is too low
        numbers, left = [], len(layers)
        for stage in reversed(range(stages)):
            load, first = head * (stage == stages - 1) + layers[left - 1], left - 1
            while first > stage and load + layers[first - 1] <= limit:  # one is for each before it
                first -= 1
                load += layers[first]
            if load > limit:
                return []
            numbers.insert(0, left - first)
            left = first
        return numbers if not left else []

    # What fits below a limit also fits below a higher one; all fits below the sum.
    return fill(bisect_left(range(sum(layers) + head), True, key=lambda limit: bool(fill(limit))))
