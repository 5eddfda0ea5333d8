"""Multi-token prediction: layers behind the last one predict tokens further ahead.

Each predicts one token further than the one before, as README.md writes out. All depths share the
model's embedding and lm_head, and each is called once for all of them. In production:
Megatron-LM's `MultiTokenPredictionBlock`.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from picotron_min.extension import Extension
from picotron_min.extensions.settings import ModelConfig, Workload
from picotron_min.loss import IGNORE_INDEX, Vocabulary, stripe_loss, wide
from picotron_min.model import DecoderLayer, Head, Llama, RMSNorm, rotary_table
from picotron_min.placement import Table


class MultiToken(Extension):
    def __init__(self, model_config: ModelConfig, workload: Workload, device: torch.device) -> None:
        D = model_config.num_nextn_predict_layers
        further = workload.mtp_loss_scaling_factor / D
        dtype = torch.promote_types(getattr(torch, workload.dtype), torch.float32)
        self.scales = torch.tensor([1.0, *[further] * D], dtype=dtype, device=device)
        # Summed losses, numbers of targets, and of those that were the likeliest, by depth.
        self.table = torch.zeros(3, 1 + D, dtype=torch.float64, device=device)
        self.first_stage = None

    def swap(self, model: Llama) -> None:
        if isinstance(model.model.embed_tokens, nn.Embedding):
            self.first_stage = model
        if isinstance(model.lm_head, Head):
            add_prediction_layers(model)

    def connect(self, model: Llama, table: Table) -> None:
        if isinstance(model.lm_head, Head):
            head = model.lm_head
            head.loss = partial(self.loss, head, head.loss)
            vocabulary = getattr(head.stripe_loss, "keywords", {}).get("vocabulary", Vocabulary())
            total = partial(self.note_likeliest, vocabulary.total)
            head.stripe_loss = partial(stripe_loss, vocabulary=replace(vocabulary, total=total))

    def wrap(self, model: Llama) -> None:
        # In a V the first and the last stage are on one rank, and their embeddings are one.
        if self.first_stage and isinstance(model.lm_head, Head):
            model.model.embed_tokens.weight = self.first_stage.model.embed_tokens.weight
            model.tie_weights()

    def loss(self, head: Head, of_next_token: Callable, x: Tensor, targets: Tensor) -> Tensor:
        """x [(1 + D) B, S, E], targets [1 + D, B, S] -> [], the summed loss of depth 0.

        Its gradient is the gradient of the sum of each depth's loss times its scale. One call for
        all depths: with several, as many gradients of lm_head would be kept until backward.
        """
        if targets.ndim == 2:  # as in validation
            return of_next_token(x, targets)
        start, per_depth, of_rows = 0, targets[0].numel(), head.stripe_loss

        def of_stripe(x: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
            nonlocal start
            losses, gradient = of_rows(x, weight, targets)
            depths = torch.arange(start, start + len(x), device=x.device) // per_depth
            start += len(x)
            self.table[0].index_add_(0, depths, losses.double())
            counts = targets != IGNORE_INDEX
            self.table[1].index_add_(0, depths, counts.double())
            self.table[2].index_add_(0, depths, (self.is_likeliest & counts).double())
            return losses * (depths == 0), gradient.mul_(self.scales[depths, None])

        head.stripe_loss = of_stripe
        total = of_next_token(x, targets)  # flattens both: a row for each depth and token
        head.stripe_loss = of_rows
        return total

    def note_likeliest(self, total: Callable, x: Tensor) -> Tensor:
        """Note of a stripe's rows whether no logit is above the target's; x is stripe_loss's."""
        x = total(x)
        # The target's logit less the largest of all ranks: an exact 0, and no further message.
        self.is_likeliest = x[1] == 0
        return x

    def begin(self) -> None:
        self.table.zero_()

    def counts(self) -> Tensor:
        return self.table[:, 1:].flatten()

    def measures(self, totals: Tensor) -> dict[str, object]:
        # tp times each: tensor-parallel ranks have the same.
        losses, numbers, likeliest = totals.view(3, -1)
        means = {"loss": losses / numbers, "acceptance": likeliest / numbers}
        return {f"mtp_{j}_{k}": m for k, of in means.items() for j, m in enumerate(of.tolist(), 1)}


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
