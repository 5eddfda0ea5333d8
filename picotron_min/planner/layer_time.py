"""How long a layer takes on a rank, forward and backward, for one micro-batch.

    matmul [i, k] x [k, j]      2 i j k / (f peak) + w (i k + k j + i j) / H
    attention                   2 N Q D S / (a peak)         causal half
    pass over memory            bytes / H

f and a are the shares of its peak that a GPU reaches in large matmuls and in fused attention; H is
what it reaches of its memory's speed. FLOPs and bytes of a matmul are added, as if not overlapped:
so a thin matmul is slow, which is what tensor parallelism costs even without messages.

N tokens of a rank's micro-batch, S positions; E hidden size, Q query heads, K key-value heads, D
head dimension, M MLP size, X experts of size F; w bytes of a number in the compute dtype.
"""

import math
from functools import cached_property
from operator import add
from typing import NamedTuple

from picotron_min.planner.activations import BYTES
from picotron_min.planner.links import link, send_seconds
from picotron_min.planner.system import Setting

ATTENTION_BACKWARD = 2.5 / 0.6  # 5 products instead of 2, at 0.6 of forward's speed
WRITTEN_OUT = 0.7  # of f: what the batched matmuls of attention that is not fused reach
SCORE_BYTES = 14  # read and written for each of its scores: softmax, mask, dropout
FUSED, UNFUSED = 0.9, 3.2  # times the bytes that must be moved between matmuls


class Pass(NamedTuple):
    """Seconds of a forward or a backward, by what they are spent on."""

    matmuls: float = 0.0
    attention: float = 0.0
    passes: float = 0.0  # over memory: norms, residuals, rotary, activation
    tp: float = 0.0  # messages that nothing hides, as in cp and ep
    cp: float = 0.0
    ep: float = 0.0


class Layer(NamedTuple):
    forward: Pass
    backward: Pass
    repeated: Pass  # of the forward, in backward

    @property
    def seconds(self) -> tuple[float, float]:
        """Forward, and backward with what it repeats."""
        return sum(self.forward), sum(self.backward) + sum(self.repeated)

    def parts(self) -> dict[str, float]:
        """Forward and backward together, by what they are spent on."""
        both = map(add, self.forward, self.backward)
        return dict(zip(Pass._fields, both, strict=True), recomputed=sum(self.repeated))


