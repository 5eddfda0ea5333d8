"""Parts of the time model against numbers that were worked out by hand.

Here are the parts that no published run has. A change of any other part changes the sum of all
predictions, in test_planner_validate.py.

The toy GPU has round numbers: 500 FLOP/s in matmuls, 1000 in 8 bits, 250 in attention (cuDNN's
500), 500 bytes/s of memory. A message inside its nodes of 4 has 50 bytes/s, to other nodes 10 of
each card. It takes 1 s to arrive, and 0.1 s more for each further rank.

The toy layer has E 8, two query heads and one key head of 4, and M 16; there are 8 tokens, and 2
bytes a number. Its linears, inputs x outputs: qkv 8 x 16, o 8 x 8, up (with its gate) 8 x 32, down
16 x 8.
"""

import json
from contextlib import suppress
from dataclasses import replace

import pytest

from picotron_min.extensions.settings import Layout, ModelConfig, Workload
from picotron_min.planner.layer_time import LayerTimes
from picotron_min.planner.links import link
from picotron_min.planner.parameters import Rank
from picotron_min.planner.step_time import StepTime, predict
from picotron_min.planner.system import Setting, System, our_system
from picotron_min.runtime.hardware import Gpu

HALF = ("matmul_share", "cudnn_share", "float8_share", "hbm_share", "link_share")
TOY = Gpu(
    "toy",
    peaks={"bfloat16": 1000.0, "float32": 100.0, "float8": 2000.0},
    memory=1e9,
    hbm=1000.0,
    nvlink=100.0,
    attention_share=0.25,
    network=50.0,
    gpus_per_node=4,
    network_share=0.2,
    **dict.fromkeys(HALF, 0.5),
    latency=1.0,
    hop=0.1,
)
MODEL = ModelConfig(10, 8, 16, 2, 2, 1)  # V 10, two layers
MIXTURE = {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 4}
EIGHT = MIXTURE | {"num_local_experts": 8}
WORK = Workload(8, dtype="bfloat16")
ONE, TWO, MIXED = ((1, False),), ((2, False),), ((1, True),)  # layers, with experts or without
RANKS = {
    "WHOLE": Rank(TWO, head=1, embedding=1),
    "HALF": Rank(ONE, head=0.5, embedding=1),
    "MIXED": Rank(MIXED, head=0, embedding=0),
}
LAYER = 8 * (2 * 3 * 4 + 3 * 16)
ALL = 2 * LAYER + 2 * 80
O_TP = 512 / 500 + 2 * (32 + 32 + 64) / 500
NUMBERS = {
    "LAYER": LAYER,
    "ALL": ALL,
    "MATMULS": 5.376 + 2.816 + 10.496 + 5.376,
    "GRADIENTS": 2.816 + O_TP + 5.376 + 2.816,  # with tp 2: qkv, o, up, down
    "t": 0.5 * (2 * 8 * 8) / 50 + 1.1,  # a gather of [8, 8] over two ranks
    "residuals": (6 * 2 + 8) * 8 * 8,
    "heads": 2 * 2 * 12 * 8,
    "inner": 3 * 2 * 16 * 8,
    "reduce": 0.5 * 4 * ALL / 50 + 1.1,
    "gather": 0.5 * 2 * ALL / 50 + 1.1,
    "of_layer": (0.5 * 2 * LAYER / 50 + 1.1, 0.5 * 4 * LAYER / 50 + 1.1),
    "ends": 0.5 * 2 * 80 / 50 + 1.1,
    "experts": 8 * 3 * 4 * 4 / 2,
    "moved": 0.9 * (20 * 64 + 2 * 2 * 12 * 8 + 2 * 2 * 3 * 4 * 8),
}

