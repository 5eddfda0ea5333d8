"""How long a step takes: what one rank does in a micro-batch, m of them, and what comes after.

    | micro-batch | micro-batch | ... | bubble | gradients that nothing hides | optimizer |

Pure: a prediction is a function of its Setting. Nothing is counted for reading data, for ranks that
are slower than others, and for a host that launches kernels too slowly.

N tokens of a rank's micro-batch, E hidden size, V vocabulary; a message of b bytes as in links.py.
"""

import copy
from collections import Counter
from dataclasses import replace
from functools import cached_property, lru_cache
from operator import add
from typing import NamedTuple

from picotron_min.costs import layers_of_stages
from picotron_min.extensions.schedules.registry import SCHEDULES
from picotron_min.extensions.settings import Layout, ModelConfig
from picotron_min.pipeline_schedule import stages_of
from picotron_min.planner.layer_time import Layer, LayerTimes, Pass
from picotron_min.planner.links import Link, link
from picotron_min.planner.system import Setting

Seconds = Counter[str]  # by what they are spent on
BUCKET_BYTES = 25 * 2**20  # of data_parallel.py


class Prediction(NamedTuple):
    parts: dict[str, float]  # seconds, which add up to the step
    pipeline: float  # seconds from the first forward to the last backward

    @property
    def step(self) -> float:
        return sum(self.parts.values())

    @property
    def bubble(self) -> float:
        return self.parts["bubble"] / self.pipeline


def predict(setting: Setting) -> Prediction:
    """The time of a step, with the closed form of the pipeline's bubble."""
    return StepTime(setting).prediction()


class Rank(NamedTuple):
    """What a pipeline rank has of the model; a fraction where an ideal balance is assumed."""

    dense: float  # layers
    mixtures: float
    head: float
    embedding: float


@lru_cache
def layers_by_kind(model_config: ModelConfig) -> Counter[bool]:
    """How many layers have experts, and how many have none."""
    return Counter(map(model_config.has_experts, range(model_config.num_hidden_layers)))


def ranks_of(setting: Setting, layout: Layout) -> list[Rank]:
    """What each pipeline rank of a layout has; of the layout, only its pipeline matters."""
    S, is_balanced = setting.workload.seq_length, setting.system.is_balanced
    pipeline = layout.pp, layout.pp_engine, layout.pp_chunks, layout.pp_layers
    return _ranks_of(setting.model_config, *pipeline, S, is_balanced)


@lru_cache(maxsize=4096)
def _ranks_of(
    model_config: ModelConfig,
    pp: int,
    engine: str,
    chunks: int,
    layers: tuple[int, ...] | None,
    seq_length: int,
    is_balanced: bool | None,
) -> list[Rank]:
    c, layout = model_config, Layout(pp=pp, pp_chunks=chunks, pp_layers=layers)
    if is_balanced is not None:
        kinds = layers_by_kind(c)
        each = kinds[False] / pp, kinds[True] / pp
        if is_balanced:
            return [Rank(*each, head=1 / pp, embedding=1.0)] * pp
        return [Rank(*each, head=float(r == pp - 1), embedding=float(r == 0)) for r in range(pp)]
    stages, first = [], 0
    for number in layers_of_stages(c, layout, seq_length):
        mixtures = sum(map(c.has_experts, range(first, first + number)))
        stages.append((number - mixtures, mixtures))
        first += number
    ranks = []
    for rank in range(pp):
        mine = stages_of(layout.schedule, rank, pp, chunks)
        dense, mixtures = map(sum, zip(*(stages[s] for s in mine), strict=True))
        ends = layout.num_stages - 1 in mine, 0 in mine
        ranks.append(Rank(dense, mixtures, *map(float, ends)))
    return ranks


