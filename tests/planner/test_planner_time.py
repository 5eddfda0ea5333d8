"""Every part of the time model against numbers that were worked out by hand.

The toy GPU has round numbers: 500 FLOP/s in matmuls, 1000 in 8 bits, 250 in attention (cuDNN's
500), 500 bytes/s of memory. A message inside its nodes of 4 has 50 bytes/s, to other nodes 10 of
each card. It takes 1 s to arrive, and 0.1 s more for each further rank.

The toy layer has E 8, two query heads and one key head of 4, and M 16; there are 8 tokens, and 2
bytes a number. Its linears, inputs x outputs: qkv 8 x 16, o 8 x 8, up (with its gate) 8 x 32, down
16 x 8.
"""

from dataclasses import replace

import pytest

from picotron_min.extensions.settings import Layout, ModelConfig, Workload
from picotron_min.planner.layer_time import LayerTimes
from picotron_min.planner.links import link
from picotron_min.planner.parameters import Rank
from picotron_min.planner.step_time import StepTime, predict
from picotron_min.planner.system import Setting, System, our_system
from picotron_min.runtime.hardware import GPUS, Gpu
from picotron_min.runtime.public_models import find_preset

TOY = Gpu(
    "toy",
    peaks={"bfloat16": 1000.0, "float32": 100.0, "float8": 2000.0},
    memory=1e9,
    hbm=1000.0,
    nvlink=100.0,
    matmul_share=0.5,
    attention_share=0.25,
    cudnn_share=0.5,
    float8_share=0.5,
    network=50.0,
    gpus_per_node=4,
    hbm_share=0.5,
    link_share=0.5,
    network_share=0.2,
    latency=1.0,
    hop=0.1,
)
ALONE, OTHERS = Layout(), System()
MODEL = ModelConfig(10, 8, 16, 2, 2, 1)  # V 10, two layers
WORK = Workload(8, dtype="bfloat16")
MATMULS = 5.376 + 2.816 + 10.496 + 5.376  # qkv, o, up, down, as below
close = pytest.approx


def setting(layout=ALONE, work=WORK, system=OTHERS, model=MODEL) -> Setting:
    return Setting(model, TOY, layout, work, system)


def layer(*args, **kwargs):
    return LayerTimes(setting(*args, **kwargs)).layer()


def test_a_matmul_has_flops_and_then_bytes():
    # [2, 3] x [3, 4]: 48 FLOPs, and 2 bytes each of 6 + 12 + 8 numbers
    assert LayerTimes(setting()).matmul(2, 3, 4) == close(48 / 500 + 52 / 500)


def test_the_linears_of_a_layer():
    qkv = 2048 / 500 + 2 * (64 + 128 + 128) / 500
    o = 1024 / 500 + 2 * (64 + 64 + 64) / 500
    up = 4096 / 500 + 2 * (64 + 256 + 256) / 500
    down = 2048 / 500 + 2 * (128 + 128 + 64) / 500
    assert qkv + o + up + down == close(MATMULS)
    forward, backward, repeated = layer()
    assert forward.matmuls == close(MATMULS) and backward.matmuls == close(2 * MATMULS)
    assert sum(repeated) == 0
    # One by one the input is read again for each: 64 numbers, twice for qkv and once for up.
    apart = layer(system=System(joins_linears=False))
    assert apart.forward.matmuls == close(MATMULS + 2 * 3 * 64 / 500)
    # A GPT's MLP has no gate: up is 8 x 16.
    gpt = layer(system=System(mlp_matrices=2))
    assert gpt.forward.matmuls == close(MATMULS - up + 2048 / 500 + 640 / 500)


def test_attention_fused_and_written_out():
    forward, backward, _ = layer()
    assert forward.attention == close(2 * 8 * 2 * 4 * 8 / 250)
    assert backward.attention == close(1024 / 250 * 2.5 / 0.6)
    cudnn = layer(system=System(attention_kernel="cudnn"))
    assert cudnn.forward.attention == close(2 * 8 * 2 * 4 * 8 / 500)
    forward, backward, _ = layer(work=replace(WORK, flash_attention=False))
    assert forward.attention == close(2048 / 350 + 14 * 8 * 2 * 8 / 500)
    assert backward.attention == close(2 * forward.attention)


