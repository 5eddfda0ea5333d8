"""Tiny: a config's layout with a small model and a random text.

Small sizes show everything only if they are uneven: layers that the stages do not divide, a
vocabulary that tp does not divide, several gradient buckets, several stripes of the loss.
"""

import math
import re
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from picotron_min.context_parallel import POSITIONS
from picotron_min.data import Batches
from picotron_min.extensions.build import open_batches
from picotron_min.extensions.settings import FAMILIES, Layout, ModelConfig, Recipe, Workload
from picotron_min.mesh import Axes
from picotron_min.runtime.config import Config
from picotron_min.runtime.config_checks import resolve_model

RATES = {"sgd": 0.5, "adamw": 0.01, "muon": 0.02}


class Trial(NamedTuple):
    """What is trained twice: by the ranks of a layout, and by one process without parallelism."""

    model_config: ModelConfig
    layout: Layout
    workload: Workload  # of a data-parallel rank
    recipe: Recipe
    seed: int
    steps: int
    wait: float  # seconds for a message, after which it is an error

    @property
    def micro_batches(self) -> list[tuple[int, int]]:
        """All (micro-batch, dp rank) of a step, in the order of the global batch."""
        m, dp = self.workload.num_micro_batches, self.layout.dp
        return [(i, d) for i in range(m) for d in range(dp)]


# What one process in float64 has otherwise, or not at all.
EXACT = {"dtype": "float64", "moments": "float32"}
PLAIN = EXACT | {
    "compile": False,
    "fp8": False,
    "fp8_experts": False,
    "offload": 0,
    "packing": "wrapped",
}
PLAIN_ROUTING = {
    "moe_global_aux_loss_coeff": 0.0,
    "moe_expert_capacity_factor": None,
    "moe_pad_expert_input_to_capacity": False,
    "moe_expert_rank_capacity_factor": None,
}


def trial_of(config: Config, steps: int, own_sizes: bool) -> Trial:
    """The trial of a config; ValueError where the config cannot be compared."""
    layout, recipe, model = config.layout, config.recipe, resolve_model(config)
    workload, routing = config.workload, config.workload.routing
    workload = replace(workload, **PLAIN, routing=replace(routing, **PLAIN_ROUTING))
    clip, rate = recipe.grad_clip and 0.5, RATES[recipe.optimizer]
    recipe = replace(
        recipe, **EXACT, schedule="constant", warmup_steps=0, learning_rate=rate, grad_clip=clip
    )
    if not own_sizes:
        model, layout = tiny_model(model, layout), replace(layout, pp_layers=None)
        m, unit = workload.num_micro_batches, math.lcm(4 * layout.cp, layout.cp * layout.tp)
        workload = replace(
            workload,
            seq_length=unit * -(-16 // unit),  # cut by cp and tp
            micro_batch_size=4,
            num_micro_batches=m if m <= 8 else max(4, 2 * layout.pp),
        )
    wait = 600.0 if own_sizes else 30.0
    return Trial(model, layout, workload, recipe, config.training.seed, steps, wait)


def tiny_model(model: ModelConfig, layout: Layout) -> ModelConfig:
    """A model of the same kind, whose sizes divide as they must and not where they need not.

    ValueError if it has no layer of a kind that the model has: nothing would be known about it.
    """
    tp = layout.tp
    unit = tp * (layout.cp if layout.cp_engine == "ulysses" else 1)
    shared = math.gcd(model.num_key_value_heads, unit)
    kv_heads = shared * (unit // shared + 1)  # several, which cp divides if it did
    ratio = model.num_attention_heads // model.num_key_value_heads
    heads = math.lcm(kv_heads * min(4, ratio), unit)
    sizes = {
        "vocab_size": tp * (tp + 12) + 1,
        "hidden_size": 4 * heads,
        "head_dim": None,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "num_hidden_layers": max(2, layout.num_stages + (layout.pp > 1)),
        "intermediate_size": tp * -(-48 // tp),
    }
    for family in FAMILIES.values():
        sizes |= family.tiny(model, layout, sizes["num_hidden_layers"])
    tiny = model.override(**sizes)
    there = {kind_of_layer(tiny, i) for i in range(tiny.num_layers)}
    for i in range(model.num_layers):
        if kind_of_layer(model, i) not in there:
            why = f"the tiny model has no layer of the kind of layer {i}"
            raise ValueError(f"{why}, and would be right without it: use --own-sizes")
    return tiny


def kind_of_layer(model: ModelConfig, layer: int) -> tuple:
    """The names of its parameters, whatever their sizes, and what these do not show."""
    names = model.attention_shapes() | model.mlp_shapes(layer)
    kinds = (family.kind(model, layer) for family in FAMILIES.values())
    return frozenset(re.sub(r"\d+", "", name) for name in names), *kinds


class Text(NamedTuple):
    tokens: np.ndarray  # of all steps' sequences, and one more
    ends: np.ndarray  # of documents


def text_of(trial: Trial) -> Text:
    sequences = len(trial.micro_batches) * trial.workload.micro_batch_size * trial.steps
    count = sequences * trial.workload.seq_length + 1
    # Random: in a tiny model every id is a target in each step.
    tokens = np.random.default_rng(0).integers(trial.model_config.vocab_size, size=count)
    ends = np.cumsum(np.arange(count) * 7 % 41 + 1)  # documents of 1 to 41 tokens
    return Text(tokens, np.append(ends[ends < count], count))


def open_text(trial: Trial, text: Text, sequences: int, axes: Axes) -> Batches:
    """Batches of a rank, each of so many sequences."""
    work, dp, cp = trial.workload, axes.dp, axes.cp
    count = len(trial.micro_batches) * work.micro_batch_size // sequences
    return open_batches(
        work,
        trial.model_config.num_nextn_predict_layers,
        text,
        seq_length=work.seq_length,
        seed=trial.seed,
        micro_batch_size=sequences,
        num_micro_batches=count // dp.size,
        dp_rank=dp.rank,
        dp_size=dp.size,
        positions=POSITIONS[trial.layout.cp_engine](cp.rank, cp.size, work.seq_length),
    )
