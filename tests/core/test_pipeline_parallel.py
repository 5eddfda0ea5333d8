"""The interpreter: what it keeps, reads and sends. That it trains right is in test_layouts.py."""

import weakref

from picotron_min.pipeline_schedule import Action
from tests.assembled import make_training
from tests.rows import row
from tests.training import Training


def pipeline(text: str) -> Training:
    return make_training(*row(f"core: {text}"))


def reads(text: str) -> int:
    training = pipeline(text)
    read, calls = training.data.batch, []
    training.data.batch = lambda step, i: calls.append(i) or read(step, i)
    training.step(0)
    return len(calls)


def test_each_forward_reads_its_batch_without_a_message(pool):
    assert pool.run(4, reads, "pp=4 m=4") == [4] * 4
    assert pool.run(2, reads, "pp=2 m=4 engine=interleaved") == [8] * 2


def outputs_alive_when_backward_begins() -> int:
    """In AFAB, after eight forwards: how many of their results are still in memory."""
    training = pipeline("pp=2 m=8 engine=afab")
    outputs, alive = [], []
    training.chunks[0].model.register_forward_hook(
        lambda module, inputs, out: outputs.append(weakref.ref(out))
    )
    interpreter = training.model.pipeline
    send = interpreter._send

    def count_after_send(action: Action) -> None:
        send(action)
        alive.append(sum(output() is not None for output in outputs))

    interpreter._send = count_after_send
    training.step(0)
    assert not (interpreter.live or interpreter.arriving or interpreter.leaving), "after a step"
    return max(alive)


def test_an_activation_is_let_go_once_it_is_sent(pool):
    assert pool.run(2, outputs_alive_when_backward_begins)[0] <= 1
