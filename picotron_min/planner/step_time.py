"""How long a step takes: what one rank does in a micro-batch, m of them, and what comes after.

    | micro-batch | micro-batch | ... | bubble | gradients that nothing hides | optimizer |

Pure: a prediction is a function of its Setting. Nothing is counted for reading data, for ranks that
are slower than others, and for a host that launches kernels too slowly.

N tokens of a rank's micro-batch, E hidden size, V vocabulary; a message of b bytes as in links.py.
"""

import copy
from collections import Counter
from functools import cached_property, lru_cache
from typing import NamedTuple

from picotron_min.costs import layers_of_stages
from picotron_min.extensions.settings import Layout, ModelConfig
from picotron_min.pipeline_schedule import stages_of
from picotron_min.planner.layer_time import LayerTimes
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

    @property
    def layers(self) -> list[tuple[float, bool]]:
        """How many there are without experts and with them, if any."""
        return [(n, kind) for n, kind in ((self.dense, False), (self.mixtures, True)) if n]


@lru_cache(maxsize=4096)
def ranks_of(
    c: ModelConfig, pipeline: Layout, seq_length: int, is_balanced: bool | None = None
) -> list[Rank]:
    """What each pipeline rank has; `is_balanced` as in system.py."""
    pp, kinds = pipeline.pp, layers_by_kind(c)
    if is_balanced is not None:
        each = kinds[False] / pp, kinds[True] / pp
        if is_balanced:
            return [Rank(*each, head=1 / pp, embedding=1.0)] * pp
        return [Rank(*each, head=float(r == pp - 1), embedding=float(r == 0)) for r in range(pp)]
    stages, first = [], 0
    for number in layers_of_stages(c, pipeline, seq_length):
        mixtures = sum(map(c.has_experts, range(first, first + number)))
        stages.append((number - mixtures, mixtures))
        first += number
    ranks = []
    for rank in range(pp):
        mine = stages_of(pipeline.schedule, rank, pp, pipeline.pp_chunks)
        dense, mixtures = map(sum, zip(*(stages[s] for s in mine), strict=True))
        ends = pipeline.num_stages - 1 in mine, 0 in mine
        ranks.append(Rank(dense, mixtures, *map(float, ends)))
    return ranks


@lru_cache
def layers_by_kind(model_config: ModelConfig) -> Counter[bool]:
    """How many layers have experts, and how many have none."""
    return Counter(map(model_config.has_experts, range(model_config.num_hidden_layers)))


def layer_parameters(
    c: ModelConfig, layout: Layout, has_experts: bool, mlp_matrices: int = 3
) -> float:
    """Elements of a layer's matrices on a rank."""
    E, heads = c.hidden_size, 2 * (c.num_attention_heads + c.num_key_value_heads) * c.head_dim
    mlp = mlp_matrices * c.intermediate_size / layout.tp
    if has_experts:
        F = c.moe_intermediate_size
        mlp = 3 * F * c.num_local_experts / (layout.ep * layout.etp)
        mlp += 3 * F * c.n_shared_experts / layout.tp + c.num_local_experts
    return E * (heads / layout.tp + mlp)


