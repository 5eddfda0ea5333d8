"""The planner's traffic against the ledgers of real steps: equal to the byte, on every rank."""

from dataclasses import fields

import pytest

from picotron_min.extensions.schedules.registry import SCHEDULES
from picotron_min.extensions.settings import ModelConfig
from picotron_min.planner.traffic import planned_ledger, planned_traffic
from picotron_min.runtime.config import KEYS, Config
from picotron_min.runtime.config_file import parse_config
from picotron_min.runtime.reporter import take_bytes
from tests.assembled import make_training

# 61 ids over 2 or 4 ranks leave the last with fewer; 3 layers over 2 stages are unequal.
MODEL = ModelConfig(61, 32, 48, 3, 8, 4)


def config_of(model: ModelConfig, **options) -> Config:
    """A config with these options, each in the section that has such a key."""
    shape = {f.name: getattr(model, f.name) for f in fields(ModelConfig)}
    shape["mlp_only_layers"] = list(model.mlp_only_layers)
    raw = {
        "distributed": {"use_cpu": True},
        # The tokenizer has more ids than this vocabulary: so its size is not in the config.
        "model": {k: v for k, v in shape.items() if k not in ("rope_scaling", "vocab_size")},
        "training": {"seq_length": 16, "micro_batch_size": 1, "eval_batches": 0},
    }
    raw["training"] |= {"optimizer": "sgd"}
    for name, value in options.items():
        key = f"{name}_size" if f"distributed.{name}_size" in KEYS else name
        section = next(section for section in raw if f"{section}.{key}" in KEYS)
        raw[section][key] = value
    return parse_config(raw)


def sent_in_a_step(config: Config, model: ModelConfig) -> tuple[dict, dict]:
    """Bytes by axis, and by axis and collective."""
    training = make_training(config, model)
    training.step(0)
    ledgers = {axis.name: axis.ledger.bytes.items() for axis in training.axes}
    by_collective = {(name, kind): n for name, sent in ledgers.items() for kind, n in sent if n}
    return take_bytes(training.axes), by_collective


TIED, EXPERTS = {"tie_word_embeddings": True}, {"num_local_experts": 4, "moe_intermediate_size": 16}
# Each expert gets the same number of rows: else how many leave a rank is up to the router.
PADDED = {"moe_expert_capacity_factor": 1.5, "moe_pad_expert_input_to_capacity": True}
SHARED = {"n_shared_experts": 1, "scoring_func": "sigmoid", "mlp_only_layers": (0,)}
THREE, FOUR = {"gradient_accumulation_steps": 3}, {"gradient_accumulation_steps": 4}

LAYOUTS = {
    "dp": dict(dp=3, **THREE),
    "tp, full": {"tp": 2, "recompute": "full"},
    "tp, sequence, overlap, selective": {
        "tp": 4,
        "sequence_parallel": True,
        "tp_overlap": True,
        "recompute": "selective",
    },
    "tp, sequence, full, bfloat16": {
        "dp": 2,
        "tp": 2,
        "sequence_parallel": True,
        "recompute": "full",
        "dtype": "bfloat16",
    },
    "cp ring, selective": {"cp": 2, "recompute": "selective", "dtype": "bfloat16"},
    "cp ring, tp": {"cp": 4, "tp": 2, "sequence_parallel": True, "dtype": "float64"},
    "cp ulysses, repeated heads, full": {
        "cp": 4,
        "cp_engine": "ulysses",
        "recompute": "full",
        "model": {"num_key_value_heads": 2},
    },
    "optimizer, tied": dict(dp=2, tp=2, sharding="optimizer", model=TIED, **THREE),
    "gradients": dict(dp=2, cp=2, sharding="gradients", dtype="bfloat16", **THREE),
    "parameters, tied": {
        "dp": 2,
        "tp": 2,
        "sequence_parallel": True,
        "sharding": "parameters",
        "model": TIED,
        "dtype": "bfloat16",
    },
    "parameters, tied apart, full": dict(
        dp=2, pp=2, sharding="parameters", model=TIED, recompute="full", **THREE
    ),
    "muon": {"dp": 2, "tp": 2, "optimizer": "muon"},
    "layerwise, muon": {
        "dp": 3,
        "tp": 2,
        "sharding": "layerwise",
        "optimizer": "muon",
        "dtype": "bfloat16",
    },
    "experts, padded": dict(dp=2, ep=2, model=EXPERTS, **PADDED, moe_global_aux_loss_coeff=0.1),
    "experts, padded, tp": dict(
        tp=2, dp=2, ep=2, etp=2, model=EXPERTS | SHARED, recompute="full", **PADDED
    ),
    "experts, padded, tp, sequence": dict(
        tp=2, cp=2, ep=4, model=EXPERTS, sequence_parallel=True, recompute="full", **PADDED
    ),
    "experts, all chosen": {"dp": 2, "ep": 2, "model": EXPERTS | {"num_experts_per_tok": 4}},
    "experts, all-gather, sharded": {
        "dp": 4,
        "tp": 2,
        "ep": 2,
        "etp": 2,
        "ep_engine": "allgather",
        "sharding": "parameters",
        "model": EXPERTS | SHARED,
        "recompute": "full",
    },
    "all at once": dict(dp=2, pp=2, cp=2, sharding="optimizer", model=TIED, **THREE),
}
LAYOUTS |= {  # a V has both ends on one rank
    f"V, {sharding}, tied": dict(
        dp=2,
        pp=2,
        pp_engine="zb_v",
        pp_chunks=2,
        sharding=sharding,
        model=TIED | {"num_hidden_layers": 5},
        **FOUR,
    )
    for sharding in ("none", "optimizer", "gradients", "parameters")
}
LAYOUTS |= {
    f"pp, {engine}": dict(
        pp=2,
        tp=2,
        pp_engine=engine,
        pp_chunks=schedule.chunks,
        sequence_parallel=True,
        recompute="full",
        model=TIED | {"num_hidden_layers": 5},
        **FOUR,
    )
    for engine, schedule in SCHEDULES.items()
}


@pytest.mark.turns(3, 7)
@pytest.mark.parametrize("options", LAYOUTS.values(), ids=LAYOUTS)
def test_planned_traffic_is_what_a_step_sends(pool, options):
    model = MODEL.override(**options.get("model", {}))
    config = config_of(model, **{key: o for key, o in options.items() if key != "model"})
    sizes = model, config.layout, config.workload
    for rank, (sent, by) in enumerate(pool.run(config.world_size, sent_in_a_step, config, model)):
        assert planned_traffic(*sizes, rank) == sent, rank
        assert {k: n for k, n in planned_ledger(*sizes, rank).items() if n} == pytest.approx(by)
