"""Mixture of experts: a layer has many MLPs, the experts, and each token uses only a few of them.

    token 0   experts 2, 0 -+   sorted by expert      expert 0   tokens 0, 2   +-> weighted sum
    token 1   experts 3, 2  +-> ------------------->  expert 2   tokens 0, 1  -+   for each token
    token 2   experts 0, 3 -+                         expert 3   tokens 1, 2   +

router.py chooses the experts; this file runs them on one device; dispatch.py spreads them over
ranks. Source: Shazeer et al. 2017, "Outrageously Large Neural Networks"; shared experts, Dai et al.
2024, "DeepSeekMoE". In production: Hugging Face's `MixtralSparseMoeBlock`, Megatron's `MoELayer`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from picotron_min.collectives import Conjugate
from picotron_min.extensions.experts.router import Router, RoutingCounts, count
from picotron_min.extensions.settings import ModelConfig, Routing
from picotron_min.loss import wide
from picotron_min.model import MLP, Llama

Routed = tuple[Tensor, Tensor | None]  # what routed and shared experts make of tokens


def apply_moe(model: Llama, routing: Routing, tally: RoutingCounts) -> None:
    """Give the layers of a model that have experts a mixture in place of their MLP."""
    for name, layer in model.model.layers.items():
        if model.config.has_experts(int(name)):
            layer.mlp = MoE(model.config, routing, tally, int(name))


def mixtures(model: nn.Module) -> list["MoE"]:
    return [module for module in model.modules() if isinstance(module, MoE)]


class MoE(nn.Module):
    """A layer's MLP: the experts that a router chooses for each token, and shared ones for all."""

    def __init__(
        self, config: ModelConfig, routing: Routing, tally: RoutingCounts, layer: int
    ) -> None:
        super().__init__()
        E, inner, X = config.hidden_size, config.moe_intermediate_size, config.num_local_experts
        n, is_gated = config.n_shared_experts, config.moe_shared_expert_gate
        self.gate = Router(config, routing, tally, layer)
        self.experts = nn.ModuleDict({str(e): Expert(E, inner) for e in range(X)})
        self.shared_experts = MLP(E, n * inner) if n else None
        self.shared_expert_gate = nn.Linear(E, 1, bias=False) if is_gated else None
        self.limit = Limit(X, config.num_experts_per_tok, routing, layer)
        self.dispatch = Dispatch(self.limit)
        self.split = self.join = lambda x: x  # the sequence, over tp: see dispatch.py

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, E] -> [B, S, E]"""
        tokens = self.split(x)
        routed, shared = self.mix(x, tokens, *self.gate(tokens))
        routed = self.join(routed)
        return routed if shared is None else routed + shared

    @torch.compiler.disable  # how many rows an expert has changes in every call
    def mix(self, x: Tensor, tokens: Tensor, weights: Tensor, experts: Tensor) -> Routed:
        """Run the experts [B, S, k] chosen for tokens [B, S, E], and shared ones on x."""
        weights, experts = weights.flatten(0, 1), experts.flatten(0, 1)  # [n, k]
        experts = self.limit(weights, experts)
        self.gate.tally.count(self.gate.layer, experts)
        rows, shared = tokens.flatten(0, 1), partial(self.shared, x)
        routed, shared = self.dispatch(rows, weights, experts, self.run, shared)
        return routed.view_as(tokens), shared

    def run(self, rows: Tensor, sizes: list[int], weights: Tensor) -> Tensor:
        """rows [r, E], sorted by expert, and their weights [r] -> [r, E]"""
        parts = zip(self.experts.values(), rows.split(sizes), weights.split(sizes), strict=True)
        # An expert without tokens also runs: its gradient, which is zero, must arrive.
        return torch.cat([expert(x, w) for expert, x, w in parts])

    def shared(self, x: Tensor) -> Tensor | None:  # of all tokens, gated for each one
        if self.shared_experts is None:
            return None
        out = self.shared_experts(x)
        return out * self.shared_expert_gate(x).sigmoid() if self.shared_expert_gate else out


class Expert(MLP):
    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        """x [r, E], weights [r] -> [r, E], weighted"""
        # Weighted before the last product, which is linear: afterwards, backward would need to keep
        # the expert's output.
        gate, up = self.project(x)
        inner = wide(F.silu(gate) * up) * weights[:, None]
        return self.down_proj(inner.to(x.dtype))


class TooManyRows(MemoryError):
    """Its message has the numbers and the remedy: see Limit.check_rows."""


@dataclass
class Limit:
    """How many tokens of a rank's micro-batch an expert takes; others are dropped."""

    num_experts: int
    k: int
    routing: Routing
    layer: int = 0

    def capacity(self, num_tokens: int) -> int:
        factor = self.routing.moe_expert_capacity_factor
        even = num_tokens * self.k / self.num_experts  # if all experts were used alike
        return math.ceil(min(num_tokens, factor * even)) if factor else num_tokens

    def rows_each(self, num_tokens: int) -> int | None:
        """The rows that every expert gets, with padding; None: as many as it has tokens."""
        pads = self.routing.moe_pad_expert_input_to_capacity
        return self.capacity(num_tokens) if pads else None

    def check_rows(self, sizes: list[int], num_tokens: int) -> None:
        """TooManyRows, before they are allocated, if experts of this rank get more than it allows.

        `sizes` are the rows of each expert, `num_tokens` the tokens of all ranks that send to them.
        Planned are as many rows as if all experts were used alike.
        """
        factor, rows = self.routing.moe_expert_rank_capacity_factor, sum(sizes)
        planned = num_tokens * self.k * len(sizes) // self.num_experts
        if factor and rows > factor * planned:
            where = f"layer {self.layer}: the experts of rank {dist.get_rank()} get {rows} rows"
            most = f"{factor:g} x {planned}, the planned rows (moe_expert_rank_capacity_factor)"
            remedy = "raise the factor or a coefficient of the balance losses, use a smaller"
            remedy += " ep_size, or drop tokens by moe_expert_capacity_factor"
            raise TooManyRows(f"{where}, above {most}: {remedy}")

    @torch.no_grad()
    def __call__(self, weights: Tensor, experts: Tensor) -> Tensor:
        """weights and experts [n, k] -> experts [n, k], with X where an expert is full."""
        capacity = self.capacity(len(experts))
        if capacity == len(experts):
            return experts
        flat, first = experts.flatten(), torch.arange(experts.numel(), device=experts.device)
        if self.routing.moe_token_drop_policy == "probs":  # else an expert keeps its first tokens
            first = weights.flatten().argsort(descending=True, stable=True)
        order = first[flat[first].argsort(stable=True)]  # by expert, then by preference
        ranked = flat[order]
        kept = ranked.where(places_in_groups(ranked, self.num_experts) < capacity, self.num_experts)
        return torch.empty_like(flat).scatter_(0, order, kept).view_as(experts)


