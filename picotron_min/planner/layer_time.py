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
from picotron_min.planner.links import link
from picotron_min.planner.system import Setting

ATTENTION_BACKWARD = 2.5 / 0.6  # 5 products instead of 2, at 0.6 of forward's speed
WRITTEN_OUT = 0.7  # of f: what the batched matmuls of attention that is not fused reach
SCORE_BYTES = 14  # read and written for each of its scores: softmax, mask, dropout
# Times the bytes that must be moved between matmuls: in norms and residuals, which are few kernels
# even if nothing fuses them; in rotary and activation, which are many then.
FUSED, UNFUSED = (0.9, 0.9), (2.0, 3.8)
CAST_BYTES = {"bf16": 4, "fp8": 4, "mxfp8": 8}  # a number: read, written, and its transpose
CASTS_INSIDE = 0.3  # of a layer's casts are left if products of experts quantise
GROUPED = 1.65  # times as long as the same products one by one
PERMUTES = {"alltoall": 9.0, "fused": 0.9}  # times the bytes, with sorts and waits of the host
TP_EXPOSED, EP_EXPOSED = 0.45 + 0.1, 0.3  # of messages that products, or other work, hide
DIRECT = 1.25, 2.0  # an all-to-all to a ring's speed, inside a node and between nodes


