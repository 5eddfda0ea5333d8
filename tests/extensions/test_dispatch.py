"""Experts on several ranks: routers' biases.

That ranks compute what one rank does with all tokens is in test_layouts.py, and that shared experts
compute while rows travel in exercise 23.
"""

import torch

from tests.assembled import make_training
from tests.rows import row


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
