"""What uneven routing costs, how far to spread experts, and whether to multiply them together:

    python -m benchmarks.experts routing    the router's choices against random, even ones, 2 ranks
    python -m benchmarks.experts layouts    ep and etp on 8 ranks with tp 2
    python -m benchmarks.experts grouped    experts in one product against one after another

Where ranks share cores, the time that passes means little. So seconds are CPU time of the threads
that compute, gloo's not counted, and contenders of "routing" and "grouped" take turns step by step.

routing    trains on text. `experts` and `ranks`: the tokens of the fullest one, divided by the
           mean; averaged over layers. Every exchange waits for the slowest rank: so a step is, over
           the stretches between exchanges, the sum of the longest time of any rank. It is divided
           by that of the same step with even routing: medians (quartiles)
layouts    of the fullest rank, MB by the formula, and at the peak above what it held before the
           model. MB that a rank sends in a step for tokens, for gradients (with ZeRO also for
           weights), and in all. CPU seconds of all ranks together
grouped    forward and backward of a layer's experts; the ratio as above
"""

import argparse
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.compare import (
    WORK,
    Place,
    Spread,
    describe_run,
    on_ranks,
    our_run,
    print_facts,
    resident_peak_mb,
)
from picotron_min.collectives import start_exchange
from picotron_min.extensions.experts import dispatch as expert_parallel
from picotron_min.extensions.experts.balance import measure_balance
from picotron_min.extensions.experts.moe import MoE, mixtures
from picotron_min.planner.memory import memory_per_rank
from picotron_min.runtime.config_checks import resolve_model
from picotron_min.runtime.config_file import parse_config
from picotron_min.runtime.launch import return_freed_memory
from train import StepResult, train_step

WARM_UP = 2  # steps
EXPERTS = {"num_hidden_layers": 4, "num_local_experts": 8, "moe_intermediate_size": 344}
ONE_BATCH = {"gradient_accumulation_steps": 1}


def main(arguments: list[str] | None = None, work: dict = WORK) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("routing", "layouts", "grouped"))
    parser.add_argument("--rounds", type=int, help="timed steps of each contender")
    options = parser.parse_args(arguments)
    measure, rounds = {
        "routing": (measure_routing, 48),
        "layouts": (measure_layouts, 3),
        "grouped": (measure_grouped, 15),
    }[options.what]
    work = work | {"model": work["model"] | EXPERTS, "training": work["training"] | ONE_BATCH}
    print_facts(describe_run(work))
    measure(work, options.rounds or rounds)


EVEN = "even, random"
ROUTINGS = {
    EVEN: {"moe_router_force_load_balancing": True},
    "balance 0.001": {},
    "balance 0.01": {"moe_seq_aux_loss_coeff": 0.01},
    "capacity 1.25": {"moe_expert_capacity_factor": 1.25},
    "1.25 and padded": {
        "moe_expert_capacity_factor": 1.25,
        "moe_pad_expert_input_to_capacity": True,
    },
}


class Routed(NamedTuple):
    """A step of one rank."""

    stretches: list[float]  # CPU seconds between exchanges
    experts: float  # the tokens of the fullest expert, to the mean
    ranks: float  # likewise
    dropped: float  # share


