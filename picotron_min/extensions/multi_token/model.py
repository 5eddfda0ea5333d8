"""Prediction layers: each predicts one token further than the one before, as README.md writes out.

All depths share the model's embedding and lm_head, and each is called once for all of them. In
production: Megatron-LM's `MultiTokenPredictionBlock`.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from picotron_min.extensions.settings import ModelConfig
from picotron_min.loss import wide
from picotron_min.model import DecoderLayer, Llama, RMSNorm, rotary_table


class PredictionLayer(DecoderLayer):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        E, eps = config.hidden_size, config.rms_norm_eps
        self.enorm, self.hnorm = RMSNorm(E, eps), RMSNorm(E, eps)
        self.eh_proj = nn.Linear(2 * E, E, bias=False)
        self.shared_head = nn.Module()
        self.shared_head.norm = RMSNorm(E, eps)  # called by `forward` below: see memory/

    def forward(self, x: Tensor, rotary: tuple) -> Tensor:
        """x [B, S, 2E], an embedding and a hidden state side by side -> [B, S, E]"""
        # One input, as of any layer: so what is wrapped around layers need not know this one.
        embedding, hidden = x.chunk(2, dim=-1)
        x = torch.cat([self.enorm(embedding), self.hnorm(hidden)], dim=-1)
        return super().forward(wide(self.eh_proj(x)), rotary)  # as the stream of other layers


def add_prediction_layers(model: Llama) -> None:
    """Give the last stage of a model on the meta device its prediction layers, in place."""
    c, dtype = model.config, next(model.parameters()).dtype
    with torch.device("meta"):
        if isinstance(model.model.embed_tokens, nn.Identity):  # another stage has it, too
            model.model.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        for i in range(c.num_hidden_layers, c.num_layers):
            model.model.layers[str(i)] = PredictionLayer(c)
    model.to(dtype)
    model.tie_weights()
    model.forward = lambda *args: forward(model, *args)


def forward(
    model: Llama, x: Tensor, positions: Tensor, targets: Tensor | None = None, *extra
) -> Tensor:
    """Llama.forward of a last stage: x [B, S], or [B, S, E] of the stage before.

    With targets [1 + D, B, S]: the loss of depth 0, with the gradient of all depths.
    """
    rotary = *rotary_table(positions, model.config), *extra
    has_depths = targets is not None and targets.ndim == 3
    x = hidden_states(model, x, rotary, targets[:-1] if has_depths else ())
    return model.lm_head(x) if targets is None else model.lm_head.loss(x, targets)


def hidden_states(model: Llama, x: Tensor, rotary: tuple, ids: Iterable[Tensor]) -> Tensor:
    """What lm_head gets of each depth, [(1 + D) B, S, E]; ids [D, B, S]: the tokens ahead."""
    # What one depth predicts, the next one gets. Where nothing is predicted, neither is any more
    # behind it: any id will do.
    ids, is_first = [tokens.clamp(min=0) for tokens in ids], not x.is_floating_point()
    ids = [x, *ids] if is_first else ids
    embeddings = model.model.embed_tokens(torch.cat(ids)).split(len(x)) if ids else ()
    if is_first:
        x, *embeddings = embeddings
        x = x.clone()  # or the first layer, which saves it, would keep the memory of all
    layers = list(model.model.layers.values())
    L = len(layers) - model.config.num_nextn_predict_layers
    for layer in layers[:L]:
        x = layer(x, rotary)
    hidden = [model.model.norm(x)]
    for layer, embedding in zip(layers[L:], embeddings, strict=False):
        x = layer(torch.cat([embedding, hidden[-1]], dim=-1), rotary)
        hidden.append(layer.shared_head.norm(x))
    return torch.cat(hidden)