class StepTime:
    def __init__(self, setting: Setting) -> None:
        self.setting, self.times = setting, LayerTimes(setting)
        self.config, self.gpu, self.layout = setting.model_config, setting.gpu, setting.layout
        self.work, self.system = setting.workload, setting.system
        self.memory_speed = self.gpu.hbm_share * self.gpu.hbm

    def at(self, layout: Layout) -> "StepTime":
        """The same with another schedule or sharding, which do not change a layer's time."""
        other = copy.copy(self)  # with the times of layers, if they have been computed
        other.setting, other.layout = replace(self.setting, layout=layout), layout
        for name in ("layer_parts", "sharding_link"):
            other.__dict__.pop(name, None)
        return other

    def at_best(self) -> float:
        """Seconds of a step if all pipeline ranks were equally busy, and nothing else counted."""
        total = self.head
        for has_experts, number in layers_by_kind(self.config).items():
            total += number * sum(self.layers[has_experts].seconds)
        return self.work.num_micro_batches * total / self.layout.pp

    def prediction(self) -> Prediction:
        m, layout = self.work.num_micro_batches, self.layout
        ranks = Counter(ranks_of(self.setting, layout))  # many have the same
        times = {rank: self.micro_batch(rank) for rank in ranks}
        mean = sum(times[rank].total() * n for rank, n in ranks.items()) / layout.pp
        slowest = max(ranks, key=lambda rank: times[rank].total())
        parts = Counter({name: m * seconds for name, seconds in times[slowest].items()})
        idle = SCHEDULES[layout.pp_engine].bubble(layout.pp, m, layout.pp_chunks)
        bubble = m * mean * idle / (1 - idle)  # idle slots beside each busy one
        # Of ranks that share cores, the others compute faster while one waits: a step takes as long
        # as the work of all, or as the longest chain at a whole core's speed if that is longer.
        share = self.gpu.core_share
        parts["bubble"] = max(0.0, share * bubble - (1 - share) * parts.total())
        pipeline = parts.total()
        parts["dp"] += self.gradients(slowest)
        parts["optimizer"] = self.optimizer(slowest)
        return Prediction(dict(parts), pipeline)

    def micro_batch(self, rank: Rank) -> Seconds:
        """Forward and backward of all that a rank has, for one micro-batch."""
        seconds = Counter()
        for number, has_experts in ((rank.dense, False), (rank.mixtures, True)):
            if number:
                for name, each in self.layer_parts[has_experts].items():
                    seconds[name] += number * each
        if rank.head:
            seconds["head"] = rank.head * self.head
            seconds["tp"] += rank.head * 2 * self.times.tp_message
        seconds["passes"] += self.accumulation(rank)
        seconds["dp"] += self.each_reduction(rank)
        return seconds

    @cached_property
    def layers(self) -> dict[bool, Layer]:
        """A layer's times, by whether it has experts."""
        return {kind: self.times.layer(kind) for kind in layers_by_kind(self.config)}

    @cached_property
    def layer_parts(self) -> dict[bool, Seconds]:
        """The same, forward and backward together, with what sharding adds to them."""
        parts = {}
        for has_experts, layer in self.layers.items():
            both = map(add, layer.forward, layer.backward)
            parts[has_experts] = Counter(dict(zip(Pass._fields, both, strict=True)))
            parts[has_experts]["recomputed"] = sum(layer.repeated)
            parts[has_experts]["dp"] = self.gathers(has_experts, *layer.seconds)
        return parts

    @cached_property
    def head(self) -> float:
        """lm_head and the loss: three products, and passes over the logits."""
        c, N, tp, times = self.config, self.times.tokens, self.layout.tp, self.times
        rows, V = min(N, self.system.stripe_rows or N), c.vocab_size / tp
        products = 3 * N / rows * times.matmul(rows, c.hidden_size, V)  # of each stripe
        moved = self.system.logit_bytes * N * V
        if self.system.stripe_rows:  # the gradient of lm_head is read and written for each
            moved += 8 * V * c.hidden_size * N / rows
        return products + moved / self.memory_speed

    # Parameters of a rank, and what is done with each.

    def layer_parameters(self, has_experts: bool) -> float:
        """Elements of a layer's matrices on this rank."""
        c, layout = self.config, self.layout
        E, heads = c.hidden_size, 2 * (c.num_attention_heads + c.num_key_value_heads) * c.head_dim
        mlp = self.system.mlp_matrices * c.intermediate_size / layout.tp
        if has_experts:
            F = c.moe_intermediate_size
            mlp = 3 * F * c.num_local_experts / (layout.ep * layout.etp)
            mlp += 3 * F * c.n_shared_experts / layout.tp + c.num_local_experts
        return E * (heads / layout.tp + mlp)

    def parameters(self, rank: Rank) -> float:
        c, vocabulary = self.config, self.config.vocab_size * self.config.hidden_size
        both = rank.embedding and (rank.head == 1) and not c.tie_word_embeddings
        ends = (1 + both) * bool(rank.embedding or rank.head) * vocabulary / self.layout.tp
        dense, mixture = self.layer_parameters(False), rank.mixtures and self.layer_parameters(True)
        return rank.dense * dense + rank.mixtures * mixture + ends

    def accumulation(self, rank: Rank) -> float:
        """Adding a micro-batch's gradients to those of the ones before, for one of them."""
        if self.layout.sharding == "parameters":
            return 0.0
        g, w = self.system.gradient_bytes, self.times.width
        bytes_each = w + 2 * g if self.work.num_micro_batches > 1 else 6
        return bytes_each * self.parameters(rank) / self.memory_speed

    def optimizer(self, rank: Rank) -> float:
        P, (owned, any_) = self.parameters(rank), self.system.optimizer_bytes
        share = 1 if self.layout.sharding == "none" else 1 / self.sharding_link.size
        return (owned * share + any_) * P / self.memory_speed

    # Messages of data parallelism.

    @cached_property
    def sharding_link(self) -> Link:
        """Between the ranks that share the parameters."""
        n, tp = self.layout.dp * self.layout.cp, self.layout.tp
        if self.system.shares_in_node:
            n = min(n, self.gpu.gpus_per_node // tp)
        return link(self.gpu, n, tp)

    def reduce_scatter(self, elements: float) -> float:
        g, over = self.system.gradient_bytes, self.sharding_link
        seconds = over.message(g * elements)
        if self.system.shares_in_node:  # then the nodes add up theirs
            nodes = self.layout.dp * self.layout.cp // over.size
            stride = self.layout.tp * over.size
            seconds += link(self.gpu, nodes, stride).all_reduce(g * elements / over.size)
        return seconds

    def gathers(self, has_experts: bool, forward: float, backward: float) -> float:
        """With parameters sharded: what of a layer's messages its own compute does not hide."""
        W = self.layer_parameters(has_experts)
        if self.layout.sharding == "parameters":
            gather, reduce = self.sharding_link.message(2 * W), self.reduce_scatter(W)
            return max(0.0, gather - forward) + max(0.0, gather + reduce - backward)
        return 0.0

    def each_reduction(self, rank: Rank) -> float:
        """With parameters or gradients sharded: what is left of a micro-batch's messages."""
        c, over = self.config, self.sharding_link
        if self.layout.sharding == "parameters":  # the first gather, the last reduction, the ends
            W = self.layer_parameters(rank.mixtures > rank.dense)
            ends = 2 * c.vocab_size * c.hidden_size / self.layout.tp
            return over.message(2 * W) + self.reduce_scatter(W) + over.message(ends)
        if self.layout.sharding == "gradients" and self.system.hides_gathers:
            reduction = self.reduce_scatter(self.parameters(rank))
            return max(0.0, reduction - self.passes_of(rank)[1])
        return 0.0  # whole gradients are accumulated, and sent after the last micro-batch

    def gradients(self, rank: Rank) -> float:
        """Once a step: what of the gradients' messages, and those of updated weights, is left."""
        over, P, g = self.gradient_link, self.parameters(rank), self.system.gradient_bytes
        if self.layout.sharding == "parameters" or over.size == 1:
            return 0.0
        reduce = over.all_reduce if self.layout.sharding == "none" else over.message
        gathered = 2 * P if self.layout.sharding != "none" else 0.0
        forward, backward = self.passes_of(rank)
        if not self.system.hides_gathers:
            hidden = backward if self.system.hides_dp else 0.0
            return max(0.0, reduce(g * P) + (over.message(gathered) if gathered else 0.0) - hidden)
        # Ours: nothing is left to hide the last bucket behind, or the embedding's gather.
        embedding = rank.embedding * self.config.vocab_size * self.config.hidden_size
        embedding *= self.system.residual_bytes / self.layout.tp
        last = reduce(min(g * P, max(BUCKET_BYTES, embedding)))
        if self.layout.sharding == "gradients":  # all but the last were sent before
            return last + self._gather(gathered, forward, embedding)
        seconds = max(last, reduce(g * P) - backward)
        return seconds + self._gather(gathered, forward, embedding)

    def _gather(self, gathered: float, forward: float, embedding: float) -> float:
        if not gathered:
            return 0.0
        over = self.gradient_link
        return max(0.0, over.message(gathered) - forward) + over.message(embedding)

    @cached_property
    def gradient_link(self) -> Link:
        return link(self.gpu, self.layout.dp * self.layout.cp, self.layout.tp)

    def passes_of(self, rank: Rank) -> tuple[float, float]:
        """Forward and backward of one micro-batch, behind which messages can travel."""
        forward, backward = self.head * rank.head / 3, 2 / 3 * self.head * rank.head
        for number, has_experts in ((rank.dense, False), (rank.mixtures, True)):
            if number:
                there, back = self.layers[has_experts].seconds
                forward, backward = forward + number * there, backward + number * back
        return forward, backward
