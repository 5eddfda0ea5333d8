"""How long a step takes: what one rank does in a micro-batch, m of them, and what comes after.

    | micro-batch | micro-batch | ... | bubble | gradients that nothing hides | optimizer |

Pure: a prediction is a function of its Setting. Nothing is counted for reading data, for slower
ranks, and for a host that launches kernels too slowly. Letters as in layer_time.py.
"""

import copy
from collections import Counter
from functools import cached_property
from operator import itemgetter, mul
from typing import NamedTuple

from picotron_min.extensions.settings import Layout
from picotron_min.planner.layer_time import LayerTimes
from picotron_min.planner.links import Link, link
from picotron_min.planner.parameters import LayerParameters, Rank, by_kind, ranks_of
from picotron_min.planner.system import Setting

Seconds = dict[str, float]  # by what they are spent on


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


class Load(NamedTuple):
    """What a pipeline rank has to do, with any schedule and sharding."""

    parts: Seconds  # a micro-batch's forward and backward, without data parallelism
    forward: float  # seconds of a micro-batch, behind which messages can travel
    backward: float
    groups: list[tuple[Link, float]]  # parameters, by the link of the ranks that share them


class StepTime(LayerTimes):
    """The parts of a step, of one of the pipeline's ranks each."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        c, layout, system = self.config, self.layout, self.system
        self.depths = c.num_nextn_predict_layers  # tokens predicted beside the next one
        self.kinds = by_kind(c, range(c.num_layers))
        # By whether a layer has experts.
        self.layers = {has_experts: self.layer(has_experts) for _, has_experts in self.kinds}
        self.layer_parts = {k: layer.parts() | {"dp": 0.0} for k, layer in self.layers.items()}
        # Between the ranks that sum their gradients, and share the parameters; and of experts.
        n, stride = layout.dp * layout.cp, layout.ep * layout.etp
        self.expert_link = link(self.gpu, max(1, n * layout.tp // stride), stride)
        shared = min(n, self.gpu.gpus_per_node // layout.tp) if system.shares_in_node else n
        self.dp_link = link(self.gpu, shared, layout.tp)
        matrices = system.mlp_matrices
        self.owned = {k: LayerParameters.of(c, layout, k, matrices) for k in self.layers}
        # Whether sharded weights, once gathered in a step, are kept to its end.
        self.keeps_weights = system.reduces == "step" and layout.pp > 1
        self.loads: dict[Rank, Load] = {}

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
        fields = ("pp", "pp_engine", "pp_chunks", "pp_layers")
        pipeline = Layout(**{name: getattr(layout, name) for name in fields})
        ranks = ranks_of(self.config, pipeline, self.work.seq_length, self.system.is_balanced)
        times = [self.micro_batch(rank) for rank in ranks]
        totals = [sum(seconds.values()) for seconds in times]
        mean = sum(map(mul, totals, ranks.values())) / layout.pp
        slowest = times[totals.index(max(totals))]
        parts = {name: m * seconds for name, seconds in slowest.items()}
        idle = layout.schedule.bubble(layout.pp, m, layout.pp_chunks)
        parts["bubble"] = m * mean * idle / (1 - idle)  # idle slots beside each busy one
        # All wait for the rank with the most to do after its last backward.
        after = [(self.gradients(rank), self.optimizer(rank)) for rank in ranks]
        gradients, optimizer = max(after, key=sum)
        with_messages = parts | {"dp": parts["dp"] + gradients, "optimizer": optimizer}
        return Prediction(with_messages, pipeline=sum(parts.values()))

    def micro_batch(self, rank: Rank) -> Seconds:
        """Forward and backward of all that a rank has, for one micro-batch."""
        seconds = dict(self.load(rank).parts)
        seconds["passes"] += self.accumulation(rank)
        if self.layout.sharding == "parameters":
            for number, has_experts in rank.layers:
                alone = self.layers[has_experts].seconds
                seconds["dp"] += number * self.gathers(has_experts, *alone)
        seconds["dp"] += self.each_reduction(rank)
        return seconds

    def load(self, rank: Rank) -> Load:
        if known := self.loads.get(rank):
            return known
        c, parts = self.config, Counter()
        forward, backward = self.head * rank.head / 3, 2 / 3 * self.head * rank.head
        others, of_experts = 0.0, 0.0  # parameters
        for number, kind in rank.layers:
            there, back = self.layers[kind].seconds
            forward, backward = forward + number * there, backward + number * back
            others += number * sum(self.owned[kind][:2])
            of_experts += number * self.owned[kind].experts
            for name, each in self.layer_parts[kind].items():
                parts[name] += number * each
        if rank.head:
            parts["head"] = rank.head * self.head
            parts["tp"] += rank.head * self.head_messages
        vocabulary = c.vocab_size * c.hidden_size / self.layout.tp
        both = rank.embedding and rank.head == 1 and not c.tie_word_embeddings
        ends = (1 + bool(both)) * bool(rank.embedding or rank.head) * vocabulary
        others += ends
        groups = [(self.dp_link, others), (self.expert_link, of_experts)]
        self.loads[rank] = Load(parts, forward, backward, groups)
        return self.loads[rank]

    @cached_property
    def head(self) -> float:
        """lm_head and the loss: three products, and passes over the logits.

        Once for each depth; a prediction layer's projection and embedding are not counted.
        """
        c, E = self.config, self.config.hidden_size
        N = self.tokens * (1 + self.depths)
        rows, V = min(N, self.system.stripe_rows or N), c.vocab_size / self.layout.tp
        products = 3 * N / rows * self.matmul(rows, E, V)  # of each stripe
        whole = V if self.system.tp_messages == (4, 4) else c.vocab_size  # gathered
        moved = self.system.logit_bytes * N * whole
        if self.system.stripe_rows:  # the gradient of lm_head is read and written for each
            moved += 8 * V * E * N / rows
        return products + moved / self.memory_speed

    @property
    def head_messages(self) -> float:
        """Of tensor parallelism: lm_head's input and its gradient; the logits, if gathered."""
        if self.system.tp_messages == (4, 4):
            return 2 * self.tp_message * (1 + self.depths)
        whole = self.width * self.tokens * self.config.vocab_size
        return 2 * self.tp_message + link(self.gpu, self.layout.tp, 1).message(whole)

    # What is done with each parameter of a rank.

    def accumulation(self, rank: Rank) -> float:
        """Adding one micro-batch's gradients to the sum of the ones before."""
        if self.layout.sharding == "parameters" and self.system.reduces == "micro-batch":
            return 0.0
        g = self.system.gradient_bytes
        bytes_each = self.width + 2 * g if self.work.num_micro_batches > 1 else 6
        parameters = sum(elements for _, elements in self.load(rank).groups)
        return bytes_each * parameters / self.memory_speed

    def optimizer(self, rank: Rank) -> float:
        sharded, (owned, any_) = self.layout.sharding != "none", self.system.optimizer_bytes
        groups = self.load(rank).groups
        each = ((owned / over.size**sharded + any_) * P for over, P in groups)
        return sum(each) / self.memory_speed

    # Messages of data parallelism: what of them nothing hides.

    def gather(self, groups: list[tuple[Link, float]]) -> float:
        width = self.system.gather_bytes
        return sum(over.message(width * elements) for over, elements in groups if elements)

    def reduce_scatter(self, groups: list[tuple[Link, float]]) -> float:
        g = self.system.gradient_bytes
        seconds = sum(over.message(g * elements) for over, elements in groups if elements)
        if self.system.shares_in_node:  # then the nodes add up theirs
            nodes = self.layout.dp * self.layout.cp // self.dp_link.size
            among = link(self.gpu, nodes, self.layout.tp * self.dp_link.size)
            seconds += 2 * among.message(g * groups[0][1] / self.dp_link.size)
        return seconds

    def _of_layer(self, has_experts: bool) -> tuple[float, float]:
        """With parameters sharded: a layer's gather and reduction in each micro-batch."""
        groups = self.load(Rank(((1, has_experts),), 0, 0)).groups
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
            load = self.load(rank)
            return max(0.0, self.reduce_scatter(load.groups) - load.backward)
        return 0.0  # whole gradients are accumulated, and sent after the last micro-batch

    def gradients(self, rank: Rank) -> float:
        """Once a step: the messages of gradients, and of updated weights if they are sharded."""
        _, forward, backward, groups = self.load(rank)
        kind, system = self.layout.sharding, self.system
        if all(over.size == 1 for over, elements in groups if elements):
            return 0.0
        reduce = self.reduce_scatter(groups) * (2 if kind == "none" else 1)
        hidden = backward if system.hides_dp else 0.0
        if kind == "parameters":  # where weights are kept, a forward hides their gather
            return max(0.0, reduce - hidden) if system.reduces == "step" else 0.0
        gather = 0.0 if kind == "none" else self.gather(groups)
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
