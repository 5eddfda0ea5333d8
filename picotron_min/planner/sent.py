"""What a rank sends, on paper: the ledger of collectives.py as formulas fill it."""

from collections import Counter
from functools import partialmethod


class Sent(Counter):
    """A ledger on paper: bytes by (axis, collective); `calls` counts messages likewise."""

    def __init__(self, sizes: dict[str, int]) -> None:
        super().__init__()
        self.sizes, self.calls = sizes, Counter()

    def add(self, axis: str, collective: str, sent: float, times: float = 1) -> None:
        if self.sizes[axis] > 1 and times:
            self[axis, collective] += times * sent
            self.calls[axis, collective] += times

    def _ring(self, name: str, rounds: int, axis: str, whole: float, times: float = 1) -> None:
        n = self.sizes[axis]
        self.add(axis, name, rounds * ((n - 1) / n) * whole, times)

    all_reduce = partialmethod(_ring, "all_reduce", 2)
    all_gather = partialmethod(_ring, "all_gather", 1)
    reduce_scatter = partialmethod(_ring, "reduce_scatter", 1)
    all_to_all = partialmethod(_ring, "all_to_all", 1)  # `whole`: of one rank

    def by_axis(self) -> Counter[str]:
        total = Counter()
        for (axis, _), sent in self.items():
            total[axis] += sent
        return total
