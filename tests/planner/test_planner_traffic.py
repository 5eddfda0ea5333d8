"""The planner's traffic against the ledgers of real steps: equal to the byte, on every rank."""

import json
from contextlib import suppress
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
        "dataset": {},
    }
    raw["training"] |= {"optimizer": "sgd"}
    for name, value in options.items():
        key = f"{name}_size" if f"distributed.{name}_size" in KEYS else name
        section = next(section for section in raw if f"{section}.{key}" in KEYS)
        raw[section][key] = value
    return parse_config(raw)


def sent_in_a_step(config: Config, model: ModelConfig) -> tuple[dict, dict, dict]:
    """Bytes by axis; bytes and calls by axis and collective, where there are any."""
    training = make_training(config, model)
    training.step(0)
    kinds = [(axis, kind) for axis in training.axes for kind, n in axis.ledger.bytes.items() if n]
    sent = {(axis.name, kind): axis.ledger.bytes[kind] for axis, kind in kinds}
    calls = {(axis.name, kind): axis.ledger.calls[kind] for axis, kind in kinds}
    return take_bytes(training.axes), sent, calls


TIED, EXPERTS = {"tie_word_embeddings": True}, {"num_local_experts": 4, "moe_intermediate_size": 16}
# Each expert gets the same number of rows: else how many leave a rank is up to the router.
PADDED = {"moe_expert_capacity_factor": 1.5, "moe_pad_expert_input_to_capacity": True}
SHARED = {"n_shared_experts": 1, "scoring_func": "sigmoid", "mlp_only_layers": (0,)}
MODELS = {
    "tied": TIED,
    "five": TIED | {"num_hidden_layers": 5},
    "repeated": {"num_key_value_heads": 2},
}
MODELS |= {
    "experts": EXPERTS,
    "shared": EXPERTS | SHARED,
    "all": EXPERTS | {"num_experts_per_tok": 4},
    "depths": {"num_nextn_predict_layers": 2, "num_hidden_layers": 5},
}

# A V has both ends on one rank.
LAYOUTS = """\
tp=4 sp=true tp_overlap=true recompute=selective
dp=2 tp=2 sp=true recompute=full dtype=bfloat16
cp=4 tp=2 sp=true dtype=float64
cp=4 cp_engine=ulysses recompute=full model=repeated
dp=2 tp=2 sharding=optimizer m=3 model=tied
dp=2 cp=2 sharding=gradients m=3 dtype=bfloat16
dp=2 tp=2 sp=true sharding=parameters dtype=bfloat16 model=tied
dp=2 pp=2 sharding=parameters recompute=full m=3 model=tied
dp=3 tp=2 sharding=layerwise optimizer=muon dtype=bfloat16
dp=2 tp=2 sharding=gradients m=3 optimizer=muon dtype=bfloat16 model=repeated
dp=4 tp=2 ep=2 etp=2 padded sharding=optimizer optimizer=muon model=shared
dp=2 ep=2 padded moe_global_aux_loss_coeff=0.1 model=experts
tp=2 dp=2 ep=2 etp=2 padded recompute=full model=shared
tp=2 cp=2 ep=4 sp=true padded recompute=full model=experts
dp=2 ep=2 model=all
dp=4 tp=2 ep=2 etp=2 ep_engine=allgather sharding=parameters recompute=full model=shared
dp=2 pp=2 cp=2 sharding=optimizer m=3 model=tied
dp=2 pp=2 tp=2 sp=true m=2 recompute=full dtype=bfloat16 model=depths
dp=2 pp=2 pp_engine=zb_v pp_chunks=2 m=4 sharding=parameters model=depths
dp=2 pp=2 pp_engine=zb_v pp_chunks=2 m=4 sharding=gradients model=five
tp=2 sp=true dtype=bfloat16 fp8=true fp8_skip=1 tp_overlap=true recompute=selective
tp=2 sp=true ep=2 padded dtype=bfloat16 fp8=true recompute=full model=shared
cp=2 document_mask=true
""".splitlines()
LAYOUTS += [
    f"pp=2 tp=2 sp=true pp_engine={name} pp_chunks={s.chunks} m=4 recompute=full model=five"
    for name, s in SCHEDULES.items()
]
KEYS_OF = {"sp": "sequence_parallel", "m": "gradient_accumulation_steps"}


def options_of(text: str) -> tuple[ModelConfig, Config]:
    """What a line above stands for."""
    options, model = {}, MODEL
    for name, _, value in (word.partition("=") for word in text.split()):
        if name == "model":
            model = MODEL.override(**MODELS[value])
        elif name == "padded":
            options |= PADDED
        else:
            with suppress(ValueError):  # else it is text
                value = json.loads(value)
            options[KEYS_OF.get(name, name)] = value
    return model, config_of(model, **options)


@pytest.mark.parametrize("text", LAYOUTS)
def test_planned_traffic_is_what_a_step_sends(pool, text):
    model, config = options_of(text)
    sizes = model, config.layout, config.workload
    steps = pool.run(config.world_size, sent_in_a_step, config, model)
    for rank, (by_axis, sent, calls) in enumerate(steps):
        assert planned_traffic(*sizes, rank) == by_axis, rank
        planned = planned_ledger(*sizes, rank)
        assert {kind: n for kind, n in planned.items() if n} == pytest.approx(sent)
        assert {kind: planned.calls[kind] for kind in calls} == calls