def test_passes_over_memory():
    residuals, heads, inner = (6 * 2 + 8) * 8 * 8, 2 * 2 * 12 * 8, 3 * 2 * 16 * 8
    forward, backward, _ = layer()
    assert forward.passes == close(0.9 * (residuals + heads + inner) / 500)
    assert backward.passes == close(2 * forward.passes)
    eager = layer(system=System(is_fused=False, residual_bytes=4))
    assert eager.forward.passes == close((2 * (6 * 4 + 8) * 64 + 3.8 * (heads + inner)) / 500)
    # Sequence parallelism cuts the residuals, tensor parallelism alone does not.
    tp, sp = (layer(Layout(tp=2, sequence_parallel=cut)) for cut in (False, True))
    assert tp.forward.passes == close(0.9 * (residuals + (heads + inner) / 2) / 500)
    assert sp.forward.passes == close(0.9 * (residuals + heads + inner) / 2 / 500)


def test_messages_inside_a_node_and_between_nodes():
    assert link(TOY, 1, 1).message(100) == 0
    assert link(TOY, 4, 1).message(100) == close(0.75 * 100 / 50 + 1 + 3 * 0.1)
    # 8 ranks in two nodes: four cards, 3 hops inside and one between
    assert link(TOY, 8, 1).message(160) == close(7 / 8 * 160 / 40 + 1 + 4 * 0.1)
    assert link(TOY, 2, 4).message(100) == close(0.5 * 100 / 10 + 1 + 0.1)  # one card, one hop
    assert link(TOY, 4, 1).send(100) == close(3) and link(TOY, 2, 4).send(100) == close(11)
    assert link(TOY, 1, 1).send(100) == 0


def test_what_weight_gradients_hide_of_tensor_parallelism():
    t = 0.5 * (2 * 8 * 8) / 50 + 1.1  # one of [8, 8]
    # Of 7 messages none is hidden; the head gathers its logits, too, and reads all of them.
    apart = System(tp_messages=(7, 7), hides_tp=False)
    forward, backward, _ = layer(Layout(tp=2), system=apart)
    assert forward.tp == backward.tp == close(7 * t)
    plain, gathering = (StepTime(setting(Layout(tp=2), system=s)) for s in (OTHERS, apart))
    assert gathering.head == close(plain.head + 8 * 8 * 5 / 500)
    assert gathering.head_messages == close(2 * t + 0.5 * (2 * 8 * 10) / 50 + 1.1)
    assert layer(Layout(tp=2), system=System(tp_gather_bytes=1)).forward.tp == close(3 * t)
    # qkv 8 x 8, o 4 x 8, up 8 x 16, down 8 x 8: each 2 i j k / 500 + 2 (i k + k j + i j) / 500
    gradients = 2.816 + (512 / 500 + 2 * (32 + 32 + 64) / 500) + 5.376 + 2.816
    assert gradients > 4 * t
    forward, backward, _ = layer(Layout(tp=2))
    assert forward.matmuls == close(gradients)
    assert forward.tp == close(4 * t) and backward.tp == 0
    sequence = layer(Layout(tp=2, sequence_parallel=True))
    assert sequence.forward.tp == close(4 * t) and sequence.backward.tp == close(2 * t)
    assert layer(Layout(tp=2), system=System(hides_tp=False)).backward.tp == close(4 * t)
    # Overlapped in both directions: at least 0.55 of the messages stay.
    forward, backward, _ = layer(Layout(tp=2), system=System(overlap="tp"))
    assert forward.tp == close(0.55 * 4 * t) and backward.tp == close(0.55 * 4 * t)
    slow = replace(TOY, latency=5.0)  # then more than the gradients is left
    plain, sequence = (
        LayerTimes(replace(setting(Layout(tp=2, sequence_parallel=cut)), gpu=slow)).layer()
        for cut in (False, True)
    )
    assert plain.backward.tp == close(4 * (t + 4) - gradients)
    assert sequence.backward.tp == close(2 * (t + 4) + 2 * (t + 4) - gradients)