def measure_routing(work: dict, rounds: int) -> None:
    config = parse_config(
        work
        | {
            "distributed": {"dp_size": 2, "ep_size": 2, "use_cpu": True, "backend": "gloo"},
            "model": work["model"] | {"vocab_size": 257},
            "training": work["training"] | {"learning_rate": 3e-3},
        }
    )
    by_rank = on_ranks(config, partial(route_in_turn, rounds), library_text())
    few = max(2, rounds // 6)  # quartiles need two
    print(routing_table(f"first {few} steps", [first(few, steps) for steps in by_rank]))
    print(routing_table(f"last {few} steps", [first(-few, steps) for steps in by_rank]))


def library_text() -> np.ndarray:
    """Bytes of Python's standard library: random tokens would give a router nothing to learn."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return np.frombuffer(b"".join(file.read_bytes() for file in files), dtype=np.uint8)


def route_in_turn(rounds: int, place: Place) -> dict[str, list[Routed]]:
    """Let a model of each routing step in turn."""
    runs, steps = {}, {name: [] for name in ROUTINGS}
    for name, choice in ROUTINGS.items():
        training = place.config.training.model_copy(update=choice)
        config = place.config.model_copy(update={"training": training})
        runs[name] = our_run(config, place.model_config, place.axes, place.data)
    for index in range(WARM_UP + rounds):
        for name, run in runs.items():
            with marked() as times:
                result = train_step(run, index)
            stretches = [after - before for before, after in pairwise(times)]
            steps[name].append(Routed(stretches, *evenness(result, place)))
    return {name: of_name[WARM_UP:] for name, of_name in steps.items()}


class Noted(NamedTuple):
    """A message in place of torch's Work: notes the CPU time when it has arrived."""

    work: dist.Work
    times: list[float]

    def wait(self) -> None:
        self.work.wait()
        self.times.append(time.thread_time())


@contextmanager
def marked() -> Iterator[list[float]]:
    """This thread's CPU time at the start, whenever rows have arrived, and at the end."""
    times = [time.thread_time()]

    def exchange(*args):
        received, work = start_exchange(*args)
        return received, Noted(work, times)

    with mock.patch.object(expert_parallel, "start_exchange", exchange):
        yield times
    times.append(time.thread_time())


def evenness(result: StepResult, place: Place) -> tuple[float, float, float]:
    """How uneven a step was over experts and over the ranks that have them; what was dropped."""
    measures = measure_balance(result.routed, place.model_config, place.config.workload.routing)
    tokens = result.routed[:, : place.model_config.num_local_experts]
    ranks = rank_imbalance(tokens, place.axes.ep.size)
    return measures["load_imbalance"], ranks, measures["dropped"]


def rank_imbalance(tokens: Tensor, ep: int) -> float:
    """tokens [layers, X] -> those of the rank that has most, to the mean: the mean of all layers"""
    of_ranks = tokens.unflatten(1, (ep, -1)).sum(-1)
    return (of_ranks.amax(1) / of_ranks.mean(1)).mean().item()


Steps = dict[str, list[Routed]]  # of a rank, by routing


def first(count: int, steps: Steps) -> Steps:
    """So many steps; negative: the last ones."""
    part = slice(count) if count > 0 else slice(count, None)
    return {name: of_name[part] for name, of_name in steps.items()}


def routing_table(title: str, by_rank: list[Steps]) -> str:
    lines = [f"\n{title:18}{'experts':>9}{'ranks':>7}{'dropped':>9}   step / even"]
    even = step_seconds([steps[EVEN] for steps in by_rank])
    for name in ROUTINGS:
        took = step_seconds([steps[name] for steps in by_rank])
        ratio = Spread.of([a / b for a, b in zip(took, even, strict=True)])
        _, *columns = zip(*by_rank[0][name], strict=True)  # all ranks know the same counts
        experts, ranks, dropped = map(fmean, columns)
        lines.append(f"{name:18}{experts:9.2f}{ranks:7.2f}{dropped:9.1%}   {ratio}")
    return "\n".join(lines)


def step_seconds(by_rank: list[list[Routed]]) -> list[float]:
    """Of each step: the slowest rank's seconds of every stretch, added."""
    return [
        sum(max(stretch) for stretch in zip(*(step.stretches for step in ranks), strict=True))
        for ranks in zip(*by_rank, strict=True)
    ]


GRID = {"dp_size": 4, "tp_size": 2, "sequence_parallel": True}
LAYOUTS = {
    "ep 1": {},
    "ep 2": {"ep_size": 2},
    "ep 4": {"ep_size": 4},
    "ep 8": {"ep_size": 8},
    "ep 2, etp 2": {"ep_size": 2, "etp_size": 2},
    "ep 4, etp 2": {"ep_size": 4, "etp_size": 2},
    "ep 1, ZeRO": {"sharding": "optimizer"},
    "ep 8, ZeRO": {"ep_size": 8, "sharding": "optimizer"},
}


class Cost(NamedTuple):
    """What a layout costs a rank."""

    peak: float  # MB that the model and its steps have added
    sent: dict[str, float]  # MB a step, by axis
    seconds: list[float]  # of CPU, of each step


def measure_layouts(work: dict, rounds: int) -> None:
    training = work["training"] | {"moe_router_force_load_balancing": True}
    head = f"\n{'':14}{'formula':>9}{'peak':>7}{'tokens':>9}{'gradients':>11}{'all':>7}{'CPU s':>8}"
    print(head, flush=True)
    for name, choice in LAYOUTS.items():
        distributed = GRID | {"use_cpu": True, "backend": "gloo"} | choice
        config = parse_config(work | {"distributed": distributed, "training": training})
        shape = resolve_model(config), config.layout, config.workload
        planned = memory_per_rank(*shape, device="cpu").total / 1e6
        ranks = on_ranks(config, partial(cost_of_steps, rounds))
        print(f"{name:14}{planned:>9.0f}{layout_columns(ranks)}", flush=True)


def cost_of_steps(rounds: int, place: Place) -> Cost:
    if place.config.layout.sharding != "none":
        return_freed_memory()  # as train.py does
    before, seconds = resident_peak_mb(), []
    run = our_run(place.config, place.model_config, place.axes, place.data)
    for index in range(WARM_UP + rounds):
        for axis in place.axes:
            axis.ledger.take_bytes()  # of the step before
        began = time.thread_time()
        train_step(run, index)
        seconds.append(time.thread_time() - began)
    sent = {axis.name: axis.ledger.take_bytes() / 1e6 for axis in place.axes}
    return Cost(resident_peak_mb() - before, sent, seconds[WARM_UP:])


def layout_columns(ranks: list[Cost]) -> str:
    """The largest peak, MB sent by a rank, and the median step in seconds of all ranks together."""

    def mean(*axes: str) -> float:
        return fmean(sum(rank.sent[axis] for axis in axes) for rank in ranks)

    tokens, gradients, everything = mean("ep_etp"), mean("edp", "dp_cp"), mean(*ranks[0].sent)
    peak = max(rank.peak for rank in ranks)
    seconds = median(map(sum, zip(*(rank.seconds for rank in ranks), strict=True)))
    return f"{peak:7.0f}{tokens:9.1f}{gradients:11.1f}{everything:7.1f}{seconds:8.2f}"


SHAPES = {  # experts, hidden size, size of an expert, tokens, experts of a token
    "8 wide": (8, 256, 688, 1024, 2),
    "8 narrow": (8, 256, 64, 1024, 2),
    "64 wide": (64, 256, 688, 1024, 4),
    "64 narrow": (64, 256, 64, 1024, 4),
    "64 narrow, few tokens": (64, 256, 64, 128, 4),
    "64 tiny, few tokens": (64, 32, 32, 128, 4),
}


def measure_grouped(work: dict, rounds: int) -> None:
    print(f"\n{'':23}{'rows each':>9}{'together':>11}{'loop':>9}   together / loop")
    for name, (X, E, F, tokens, k) in SHAPES.items():
        model = {"hidden_size": E, "num_hidden_layers": 1, "num_local_experts": X}
        model |= {"moe_intermediate_size": F, "num_experts_per_tok": k}
        config = parse_config(
            {
                "distributed": {"use_cpu": True, "backend": "gloo"},
                "model": work["model"] | model,
                "training": work["training"] | {"seq_length": tokens, "micro_batch_size": 1},
            }
        )
        ((together, loop),) = on_ranks(config, partial(both_products, rounds))
        ratio = Spread.of([a / b for a, b in zip(together, loop, strict=True)])
        ms = "".join(f"{1000 * median(x):>6.1f} ms" for x in (together, loop))
        print(f"{name:23}{tokens * k // X:>9}  {ms}   {ratio}", flush=True)


def both_products(rounds: int, place: Place) -> tuple[list[float], list[float]]:
    """CPU seconds of a layer's experts, forward and backward, together and one after another."""
    run = our_run(place.config, place.model_config, place.axes, place.data)
    (moe,) = mixtures(run.model.pipeline.chunks[0].model)
    c, tokens = place.model_config, place.config.training.seq_length
    sizes = [tokens * c.num_experts_per_tok // c.num_local_experts] * c.num_local_experts
    rows = torch.randn(sum(sizes), c.hidden_size, requires_grad=True)
    weights = torch.rand(len(rows))
    seconds = {moe.run: [], partial(MoE.run, moe): []}
    for _ in range(WARM_UP + rounds):
        for products, of_kind in seconds.items():
            for buckets in run.model.gradients:
                buckets.begin(1)
            began = time.thread_time()
            products(rows, sizes, weights).sum().backward()
            of_kind.append(time.thread_time() - began)
    return tuple(of_kind[WARM_UP:] for of_kind in seconds.values())


if __name__ == "__main__":
    main()
