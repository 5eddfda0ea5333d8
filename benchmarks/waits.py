"""How long ranks wait for messages that no computation hides:

    python -m benchmarks.waits experts     rows that travel to experts and back, on 2 ranks
    python -m benchmarks.waits sharding    weights that are gathered, on 4 ranks

Processes of one machine exchange messages in memory, by the cores that compute. So the link is
simulated: the messages of a rank cross it one after another, at so many MB/s. The clock is
simulated as well, so that neither other work on the machine nor ranks that share a core matter: a
rank's time is what its thread computes plus what it waits for the link.

    computes    |== A ==|== B ==|       |== C ==|      A starts a message, C needs it
    link                |~~~~~~~~~~~~~~~|
                                |-------|              waited: exposed, B hides the rest

Not simulated: ranks that come late, latency, and a processor that copies messages itself.

`experts` lets one model step in turn with shared experts computed while rows travel ("overlap") and
after that ("none"), with even routing, and prints ms a step; `sharding` prints ms a gather, for
each `sharding`. Both are medians over the rounds of the mean of the ranks. CPU only, float32.
"""

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from statistics import fmean, median
from typing import NamedTuple
from unittest import mock

import torch.distributed as dist
from torch import Tensor

from benchmarks.compare import WORK, Place, Spread, describe_run, on_ranks, our_run, print_facts
from picotron_min.collectives import Axis, start_all_gather_, start_exchange
from picotron_min.extensions.experts import dispatch as expert_parallel
from picotron_min.extensions.sharding import units as sharding
from picotron_min.extensions.sharding.units import ShardedUnit
from picotron_min.runtime.config_file import parse_config
from train import train_step

WARM_UP = 2  # steps
LINKS = (400, 100, 25)  # MB/s
EXPERTS = {
    "num_hidden_layers": 4,
    "num_local_experts": 8,
    "moe_intermediate_size": 344,
    "n_shared_experts": 1,
    "scoring_func": "sigmoid",
}
SHARDINGS = ("optimizer", "layerwise", "parameters")


def main(arguments: list[str] | None = None, work: dict = WORK) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("experts", "sharding"))
    parser.add_argument("--rounds", type=int, default=15, help="timed steps of each kind")
    parser.add_argument("--link", type=float, default=100.0, metavar="MB/s", help="of sharding")
    options = parser.parse_args(arguments)
    if options.what == "experts":
        works = {"experts": with_experts(work)}
        function = partial(waits_for_rows, options.rounds)
    else:
        works = {kind: with_sharding(kind, work) for kind in SHARDINGS}
        function = partial(waits_for_weights, options.rounds, options.link)
    print_facts(describe_run(next(iter(works.values()))))
    ranks = {kind: on_ranks(parse_config(work), function) for kind, work in works.items()}
    print(table_of_rows(ranks["experts"]) if "experts" in works else table_of_weights(ranks))


class Link:
    """What the messages of a rank cross one after another, and the clock of that rank."""

    def __init__(self, megabytes_per_second: float) -> None:
        self.rate = 1e6 * megabytes_per_second
        self.free = 0.0  # when it can carry the next message
        self.busy = self.waited = 0.0  # seconds so far

    def now(self) -> float:
        return time.thread_time() + self.waited

    def carry(self, work: dist.Work, num_bytes: float) -> "Crossing":
        takes = num_bytes / self.rate
        self.free = max(self.free, self.now()) + takes
        self.busy += takes
        return Crossing(self, work, self.free)


class Crossing(NamedTuple):
    """A message on a link, in place of torch's Work."""

    link: Link
    work: dist.Work
    arrives: float

    def wait(self) -> None:
        self.work.wait()
        self.link.waited += max(0.0, self.arrives - self.link.now())


def with_experts(work: dict) -> dict:
    one = {"gradient_accumulation_steps": 1, "moe_router_force_load_balancing": True}
    return work | {
        "distributed": {"dp_size": 2, "ep_size": 2, "use_cpu": True, "backend": "gloo"},
        "model": work["model"] | EXPERTS,
        "training": work["training"] | one,
    }


class Step(NamedTuple):
    """Seconds of one step of a rank."""

    travel: float  # the link was busy
    waited: float  # for the link
    took: float


Kind = tuple[int, bool]  # a link, and whether rows travel while shared experts compute