def test_what_attention_hides_of_context_parallelism():
    # 4 tokens a rank; k and v are 2 x 1 x 4 x 4 numbers
    attention = 2 * 4 * 2 * 4 * 8 / 250
    hop, last = 64 / 50 + 1, 128 / 50 + 1  # in bfloat16, and their gradients in float32
    forward, backward, _ = layer(Layout(cp=2))
    assert forward.cp == close(hop - attention)
    assert attention * 2.5 / 0.6 > hop + last and backward.cp == close(last)
    # q and the output have 2 heads of 4 x 4 numbers; k and v are repeated to 2 heads
    forward, backward, _ = layer(Layout(cp=2, cp_engine="ulysses"))
    assert forward.cp == backward.cp == close(4 * (0.5 * 64 / 50 + 1.1))


@pytest.mark.parametrize("cut", [False, True])
def test_what_backward_runs_again(cut):
    layout = Layout(tp=2, sequence_parallel=cut)
    t = 0.5 * 128 / 50 + 1.1
    full = layer(layout, replace(WORK, recompute="full"))
    assert full.repeated.matmuls == close(full.forward.matmuls - 2.816)  # all but down
    assert full.repeated.attention == close(full.forward.attention)
    assert full.repeated.passes == close(full.forward.passes)
    assert full.repeated.tp == close((3 if cut else 2) * t)
    selective = layer(layout, replace(WORK, recompute="selective"))
    assert sum(selective.repeated) == close(2.816 + full.forward.attention + cut * t)
    some = layer(layout, system=System(repeats=(0.5, 0.25)))
    assert some.repeated.matmuls == close(some.forward.matmuls / 2)
    assert some.repeated.attention == close(some.forward.attention / 4)


def test_the_head_at_once_and_in_stripes():
    at_once = 3 * (1280 / 500 + 2 * (64 + 80 + 80) / 500) + 8 * 80 / 500
    assert StepTime(setting()).head == close(at_once)
    stripes = 2 * 3 * (640 / 500 + 2 * (32 + 80 + 40) / 500) + 8 * 80 / 500
    stripes += 2 * 8 * 80 / 500  # the gradient of lm_head, read and written for each
    assert StepTime(setting(system=System(stripe_rows=4))).head == close(stripes)


def test_prediction_layers_multiply_with_a_projection_and_lm_head_again():
    further = MODEL.override(num_nextn_predict_layers=2)
    head = 3 * (3 * 1280 / 500 + 2 * (3 * 64 + 80 + 3 * 80) / 500) + 8 * 3 * 80 / 500

    def projections(tokens: int) -> float:  # [tokens, 16] x [16, 8], three products of each depth
        return 2 * 3 * (256 * tokens / 500 + 2 * (16 * tokens + 128 + 8 * tokens) / 500)

    five = MODEL.override(num_hidden_layers=4, num_nextn_predict_layers=1)
    assert our_system(five, replace(WORK, fp8=True, fp8_skip=1)).layers_in_8_bits == 2 / 5
    step = StepTime(setting(model=further))
    assert step.head == close(head + projections(8))
    for cut in (False, True):  # with sequence parallelism each rank has half of the tokens
        of = Layout(tp=2, sequence_parallel=cut)
        more, plain = (StepTime(setting(of, model=model)) for model in (further, MODEL))
        lm_head = more.head - projections(4 if cut else 8)
        assert lm_head == close(3 * (3 * 640 / 500 + 2 * (192 + 40 + 120) / 500) + 8 * 120 / 500)
        assert more.head_messages == close(3 * plain.head_messages)
    assert (
        step.load(Rank(((4, False),), head=1, embedding=1)).parameters == 2 * LAYER + ALL + 2 * 128
    )
    assert step.load(Rank(ONE, head=1, embedding=0)).parameters == LAYER + 2 * 80 + 2 * 128
    assert step.load(Rank(ONE, head=0, embedding=1)).parameters == LAYER + 80