# Linears that have the same input: rows, inputs and outputs of each, by name.
Products = dict[str, tuple[float, float, list[float]]]


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
        self.tokens = self.work.micro_batch_size * self.work.seq_length / self.layout.cp  # N
        self.width = BYTES[self.work.dtype]  # w
        self.peak = self.gpu.peaks[self.work.dtype]
        in_8_bits = self.system.precision != "bf16"
        self.narrow = in_8_bits * self.system.layers_in_8_bits  # share of products in 8 bits
        experts = self.system.experts_in_8_bits
        experts = in_8_bits if experts is None else experts
        self.narrow_experts = experts * self.system.layers_in_8_bits
        self.memory_speed = self.gpu.hbm_share * self.gpu.hbm  # H

    def layer(self, has_experts: bool = False) -> Layer:
        products = self._products(has_experts)
        linears = self._linears(products, has_experts)
        matmuls = sum(linears.values())
        attention, passes = self._attention(), self._passes(products, has_experts)
        tp, cp, ep = self._tp(matmuls), self._cp(*attention), self._ep(has_experts)
        # Of a linear, backward has two products that each cost what the forward's does.
        each = (matmuls, 2 * matmuls), attention, passes, tp, cp, (ep, ep)
        there, back = (Pass(*seconds) for seconds in zip(*each, strict=True))
        return Layer(there, back, self._repeated(there, linears))

    def matmul(self, i: float, k: float, j: float, narrow: float = 0.0) -> float:
        """[i, k] x [k, j]; the mean of such products if this share of them is in 8 bits."""
        flops, w, H = 2 * i * j * k, self.width, self.memory_speed
        wide = flops / (self.gpu.matmul_share * self.peak) + w * (i * k + k * j + i * j) / H
        if not narrow:
            return wide
        in_8_bits = flops / (self.gpu.float8_share * self.gpu.peaks["float8"])
        return wide + narrow * (in_8_bits + (i * k + k * j + w * i * j) / H - wide)

    def _products(self, has_experts: bool) -> Products:
        """The linears of a layer, by the parts of costs.layer_flops."""
        c, tp, N, E = self.config, self.layout.tp, self.tokens, self.config.hidden_size
        Q, K = (n * c.head_dim / tp for n in (c.num_attention_heads, c.num_key_value_heads))
        inner, ups = c.intermediate_size / tp, self.system.mlp_matrices - 1
        if has_experts:  # a token has k of them
            N, inner, ups = N / tp * c.num_experts_per_tok, c.moe_intermediate_size, 2
        attention = {"q, k, v": (self.tokens, E, [Q, K, K]), "o": (self.tokens, Q, [E])}
        return attention | {"gate, up": (N, E, [inner] * ups), "down": (N, inner, [E])}

    def _linears(self, products: Products, has_experts: bool) -> dict[str, float]:
        """Their times in forward."""
        times = {}
        for name, (rows, inputs, outputs) in products.items():
            columns = [sum(outputs)] if self.system.joins_linears else outputs
            times[name] = sum(self.matmul(rows, inputs, j, self.narrow) for j in columns)
        return times | (self._experts() if has_experts else {})

    def _experts(self) -> dict[str, float]:
        """Of a mixture."""
        c, layout = self.config, self.layout
        E, F, X = c.hidden_size, c.moe_intermediate_size / layout.etp, c.num_local_experts
        own = self.tokens / layout.tp  # tokens that a rank brings
        here = X // layout.ep  # experts; each has its share of the rows that come from all ranks
        rows = own * c.num_experts_per_tok * layout.etp / here
        each = here * (GROUPED if self.system.expert_kernels == "grouped" else 1.0)
        times = {  # the router in TF32, or in the compute dtype
            "router": own * E * X / (2 * self.gpu.matmul_share * self.gpu.peaks["float32"]),
            "gate, up": 2 * each * self.matmul(rows, E, F, self.narrow_experts),
            "down": each * self.matmul(rows, F, E, self.narrow_experts),
        }
        if n := c.n_shared_experts:
            inner = n * c.moe_intermediate_size / layout.tp
            times["shared experts"] = 3 * self.matmul(self.tokens, E, inner, self.narrow)
        return times

    def _attention(self) -> tuple[float, float]:
        """Forward and backward of attention itself."""
        D, S = self.config.head_dim, self.work.seq_length
        pairs = self.tokens * self.config.num_attention_heads / self.layout.tp * S
        if self.work.flash_attention:
            share = self.gpu.attention_share
            if self.system.attention_kernel == "cudnn":
                share = self.gpu.cudnn_share
            forward = 2 * pairs * D / (share * self.peak)
            return forward, ATTENTION_BACKWARD * forward
        forward = 4 * pairs * D / (WRITTEN_OUT * self.gpu.matmul_share * self.peak)  # no half
        forward += SCORE_BYTES * pairs / self.memory_speed
        return forward, 2 * forward

    def _passes(self, products: Products, has_experts: bool) -> tuple[float, float]:
        """Forward and backward of what lies between matmuls."""
        c, tp, N, w = self.config, self.layout.tp, self.tokens, self.width
        heads = (c.num_attention_heads + c.num_key_value_heads) * c.head_dim / tp
        inner, permuted = self.system.mlp_matrices * c.intermediate_size, 0.0  # gate, up, product
        if has_experts:
            F, k = c.moe_intermediate_size, c.num_experts_per_tok
            inner = 3 * F * (k + c.n_shared_experts)
            if self.system.expert_kernels == "grouped":  # into the order of the experts, and back
                times = PERMUTES[self.system.dispatcher]
                permuted = times * 4 * w * k * self.layout.etp * c.hidden_size * N / tp
        split = tp if self.layout.sequence_parallel else 1  # of the residual stream
        residuals = (6 * self.system.residual_bytes + 8) * c.hidden_size * N / split
        few, many = FUSED if self.system.is_fused else UNFUSED
        moved = few * residuals + many * w * (2 * heads + inner / tp) * N + permuted
        there, back = self._casts(products, has_experts)
        return (moved + there) / self.memory_speed, (2 * moved + back) / self.memory_speed

    def _casts(self, products: Products, has_experts: bool) -> tuple[float, float]:
        """Bytes of rounding to 8 bits: of inputs in forward, of gradients in backward."""
        share = max(self.narrow, self.narrow_experts) if has_experts else self.narrow
        each = CAST_BYTES[self.system.precision] * share
        if has_experts and self.narrow != self.narrow_experts:  # only one kind is in 8 bits
            kind = ("q, k, v", "o") if self.narrow else ("gate, up", "down")
            products = {name: products[name] for name in kind}
        elif has_experts and self.system.expert_kernels == "fused":
            each *= CASTS_INSIDE
        there = sum(rows * inputs for rows, inputs, _ in products.values())
        back = sum(rows * sum(outputs) for rows, _, outputs in products.values())
        return each * there, each * back

    # Messages: what of them is not hidden, forward and backward.

    def _tp(self, matmuls: float) -> tuple[float, float]:
        there, back = (number * self.layer_message for number in self.system.tp_messages)
        if self.system.overlap == "tp":
            least = TP_EXPOSED * there, TP_EXPOSED * back
            return max(least[0], there - matmuls), max(least[1], back - 2 * matmuls)
        if not self.system.hides_tp:
            return there, back
        # With sequence parallelism the gathers at the end of a sublayer have no cover.
        exposed = back / 2 if self.layout.sequence_parallel else 0.0
        return there, exposed + max(0.0, back - exposed - matmuls)  # the weights' gradients

    @cached_property
    def tp_message(self) -> float:
        """An all-gather or a reduce-scatter of a sublayer's input; an all-reduce is two of them."""
        whole = self.width * self.tokens * self.config.hidden_size
        return link(self.gpu, self.layout.tp, 1).message(whole)

    @property
    def layer_message(self) -> float:
        """The mean of a layer's: in 8 bits gathers, a half of the messages, have half the bytes."""
        return self.tp_message * (0.75 if self.system.tp_gather_bytes == 1 else 1.0)

    def _cp(self, forward: float, backward: float) -> tuple[float, float]:
        """Given how long attention computes."""
        c, tp, cp, w = self.config, self.layout.tp, self.layout.cp, self.width
        if cp == 1:
            return 0.0, 0.0
        heads, kv_heads = c.num_attention_heads / tp, c.num_key_value_heads / tp
        each, over = self.tokens * c.head_dim, link(self.gpu, cp, tp)  # elements of a head
        if self.layout.cp_engine == "ulysses":
            repeated = math.lcm(max(1, int(kv_heads)), cp)  # so that every rank has some
            once = 2 * over.message(w * heads * each) + 2 * over.message(w * repeated * each)
            return once, once
        hop = over.send(2 * w * kv_heads * each)
        last = over.send(2 * max(4, w) * kv_heads * each)  # float32 gradients
        ring = (cp - 1) * hop
        both = (cp - 1) * (hop + last)
        return max(0.0, ring - forward), max(0.0, both - backward) + last

    def _ep(self, has_experts: bool) -> float:
        """Rows travel to their experts, and back."""
        layout, gpu, n = self.layout, self.gpu, self.layout.ep * self.layout.etp
        if not has_experts or n == 1:
            return 0.0
        ranks = link(gpu, n, 1)
        own = self.tokens / layout.tp * self.config.hidden_size * self.width
        if layout.ep_engine == "allgather":
            return 2 * ranks.message(n * own)
        k, nodes = self.config.num_experts_per_tok * layout.etp, math.ceil(n / gpu.gpus_per_node)
        sent = k * own * (1 if nodes > 1 else (n - 1) / n)
        seconds = sent / (DIRECT[0] * gpu.link_share * gpu.nvlink)
        if nodes > 1:
            far = k * (1 - 1 / nodes)
            if self.system.dispatcher == "fused":  # once to each node that has one of its experts
                far = (nodes - 1) * (1 - (1 - 1 / nodes) ** k)
            seconds = max(seconds, far * own / (DIRECT[1] * gpu.network_share * gpu.network))
        exposed = EP_EXPOSED if self.system.overlap == "ep" else 1.0
        return exposed * 2 * (seconds + gpu.latency)

    def _repeated(self, forward: Pass, linears: dict[str, float]) -> Pass:
        """What backward runs again: see hardware_flops_per_token in runtime/hardware.py."""
        if self.system.repeats is not None:
            matmuls, attention = self.system.repeats
            again = Pass(*(matmuls * seconds for seconds in forward))
            return again._replace(attention=attention * forward.attention)
        t, cut = self.layer_message, self.layout.sequence_parallel  # then inputs are gathered again
        if self.work.recompute == "none":
            return Pass()
        if self.work.recompute == "selective":
            return Pass(linears["q, k, v"], forward.attention, tp=t * cut, cp=forward.cp)
        # Not again: the sum at the end of the layer, and the way back from the experts.
        matmuls = forward.matmuls - linears["down"]
        return forward._replace(matmuls=matmuls, tp=(2 + cut) * t, ep=forward.ep / 2)
