"""Tiny: a config's layout with a small model, on data in which every id is a target in each step.

Small sizes show everything only if they are uneven: layers that the stages do not divide, a
vocabulary that tp does not divide, several gradient buckets, several stripes of the loss.
"""

import math
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from picotron_min.extensions.settings import Layout, ModelConfig, Recipe, Workload
from picotron_min.runtime.config import Config
from picotron_min.runtime.config_checks import resolve_model

BUCKET_BYTES, STRIPE_ROWS = 20_000, 24  # several of each, also in a tiny model
MOST_PARAMETERS = 50_000_000  # the run in one process keeps all its tensors, in float64
RATES = {"sgd": 0.5, "adamw": 0.01, "muon": 0.02}


class Trial(NamedTuple):
    """What is trained twice: by the ranks of a layout, and by one process without parallelism."""

    model_config: ModelConfig
    layout: Layout
    workload: Workload  # of a data-parallel rank
    recipe: Recipe
    seed: int
    steps: int
    changes: list[str]  # what the config has and the trial has not
    wait: float  # seconds for a message, after which it is an error

    @property
    def depths(self) -> int:
        """Tokens that are predicted beside the next one."""
        return self.model_config.num_nextn_predict_layers

    @property
    def micro_batches(self) -> list[tuple[int, int]]:
        """All (micro-batch, dp rank) of a step, in the order of the global batch."""
        m, dp = self.workload.num_micro_batches, self.layout.dp
        return [(i, d) for i in range(m) for d in range(dp)]


# What one process in float64 has otherwise, or not at all.
EXACT = {"dtype": "float64", "moments": "float32"}
PLAIN = EXACT | {"compile": False, "fp8": False, "offload": 0, "packing": "wrapped"}
PLAIN_ROUTING = {"moe_global_aux_loss_coeff": 0.0, "moe_expert_capacity_factor": None}
PLAIN_ROUTING |= {"moe_pad_expert_input_to_capacity": False}
PLAIN_ROUTING |= {"moe_expert_rank_capacity_factor": None}


def trial_of(config: Config, steps: int, own_sizes: bool) -> Trial:
    """The trial of a config; ValueError where the config cannot be compared."""
    changes: list[str] = []

    def plain(settings: Any, values: dict) -> Any:
        was = {key: getattr(settings, key) for key in values}
        changes.extend(f"{key} {was[key]}" for key in values if was[key] != values[key])
        return replace(settings, **values)

    layout, recipe, model = config.layout, config.recipe, resolve_model(config)
    workload = plain(config.workload, PLAIN)
    workload = replace(workload, routing=plain(workload.routing, PLAIN_ROUTING))
    clip = recipe.grad_clip and (recipe.grad_clip if own_sizes else 0.5)
    rate = {"learning_rate": RATES[recipe.optimizer], "schedule": "constant", "warmup_steps": 0}
    recipe = replace(recipe, **EXACT, **rate, grad_clip=clip)
    count = sum(map(math.prod, model.parameter_shapes().values()))
    if own_sizes and count > MOST_PARAMETERS:
        why = f"{count:,} parameters, and --own-sizes compares at most {MOST_PARAMETERS:,}"
        raise ValueError(f"the model has {why}: leave it out, or use fewer layers")
    if not own_sizes:
        model, layout = tiny_model(model, layout), replace(layout, pp_layers=None)
        m, unit = workload.num_micro_batches, math.lcm(4 * layout.cp, layout.cp * layout.tp)
        sizes = {"seq_length": unit * -(-16 // unit), "micro_batch_size": 4}  # cut by cp and tp
        sizes["num_micro_batches"] = m if m <= 8 else max(4, 2 * layout.pp)
        workload = replace(workload, **sizes)
    wait = 600.0 if own_sizes else 30.0
    return Trial(model, layout, workload, recipe, config.training.seed, steps, changes, wait)


def tiny_model(model: ModelConfig, layout: Layout) -> ModelConfig:
    """A model of the same kind, whose sizes divide as they must and not where they need not."""
    tp, vocabulary = layout.tp, 29
    unit = tp * (layout.cp if layout.cp_engine == "ulysses" else 1)
    own, ratio = model.num_key_value_heads, model.num_attention_heads / model.num_key_value_heads

    def unlike(heads: tuple[int, int]) -> tuple:  # cp divides the key heads where it did
        (q, kv), of_cp = heads, math.gcd(own, unit)
        return math.gcd(kv, unit) != of_cp, abs(q / kv - ratio), abs(q - 8)

    counts = range(unit, 2 * max(8, unit) + 1, unit)
    heads, kv_heads = min(
        ((q, k) for q in counts for k in range(tp, q + 1, tp) if q % k == 0), key=unlike
    )
    while tp > 1 and (vocabulary % tp == 0 or (tp - 1) * -(-vocabulary // tp) >= vocabulary):
        vocabulary += 1
    sizes = {"vocab_size": vocabulary, "hidden_size": 4 * heads, "head_dim": None}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    sizes["num_hidden_layers"] = max(2, layout.num_stages + (layout.pp > 1))
    sizes["intermediate_size"] = tp * -(-48 // tp)
    if model.num_local_experts:
        sizes |= {"num_local_experts": layout.ep * -(-4 // layout.ep), "num_experts_per_tok": 2}
        sizes |= {"moe_intermediate_size": layout.etp * -(-16 // layout.etp)}
        sizes |= {"n_shared_experts": min(1, model.n_shared_experts), "n_group": 1}
        sizes |= {"mlp_only_layers": (0,) if model.mlp_only_layers else (), "topk_group": 1}
    return model.override(**sizes)


class Text(NamedTuple):
    tokens: np.ndarray  # of all sequences, joined, and one more
    ends: np.ndarray  # of documents
    rows: list[list[int]]  # for each step, where the sequences of its global batch begin


def text_of(trial: Trial) -> Text:
    """A stream in which the targets of each step are one permutation of all ids after another."""
    dice, V, S = np.random.default_rng(0), trial.model_config.vocab_size, trial.workload.seq_length
    G = len(trial.micro_batches) * trial.workload.micro_batch_size
    order = np.random.default_rng((trial.seed, 0)).permutation(G * trial.steps)  # see data.py
    tokens = np.zeros(G * trial.steps * S + 1, np.uint32)
    rows = [[int(S * i) for i in of_step] for of_step in order.reshape(trial.steps, G)]
    for of_step in rows:
        ids = np.concatenate([dice.permutation(V) for _ in range(-(-G * S // V))])
        for j, start in enumerate(of_step):
            tokens[start + 1 : start + S + 1] = ids[j * S : j * S + S]
    ends = np.cumsum(np.arange(len(tokens)) * 7 % 41 + 1)  # documents of 1 to 41 tokens
    return Text(tokens, np.append(ends[ends < len(tokens)], len(tokens)), rows)
