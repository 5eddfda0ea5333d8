"""Every part of the time model against numbers that were worked out by hand.

The toy GPU has round numbers: 500 FLOP/s in matmuls, 250 in attention, 500 bytes/s of memory. A
message inside its nodes of 4 has 50 bytes/s, to other nodes 10 of each card. It takes 1 s to
arrive, and 0.1 s more for each further rank.

The toy layer has E 8, two query heads and one key head of 4, and M 16; there are 8 tokens, and 2
bytes a number. Its linears, inputs x outputs: qkv 8 x 16, o 8 x 8, up (with its gate) 8 x 32, down
16 x 8.
"""

from dataclasses import replace

import pytest

from picotron_min.extensions.settings import Layout, ModelConfig, Workload
from picotron_min.planner.layer_time import LayerTimes
from picotron_min.planner.links import link, send_seconds
from picotron_min.planner.step_time import Rank, StepTime, predict
from picotron_min.planner.system import Setting, System, our_system
from picotron_min.runtime.hardware import GPUS, Gpu
from picotron_min.runtime.public_models import find_preset

TOY = Gpu(
    "toy",
    peaks={"bfloat16": 1000.0, "float32": 100.0},
    memory=1e9,
    hbm=1000.0,
    nvlink=100.0,
    matmul_share=0.5,
    attention_share=0.25,
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
    forward, backward, _ = layer(work=replace(WORK, flash_attention=False))
    assert forward.attention == close(2048 / 350 + 14 * 8 * 2 * 8 / 500)
    assert backward.attention == close(2 * forward.attention)


def test_passes_over_memory():
    residuals, heads, inner = (6 * 2 + 8) * 8 * 8, 2 * 2 * 12 * 8, 3 * 2 * 16 * 8
    forward, backward, _ = layer()
    assert forward.passes == close(0.9 * (residuals + heads + inner) / 500)
    assert backward.passes == close(2 * forward.passes)
    eager = layer(system=System(is_fused=False, residual_bytes=4))
    assert eager.forward.passes == close(3.2 * ((6 * 4 + 8) * 64 + heads + inner) / 500)
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
    assert link(TOY, 2, 1).all_reduce(100) == close(2 * (1 + 1 + 0.1))
    assert send_seconds(TOY, 4, 1, 100) == close(3) and send_seconds(TOY, 2, 4, 100) == close(11)
    assert send_seconds(TOY, 1, 1, 100) == 0


def test_what_weight_gradients_hide_of_tensor_parallelism():
    t = 0.5 * (2 * 8 * 8) / 50 + 1.1  # one of [8, 8]
    # qkv 8 x 8, o 4 x 8, up 8 x 16, down 8 x 8: each 2 i j k / 500 + 2 (i k + k j + i j) / 500
    gradients = 2.816 + (512 / 500 + 2 * (32 + 32 + 64) / 500) + 5.376 + 2.816
    assert gradients > 4 * t
    forward, backward, _ = layer(Layout(tp=2))
    assert forward.matmuls == close(gradients)
    assert forward.tp == close(4 * t) and backward.tp == 0
    sequence = layer(Layout(tp=2, sequence_parallel=True))
    assert sequence.forward.tp == close(4 * t) and sequence.backward.tp == close(2 * t)
    assert layer(Layout(tp=2), system=System(hides_tp=False)).backward.tp == close(4 * t)
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


LAYER = 8 * (2 * 3 * 4 + 3 * 16)  # parameters: 576
ALL = 2 * LAYER + 2 * 80
WHOLE = Rank(dense=2, mixtures=0, head=1, embedding=1)


def test_parameters_accumulation_and_optimizer():
    step = StepTime(setting())
    assert step.layer_parameters(False) == LAYER and step.parameters(WHOLE) == ALL
    assert StepTime(setting(Layout(tp=2))).parameters(WHOLE) == ALL / 2
    tied = MODEL.override(tie_word_embeddings=True)
    assert StepTime(setting(model=tied)).parameters(WHOLE) == ALL - 80
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
    ours = our_system(WORK)
    # All fits one bucket, and nothing is left to hide it behind.
    step = StepTime(setting(Layout(dp=2), system=ours))
    assert step.gradients(WHOLE) == close(2 * (0.5 * 4 * ALL / 50 + 1.1))
    fast = replace(TOY, nvlink=1e9)  # only latencies are left
    step = StepTime(replace(setting(Layout(dp=2, sharding="optimizer"), system=ours), gpu=fast))
    assert step.gradients(WHOLE) == close(1.1 + 1.1, rel=1e-3)
    # With gradients sharded, each micro-batch's are sent behind its backward.
    several = replace(WORK, num_micro_batches=2)
    step = StepTime(setting(Layout(dp=2, sharding="gradients"), several, ours))
    _, backward = step.passes_of(WHOLE)
    assert step.each_reduction(WHOLE) == close(max(0, 0.5 * 4 * ALL / 50 + 1.1 - backward))


def test_messages_of_sharded_parameters():
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
    assert step.reduce_scatter(LAYER) == close(0.75 * 4 * LAYER / 50 + 1.3 + between)


def test_experts_compute_and_travel():
    model = ModelConfig(
        10, 8, 16, 2, 2, 1, num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=4
    )
    of = LayerTimes(setting(Layout(dp=2, ep=2), model=model))
    parts = of._experts()
    # 8 tokens x 2 experts from each of two ranks over four experts: 8 rows for each
    assert parts["gate, up"] == close(2 * 2 * (512 / 500 + 2 * (64 + 32 + 32) / 500))
    assert parts["down"] == close(2 * (512 / 500 + 2 * (32 + 32 + 64) / 500))
    assert parts["router"] == close(2 * 8 * 8 * 4 / 50)  # in float32
    there = of.layer(has_experts=True).forward
    assert there.ep == close(2 * (0.5 * (2 * 8 * 8 * 2) / 50 + 1.1))  # and back
    assert of.layer(has_experts=False).forward.ep == 0
    expected = 8 * (2 * 3 * 4 + 3 * 4 * 4 / 2 + 4)  # heads, half of the experts, router
    step = StepTime(setting(Layout(dp=2, ep=2), model=model))
    assert step.layer_parameters(True) == expected


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
    each = StepTime(setting(layout, work)).micro_batch(Rank(1, 0, 0.5, 1)).total()
    assert prediction.parts["bubble"] == close(each)  # (p - 1) micro-batches
    assert prediction.pipeline == close(5 * each) and prediction.bubble == close(1 / 5)
    assert sum(prediction.parts.values()) == close(prediction.step, rel=1e-9)
    after = prediction.parts["optimizer"]
    assert prediction.step == close(5 * each + after)
    # With equal layers, the last rank has the head besides, and sets the pace.
    uneven = predict(setting(layout, work, System(is_balanced=False)))
    times = StepTime(setting(layout, work, System(is_balanced=False)))
    first, last = (times.micro_batch(rank).total() for rank in (Rank(1, 0, 0, 1), Rank(1, 0, 1, 0)))
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


@pytest.mark.parametrize("layout", GRID, ids=str)
def test_better_hardware_is_never_slower(layout):
    gpu, model = GPUS["H100"], find_preset("Llama-3.2-1B")
    work = Workload(4096, 1, 4, "bfloat16", "full")
    now = predict(Setting(model, gpu, layout, work, our_system(work))).step
    better = [{name: 2 * getattr(gpu, name)} for name in ("hbm", "nvlink", "network")]
    better += [{name: 1.2 * getattr(gpu, name)} for name in ("matmul_share", "attention_share")]
    better.append({"peaks": {name: 2 * peak for name, peak in gpu.peaks.items()}})
    for change in better:
        faster = replace(gpu, **change)
        assert predict(Setting(model, faster, layout, work, our_system(work))).step <= now


def test_an_axis_of_one_rank_costs_nothing():
    work = Workload(4096, 1, 4, "bfloat16")
    parts = predict(
        Setting(find_preset("Llama-3.2-1B"), GPUS["H100"], Layout(), work, our_system(work))
    ).parts
    assert [parts[name] for name in ("tp", "cp", "ep", "dp", "bubble")] == [0] * 5
