"""Layers without rotary embedding: their attention sees order only through the causal mask.

    SmolLM3    rotary, rotary, rotary, none, rotary, rotary, rotary, none, ...

Source: Kazemnejad et al. 2023, "The Impact of Positional Encoding on Length Generalization"; Yang
et al. 2025, "Rope to Nope and Back Again", section 3, on some layers without.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from picotron_min.extension import Extension
from picotron_min.model import Llama


class NoRope(Extension):
    def swap(self, model: Llama) -> None:
        for i, layer in model.model.layers.items():  # of this stage, by their numbers in the model
            if int(i) in model.config.rope_free:
                layer.self_attn.forward = partial(_unrotated, layer.self_attn.forward)


def _unrotated(forward: Callable, x: Tensor, rotary: tuple) -> Tensor:
    cos, sin, *extra = rotary
    # By an angle of zero: simpler than another forward, and as fast as a layer that rotates.
    return forward(x, (torch.ones_like(cos), torch.zeros_like(sin), *extra))