class LayerTimes:
    """The times of a layer on one rank."""

    def __init__(self, setting: Setting) -> None:
        self.config, self.gpu, self.layout = setting.model_config, setting.gpu, setting.layout
        self.work, self.system = setting.workload, setting.system
        self.attended = setting.attended or self.work.seq_length  # S of attention
        self.tokens = self.work.micro_batch_size * self.work.seq_length / self.layout.cp  # N
        self.width = BYTES[self.work.dtype]  # w
        self.peak = self.gpu.peaks[self.work.dtype]
        self.memory_speed = self.gpu.hbm_share * self.gpu.hbm  # H

    def layer(self, has_experts: bool = False) -> Layer:
        forward, backward = self._attention()
        linears = self._linears(has_experts)
        matmuls, passes = sum(linears.values()), self._passes(has_experts)
        tp, cp, ep = self._tp(matmuls), self._cp(forward, backward), self._ep(has_experts)
        there = Pass(matmuls, forward, passes, tp[0], cp[0], ep)
        # Of a linear, backward has two products that each cost what the forward's does.
        back = Pass(2 * matmuls, backward, 2 * passes, tp[1], cp[1], ep)
        return Layer(there, back, self._repeated(there, linears))

    def matmul(self, i: float, k: float, j: float) -> float:
        flops = 2 * i * j * k / (self.gpu.matmul_share * self.peak)
        return flops + self.width * (i * k + k * j + i * j) / self.memory_speed

    def _linears(self, has_experts: bool) -> dict[str, float]:
        """The forward of a layer's linears, by the parts of costs.layer_flops."""
        c, tp, N = self.config, self.layout.tp, self.tokens
        E, M, D = c.hidden_size, c.intermediate_size / tp, c.head_dim / tp
        Q, K = c.num_attention_heads * D, c.num_key_value_heads * D
        ups = self.system.mlp_matrices - 1
        if self.system.joins_linears:
            qkv, up = self.matmul(N, E, Q + 2 * K), self.matmul(N, E, ups * M)
        else:
            qkv = self.matmul(N, E, Q) + 2 * self.matmul(N, E, K)
            up = ups * self.matmul(N, E, M)
        attention = {"o": self.matmul(N, Q, E), "q, k, v": qkv}
        mlp = {"gate, up": up, "down": self.matmul(N, M, E)}
        return attention | (self._experts() if has_experts else mlp)

    def _experts(self) -> dict[str, float]:
        """Those of a mixture, if tokens use all experts alike."""
        c, layout = self.config, self.layout
        E, F, X = c.hidden_size, c.moe_intermediate_size / layout.etp, c.num_local_experts
        own = self.tokens / layout.tp  # tokens that a rank brings
        here = X // layout.ep  # experts; each has its share of the rows that come from all ranks
        rows = own * c.num_experts_per_tok * layout.etp / here
        times = {
            "router": 2 * own * E * X / (self.gpu.matmul_share * self.gpu.peaks["float32"]),
            "gate, up": 2 * here * self.matmul(rows, E, F),
            "down": here * self.matmul(rows, F, E),
        }
        if n := c.n_shared_experts:
            inner = n * c.moe_intermediate_size / layout.tp
            times["shared experts"] = 3 * self.matmul(self.tokens, E, inner)
        return times

    def _attention(self) -> tuple[float, float]:
        """Forward and backward of attention itself."""
        D, S = self.config.head_dim, self.attended
        pairs = self.tokens * self.config.num_attention_heads / self.layout.tp * S
        if self.work.flash_attention:
            forward = 2 * pairs * D / (self.gpu.attention_share * self.peak)
            return forward, ATTENTION_BACKWARD * forward
        forward = 4 * pairs * D / (WRITTEN_OUT * self.gpu.matmul_share * self.peak)  # no half
        forward += SCORE_BYTES * pairs / self.memory_speed
        return forward, 2 * forward

    def _passes(self, has_experts: bool) -> float:
        """The forward of what lies between matmuls; backward takes twice as long."""
        c, tp, N, w = self.config, self.layout.tp, self.tokens, self.width
        heads = (c.num_attention_heads + c.num_key_value_heads) * c.head_dim / tp
        inner = self.system.mlp_matrices * c.intermediate_size / tp  # gate, up and their product
        if has_experts:
            F, E = c.moe_intermediate_size, c.hidden_size
            k = c.num_experts_per_tok / tp
            # Rows are copied into the order of the experts, and back, on both sides of a message.
            inner = k * (3 * F + 4 * self.layout.etp * E) + 3 * c.n_shared_experts * F / tp
        split = tp if self.layout.sequence_parallel else 1  # of the residual stream
        residuals = (6 * self.system.residual_bytes + 8) * c.hidden_size * N / split
        moved = residuals + 2 * w * heads * N + w * inner * N
        return (FUSED if self.system.is_fused else UNFUSED) * moved / self.memory_speed

    # Messages: what of them is not hidden, forward and backward.

    def _tp(self, weight_gradients: float) -> tuple[float, float]:
        t = self.tp_message
        if not self.system.hides_tp:
            return 4 * t, 4 * t
        # With sequence parallelism the gathers at the end of a sublayer have no cover.
        exposed, covered = (2 * t, 2 * t) if self.layout.sequence_parallel else (0.0, 4 * t)
        return 4 * t, exposed + max(0.0, covered - weight_gradients)

    @cached_property
    def tp_message(self) -> float:
        """An all-gather or a reduce-scatter of a sublayer's input; an all-reduce is two of them."""
        whole = self.width * self.tokens * self.config.hidden_size
        return link(self.gpu, self.layout.tp, 1).message(whole)

    def _cp(self, forward: float, backward: float) -> tuple[float, float]:
        """Given how long attention computes."""
        c, tp, cp, w = self.config, self.layout.tp, self.layout.cp, self.width
        if cp == 1:
            return 0.0, 0.0
        heads, kv_heads = c.num_attention_heads / tp, c.num_key_value_heads / tp
        each = self.tokens * c.head_dim  # elements of a head
        if self.layout.cp_engine == "ulysses":
            repeated = math.lcm(max(1, int(kv_heads)), cp)  # so that every rank has some
            over = link(self.gpu, cp, tp)
            once = 2 * over.message(w * heads * each) + 2 * over.message(w * repeated * each)
            return once, once
        hop = send_seconds(self.gpu, cp, tp, 2 * w * kv_heads * each)
        last = send_seconds(self.gpu, cp, tp, 2 * max(4, w) * kv_heads * each)  # float32 gradients
        ring = (cp - 1) * hop
        both = (cp - 1) * (hop + last)
        return max(0.0, ring - forward), max(0.0, both - backward) + last

    def _ep(self, has_experts: bool) -> float:
        """Rows travel to their experts and back; balanced, and half of it hides nothing."""
        layout, c = self.layout, self.config
        if not has_experts or layout.ep * layout.etp == 1:
            return 0.0
        ranks = link(self.gpu, layout.ep * layout.etp, 1)
        own = self.tokens / layout.tp * c.hidden_size * self.width
        if layout.ep_engine == "allgather":
            return 2 * ranks.message(ranks.size * own)
        return 2 * ranks.message(c.num_experts_per_tok * layout.etp * own)

    def _repeated(self, forward: Pass, linears: dict[str, float]) -> Pass:
        """What backward runs again: see hardware_flops_per_token in runtime/hardware.py."""
        if self.system.repeats is not None:
            matmuls, attention = self.system.repeats
            again = Pass(*(matmuls * seconds for seconds in forward))
            return again._replace(attention=attention * forward.attention)
        t, cut = self.tp_message, self.layout.sequence_parallel  # then inputs are gathered again
        if self.work.recompute == "none":
            return Pass()
        if self.work.recompute == "selective":
            return Pass(linears["q, k, v"], forward.attention, tp=t * cut, cp=forward.cp)
        # Not again: the sum at the end of the layer, and the way back from the experts.
        matmuls = forward.matmuls - linears["down"]
        return forward._replace(matmuls=matmuls, tp=(2 + cut) * t, ep=forward.ep / 2)