def waits_for_rows(rounds: int, place: Place) -> dict[Kind, list[Step]]:
    """Let a model step over all links in turn, with and without overlap."""
    run = our_run(place.config, place.model_config, place.axes, place.data)
    steps = {(rate, overlaps): [] for rate in LINKS for overlaps in (True, False)}
    for index in range(WARM_UP + rounds):
        for (rate, overlaps), of_kind in steps.items():
            link = Link(rate)
            began = link.now()
            with rows_over(link, overlaps):
                train_step(run, index)
            of_kind.append(Step(link.busy, link.waited, link.now() - began))
    return {kind: of_kind[WARM_UP:] for kind, of_kind in steps.items()}


@contextmanager
def rows_over(link: Link, overlaps: bool) -> Iterator[None]:
    """Within, the rows of experts cross a link; without overlap, before anything else happens."""

    def exchange(rows: Tensor, to_each: list[int], from_each: list[int], axis: Axis):
        received, work = start_exchange(rows, to_each, from_each, axis)
        message = link.carry(work, rows[to_each[axis.rank] :].nbytes)  # as many as leave
        if not overlaps:
            message.wait()
        return received, message

    with mock.patch.object(expert_parallel, "start_exchange", exchange):
        yield


def table_of_rows(by_rank: list[dict[Kind, list[Step]]]) -> str:
    head = f"{'link':>10}{'travel':>11}{'overlap':>11}{'none':>11}{'ratio':>8}"
    lines = [f"\n{head}   a step with overlap / without"]
    for rate in LINKS:
        on, off = (mean_of_ranks(by_rank, (rate, overlaps)) for overlaps in (True, False))
        travel = 1000 * median(step.travel for step in on)
        exposed, without = (1000 * median(step.waited for step in steps) for steps in (on, off))
        time = Spread.of([a.took / b.took for a, b in zip(on, off, strict=True)])
        lines.append(
            f"{rate:>5} MB/s{travel:>8.1f} ms{exposed:>8.1f} ms{without:>8.1f} ms"
            f"{exposed / without:>8.2f}   {time}"
        )
    return "\n".join(lines)


def mean_of_ranks(by_rank: list[dict[Kind, list[Step]]], kind: Kind) -> list[Step]:
    """Step by step, the mean of all ranks."""
    steps = zip(*(rank[kind] for rank in by_rank), strict=True)
    return [Step(*map(fmean, zip(*ranks, strict=True))) for ranks in steps]


def with_sharding(kind: str, work: dict) -> dict:
    return work | {
        "distributed": {"dp_size": 4, "sharding": kind, "use_cpu": True, "backend": "gloo"},
        "training": work["training"] | {"gradient_accumulation_steps": 1},
    }


Waits = dict[str, float]  # seconds that a rank waited in a step, for each gather


def waits_for_weights(rounds: int, rate: float, place: Place) -> list[Waits]:
    run, steps = our_run(place.config, place.model_config, place.axes, place.data), []
    for index in range(WARM_UP + rounds):
        link, waits = Link(rate), {}
        for unit in run.model.units:
            unit.finish = partial(finish, unit, link, waits)
        with weights_over(link):
            train_step(run, index)
        steps.append(waits)
    return steps[WARM_UP:]


@contextmanager
def weights_over(link: Link) -> Iterator[None]:
    """Within, the weights that are gathered cross a link."""

    def gather(rows: Tensor, axis: Axis) -> Crossing:
        return link.carry(start_all_gather_(rows, axis), axis.share * rows.nbytes)

    with mock.patch.object(sharding, "start_all_gather_", gather):
        yield


def finish(unit: ShardedUnit, link: Link, waits: Waits) -> None:
    """ShardedUnit.finish, which also notes how long it waited."""
    before = link.waited
    ShardedUnit.finish(unit)
    name = next(iter(unit.modules)).removeprefix("model.").removesuffix(".weight")
    name = ".".join(name.split(".")[:2])  # of a layer, its number
    # With one micro-batch, a second use in a step is that of backward.
    waits[f"{name}, backward" if name in waits else name] = link.waited - before


def table_of_weights(by_kind: dict[str, list[list[Waits]]]) -> str:
    names = dict.fromkeys(name for ranks in by_kind.values() for name in ranks[0][0])
    lines = ["\n" + f"{'ms':22}" + "".join(f"{kind:>12}" for kind in by_kind)]
    for name in names:
        cells = [median_wait(name, ranks) for ranks in by_kind.values()]
        lines.append(f"{name:22}" + "".join(f"{cell:>12}" for cell in cells))
    return "\n".join(lines)


def median_wait(name: str, ranks: list[list[Waits]]) -> str:
    """Over the steps, of the mean of the ranks; nothing where that gather does not occur."""
    if name not in ranks[0][0]:
        return ""
    means = [fmean(waits[name] for waits in step) for step in zip(*ranks, strict=True)]
    return f"{1000 * median(means):.1f}"


if __name__ == "__main__":
    main()
