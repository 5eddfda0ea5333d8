"""Router: it chooses the experts of each token, and keeps all of them in use.

    x [B, S, E] -> logits [B, S, X] -> scores -> the best k experts of each token, and their weights

Left alone, a router soon chooses the same few experts for all tokens, and the others learn nothing.
There are two remedies:

    balance losses   for each token X sum_i f_i s_i; f_i is expert i's share of all choices, s_i its
                     share of the token's scores: 1 if all experts are used alike
    a bias           is added to the scores, but only to choose; it rises where tokens are few

A balance loss is a sum over tokens, as the cross entropy is, and the step divides both by the
number of target tokens: no rank, micro-batch or pipeline stage needs a factor. Only its gradient is
added, to the gradient of the scores; the loss that is reported stays the cross entropy.

Kernels of a forward with 64 experts, 8 of them for each of 4,096 tokens, and softmax: 8 to route,
14 for the balance, 20 to sort rows and add them up (moe.py); 29 of the backward. torch.compile
joins only the first 8. Transformer Engine has three kernels for route and balance.

Source: Fedus et al. 2021, "Switch Transformers", section 2.2; the bias, Wang et al. 2024,
"Auxiliary-Loss-Free Load Balancing Strategy". In production: Megatron-LM's `TopKRouter`.
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from picotron_min.extensions.settings import ModelConfig, Routing
from picotron_min.loss import wide

LOSSES = {  # as metrics name them, each with its coefficient
    "load_balancing_loss": "moe_aux_loss_coeff",
    "seq_load_balancing_loss": "moe_seq_aux_loss_coeff",
    "global_load_balancing_loss": "moe_global_aux_loss_coeff",
    "z_loss": "moe_z_loss_coeff",
}
TINY = 1e-20  # added to sums: sigmoids of very negative logits are 0 in float32, and 0 / 0 is nan


class Router(nn.Module):
    """Chooses k of X experts for each token."""

    def __init__(
        self, config: ModelConfig, routing: Routing, tally: "RoutingCounts", layer: int
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.num_local_experts, config.hidden_size))
        bias = torch.empty(config.num_local_experts) if config.scoring_func == "sigmoid" else None
        self.register_buffer("e_score_correction_bias", bias)  # updated after a step
        self.config, self.routing, self.tally, self.layer = config, routing, tally, layer
        # Over ranks with other tokens of the same sequences, with other sequences: see dispatch.py.
        self.sum_over_sequences = self.sum_over_batch = lambda counts: counts

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[B, S, E] -> weights and experts of each token, [B, S, k]; nothing is sent but counts."""
        logits = self.logits(x)
        weights, experts, shares = route(logits, self.config, self.e_score_correction_bias)
        if torch.is_grad_enabled():
            weights = self._with_losses(weights, shares, logits, experts)
        return weights, experts

    def logits(self, x: Tensor) -> Tensor:
        # In bfloat16, with three digits, many scores would be equal, and the choice arbitrary.
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(wide(x), self.weight)

    @torch.compiler.disable  # compiled, its gradient would be saved, and replaced in a repeat
    def _with_losses(
        self, weights: Tensor, shares: Tensor, logits: Tensor, experts: Tensor
    ) -> Tensor:
        """The weights, unchanged; in backward the losses' gradients are added, see _Attach."""
        routing = self.routing
        if routing.moe_z_loss_coeff:
            z = logits.logsumexp(-1)
            self.tally.add(self.layer, "z_loss", z.detach().square().sum())
            weights = _Attach.apply(weights, z, 2 * routing.moe_z_loss_coeff * z.detach())
        # A forward that is run again, for backward, only restores tensors, and its graph is thrown
        # away: nothing to attach, to count or to send.
        balances = routing.moe_seq_aux_loss_coeff, routing.moe_aux_loss_coeff
        if any((*balances, routing.moe_global_aux_loss_coeff)) and not self.tally.is_paused:
            # A bias and groups also choose: else the experts are those with the largest shares.
            best = experts if self.e_score_correction_bias is None else None
            balance = self._balance(shares, best).expand_as(shares)
            weights = _Attach.apply(weights, shares, balance)
        return weights

    @torch.no_grad()
    def _balance(self, shares: Tensor, best: Tensor | None = None) -> Tensor:
        """Gradient of the balance losses, [B, S, X] -> [B, 1, X]: f, the same for all tokens.

        `best`: each token's k best experts by share, if these are known already.
        """
        routing, X, tally = self.routing, shares.shape[-1], self.tally
        if best is None:  # without bias and groups
            best = shares.topk(self.config.num_experts_per_tok).indices
        counts = torch.zeros_like(shares).scatter_(-1, best, 1.0).sum(1)
        counts = self.sum_over_sequences(counts)  # [B, X], of whole sequences
        of_step = tally.counts_of_step[self.layer]  # [X]
        if routing.moe_global_aux_loss_coeff:
            of_step += self.sum_over_batch(counts.sum(0))
        scopes = {  # a loss, its coefficient, and the tokens among which experts are to be even
            "seq_load_balancing_loss": (routing.moe_seq_aux_loss_coeff, counts),
            "load_balancing_loss": (routing.moe_aux_loss_coeff, counts.sum(0)),
            "global_load_balancing_loss": (routing.moe_global_aux_loss_coeff, of_step),
        }
        gradient = torch.zeros_like(counts)
        for name, (coefficient, scope) in scopes.items():
            if coefficient:
                f = (X * scope / scope.sum(-1, keepdim=True)).to(shares.dtype).expand_as(counts)
                tally.add(self.layer, name, (f[:, None] * shares).sum())
                gradient += coefficient * f
        return gradient[:, None]