def places_in_groups(experts: Tensor, num_experts: int) -> Tensor:
    """The place of each pair among its expert's pairs, sorted by expert: 0 0 2 2 -> 0 1 0 1."""
    counts = count(experts, num_experts)
    return torch.arange(len(experts), device=experts.device) - (counts.cumsum(0) - counts)[experts]


class Dispatch:
    """Brings tokens to their experts, here on the same rank, and the results back."""

    def __init__(self, limit: Limit) -> None:
        self.limit, self.num_experts = limit, limit.num_experts
        self.ranks = 1  # whose tokens are here

    def __call__(
        self, x: Tensor, weights: Tensor, experts: Tensor, run: Callable, meanwhile: Callable
    ) -> Routed:
        """x [n, E], weights and experts [n, k] -> the weighted sum [n, E], and `meanwhile()`.

        `run` is MoE.run, for the experts of this rank.
        """
        # First, because torch's checkpoint ends a repeated forward at the last tensor that it
        # needs, the experts' last input. Shared experts after it would make all run again.
        shared = meanwhile()
        if rows_each := self.limit.rows_each(len(x) // self.ranks):
            rows_each *= self.ranks
            sizes = [rows_each] * self.num_experts
        else:  # the host waits for a GPU, to learn the numbers of rows
            sizes = count(experts, self.num_experts)[:-1].tolist()
            self.limit.check_rows(sizes, len(x))
        pairs = Pairs(experts, sum(sizes), rows_each)
        return pairs.collect(run(pairs.spread(x), sizes, pairs.sort(weights))), shared


def on_device(numbers: Sequence, device: torch.device) -> Tensor:
    """Numbers of the host as a tensor; a GPU copies them by itself, and the host does not wait."""
    tensor = torch.tensor(numbers)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


class Pairs:
    """The pairs (token, one of its experts) [n, k], and the rows [r] that have them by expert.

    Dropped pairs, whose expert is num_experts, have no row. With `rows_each` every expert has that
    many rows, the last ones zero if it has fewer pairs: no shape depends on what the router chose.
    A token's k rows are added in their order, without atomic additions: so results repeat.
    """

    def __init__(self, experts: Tensor, num_rows: int, rows_each: int | None = None) -> None:
        self.shape, flat = experts.shape, experts.flatten()
        order = flat.argsort(stable=True)
        if rows_each:
            ranked = flat[order]
            places = ranked * rows_each + places_in_groups(ranked, num_rows // rows_each)
            empty = order.new_full((num_rows + 1,), len(flat))
            order = empty.scatter_(0, places.clamp(max=num_rows), order)  # the last row: dropped
        self.order = order[:num_rows]  # the pair in each row; behind the last pair if it is empty

    def spread(self, x: Tensor) -> Tensor:
        """x of each token [n, E] -> of each pair, sorted [r, E]"""
        return Conjugate.apply(self._spread, self._collect, x)

    def collect(self, y: Tensor) -> Tensor:
        """y of each pair, sorted [r, E] -> the sum for each token [n, E]"""
        return Conjugate.apply(self._collect, self._spread, y)

    def sort(self, weights: Tensor) -> Tensor:
        """[n, k] -> of each pair, sorted [r]"""
        return F.pad(weights.flatten(), (0, 1))[self.order]

    def _spread(self, x: Tensor) -> Tensor:
        return F.pad(x, (0, 0, 0, 1))[self.order // self.shape[1]]

    def _collect(self, y: Tensor) -> Tensor:
        pairs = y.new_zeros(self.shape.numel() + 1, y.shape[1]).index_copy_(0, self.order, y)
        return pairs[:-1].unflatten(0, self.shape).sum(1)