LAYER = 8 * (2 * 3 * 4 + 3 * 16)  # parameters: 576
ALL = 2 * LAYER + 2 * 80
WHOLE = Rank(((2, False),), head=1, embedding=1)
ONE = ((1, False),)  # layer, without experts


def test_parameters_accumulation_and_optimizer():
    step = StepTime(setting())
    assert step.owned[False] == (LAYER, 0, 0) and step.load(WHOLE).parameters == ALL
    assert StepTime(setting(Layout(tp=2))).load(WHOLE).parameters == ALL / 2
    tied = MODEL.override(tie_word_embeddings=True)
    assert StepTime(setting(model=tied)).load(WHOLE).parameters == ALL - 80
    assert step.accumulation(WHOLE) == close(6 * ALL / 500)
    several = replace(WORK, num_micro_batches=2)
    assert StepTime(setting(work=several)).accumulation(WHOLE) == close((2 + 2 * 4) * ALL / 500)
    sharded = StepTime(setting(Layout(dp=2, sharding="parameters"), several))
    assert sharded.accumulation(WHOLE) == 0
    assert step.optimizer(WHOLE) == close((30 + 4) * ALL / 500)
    assert sharded.optimizer(WHOLE) == close((30 / 2 + 4) * ALL / 500)


def test_gradients_of_data_parallelism():
    open_ended = System(hides_dp=False)
    step = StepTime(setting(Layout(dp=2), system=open_ended))
    assert step.gradients(WHOLE) == close(2 * (0.5 * 4 * ALL / 50 + 1.1))
    hidden = StepTime(setting(Layout(dp=2)))
    backward = 2 * sum(sum(part) for part in hidden.layers[False][1:]) + 2 / 3 * hidden.head
    left = 2 * (0.5 * 4 * ALL / 50 + 1.1) - backward
    assert hidden.gradients(WHOLE) == close(max(0, left))
    step = StepTime(setting(Layout(dp=2, sharding="optimizer"), system=open_ended))
    assert step.gradients(WHOLE) == close((0.5 * 4 * ALL / 50 + 1.1) + (0.5 * 2 * ALL / 50 + 1.1))
    step = StepTime(setting(Layout(dp=2, sharding="parameters"), system=open_ended))
    assert step.gradients(WHOLE) == 0


def test_our_gradients_leave_the_last_bucket_and_the_embedding():
    ours = our_system(MODEL, WORK)
    # All fits one bucket, and nothing is left to hide it behind.
    step = StepTime(setting(Layout(dp=2), system=ours))
    assert step.gradients(WHOLE) == close(2 * (0.5 * 4 * ALL / 50 + 1.1))
    fast = replace(TOY, nvlink=1e9)  # only latencies are left
    step = StepTime(replace(setting(Layout(dp=2, sharding="optimizer"), system=ours), gpu=fast))
    assert step.gradients(WHOLE) == close(1.1 + 1.1, rel=1e-3)
    # With gradients sharded, each micro-batch's are sent behind its backward.
    several = replace(WORK, num_micro_batches=2)
    step = StepTime(setting(Layout(dp=2, sharding="gradients"), several, ours))
    backward = step.load(WHOLE).backward
    assert step.each_reduction(WHOLE) == close(max(0, 0.5 * 4 * ALL / 50 + 1.1 - backward))