class _Attach(torch.autograd.Function):
    """x, unchanged; backward also gives `tensor` a gradient, as if its loss were in the total."""

    @staticmethod
    def forward(ctx, x, tensor, gradient):
        # Not by save_for_backward: a forward that is run again would replace it, and the counts of
        # the step have grown by then.
        ctx.gradient = gradient
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dx):
        return dx, ctx.gradient, None


def force_routing(routers: Iterable[Router], seq_length: int, positions: Tensor) -> None:
    """Change routers' logits, in place, for benchmarks of an even routing, an uneven one, or both.

    Even: random ones replace them, of the layer and the position; `positions` [S/cp/tp] are this
    rank's. Uneven: each expert gets a random bias, of the layer alone, with the standard deviation
    -moe_router_force_biased. Megatron-LM draws a new one in each forward if the key is positive.
    """
    for router in routers:
        generator, X = torch.Generator().manual_seed(router.layer), len(router.weight)
        is_even = router.routing.moe_router_force_load_balancing
        table = torch.randn(seq_length, X, generator=generator)[positions.cpu()] * is_even
        std = -(router.routing.moe_router_force_biased or 0)
        table += std * torch.randn(X, generator=generator.manual_seed(~router.layer))
        table = table.to(positions.device)

        def forced(x: Tensor, own=router.logits, even=is_even, table=table) -> Tensor:
            logits = own(x)  # they get the gradient: the work of a step stays the same
            return logits - logits.detach() * even + table

        router.logits = forced


def route(
    logits: Tensor, config: ModelConfig, bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """logits [..., X] -> weights and experts [..., k], and shares of the scores [..., X]."""
    scores = logits.softmax(-1) if config.scoring_func == "softmax" else logits.sigmoid()
    with torch.no_grad():
        ranked = scores if bias is None else scores + bias  # the bias chooses, but has no weight
        if config.n_group > 1:  # a group is as good as its two best experts, as in DeepSeek-V3
            groups = ranked.unflatten(-1, (config.n_group, -1))
            best = groups.topk(2).values.sum(-1).topk(config.topk_group).indices
            is_best = torch.zeros_like(groups[..., 0], dtype=torch.bool).scatter_(-1, best, True)
            ranked = groups.masked_fill(~is_best[..., None], -math.inf).flatten(-2)
        experts = ranked.topk(config.num_experts_per_tok).indices
    weights, shares = scores.gather(-1, experts), scores
    if config.norm_topk_prob:
        weights = weights / (weights.sum(-1, keepdim=True) + TINY)
    if config.scoring_func == "sigmoid":
        shares = scores / (scores.sum(-1, keepdim=True) + TINY)
    return weights * config.routed_scaling_factor, experts, shares


class RoutingCounts:
    """What the routers of a rank count in a step: a row for each layer of the whole model.

    A row has the tokens of each expert, without dropped ones, then COLUMNS.
    """

    COLUMNS = ("dropped", "tokens", *LOSSES)  # after the experts

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        X, layers = config.num_local_experts, config.num_layers
        kind = {"dtype": torch.float64, "device": device}
        self.num_experts, self.is_paused = X, False  # while a forward is run again, for backward
        self.table = torch.zeros(layers, X + len(self.COLUMNS), **kind)
        self.counts_of_step = torch.zeros(layers, X, **kind)  # for the global balance

    def begin(self) -> None:
        self.table.zero_()
        self.counts_of_step.zero_()

    def add(self, layer: int, column: str, value: Tensor | int) -> None:
        if not self.is_paused:
            self.table[layer, self.num_experts + self.COLUMNS.index(column)] += value

    def count(self, layer: int, experts: Tensor) -> None:
        """Add the tokens of each expert, and dropped ones, whose expert is X: experts [n, k]."""
        if torch.is_grad_enabled() and not self.is_paused:
            counts = count(experts, self.num_experts)  # the last, of dropped ones, is COLUMNS[0]
            self.table[layer, : self.num_experts + 1] += counts
            self.add(layer, "tokens", len(experts))

    def update_biases(self, routers: Iterable[Router], totals: Tensor) -> None:
        """Raise the biases of experts with few tokens; `totals` is the sum of all ranks' tables."""
        for router in routers:
            if (bias := router.e_score_correction_bias) is not None:
                tokens = totals[router.layer, : self.num_experts]
                rate = router.routing.moe_router_bias_update_rate
                bias += (rate * (tokens.mean() - tokens).sign()).to(bias.dtype)

    @contextmanager
    def paused(self) -> Iterator[None]:
        self.is_paused = True
        try:
            yield
        finally:  # torch leaves a repeated forward by an exception once it has what it needs
            self.is_paused = False


def count(experts: Tensor, num_experts: int) -> Tensor:
    """How many are of each expert; the last, num_experts, are dropped ones: [..] -> [X + 1]."""
    experts = experts.flatten()  # torch.bincount would make the host wait for a GPU
    return experts.new_zeros(num_experts + 1).scatter_add_(0, experts, torch.ones_like(experts))