ROWS = """
# a matmul has FLOPs and then bytes; [2, 3] x [3, 4] multiplies 48, and has 6 + 12 + 8 numbers
layers.matmul(2, 3, 4)        |  | 48 / 500 + 52 / 500
layers.matmul(2, 3, 4, 1.0)   | precision=fp8 | 48 / 1000 + 34 / 500
# one by one the input is read again for each: 64 numbers, twice for qkv and once for up
forward.matmuls               | joins_linears=false | MATMULS + 2 * 3 * 64 / 500
# passes over memory: sequence parallelism cuts the residuals, tensor parallelism alone does not
forward.passes                | is_fused=false residual_bytes=4 | (2 * 32 * 64 + 3.8 * (heads + inner)) / 500
forward.passes                | tp=2 sp=true | 0.9 * (residuals + heads + inner) / 2 / 500
# messages: 8 ranks in two nodes have four cards, 3 hops inside and one between
link(8, 1).message(160)       |  | 7 / 8 * 160 / 40 + 1 + 4 * 0.1
link(2, 4).send(100)          |  | 11
# tensor parallelism: weight gradients hide messages in backward, slow messages outlast them
backward.tp                   | tp=2 | 0
backward.tp                   | tp=2 sp=true | 2 * t
backward.tp                   | tp=2 latency=5.0 | 4 * (t + 4) - GRADIENTS
forward.tp                    | tp=2 tp_gather_bytes=1 | 3 * t
# context parallelism: 4 tokens a rank; k and v are 2 x 1 x 4 x 4 numbers, gradients in float32
forward.cp                    | cp=2 | 64 / 50 + 1 - 2 * 4 * 2 * 4 * 8 / 250
backward.cp                   | cp=2 | 128 / 50 + 1
forward.cp                    | cp=2 cp_engine=ulysses | 4 * (0.5 * 64 / 50 + 1.1)
# what backward runs again: all but down, or q, k, v and attention
repeated.matmuls              | tp=2 recompute=full | GRADIENTS - 2.816
repeated.tp                   | tp=2 sp=true recompute=full | 3 * t
sum(repeated)                 | tp=2 sp=true recompute=selective | 2.816 + 512 / 250 + t
# the head in stripes, and once for each further token
step.head                     | stripe_rows=4 | 6 * (640 / 500 + 2 * 152 / 500) + 8 * 80 / 500 + 2 * 8 * 80 / 500
step.head                     | depths=2 | 3 * (3840 / 500 + 2 * 512 / 500) + 1920 / 500
# parameters, accumulation
parameters(WHOLE)             | tied=true | ALL - 80
step.accumulation(WHOLE)      | m=2 | (2 + 2 * 4) * ALL / 500
step.load(WHOLE).backward     | recompute=full | 2 * (sum(backward) + sum(repeated)) + 2 / 3 * step.head
# gradients of data parallelism: what the last backward does not hide
step.gradients(WHOLE)         | dp=2 latency=90.0 | 2 * (reduce + 89) - step.load(WHOLE).backward
step.gradients(WHOLE)         | dp=2 hides_dp=false sharding=optimizer | reduce + gather
# of this project: on a fast link only latencies are left
step.gradients(WHOLE)         | ours dp=2 nvlink=1e12 sharding=optimizer | 1.1 + 1.1
step.each_reduction(WHOLE)    | ours dp=2 m=2 latency=200.0 sharding=gradients | reduce + 199 - step.load(WHOLE).backward
our.layers_in_8_bits          | fp8=true fp8_skip=1 depths=1 num_hidden_layers=4 | 2 / 5
# sharded parameters: a layer's compute hides its messages, not the first and the last
step.gathers(False, 10, 30)   | dp=2 sharding=parameters | sum(of_layer) + of_layer[0] - 40
step.each_reduction(WHOLE)    | dp=2 sharding=parameters | sum(of_layer) + ends
# half of the layers are in 8 bits
forward.matmuls               | precision=fp8 layers_in_8_bits=0.5 | (2 * 8 * 576 / 1000 + 1920 / 500 + MATMULS) / 2
# only the experts are in 8 bits: up and down cast what goes in
forward.passes                | eight experts_in_8_bits=true | (moved + 9 * 4 * 2 * 2 * 64 + 4 * 8 * 2 * (8 + 4)) / 500
# experts are on one rank each: not reduced, not gathered, and its own to update
parameters(MIXED)             | mixture dp=2 ep=2 sharding=optimizer | 8 * (2 * 3 * 4 + 4) + experts
step.optimizer(MIXED)         | mixture dp=2 ep=2 sharding=optimizer | (30 * (112 + experts) + 4 * (224 + experts)) / 500
# the bubble: (p - 1) micro-batches of a balanced pipeline; two chunks halve it
parts["bubble"]               | pp=2 m=4 | busy(HALF)
parts["bubble"]               | pp=2 m=4 pp_engine=interleaved pp_chunks=2 | busy(HALF) / 2
"""  # noqa: E501
ROWS = [row for row in ROWS.splitlines() if row and row[0] != "#"]
SHORT = {"sp": "sequence_parallel", "m": "num_micro_batches", "tied": "tie_word_embeddings"}
SHORT |= {"depths": "num_nextn_predict_layers"}


def setting_of(options: str) -> Setting:
    """The toy with these options, each of the part that has such a field."""
    parts, changes = (MODEL, TOY, Layout(), WORK, System()), {}
    for word in options.split():
        name, _, value = word.partition("=")
        changes |= {"mixture": MIXTURE, "eight": EIGHT}.get(name, {})
        with suppress(ValueError):  # else it is text
            value = json.loads(value)
        changes[SHORT.get(name, name)] = tuple(value) if isinstance(value, list) else value
    parts = [
        replace(part, **{k: v for k, v in changes.items() if k in part.__dataclass_fields__})
        for part in parts
    ]
    if "ours" in changes:
        parts[-1] = our_system(parts[0], parts[3])
    return Setting(*parts)


@pytest.mark.parametrize("row", ROWS)
def test_times_are_those_worked_out_by_hand(row):
    quantity, options, seconds = row.split("|")
    at = setting_of(options)
    layers, step, prediction = LayerTimes(at), StepTime(at), predict(at)
    layer = layers.layer(has_experts=at.model_config.num_local_experts > 0)
    names = NUMBERS | RANKS | layer._asdict() | prediction._asdict()
    names |= {"layers": layers, "step": step, "predicted": prediction}
    names |= {"our": our_system(at.model_config, at.workload)}
    names |= {"parameters": lambda rank: sum(n for _, n in step.load(rank).groups)}
    names |= {"link": lambda size, stride: link(at.gpu, size, stride)}
    names |= {"busy": lambda rank: sum(step.micro_batch(rank).values())}
    assert eval(quantity, names) == pytest.approx(eval(seconds, names), rel=1e-6)


@pytest.mark.parametrize("options", ["", "ours", "eight ours", "eight tp_messages=[7,7]"])
def test_an_axis_of_one_rank_costs_nothing(options):
    parts = predict(setting_of(options)).parts
    assert [parts[name] for name in ("tp", "cp", "ep", "dp", "bubble")] == [0] * 5
