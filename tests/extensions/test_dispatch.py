"""Experts on several ranks: the order of messages, and routers' biases.

That ranks compute what one rank does with all tokens is in test_layouts.py.
"""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from picotron_min.extensions.experts.moe import mixtures
from picotron_min.pipeline_schedule import Kind
from tests.assembled import make_training
from tests.rows import row


def order_of_messages(text: str) -> dict:
    """What happens in each forward and backward of the only layer with experts."""
    training = make_training(*row(text))
    log, orders = [], {}
    start = dist.all_to_all_single

    def noting_start(*args, async_op=False, **options):
        work = start(*args, async_op=async_op, **options)
        if not async_op:  # counts of rows
            return work
        log.append("start")
        return SimpleNamespace(wait=lambda: log.append("wait") or work.wait())

    (moe,) = mixtures(training.chunks[0].model)
    shared = moe.shared

    def marked(x: Tensor) -> Tensor:
        log.append("(")
        x = x.view_as(x)
        out = shared(x)
        log.append(")")
        out.register_hook(lambda _: log.append("("))  # in backward
        x.register_hook(lambda _: log.append(")"))
        return out

    moe.shared = marked

    @contextmanager
    def watch(action):
        log.clear()
        yield
        orders[action.kind] = " ".join(log)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", noting_start)
        training.step(0, watch)
    return orders


@pytest.mark.parametrize("words", ["dp=2", "tp=2 sp recompute=full"])
def test_shared_experts_compute_while_rows_travel(pool, words):
    """Rows and weights travel to the experts in two messages, results back in one."""
    there, back = "start start ( ) wait wait", "start wait"
    # Recomputation begins where backward first needs something, and does not repeat the way back.
    again = f"{there} " if "full" in words else ""
    expected = {Kind.FORWARD: f"{there} {back}", Kind.BACKWARD: f"{back} {again}{there}"}
    text = f"experts: {words} ep=2 model=sigmoid num_nextn_predict_layers=0"
    assert pool.run(2, order_of_messages, text) == [expected] * 2


def biases_of_steps() -> None:
    """The second step is skipped; the expected biases are sums of signs of exact counts."""
    words = "dp=2 tp=2 ep=2 etp=2 dtype=bfloat16 moe_router_bias_update_rate=0.01 model=sigmoid"
    training = make_training(*row(f"experts: {words}"))
    (experts,), biases = training.experts, training.model.buffers
    expected = {name: torch.zeros(8) for name in biases}
    norm = training.parameters["model.norm.weight"]
    for step in range(3):
        bad = norm.register_hook(lambda gradient, by=torch.nan if step == 1 else 1: gradient * by)
        assert training.step(step).skipped == (step == 1)
        bad.remove()
        for name, bias in biases.items():
            counts = experts.routed[int(name.split(".")[2]), :8]
            if step != 1:
                expected[name] += (0.01 * (counts.mean() - counts).sign()).float()
            assert bias.dtype == torch.float32 and torch.equal(bias, expected[name]) and bias.any()
    assert biases and all(router.weight.dtype == torch.float32 for router in experts.routers)


def test_biases_follow_the_counts_of_all_ranks_but_in_a_skipped_step(pool):
    pool.run(4, biases_of_steps)