class StepTime(LayerTimes):
    """The parts of a step, of one of the pipeline's ranks each."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        # By whether a layer has experts.
        self.layers = {kind: self.layer(kind) for kind in layers_by_kind(self.config)}
        self.layer_parts = {k: layer.parts() | {"dp": 0.0} for k, layer in self.layers.items()}
        self.dp_link = self._dp_link()

    def at(self, layout: Layout) -> "StepTime":
        """The same with another schedule or sharding, which do not change a layer's time."""
        other = copy.copy(self)  # with what is computed already
        other.layout = layout
        return other

    def at_best(self) -> float:
        """Seconds of a step if all pipeline ranks were equally busy, and nothing else counted."""
        total = self.head
        for has_experts, number in layers_by_kind(self.config).items():
            total += number * sum(self.layers[has_experts].seconds)
        return self.work.num_micro_batches * total / self.layout.pp

    def prediction(self) -> Prediction:
        m, layout = self.work.num_micro_batches, self.layout
        names = ("pp", "pp_engine", "pp_chunks", "pp_layers")
        stages = Layout(**{name: getattr(layout, name) for name in names})
        sizes = stages, self.work.seq_length, self.system.is_balanced
        ranks = Counter(ranks_of(self.config, *sizes))  # many have the same
        times = {rank: self.micro_batch(rank) for rank in ranks}
        mean = sum(times[rank].total() * n for rank, n in ranks.items()) / layout.pp
        slowest = max(ranks, key=lambda rank: times[rank].total())
        parts = Counter({name: m * seconds for name, seconds in times[slowest].items()})
        idle = layout.schedule.bubble(layout.pp, m, layout.pp_chunks)
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
        for number, has_experts in rank.layers:
            for name, each in self.layer_parts[has_experts].items():
                seconds[name] += number * each
            if self.layout.sharding == "parameters":
                alone = self.layers[has_experts].seconds
                seconds["dp"] += number * self.gathers(has_experts, *alone)
        if rank.head:
            seconds["head"] = rank.head * self.head
            seconds["tp"] += rank.head * 2 * self.tp_message
        seconds["passes"] += self.accumulation(rank)
        seconds["dp"] += self.each_reduction(rank)
        return seconds

    @cached_property
    def head(self) -> float:
        """lm_head and the loss: three products, and passes over the logits."""
        c, N = self.config, self.tokens
        rows, V = min(N, self.system.stripe_rows or N), c.vocab_size / self.layout.tp
        products = 3 * N / rows * self.matmul(rows, c.hidden_size, V)  # of each stripe
        moved = self.system.logit_bytes * N * V
        if self.system.stripe_rows:  # the gradient of lm_head is read and written for each
            moved += 8 * V * c.hidden_size * N / rows
        return products + moved / self.memory_speed

    # Parameters of a rank, and what is done with each.

    def layer_parameters(self, has_experts: bool) -> float:
        return layer_parameters(self.config, self.layout, has_experts, self.system.mlp_matrices)

    def parameters(self, rank: Rank) -> float:
        c, vocabulary = self.config, self.config.vocab_size * self.config.hidden_size
        both = rank.embedding and (rank.head == 1) and not c.tie_word_embeddings
        ends = (1 + both) * bool(rank.embedding or rank.head) * vocabulary / self.layout.tp
        return sum(n * self.layer_parameters(kind) for n, kind in rank.layers) + ends

    def accumulation(self, rank: Rank) -> float:
        """Adding a micro-batch's gradients to those of the ones before, for one of them."""
        if self.layout.sharding == "parameters":
            return 0.0
        g = self.system.gradient_bytes
        bytes_each = self.width + 2 * g if self.work.num_micro_batches > 1 else 6
        return bytes_each * self.parameters(rank) / self.memory_speed

    def optimizer(self, rank: Rank) -> float:
        P, (owned, any_) = self.parameters(rank), self.system.optimizer_bytes
        share = 1 if self.layout.sharding == "none" else 1 / self.dp_link.size
        return (owned * share + any_) * P / self.memory_speed

    # Messages of data parallelism: what of them nothing hides.

    def _dp_link(self) -> Link:
        """Between the ranks that sum their gradients, and share the parameters."""
        n, tp = self.layout.dp * self.layout.cp, self.layout.tp
        if self.system.shares_in_node:
            n = min(n, self.gpu.gpus_per_node // tp)
        return link(self.gpu, n, tp)

    def reduce_scatter(self, elements: float) -> float:
        g, over = self.system.gradient_bytes, self.dp_link
        seconds = over.message(g * elements)
        if self.system.shares_in_node:  # then the nodes add up theirs
            nodes = self.layout.dp * self.layout.cp // over.size
            stride = self.layout.tp * over.size
            seconds += link(self.gpu, nodes, stride).all_reduce(g * elements / over.size)
        return seconds

    def gathers(self, has_experts: bool, forward: float, backward: float) -> float:
        """With parameters sharded: a layer's messages, which its own compute hides."""
        W = self.layer_parameters(has_experts)
        gather, reduce = self.dp_link.message(2 * W), self.reduce_scatter(W)
        return max(0.0, gather - forward) + max(0.0, gather + reduce - backward)

    def each_reduction(self, rank: Rank) -> float:
        """With parameters or gradients sharded: a micro-batch's other messages."""
        c, over = self.config, self.dp_link
        if self.layout.sharding == "parameters":  # the first gather, the last reduction, the ends
            W = self.layer_parameters(rank.mixtures > rank.dense)
            ends = 2 * c.vocab_size * c.hidden_size / self.layout.tp
            return over.message(2 * W) + self.reduce_scatter(W) + over.message(ends)
        if self.layout.sharding == "gradients" and self.system.hides_gathers:
            reduction = self.reduce_scatter(self.parameters(rank))
            return max(0.0, reduction - self.passes_of(rank)[1])
        return 0.0  # whole gradients are accumulated, and sent after the last micro-batch

    def gradients(self, rank: Rank) -> float:
        """Once a step: the messages of gradients, and of updated weights if they are sharded."""
        over, P, g = self.dp_link, self.parameters(rank), self.system.gradient_bytes
        kind = self.layout.sharding
        if kind == "parameters" or over.size == 1:
            return 0.0
        reduce = over.all_reduce if kind == "none" else over.message
        gather = 0.0 if kind == "none" else over.message(2 * P)
        forward, backward = self.passes_of(rank)
        if not self.system.hides_gathers:
            return max(0.0, reduce(g * P) + gather - (backward if self.system.hides_dp else 0.0))
        # Ours: nothing is left to hide the last bucket behind, or the embedding's gather.
        embedding = rank.embedding * self.config.vocab_size * self.config.hidden_size
        embedding *= self.system.residual_bytes / self.layout.tp
        seconds = reduce(min(g * P, max(BUCKET_BYTES, embedding)))
        if kind != "gradients":  # else all but the last were sent before
            seconds = max(seconds, reduce(g * P) - backward)
        if kind != "none":
            seconds += max(0.0, gather - forward) + over.message(embedding)
        return seconds

    def passes_of(self, rank: Rank) -> tuple[float, float]:
        """Forward and backward of one micro-batch, behind which messages can travel."""
        forward, backward = self.head * rank.head / 3, 2 / 3 * self.head * rank.head
        for number, has_experts in rank.layers:
            there, back = self.layers[has_experts].seconds
            forward, backward = forward + number * there, backward + number * back
        return forward, backward
