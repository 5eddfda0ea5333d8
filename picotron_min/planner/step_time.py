"""How long a step takes: what one rank does in a micro-batch, m of them, and what comes after.

    | micro-batch | micro-batch | ... | bubble | gradients that nothing hides | optimizer |

Pure: a prediction is a function of its Setting. Nothing is counted for reading data, for slower
ranks, and for a host that launches kernels too slowly. Letters are those of layer_time.py.
"""

import copy
from collections import Counter
from collections.abc import Sequence
from functools import cached_property, lru_cache
from itertools import accumulate, chain
from operator import itemgetter
from typing import NamedTuple

from picotron_min.costs import layers_of_stages
from picotron_min.extensions.settings import Layout, ModelConfig
from picotron_min.pipeline_schedule import stages_of
from picotron_min.planner.layer_time import LayerTimes
from picotron_min.planner.links import Link, link
from picotron_min.planner.system import Setting

Seconds = Counter[str]  # by what they are spent on


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

    layers: tuple[tuple[float, bool], ...]  # how many there are without experts, and with them
    head: float
    embedding: float


@lru_cache(maxsize=4096)
def ranks_of(
    c: ModelConfig, pipeline: Layout, seq_length: int, is_balanced: bool | None = None
) -> list[Rank]:
    """What each pipeline rank has; `is_balanced` as in system.py."""
    pp, ranks = pipeline.pp, []
    if is_balanced is not None:
        each = tuple((number / pp, kind) for number, kind in by_kind(c, range(c.num_layers)))
        if is_balanced:
            return [Rank(each, head=1 / pp, embedding=1.0)] * pp
        return [Rank(each, head=float(r == pp - 1), embedding=float(r == 0)) for r in range(pp)]
    stops = [0, *accumulate(layers_of_stages(c, pipeline, seq_length))]
    for rank in range(pp):
        stages = stages_of(pipeline.schedule, rank, pp, pipeline.pp_chunks)
        layers = tuple(chain(*(range(stops[s], stops[s + 1]) for s in stages)))
        ends = pipeline.num_stages - 1 in stages, 0 in stages
        ranks.append(Rank(by_kind(c, layers), *map(float, ends)))
    return ranks


@lru_cache(maxsize=4096)
def by_kind(c: ModelConfig, layers: Sequence[int]) -> tuple[tuple[int, bool], ...]:
    """How many of these layers have no experts, and how many have some, without zeros."""
    kinds = Counter(map(c.has_experts, layers))
    return tuple((kinds[kind], kind) for kind in sorted(kinds))


def layer_parameters(
    c: ModelConfig, layout: Layout, has_experts: bool, mlp_matrices: int = 3
) -> float:
    """Elements of a layer's matrices on a rank."""
    E, heads = c.hidden_size, 2 * (c.num_attention_heads + c.num_key_value_heads) * c.head_dim
    mlp = mlp_matrices * c.intermediate_size / layout.tp
    if has_experts:
        F = c.moe_intermediate_size
        mlp = 3 * F * c.n_shared_experts / layout.tp + c.num_local_experts
    return E * (heads / layout.tp + mlp) + has_experts * expert_parameters(c, layout)


def expert_parameters(c: ModelConfig, layout: Layout) -> float:
    """Those of a layer's routed experts, which fewer ranks have in common."""
    number = c.num_local_experts / (layout.ep * layout.etp)
    return 3 * c.hidden_size * c.moe_intermediate_size * number


