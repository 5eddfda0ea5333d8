"""Tensor parallelism apart from training, for which see test_layouts.py."""

from types import SimpleNamespace

import numpy as np
import pytest

from picotron_min import collectives
from picotron_min.extensions.overlap.linear import Linear
from tests.assembled import make_training, whole_run
from tests.rows import row


@pytest.mark.parametrize("text", ["tp=2 sp", "tp=2 overlap=false"])
def test_two_ranks_err_little_more_than_one_in_bfloat16(pool, text):
    texts = "dtype=float64", "dtype=bfloat16", f"dtype=bfloat16 {text}"
    exact, one_rank, ours = (
        whole_run(pool, *row(f"core: {text} layers=1 grad_clip=null"), steps=1, atol=1e-5).gradients
        for text in texts
    )
    for name, gradient in exact.items():
        errors = [np.linalg.norm(of[name] - gradient) for of in (ours, one_rank)]
        assert 0 < errors[0] < 2 * errors[1], name


def backward_events(text: str) -> list[str]:
    """What happens in the backward of one layer, in order."""
    events = []

    def logged(name: str, function):
        def call(*args, **kwargs):
            events.append(name)
            result = function(*args, **kwargs)
            if name == "weight gradient":
                return result
            *rest, work = result if isinstance(result, tuple) else (result,)
            waited = SimpleNamespace(wait=lambda: (events.append("wait"), work.wait()))
            return (*rest, waited) if rest else waited

        return call

    training = make_training(*row(f"core: {text} layers=1"))
    batch = training.data.batch(0, 0)
    loss = training.chunks[0].model(batch.tokens, batch.positions, batch.targets)
    with pytest.MonkeyPatch.context() as patch:
        for module, name, label in (
            (collectives, "start_all_reduce", "start"),
            (collectives, "start_reduce_scatter", "start"),
            (Linear, "add_weight_gradient", "weight gradient"),
        ):
            patch.setattr(module, name, logged(label, getattr(module, name)))
        loss.backward()
    return events


@pytest.mark.parametrize("text", ["tp=2", "tp=2 sp"])
def test_weight_gradients_are_computed_while_the_input_gradient_travels(pool, text):
    head = ["start", "wait"]
    mlp = ["start", *["weight gradient"] * 3, "wait"]
    attention = ["start", *["weight gradient"] * 4, "wait"]
    for events in pool.run(2, backward_events, text):
        assert events == head + mlp + attention
