"""How many bytes a rank sends in a step, over each axis: what the ledgers of a run will count.

    tp, cp, ep_etp, cp_tp    for each layer and micro-batch: activations and their gradients
    pp                       for each micro-batch: what crosses to another rank's stage
    dp_cp, edp, ends, ...    for each parameter: gradients, and weights where they are sharded
    world                    once: the loss, the gradient norm, and where tokens went

Bytes are algorithmic, as in collectives.py, and equal `comm_bytes` in metrics.jsonl exactly. The
formulas are in the docstrings of the modules that send. Where tokens choose their experts
freely, the traffic of ep_etp is for an even choice.

N tokens of a rank's micro-batch; `narrow` are the bytes of a number in the compute dtype, `wide`
of a number of the residual stream, of statistics and of gradients. Standard library only.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from functools import partialmethod
from itertools import chain, pairwise

from picotron_min.extensions.settings import Layout, ModelConfig, Workload
from picotron_min.extensions.sharding.rows import shard_of
from picotron_min.layout import BUCKET_BYTES, STRIPE_ROWS
from picotron_min.planner.activations import BYTES, WIDE
from picotron_min.planner.links import ranks_of_axis
from picotron_min.planner.parameters import hidden_batches, layers_of_ranks, share_of_rank


class Sent(Counter):
    """A ledger on paper: bytes by (axis, collective); `calls` counts messages likewise."""

    def __init__(self, sizes: dict[str, int]) -> None:
        super().__init__()
        self.sizes, self.calls = sizes, Counter()

    def add(self, axis: str, collective: str, sent: float, times: float = 1) -> None:
        if self.sizes[axis] > 1 and times:
            self[axis, collective] += times * sent
            self.calls[axis, collective] += times

    def _ring(self, name: str, rounds: int, axis: str, whole: float, times: float = 1) -> None:
        n = self.sizes[axis]
        self.add(axis, name, rounds * ((n - 1) / n) * whole, times)

    all_reduce = partialmethod(_ring, "all_reduce", 2)
    all_gather = partialmethod(_ring, "all_gather", 1)
    reduce_scatter = partialmethod(_ring, "reduce_scatter", 1)
    all_to_all = partialmethod(_ring, "all_to_all", 1)  # `whole`: of one rank


def planned_traffic(
    model_config: ModelConfig, layout: Layout, workload: Workload, rank: int = 0
) -> dict[str, int]:
    """Bytes that a rank sends in a step, by axis, without silent ones."""
    total = by_axis(planned_ledger(model_config, layout, workload, rank))
    return {axis: round(sent) for axis, sent in total.items() if round(sent)}


def by_axis(of: Counter[tuple[str, str]]) -> Counter[str]:
    """The sum over all collectives of an axis, of a ledger's bytes or calls."""
    total = Counter()
    for (axis, _), number in of.items():
        total[axis] += number
    return total


def planned_ledger(
    model_config: ModelConfig, layout: Layout, workload: Workload, rank: int = 0
) -> Sent:
    """The bytes by axis and collective, and how often a rank calls each."""
    step = _Step(model_config, layout, workload, rank)
    step.activations()
    step.parameters()
    X, L = model_config.num_local_experts, model_config.num_layers
    numbers = 4 + (L * (X + 6) if X else 0)  # sums of the step, see train.py; RoutingCounts
    numbers += 3 * model_config.num_nextn_predict_layers  # see multi_token/
    step.sent.all_reduce("world", BYTES["float64"] * numbers)
    return step.sent


