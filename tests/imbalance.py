"""Imbalance: what it costs if some ranks get more rows of experts than others, as a table.

    python -m tests.imbalance --ep 4 --steps 15

One layer with experts, whose choice is forced: at random, and with a bias for each expert. The runs
of all biases are in the same processes and take turns. Times are CPU time, because that of a rank
does not have the others' load: the median over the steps, of the rank that has most.
"""

import argparse
import statistics
import time

from picotron_min.runtime.config_checks import resolve_model
from picotron_min.runtime.config_file import parse_config
from tests.assembled import make_training
from tests.pool import Pool

BIASES = (0, 0.5, 1, 1.5, 2, 8)
MODEL = {"num_hidden_layers": 1, "hidden_size": 256, "num_local_experts": 8}
WORK = {"seq_length": 256, "micro_batch_size": 4, "moe_router_force_load_balancing": True}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.imbalance", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--ep", type=int, default=4)
    parser.add_argument("--steps", type=int, default=15)
    options = parser.parse_args()
    pool = Pool()
    ranks = pool.run(options.ep, measure, options.ep, options.steps, timeout=600)
    pool.close()
    slowest = [max(seconds for _, seconds in of_ranks) for of_ranks in zip(*ranks, strict=True)]
    print("bias   rows of the busiest rank / mean   its CPU time, ms   / without a bias")
    for bias, (rows, _), seconds in zip(BIASES, ranks[0], slowest, strict=True):
        print(f"{bias:4}   {rows:31.2f}   {1000 * seconds:16.1f}   {seconds / slowest[0]:16.2f}")


def measure(ep: int, steps: int) -> list[tuple[float, float]]:
    """For each bias the imbalance of the ranks, and this rank's CPU seconds in a step."""
    runs, seconds, rows = [], [[] for _ in BIASES], [0.0 for _ in BIASES]
    for bias in BIASES:
        layout = {"dp_size": ep, "ep_size": ep, "use_cpu": True}
        forced = {"moe_router_force_biased": -float(bias)}
        config = parse_config({"distributed": layout, "model": MODEL, "training": WORK | forced})
        runs.append(make_training(config, resolve_model(config)))
    for step in range(steps + 2):  # two to warm up
        for i, run in enumerate(runs):
            began = time.process_time()
            rows[i] = run.step(step).measures["rank_imbalance"]
            seconds[i].append(time.process_time() - began)
    medians = [statistics.median(times[2:]) for times in seconds]
    return list(zip(rows, medians, strict=True))


if __name__ == "__main__":
    main()
