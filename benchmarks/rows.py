"""The rows of compare.py: who is compared with whom, in which layout, on which work.

A new row is an entry here, and a function in ours.py or peers.py for each new contender.
"""

from functools import partial
from typing import Any, NamedTuple

from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from benchmarks import ours, peers
from picotron_min.loss import head_loss, stripe_loss

# The step of most rows. About 8M parameters.
MODEL = {"name": "tiny", "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 688}
MODEL |= {"num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4}
STEP = {"seq_length": 256, "micro_batch_size": 4, "gradient_accumulation_steps": 4}
WORK = {"model": MODEL, "training": STEP | {"learning_rate": 1e-3, "eval_batches": 0}}

# What rows have in "distributed",
DP2, TP2, PP2, CP2 = {"dp_size": 2}, {"tp_size": 2}, {"pp_size": 2}, {"cp_size": 2}
SEQUENCE = TP2 | {"sequence_parallel": True}
AFAB, ONE_F_ONE_B = PP2 | {"pp_engine": "afab"}, PP2 | {"pp_engine": "1f1b"}
RING = SEQUENCE | {"tp_overlap": True}
INTERLEAVED = PP2 | {"pp_engine": "interleaved", "pp_chunks": 2}
ZB_V = PP2 | {"pp_engine": "zb_v", "pp_chunks": 2}
ULYSSES, EP2 = CP2 | {"cp_engine": "ulysses"}, DP2 | {"ep_size": 2}
ZERO_1, ZERO_3, LAYERWISE = (
    DP2 | {"sharding": kind} for kind in ("optimizer", "parameters", "layerwise")
)

# what some have in "training",
SMALL = {"micro_batch_size": 2, "gradient_accumulation_steps": 8}
LONG = {"seq_length": 2048, "micro_batch_size": 1, "gradient_accumulation_steps": 2}
LONG |= {"learning_rate": 1e-4}  # AdamW makes much of the rounding of gradients that are almost 0
MUON = {"optimizer": "muon", "learning_rate": 1e-2}
# Batches so large that three steps show a difference between two updates: on random tokens little
# changes. Without balance losses, which transformers computes in another way.
ALIKE = {"micro_batch_size": 8, "gradient_accumulation_steps": 2, "learning_rate": 1e-4}
ALIKE |= {"moe_seq_aux_loss_coeff": 0.0, "moe_router_bias_update_rate": 0.0}

# and in "model".
EXPERTS = {"num_hidden_layers": 4, "num_local_experts": 8, "moe_intermediate_size": 344}
MIXTRAL = EXPERTS | {"intermediate_size": EXPERTS["moe_intermediate_size"]}
GLM = EXPERTS | {"scoring_func": "sigmoid", "n_shared_experts": 1, "mlp_only_layers": [0]}
MANY = EXPERTS | {"num_local_experts": 64, "num_experts_per_tok": 4, "moe_intermediate_size": 96}

# Contenders, ours first.
OURS = {"picotron-min": ours.picotron_min}
TRANSFORMERS = OURS | {"transformers": peers.transformers_model}
VIEWS = partial(peers.torch_ddp, views=True)
DDP = OURS | {"DDP": peers.torch_ddp, "DDP, bucket views": VIEWS}
ZERO = OURS | {
    "DDP, ZeRO": partial(peers.torch_ddp, optimize=peers.zero_redundancy),
    "DDP, ZeRO, views": partial(VIEWS, optimize=partial(peers.zero_redundancy, views=True)),
}
FSDP = OURS | {"FSDP2": peers.torch_fsdp}
TORCH_TP = OURS | {"torch": peers.torch_tensor_parallel}
OVERLAP = {"overlap": ours.picotron_min, "none": partial(ours.picotron_min, tp_overlap=False)}
GPIPE, ONE_EACH, LOOPED = (
    OURS | {kind.__name__.removeprefix("Schedule"): partial(peers.torch_pipeline, schedule=kind)}
    for kind in (ScheduleGPipe, Schedule1F1B, ScheduleInterleaved1F1B)
)
ONE_STAGE = {"pp_engine": "1f1b", "pp_chunks": 1}
TO_1F1B = OURS | {"1F1B": partial(peers.torch_pipeline, schedule=Schedule1F1B, **ONE_STAGE)}
SCALING = OURS | {"one process": ours.one_process}
LOOP = OURS | {"loop": ours.experts_one_by_one}
ALL_GATHER = OURS | {"all-gather": partial(ours.picotron_min, ep_engine="allgather")}
APART = {
    "8 documents": partial(ours.attention_alone, documents=8),
    "one": partial(ours.attention_alone, documents=1),
}
LOSSES = {
    "picotron-min": partial(ours.loss_alone, loss=partial(head_loss, of_stripe=stripe_loss)),
    "torch": partial(ours.loss_alone, loss=peers.torch_loss),
}


class Row(NamedTuple):
    about: str
    contenders: dict[str, ours.Build]  # ours first
    distributed: dict[str, Any]
    training: dict[str, Any] | None = None  # what differs from WORK
    model: dict[str, Any] | None = None  # likewise

    def sections(self, work: dict[str, dict]) -> dict[str, dict]:
        """A config.json, for a CPU."""
        return work | {
            "distributed": self.distributed | {"use_cpu": True, "backend": "gloo"},
            "training": work["training"] | (self.training or {}),
            "model": work["model"] | (self.model or {}),
        }


ROWS = {
    "one-process": Row("against transformers' Llama in an eager loop", TRANSFORMERS, {}),
    "dp2": Row("our gradient buckets against torch's DDP", DDP, DP2),
    "tp2": Row("against torch's parallelize_module and loss_parallel", TORCH_TP, TP2),
    "tp2-sequence": Row("the same with sequence parallelism", TORCH_TP, SEQUENCE),
    "tp2-overlap": Row("messages during products against between them", OVERLAP, RING),
    "tp2-scaling": Row("two ranks against one alone: 0.5 would be perfect", SCALING, TP2),
    "pp2-afab": Row("against torch's pipelines, all forwards first", GPIPE, AFAB),
    "pp2-1f1b": Row("the same, one forward and one backward in turn", ONE_EACH, ONE_F_ONE_B),
    "pp2-interleaved": Row("the same with two stages a rank", LOOPED, INTERLEAVED),
    "pp2-zb-v": Row("zero bubble in a V against torch's 1F1B", TO_1F1B, ZB_V),
    "pp2-scaling": Row("two pipeline ranks against one process alone", SCALING, PP2, SMALL),
    "cp2-scaling": Row("two ranks with ring attention against one alone", SCALING, CP2, LONG),
    "cp2-ulysses": Row("the same with Ulysses", SCALING, ULYSSES, LONG),
    "sharding-optimizer": Row("against DDP with torch's ZeroRedundancyOptimizer", ZERO, ZERO_1),
    "sharding-parameters": Row("against FSDP2's fully_shard of every layer", FSDP, ZERO_3),
    "muon": Row("against its bound alone", OURS, DP2, MUON),
    "muon-layerwise": Row("the same with an owner for each matrix", OURS, LAYERWISE, MUON),
    "experts": Row("8, of which 2 are chosen, against Mixtral", TRANSFORMERS, {}, ALIKE, MIXTRAL),
    "experts-glm": Row("one shared, sigmoid scores, against Glm4Moe", TRANSFORMERS, {}, ALIKE, GLM),
    "experts-64": Row("4 chosen, one product against our own loop", LOOP, {}, ALIKE, MANY),
    "experts-dispatch": Row("tokens sent against all gathered", ALL_GATHER, EP2, ALIKE, EXPERTS),
    "documents": Row("attention to 2048 tokens: 8 documents against one", APART, {}, LONG),
    "loss-128k": Row("of 2048 tokens alone, against torch's cross_entropy", LOSSES, {}),
}
