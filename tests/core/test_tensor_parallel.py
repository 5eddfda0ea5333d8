"""Tensor parallelism apart from training, for which see test_layouts.py."""

import numpy as np
import pytest

from tests.assembled import whole_run
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
