"""Fuzz: random layouts train what one rank trains, and resume from another's checkpoint.

    python -m tests.fuzz --seed 1 --minutes 10
    python -m tests.fuzz --pair '{"saved": {...}, "resumed": {...}}'    one again, as it was printed

A pair is two configs of train.py with the same model, data and global batch: the first trains two
steps and saves, the second loads that and trains two more. In float64 with SGD, losses, norms,
gradients, weights and routes must be one rank's within 1e-10: else the exit code is 1. Switches and
named choices are drawn from where they are declared; config_checks.py says what is valid.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from dataclasses import fields
from functools import partial
from itertools import count
from math import prod
from pathlib import Path
from typing import Literal, get_args, get_origin

from picotron_min.extensions.schedules.registry import SCHEDULES
from picotron_min.extensions.settings import Layout, ModelConfig, Recipe, Workload
from picotron_min.layout import Coordinates
from picotron_min.runtime.config import KEY, Config, ConfigError
from picotron_min.runtime.config_checks import resolve_model
from picotron_min.runtime.config_file import parse_config
from tests.assembled import Run, assert_same, make_training, on_one_rank, run_of, whole_run
from tests.pool import MAX_RANKS, Pool, RankFailed
from tests.training import raw_config

STEPS = 2  # before the save, and again after it
GLOBAL_BATCH = 24
# The mask and packing of documents are of a pair, compiling takes seconds, and the others round.
FIXED = ("dtype", "document_mask", "packing", "compile", "fp8")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--pair", type=json.loads)
    options = parser.parse_args()
    pool, end, done = Pool(), time.monotonic() + 60 * options.minutes, 0
    pairs = (draw(random.Random(f"{options.seed} {number}")) for number in count())
    for pair in [options.pair] if options.pair else pairs:
        print(json.dumps(pair), flush=True)
        try:
            check(pool, **pair)
        except (AssertionError, RankFailed) as error:
            print(f"{error}\nthe pair above differs from one rank", file=sys.stderr)
            sys.exit(1)
        done += 1
        if time.monotonic() > end:
            break
    pool.close()
    print(f"{done} pairs: no difference above 1e-10")


def check(pool: Pool, saved: dict, resumed: dict) -> None:
    """AssertionError if a pair differs from one rank; RankFailed if a rank does not finish."""
    first, second = parse_config(saved), parse_config(resumed)
    with tempfile.TemporaryDirectory() as folder:
        for config, train, steps in (
            (first, partial(train_and_save, folder=Path(folder)), STEPS),
            (second, partial(load_and_train, folder=Path(folder)), 2 * STEPS),
        ):
            model_config = resolve_model(config)
            one = whole_run(pool, on_one_rank(config), model_config, steps)
            ours = whole_run(pool, config, model_config, steps, train, atol=1e-10)
            last = {
                key: getattr(one, key)[-STEPS:] for key in ("losses", "norms", "routed", "further")
            }
            assert_same(ours, one._replace(**last))


def train_and_save(config: Config, model_config: ModelConfig, steps: int, folder: Path) -> Run:
    training = make_training(config, model_config)
    run = run_of(training, range(steps))
    training.save(folder, steps)
    return run


def load_and_train(config: Config, model_config: ModelConfig, steps: int, folder: Path) -> Run:
    training = make_training(config, model_config)
    training.load(folder / f"step-{STEPS:08d}", STEPS)
    return run_of(training, range(STEPS, steps))


def draw(rng: random.Random) -> dict[str, dict]:
    """Two configs of one training, whose model fits enough layouts."""
    for _ in range(20):
        shared = draw_model(rng), draw_training(rng)
        try:
            return {role: draw_config(rng, *shared) for role in ("saved", "resumed")}
        except ConfigError as error:
            last = error
    raise last


def draw_model(rng: random.Random) -> dict[str, object]:
    heads, layers = rng.choice((4, 6, 8)), rng.choice((2, 3, 4, 5, 8))
    model = {
        "vocab_size": rng.choice((257, 261, 264)),  # divided by 2, 4 and 8, or unevenly
        "hidden_size": rng.choice((24, 32)),
        "intermediate_size": rng.choice((24, 48)),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": rng.choice([n for n in range(1, heads + 1) if heads % n == 0]),
        "head_dim": rng.choice((4, 6)),
        "tie_word_embeddings": rng.random() < 0.5,
        "qk_norm": rng.random() < 0.3,
        "num_nextn_predict_layers": rng.choice((0, 0, 0, 1, 2)),
    }
    if rng.random() < 0.6:
        return model
    return model | {
        "num_local_experts": rng.choice((4, 6, 8)),
        "num_experts_per_tok": rng.choice((2, 3)),
        "moe_intermediate_size": rng.choice((8, 12)),
        "n_shared_experts": rng.choice((0, 1, 2)),
        "moe_shared_expert_gate": rng.random() < 0.5,
        "mlp_only_layers": rng.sample(range(layers), rng.choice((0, 0, 1))),
        "scoring_func": rng.choice(choices(ModelConfig)["scoring_func"]),
        "norm_topk_prob": rng.random() < 0.7,
    }


def draw_training(rng: random.Random) -> dict[str, object]:
    # Balance within sequences alone: other scopes depend on how sequences lie in micro-batches.
    mask = rng.random() < 0.4
    return {
        "seed": rng.randrange(1000),
        "seq_length": rng.choice((16, 24, 48)),
        "use_cpu": True,
        "dtype": "float64",
        "optimizer": "sgd",
        "learning_rate": 0.5,
        "schedule": rng.choice(choices(Recipe)["schedule"]),
        "total_train_steps": 5,
        "warmup_steps": rng.choice((0, 1)),
        "weight_decay": rng.choice((0.0, 0.01)),
        "grad_clip": rng.choice((None, 0.5)),
        "eval_batches": 1,
        "document_mask": mask,
        "packing": rng.choice(("wrapped", "bfd")) if mask else "wrapped",
        "moe_seq_aux_loss_coeff": rng.choice((0.0, 0.1)),
        "moe_z_loss_coeff": rng.choice((0.0, 0.01)),
        "moe_router_bias_update_rate": 0.01,
    }


def draw_config(rng: random.Random, model: dict, training: dict) -> dict[str, dict]:
    """A valid config of a model, in any layout; ConfigError if there is hardly any."""
    of_experts, last = ("ep", "etp") if "num_local_experts" in model else (), None
    for _ in range(2000):
        sizes = {axis: rng.choice((1, 1, 2, 2, 3, 4, 8)) for axis in Coordinates._fields}
        micro_batches = rng.choice((1, 2, 3, 4, 6))
        batch, rest = divmod(GLOBAL_BATCH, sizes["dp"] * micro_batches)
        if rest or not 1 < prod(sizes.values()) <= MAX_RANKS:
            continue
        sizes |= {axis: rng.choice((1, 2, 4)) for axis in of_experts}
        keys = sizes | model | training
        for kind in (Layout, Workload):
            keys |= {key: rng.choice(options) for key, options in choices(kind).items()}
        keys |= {"pp_chunks": rng.choice((1, SCHEDULES[keys["pp_engine"]].chunks))}
        keys |= {"micro_batch_size": batch, "gradient_accumulation_steps": micro_batches}
        raw = raw_config(**keys)
        try:
            parse_config(raw)
            return raw
        except ConfigError as error:
            last = error
    raise last or ConfigError("this model fits few layouts")


def choices(kind: type) -> dict[str, tuple]:
    """The allowed values of each field that is a bool or a Literal, by its key in a config."""
    types = {KEY.get(f.name, f.name): f.type for f in fields(kind) if f.name not in FIXED}
    types = {key: Literal[False, True] if kind is bool else kind for key, kind in types.items()}
    return {key: get_args(kind) for key, kind in types.items() if get_origin(kind) is Literal}


if __name__ == "__main__":
    main()