class StepTime(LayerTimes):
    """The parts of a step, of one of the pipeline's ranks each."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.kinds = by_kind(self.config, range(self.config.num_layers))
        # By whether a layer has experts.
        self.layers = {has_experts: self.layer(has_experts) for _, has_experts in self.kinds}
        self.layer_parts = {k: layer.parts() | {"dp": 0.0} for k, layer in self.layers.items()}
        self.dp_link, self.expert_link = self._dp_links()
        of, mlps = (self.config, self.layout), self.system.mlp_matrices
        own = expert_parameters(*of)
        self.owned = {kind: (layer_parameters(*of, kind, mlps), kind * own) for kind in self.layers}

    def at(self, layout: Layout) -> "StepTime":
        """The same with another schedule or sharding, which do not change a layer's time."""
        other = copy.copy(self)  # with what is computed already
        other.layout = layout
        return other

    def at_best(self) -> float:
        """Seconds of a step if all pipeline ranks were equally busy, and nothing else counted."""
        total = self.head
        for number, has_experts in self.kinds:
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
        # All wait for the rank with the most to do after its last backward.
        after = [(self.gradients(rank), self.optimizer(rank)) for rank in ranks]
        gradients, parts["optimizer"] = max(after, key=sum)
        parts["dp"] += gradients
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
            seconds["tp"] += rank.head * self.head_messages
        seconds["passes"] += self.accumulation(rank)
        seconds["dp"] += self.each_reduction(rank)
        return seconds

    @cached_property
    def head(self) -> float:
        """lm_head and the loss: three products, and passes over the logits."""
        c = self.config
        N = self.tokens * (1 + c.num_layers - c.num_hidden_layers)  # with those further ahead
        rows, V = min(N, self.system.stripe_rows or N), c.vocab_size / self.layout.tp
        products = 3 * N / rows * self.matmul(rows, c.hidden_size, V)  # of each stripe
        whole = V if self.system.tp_messages == (4, 4) else c.vocab_size  # gathered
        moved = self.system.logit_bytes * N * whole
        if self.system.stripe_rows:  # the gradient of lm_head is read and written for each
            moved += 8 * V * c.hidden_size * N / rows
        return products + moved / self.memory_speed

    @property
    def head_messages(self) -> float:
        """Of tensor parallelism: lm_head's input and its gradient; the logits, if gathered."""
        if self.system.tp_messages == (4, 4):
            return 2 * self.tp_message
        whole = self.width * self.tokens * self.config.vocab_size
        return 2 * self.tp_message + link(self.gpu, self.layout.tp, 1).message(whole)

    # Parameters of a rank, and what is done with each.

    def parameters(self, rank: Rank) -> float:
        c, vocabulary = self.config, self.config.vocab_size * self.config.hidden_size
        both = rank.embedding and (rank.head == 1) and not c.tie_word_embeddings
        ends = (1 + both) * bool(rank.embedding or rank.head) * vocabulary / self.layout.tp
        return sum(number * self.owned[kind][0] for number, kind in rank.layers) + ends

    def groups(self, rank: Rank) -> list[tuple[Link, float]]:
        """The parameters of a rank, by the link of the ranks that share them."""
        own = sum(number * self.owned[kind][1] for number, kind in rank.layers)
        return [(self.dp_link, self.parameters(rank) - own), (self.expert_link, own)]

    def accumulation(self, rank: Rank) -> float:
        """Adding a micro-batch's gradients to those of the ones before, for one of them."""
        if self.layout.sharding == "parameters" and self.system.reduces == "micro-batch":
            return 0.0
        g = self.system.gradient_bytes
        bytes_each = self.width + 2 * g if self.work.num_micro_batches > 1 else 6
        return bytes_each * self.parameters(rank) / self.memory_speed

    def optimizer(self, rank: Rank) -> float:
        sharded, (owned, any_) = self.layout.sharding != "none", self.system.optimizer_bytes
        each = ((owned / over.size**sharded + any_) * P for over, P in self.groups(rank))
        return sum(each) / self.memory_speed

    # Messages of data parallelism: what of them nothing hides.

    def _dp_links(self) -> tuple[Link, Link]:
        """Between the ranks that sum their gradients, and share the parameters; and of experts."""
        layout, tp = self.layout, self.layout.tp
        n, stride = layout.dp * layout.cp, layout.ep * layout.etp
        experts = link(self.gpu, max(1, n * tp // stride), stride)
        if self.system.shares_in_node:
            n = min(n, self.gpu.gpus_per_node // tp)
        return link(self.gpu, n, tp), experts

    def gather(self, groups: list[tuple[Link, float]]) -> float:
        width = self.system.gather_bytes or 2
        return sum(over.message(width * elements) for over, elements in groups if elements)

    def reduce_scatter(self, groups: list[tuple[Link, float]]) -> float:
        g = self.system.gradient_bytes
        seconds = sum(over.message(g * elements) for over, elements in groups if elements)
        if self.system.shares_in_node:  # then the nodes add up theirs
            nodes = self.layout.dp * self.layout.cp // self.dp_link.size
            among = link(self.gpu, nodes, self.layout.tp * self.dp_link.size)
            seconds += among.all_reduce(g * groups[0][1] / self.dp_link.size)
        return seconds

    @property
    def keeps_weights(self) -> bool:
        """Whether sharded weights, once gathered in a step, are kept to its end."""
        once = self.system.reduces == "step" and self.layout.pp > 1
        return self.system.gather_bytes == 0 or once

    def _of_layer(self, has_experts: bool) -> tuple[float, float]:
        """With parameters sharded: a layer's gather and reduction in each micro-batch."""
        groups = self.groups(Rank(((1, has_experts),), 0, 0))
        gather = 0.0 if self.keeps_weights else self.gather(groups)
        return gather, 0.0 if self.system.reduces == "step" else self.reduce_scatter(groups)

    def gathers(self, has_experts: bool, forward: float, backward: float) -> float:
        """With parameters sharded: a layer's messages, which its own compute hides."""
        gather, reduce = self._of_layer(has_experts)
        return max(0.0, gather - forward) + max(0.0, gather + reduce - backward)

    def each_reduction(self, rank: Rank) -> float:
        """With parameters or gradients sharded: a micro-batch's other messages."""
        if self.layout.sharding == "parameters":  # the first gather, the last reduction, the ends
            ends = self.config.vocab_size * self.config.hidden_size / self.layout.tp
            _, most = max(rank.layers, key=itemgetter(0))
            seconds = sum(self._of_layer(most))
            return seconds + (not self.keeps_weights) * self.gather([(self.dp_link, ends)])
        if self.layout.sharding == "gradients" and self.system.hides_gathers:
            reduction = self.reduce_scatter(self.groups(rank))
            return max(0.0, reduction - self.passes_of(rank)[1])
        return 0.0  # whole gradients are accumulated, and sent after the last micro-batch

    def gradients(self, rank: Rank) -> float:
        """Once a step: the messages of gradients, and of updated weights if they are sharded."""
        groups, kind, system = self.groups(rank), self.layout.sharding, self.system
        if all(over.size == 1 for over, elements in groups if elements):
            return 0.0
        forward, backward = self.passes_of(rank)
        reduce = self.reduce_scatter(groups) * (2 if kind == "none" else 1)
        gather = 0.0 if kind == "none" else self.gather(groups)
        hidden = backward if system.hides_dp else 0.0
        if kind == "parameters":
            seconds = max(0.0, reduce - hidden) if system.reduces == "step" else 0.0
            return seconds + (max(0.0, gather - forward) if self.keeps_weights else 0.0)
        if not system.hides_gathers:
            return max(0.0, reduce + gather - hidden)
        # Nothing is left to hide the last bucket behind, or the embedding's gather.
        seconds = 0.0 if kind == "gradients" else max(0.0, reduce - hidden)
        if system.exposed_bucket:
            embedding = rank.embedding * self.config.vocab_size * self.config.hidden_size
            embedding *= system.residual_bytes / self.layout.tp
            size = min(system.gradient_bytes * groups[0][1], max(system.exposed_bucket, embedding))
            seconds = max(seconds, self.dp_link.message(size) * (2 if kind == "none" else 1))
            seconds += self.dp_link.message(embedding) if kind != "none" else 0.0
        return seconds + max(0.0, gather - forward)

    def passes_of(self, rank: Rank) -> tuple[float, float]:
        """Forward and backward of one micro-batch, behind which messages can travel."""
        forward, backward = self.head * rank.head / 3, 2 / 3 * self.head * rank.head
        for number, has_experts in rank.layers:
            there, back = self.layers[has_experts].seconds
            forward, backward = forward + number * there, backward + number * back
        return forward, backward