def test_messages_of_sharded_parameters():
    several = replace(WORK, num_micro_batches=2)
    step = StepTime(setting(Layout(dp=2, sharding="parameters")))
    gather, reduction = 0.5 * 2 * LAYER / 50 + 1.1, 0.5 * 4 * LAYER / 50 + 1.1
    assert step.gathers(False, forward=10, backward=30) == close(
        (gather - 10) + (gather + reduction - 30)
    )
    assert step.gathers(False, forward=50, backward=90) == 0
    ends = 0.5 * 2 * 80 / 50 + 1.1
    assert step.each_reduction(WHOLE) == close(gather + reduction + ends)
    # Shared in each of two nodes of 4: then a rank's quarter is summed with the other node's.
    hybrid = System(shares_in_node=True)
    step = StepTime(setting(Layout(dp=8, sharding="parameters"), system=hybrid))
    between = 2 * (0.5 * LAYER / 10 + 1.1)
    assert step.reduce_scatter(step.load(Rank(ONE, 0, 0)).groups) == close(
        0.75 * 4 * LAYER / 50 + 1.3 + between
    )
    # Reduced once a step: added up in each micro-batch, hidden behind the last one's backward.
    once = System(reduces="step", hides_dp=False)
    step = StepTime(setting(Layout(dp=2, sharding="parameters"), several, once))
    assert step.accumulation(WHOLE) == close((2 + 2 * 4) * ALL / 500)
    assert step.gradients(WHOLE) == close(0.5 * 4 * ALL / 50 + 1.1)
    assert step.gathers(False, forward=10, backward=30) == close(gather - 10)
    assert step.each_reduction(WHOLE) == close(gather + ends)
    # Kept: gathered once a step, with 0 bytes or in a pipeline; in 8 bits: half as long.
    kept = StepTime(setting(Layout(dp=2, sharding="parameters"), system=System(gather_bytes=0)))
    assert kept.gathers(False, forward=0, backward=0) == close(reduction)
    assert kept.each_reduction(WHOLE) == close(reduction)
    forward = kept.load(WHOLE).forward
    assert kept.gradients(WHOLE) == close(max(0, 0.5 * 2 * ALL / 50 + 1.1 - forward))
    assert StepTime(setting(Layout(pp=2, dp=2), system=once)).keeps_weights
    narrow = StepTime(setting(Layout(dp=2, sharding="parameters"), system=System(gather_bytes=1)))
    assert narrow.gather([(narrow.dp_link, LAYER)]) == close(0.5 * LAYER / 50 + 1.1)


EIGHT = MODEL.override(num_local_experts=8, num_experts_per_tok=2, moe_intermediate_size=4)


def test_products_in_8_bits_and_their_casts():
    # FLOPs at 1000; inputs have one byte. Casts: E and E, Q, M; back Q + 2 K, E, gate and up, E.
    f8, plain = System(precision="fp8"), layer()
    assert LayerTimes(setting(system=f8)).matmul(2, 3, 4, 1.0) == close(48 / 1000 + 34 / 500)
    there, back, _ = layer(system=f8)
    flops, inputs = 2 * 8 * 576 / 1000, 8 * (8 + 8 + 8 + 16) + 576
    outputs = 2 * 8 * (16 + 8 + 32 + 8)
    assert there.matmuls == close(flops + (inputs + outputs) / 500)
    assert there.passes - plain.forward.passes == close(4 * 8 * (16 + 8 + 16) / 500)
    assert back.passes - plain.backward.passes == close(4 * 8 * (16 + 16 + 32) / 500)
    mx = layer(system=System(precision="mxfp8")).forward.passes
    assert mx - plain.forward.passes == close(8 * 8 * 40 / 500)
    half = layer(system=System(precision="fp8", layers_in_8_bits=0.5))
    assert half.forward.matmuls == close((there.matmuls + plain.forward.matmuls) / 2)
    # A mixture's rows of experts, once a token and expert: k (E + F) there, k (2 F + E) back.
    there, wide = (
        LayerTimes(setting(model=EIGHT, system=s)).layer(has_experts=True)
        for s in (f8, System(precision="fp8", experts_in_8_bits=False))
    )
    assert there.forward.passes - wide.forward.passes == close(4 * 8 * 2 * (8 + 4) / 500)
    assert there.backward.passes - wide.backward.passes == close(4 * 8 * 2 * (8 + 8) / 500)
    assert there.forward.matmuls < wide.forward.matmuls