class _Step:
    """What a rank sends in all micro-batches of a step."""

    def __init__(self, config: ModelConfig, layout: Layout, work: Workload, rank: int) -> None:
        self.config, self.layout, self.work = config, layout, work
        rows = {axis: ranks_of_axis(layout, axis, rank) for axis in (*layout.axis_sizes, "ends")}
        self.places = {axis: row.index(rank) for axis, row in rows.items()}
        self.sent = Sent({axis: len(row) for axis, row in rows.items()})
        self.narrow, self.wide = BYTES[work.dtype], WIDE[work.dtype]
        self.tokens = work.micro_batch_size * work.seq_length // layout.cp  # N
        self.elements = self.tokens * config.hidden_size  # of [B, S/cp, E]
        self.m = work.num_micro_batches

    def activations(self) -> None:
        """And their gradients."""
        me, layout, place = self.places["pp"], self.layout, self.layout.schedule.place
        ranks = [place(stage, layout.pp)[0] for stage in range(layout.num_stages)]
        for layer in chain(*layers_of_ranks(self.config, layout, self.work.seq_length)[me]):
            self._layer(layer)
        further = self.config.num_nextn_predict_layers
        lookups = (ranks[0] == me) + further * (ranks[-1] == me)  # of a token
        if lookups:  # see VocabularyParallelEmbedding: in the dtype of the residual stream
            self._boundary(self.m, self.m, self.wide * lookups)
        if ranks[-1] == me:  # see VocabularyParallelHead: its input; and three numbers a token
            self._boundary(self.m, self.m, self.narrow * (1 + further))
            rows = self.tokens * (1 + further)
            stripes = math.ceil(rows / STRIPE_ROWS["cuda"])
            for numbers in (1, 2):  # the largest logit; the sum and the target's
                sent = numbers * self.wide * rows / stripes
                self.sent.all_reduce("tp", sent, self.m * stripes)
        # An activation to the next stage and a gradient to the one before, if others have them.
        leaving = sum(me in pair and len(set(pair)) == 2 for pair in pairwise(ranks))
        split = layout.tp if layout.sequence_parallel else 1
        self.sent.add("pp", "send", self.wide * self.elements / split, self.m * leaving)

    def _boundary(self, gathers: int, sums: int, width: int, overlap: bool = False) -> None:
        """Ends of sublayers: inputs that are made whole, and sums of what the ranks have made."""
        whole, tp = width * self.elements, self.layout.tp
        if overlap:  # part after part: see overlap/ring.py
            self.sent.add("tp", "shift", whole / tp, (tp - 1) * (gathers + sums))
        elif self.layout.sequence_parallel:
            self.sent.all_gather("tp", whole, gathers)
            self.sent.reduce_scatter("tp", whole, sums)
        else:
            self.sent.all_reduce("tp", whole, sums)

    def _layer(self, layer: int) -> None:
        again, m, overlap = self.work.recompute, self.m, self.layout.tp_overlap
        # How often forwards run, in units of micro-batches: twice where they are run again.
        attention = 2 if again in ("full", "selective") else 1
        whole = 2 if again == "full" else 1
        has_experts = self.config.has_experts(layer)
        self._attention(m * attention)
        # Enter and leave, forward and backward. What backward repeats ends with the last input of a
        # linear: so the sum at the end of a sublayer is repeated only within a whole layer.
        gathers, sums = m * (attention + 1), m * (whole + 1)
        if not has_experts or self.config.n_shared_experts:
            gathers += m * (whole + 1)
            # Shared experts come before the others' last linear, and a norm behind keeps the sum.
            sums += m * (whole + 1 if has_experts or self.config.post_norm else 2)
        fp8 = self.work.in_fp8(layer, self.config.num_hidden_layers)
        self._boundary(gathers, 0, 1 if fp8 else self.narrow, overlap)
        self._boundary(0, sums, self.narrow, overlap)
        if fp8 and self.layout.sequence_parallel:  # amax
            self.sent.all_reduce("tp", BYTES["float32"], gathers)
        if has_experts:
            self._experts(whole)

    def _attention(self, forwards: int) -> None:
        """Context parallelism: see context_parallel.py."""
        c, cp, tp = self.config, self.layout.cp, self.layout.tp
        heads, kv_heads = c.num_attention_heads // tp, c.num_key_value_heads // tp
        head = self.tokens * c.head_dim  # elements
        if c.post_norm:  # squares of queries and keys, and their gradients: see post_norm/
            self.sent.all_reduce("tp", self.wide * 2 * self.tokens, forwards + self.m)
        if self.layout.cp_engine == "ulysses":
            repeated = math.lcm(kv_heads, cp)
            for count in (heads, repeated, repeated, heads):  # q, k, v and the output
                self.sent.all_to_all("cp", self.narrow * count * head, forwards + self.m)
            return
        kv = 2 * kv_heads * head
        self.sent.add("cp", "shift", self.narrow * kv, (cp - 1) * (forwards + self.m))
        self.sent.add("cp", "shift", self.wide * kv, (cp - 1) * self.m)  # their gradients

    def _experts(self, forwards: int) -> None:
        """Expert parallelism, given how often forward runs: see experts/dispatch.py."""
        c, layout, m, routing = self.config, self.layout, self.m, self.work.routing
        if layout.tp > 1 and not layout.sequence_parallel:
            # The outputs of the tp ranks' parts, and in backward the gradients of the inputs.
            self.sent.all_gather("tp", self.narrow * self.elements, 2 * m)
        X, k, ranks = c.num_local_experts, c.num_experts_per_tok, layout.ep * layout.etp
        own, row = self.tokens / layout.tp, self.narrow * c.hidden_size  # that a rank brings
        if layout.ep_engine == "allgather":
            whole = ranks * self.tokens // layout.tp  # tokens of all ranks
            # Rows, weights and choices, each as a message; the sum for each token; and backward.
            for width, gathers, sums in ((row, forwards + 1, 2), (self.wide * k, forwards, 1)):
                self.sent.all_gather("ep_etp", whole * width, m * gathers)
                self.sent.reduce_scatter("ep_etp", whole * width, m * sums)
            self.sent.all_gather("ep_etp", whole * 8 * k, m * forwards)
        else:
            rows = own * k * layout.etp * (ranks - 1) / ranks  # that leave
            if routing.moe_pad_expert_input_to_capacity:
                capacity = math.ceil(min(own, routing.moe_expert_capacity_factor * own * k / X))
                rows = capacity * X // layout.ep * (ranks - 1)
            else:  # the numbers of rows, as int64
                self.sent.all_to_all("ep_etp", 8 * ranks * X // layout.ep, m * forwards)
            # There, each with a weight, and back; in backward the same, the other way.
            self.sent.add("ep_etp", "exchange", rows * row, m * (forwards + 3))
            self.sent.add("ep_etp", "exchange", rows * self.wide, m * (forwards + 1))
        balances = (routing.moe_seq_aux_loss_coeff, routing.moe_aux_loss_coeff)
        if any((*balances, routing.moe_global_aux_loss_coeff)):  # how many tokens experts have
            self.sent.all_reduce("cp_tp", self.wide * self.work.micro_batch_size * X, m)
        if routing.moe_global_aux_loss_coeff:
            self.sent.all_reduce("dp", self.wide * X, m)

    def parameters(self) -> None:
        """Gradients, and weights where they are sharded."""
        c, layout, m, sent = self.config, self.layout, self.m, self.sent
        places, kind = self.places, layout.sharding
        of = c, layout, self.work.seq_length, places
        # Muon makes matrices whole, and brings parts of the directions back: optimizers/muon.py.
        for batch in hidden_batches(*of) if self.work.optimizer == "muon" else ():
            for numbers in batch.numbers(places[batch.axis]) if batch.axis else ():
                leaves = sum(numbers) - numbers[places[batch.axis]]
                sent.add(batch.axis, "exchange", self.narrow * leaves)
        share = share_of_rank(*of)
        for chunk in share.chunks:  # gradients of what is whole: see data_parallel.py
            whole = defaultdict(list)
            for part in chain(*(unit.parts for unit in chunk)):
                if not shard_of(part.placement):
                    whole[part.placement.sums].append(self.wide * part.elements)
            for axis, bucket in (
                (a, b) for axes in whole for b in buckets(whole[axes]) for a in axes
            ):
                sent.all_reduce(axis, bucket)
        is_first, is_last, tied = share.stages[0].start == 0, share.has_head, c.tie_word_embeddings
        looks_further = is_last and c.num_nextn_predict_layers > 0
        # In how many chunks the embedding is, and how many modules use it. One chunk uses it once.
        chunks = is_first + (looks_further or (is_last and tied))
        uses = is_first + looks_further
        if layout.num_stages == 1:
            chunks = uses = 1
        for unit in share.units:
            # A layer's weights are needed for forward and backward, a tied embedding at both ends.
            # A V has the ends in two chunks, which reduce their gradients one by one.
            gathers, reductions = (1, 1) if unit.is_end else (2, 1)
            if unit.is_end and unit is share.units[0]:  # the embedding
                gathers, reductions = uses + (is_last and tied), chunks
            gathers = m * gathers if kind == "parameters" else 1
            reductions = m * reductions if kind in ("gradients", "parameters") else 1
            for axis, R in unit.rows.items():
                buffer = layout.axis_sizes[axis] * R
                sent.reduce_scatter(axis, self.wide * buffer, reductions)
                sent.all_gather(axis, (self.wide if unit.is_end else self.narrow) * buffer, gathers)
                for part in unit.parts:
                    for other in part.placement.sums[1:]:  # a tied embedding: the pipeline's ends
                        sent.all_reduce(other, self.wide * R)


def buckets(sizes: Sequence[int]) -> Iterator[int]:
    """The bytes of each bucket that has gradients of these bytes, in the order of the forward."""
    filled = 0
    for size in reversed(sizes):
        if filled and filled + size > BUCKET_BYTES:
            yield filled
            filled = 0
        filled += size
    yield filled
