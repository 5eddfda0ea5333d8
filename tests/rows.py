"""How rows are read: a line of text is a run, with its model.

    sharding: dp=2 tp=2 sp sharding=optimizer m=3 model=tied

The folder that the row is for comes first: `pytest -k sharding:` runs its rows alone. `families`
are qk_norm, qkv_bias and no_rope, all in one model. Then come keys of any section of a config,
numbers of the model, and short names. A word alone means true, or stands for several keys. What a
row leaves out is as `make_config` in tests/assembled.py has it.
The rows are in test_layouts, test_resumes, test_memory and planner/test_planner_traffic.
"""

import json
from contextlib import suppress
from dataclasses import fields
from typing import Literal, get_args, get_origin

from picotron_min.extensions.schedules.registry import SCHEDULES
from picotron_min.extensions.settings import ModelConfig
from picotron_min.runtime.config import OVERRIDES, Config
from tests.assembled import MODELS, make_config

EXPERTS = MODELS["untied"].override(num_local_experts=8, moe_intermediate_size=16)
SIGMOID = {"scoring_func": "sigmoid", "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3}
SHAPES = MODELS | {
    # Layers of each kind are not at the same places of two stages. Only the first ones are used.
    "families": MODELS["grouped-query"].override(
        qk_norm=True, qkv_bias=True, no_rope_layers=(1, 0, 0) * 8
    ),
    "post-norm": MODELS["grouped-query"].override(post_norm=True),
    "depths": MODELS["untied"].override(num_nextn_predict_layers=2),
    "softmax": EXPERTS,
    "gated": EXPERTS.override(
        n_shared_experts=1, moe_shared_expert_gate=True, mlp_only_layers=(1,), norm_topk_prob=False
    ),
    "sigmoid": EXPERTS.override(
        **SIGMOID,
        n_shared_experts=2,
        mlp_only_layers=(0,),
        routed_scaling_factor=2.5,
        tie_word_embeddings=True,
        num_nextn_predict_layers=1,
    ),
}

SHORT = {"m": "micro_batches"}
DROPPING = {"moe_expert_capacity_factor": 0.7}
WORDS = {
    "sp": {"sequence_parallel": True},
    "ulysses": {"cp_engine": "ulysses"},
    "allgather": {"ep_engine": "allgather"},
    "mask": {"document_mask": True},
    "packed": {"document_mask": True, "packing": "bfd"},
    "adamw": {"optimizer": "adamw", "learning_rate": 0.01, "betas": [0.8, 0.9]},
    "muon": {"optimizer": "muon", "learning_rate": 0.02, "betas": [0.8, 0.9], "momentum": 0.9},
    "aux": {"moe_aux_loss_coeff": 0.3},
    "global_aux": {"moe_global_aux_loss_coeff": 0.3},
    "dropping": DROPPING,
    "dropping_last": DROPPING | {"moe_token_drop_policy": "position"},
    "padded": DROPPING | {"moe_pad_expert_input_to_capacity": True},
}


def lines(*tables: str) -> list[str]:
    """The rows of tables; "-" is a line between them."""
    return [line for table in tables for line in table.strip().splitlines() if line != "-"]


def row(text: str, **defaults) -> tuple[Config, ModelConfig]:
    """What a line stands for; `defaults`: keys that the line may change."""
    options = defaults | options_of(text.partition(": ")[2])
    numbers = {f.name: options.pop(f.name) for f in fields(ModelConfig) if f.name in options}
    shape = SHAPES[options.pop("model", "untied")].override(**numbers)
    if options.get("pp", 1) > 1:
        options = {"chunks": SCHEDULES[options.get("engine", "1f1b")].chunks} | options
    # The tokenizer has more ids than this vocabulary: so its size is not in the config.
    written = {key: getattr(shape, key) for key in OVERRIDES if key != "vocab_size"}
    written = {k: list(v) if isinstance(v, tuple) else v for k, v in written.items()}
    del written["num_hidden_layers"]  # see `layers` of make_config
    config = make_config(**options, model=written)
    return config, shape.override(num_hidden_layers=config.model.num_hidden_layers)


def options_of(words: str) -> dict[str, object]:
    options = {}
    for name, equals, value in (word.partition("=") for word in words.split()):
        if equals:
            with suppress(ValueError):  # else it is text
                value = json.loads(value)
            options[SHORT.get(name, name)] = value
        else:
            options |= WORDS.get(name, {name: True})
    return options


def choices(kind: type) -> dict[str, tuple]:
    """The allowed values of each field of a dataclass that is a bool or a Literal."""
    types = {f.name: Literal[False, True] if f.type is bool else f.type for f in fields(kind)}
    return {name: get_args(kind) for name, kind in types.items() if get_origin(kind) is Literal}