def test_experts_compute_and_travel():
    model = ModelConfig(
        10, 8, 16, 2, 2, 1, num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=4
    )
    of = LayerTimes(setting(Layout(dp=2, ep=2), model=model))
    parts = of._experts()
    # 8 tokens x 2 experts from each of two ranks over four experts: 8 rows for each
    assert parts["gate, up"] == close(1.65 * 2 * 2 * (512 / 500 + 2 * (64 + 32 + 32) / 500))
    assert parts["down"] == close(1.65 * 2 * (512 / 500 + 2 * (32 + 32 + 64) / 500))
    assert parts["router"] == close(2 * 8 * 8 * 4 / 50 / 4)  # a quarter of the time in float32
    there = of.layer(has_experts=True).forward
    assert there.ep == close(2 * (0.5 * (2 * 8 * 8 * 2) / 62.5 + 1))  # and back
    moved = 0.9 * (20 * 64 + 2 * 2 * 12 * 8 + 2 * 2 * 3 * 4 * 8)
    assert there.passes == close((moved + 9 * 4 * 2 * 2 * 8 * 8) / 500)  # and permuted
    inside = System(dispatcher="fused", expert_kernels="fused", imbalance=1.5, overlap="ep")
    kernels = LayerTimes(setting(Layout(dp=2, ep=2), model=model, system=inside))
    assert kernels._experts()["down"] == close(2 * (768 / 500 + 2 * (48 + 32 + 96) / 500))
    assert kernels.layer(has_experts=True).forward.passes == close(moved / 500)
    assert kernels.layer(has_experts=True).forward.ep == close(0.3 * there.ep)
    fused = LayerTimes(setting(model=model, system=System(dispatcher="fused")))
    assert fused.layer(has_experts=True).forward.passes == close((moved + 0.9 * 1024) / 500)
    # 8 ranks in two nodes: half of the rows leave, or each token does with 3/4.
    for dispatcher, far in (("alltoall", 1.0), ("fused", 0.75)):
        of = LayerTimes(
            setting(Layout(dp=8, ep=8), model=EIGHT, system=System(dispatcher=dispatcher))
        )
        seconds = max(2 * 128 / 62.5, far * 128 / 20)
        assert of.layer(has_experts=True).forward.ep == close(2 * (seconds + 1))
    assert of.layer(has_experts=False).forward.ep == 0
    rank, experts = Rank(((1, True),), 0, 0), 8 * 3 * 4 * 4 / 2  # half of them
    step = StepTime(setting(Layout(dp=2, ep=2, sharding="optimizer"), model=model))
    assert step.owned[True] == (8 * 2 * 3 * 4, 8 * 4, experts)
    # Experts are on one rank each: not reduced, not gathered, and its own to update.
    (over, others), (alone, own) = step.load(rank).groups
    assert (over.size, alone.size, own) == (2, 1, experts)
    assert step.gather(step.load(rank).groups) == close(0.5 * 2 * others / 50 + 1.1)
    assert others == 8 * (2 * 3 * 4 + 4)
    assert step.optimizer(rank) == close((30 * (others / 2 + own) + 4 * (others + own)) / 500)


def test_ranks_that_share_cores_compute_while_others_wait():
    # Two ranks, four micro-batches: 4 work, 1 bubble, twice as long on half a core each: 8 and 2.
    # The work of both fills the core for 8. On 0.9 of a core: 4.44, and a chain of 5 without waits.
    def bubble(share: float) -> float:
        peaks = {name: share * peak for name, peak in TOY.peaks.items()}
        gpu = replace(TOY, peaks=peaks, hbm=share * TOY.hbm, latency=0.0, hop=0.0, nvlink=1e30)
        work = replace(WORK, num_micro_batches=4)
        at = replace(setting(Layout(pp=2), work), gpu=replace(gpu, core_share=share))
        parts = predict(replace(at, system=replace(OTHERS, is_balanced=True))).parts
        return parts["bubble"] / (sum(parts.values()) - parts["bubble"] - parts["optimizer"])

    assert bubble(1.0) == close(1 / 4)
    assert bubble(0.5) == 0
    assert bubble(0.9) == close((5 - 4 / 0.9) / (4 / 0.9))


def test_the_bubble_and_the_sum_of_the_parts():
    work, layout = replace(WORK, num_micro_batches=4), Layout(pp=2)
    prediction = predict(setting(layout, work))  # balanced: both ranks take as long
    each = sum(StepTime(setting(layout, work)).micro_batch(Rank(ONE, 0.5, 1)).values())
    assert prediction.parts["bubble"] == close(each)  # (p - 1) micro-batches
    assert prediction.pipeline == close(5 * each) and prediction.bubble == close(1 / 5)
    assert sum(prediction.parts.values()) == close(prediction.step, rel=1e-9)
    after = prediction.parts["optimizer"]
    assert prediction.step == close(5 * each + after)
    # With equal layers, the last rank has the head besides, and sets the pace.
    uneven = predict(setting(layout, work, System(is_balanced=False)))
    times = StepTime(setting(layout, work, System(is_balanced=False)))
    ranks = Rank(ONE, 0, 1), Rank(ONE, 1, 0)
    first, last = (sum(times.micro_batch(rank).values()) for rank in ranks)
    assert uneven.pipeline == close(4 * last + (first + last) / 2)
    # Two chunks halve the bubble.
    chunks = predict(setting(Layout(pp=2, pp_engine="interleaved", pp_chunks=2), work))
    assert chunks.parts["bubble"] == close(each / 2)


GRID = [
    Layout(dp=2, tp=4),
    Layout(dp=4, pp=4, tp=2, sequence_parallel=True, sharding="optimizer"),
    Layout(dp=16, sharding="parameters"),
    Layout(dp=16, sharding="gradients"),
    Layout(cp=8, tp=2),
    Layout(cp=4, cp_engine="ulysses", pp=4, pp_engine="interleaved", pp_chunks=2),
]


LARGE = find_preset("Llama-3.2-1B")
EXPERTS = LARGE.override(num_local_experts=8, num_experts_per_tok=2, moe_intermediate_size=1024)
THEIRS = {"attention_kernel": "cudnn", "overlap": "tp", "reduces": "step", "hides_gathers": True}
THEIRS |= {"dispatcher": "fused", "tp_gather_bytes": 1, "gather_bytes": 1}
HOW = {"ours": {}, "8 bits": {}, "theirs": THEIRS, "7 messages": {"tp_messages": (7, 7)}}


def large(how: str, model: ModelConfig, layout: Layout, recompute="full") -> Setting:
    work = Workload(4096, 1, 4, "bfloat16", recompute, fp8=how in ("8 bits", "theirs"))
    system = replace(our_system(model, work), **HOW[how])
    return Setting(model, GPUS["H100"], layout, work, system)


@pytest.mark.parametrize("model", [LARGE, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("layout", [*GRID, Layout(dp=16, ep=8), Layout(dp=8, tp=2, ep=16)], ids=str)
def test_better_hardware_is_never_slower(layout, how, model):
    at = large(how, model, replace(layout, ep=min(layout.ep, model.num_local_experts or 1)))
    gpu, now = at.gpu, predict(at)
    assert sum(now.parts.values()) == close(now.step, rel=1e-9)
    assert all(seconds >= 0 for seconds in now.parts.values())
    names = ("hbm", "nvlink", "network", "matmul_share", "float8_share", "attention_share")
    better = [{name: 1.2 * getattr(gpu, name)} for name in (*names, "cudnn_share")]
    better.append({"peaks": {name: 2 * peak for name, peak in gpu.peaks.items()}})
    for change in better:
        assert predict(replace(at, gpu=replace(gpu, **change))).step <= now.step, change


@pytest.mark.parametrize("model", [LARGE, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("how", HOW)
def test_an_axis_of_one_rank_costs_nothing(how, model):
    parts = predict(large(how, model, Layout(), "none")).parts
    assert [parts[name] for name in ("tp", "cp", "ep", "dp", "bubble")] == [0] * 5
