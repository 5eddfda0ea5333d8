"""Context parallelism: every sequence is cut over ranks, and attention reaches across the cuts.

Only attention needs more than a rank's own S/n tokens: the keys and values of the other ranks.

    ring       queries stay, keys and values go round:   rank 0 -> 1 -> 2 -> 3 -> 0
    Ulysses    an all-to-all turns [all heads, S/n] into [heads/n, all of S], another turns it back

Bytes sent per layer, with q, k, k' the bytes of [B, Q, S/n, D], [B, K, S/n, D], [B, lcm(K, n), ..]:

                forward                     backward
    ring        2 (n-1) k                   2 (n-1) k, and the same in float32 (or better)
    Ulysses     (n-1)/n (2 q + 2 k')        the same

The ring hides its messages behind compute and takes any number of heads; Ulysses sends less with
many ranks, which must divide the query heads. At a fixed S/n, memory does not grow with n.
Source: Liu et al. 2023, "Ring Attention with Blockwise Transformers"; Jacobs et al. 2023,
"DeepSpeed Ulysses". In production: `torch.distributed.tensor.experimental.context_parallel`.
"""

import math
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn

from picotron_min.attention import Kernel, merge_blocks
from picotron_min.collectives import Axis, Conjugate, Shift, all_to_all, ring
from picotron_min.loss import wide
from picotron_min.model import Llama


# Cut in order, the last rank's tokens would see all others and the first rank's only themselves. So
# the ring cuts into 2n pieces and gives rank r an early and a late one, r and 2n-1-r:
#     8 pieces, 4 ranks    [0][1][2][3][4][5][6][7]     work of the busiest rank to the mean
#     in order              0  0  1  1  2  2  3  3      n = 2: 1.5    4: 1.75    8: 1.875
#     zigzag                0  1  2  3  3  2  1  0      1        (Dubey et al. 2024, section 3.3.2)
def zigzag_positions(rank: int, size: int, seq_length: int) -> Tensor:
    """[S/n]: where in the sequence the tokens of a rank are, for the ring; 2n must divide S."""
    can_be_cut = seq_length % (2 * size) == 0 or size == 1  # one rank has any length whole
    assert can_be_cut, f"{seq_length} positions in {2 * size} pieces"
    pieces = torch.arange(seq_length).tensor_split(2 * size)
    return torch.cat((pieces[rank], pieces[-1 - rank]))


def contiguous_positions(rank: int, size: int, seq_length: int) -> Tensor:
    """[S/n]: where in the sequence the tokens of a rank are, for Ulysses; n must divide S."""
    return torch.arange(seq_length).view(size, -1)[rank]


POSITIONS = {"ring": zigzag_positions, "ulysses": contiguous_positions}


def apply_context_parallel(model: Llama, axis: Axis, engine: str, kernel: Kernel) -> None:
    """Swap a model's attention for one that reaches over the axis; `kernel` is for the ring."""
    if axis.size == 1:
        return
    for layer in model.model.layers.values():
        inner = layer.self_attn.core_attention
        over = UlyssesAttention(axis, inner) if engine == "ulysses" else RingAttention(axis, kernel)
        layer.self_attn.core_attention = over


class RingAttention(nn.Module):
    """Causal attention to the keys of all ranks. Backward sends keys and values round again."""

    def __init__(self, axis: Axis, kernel: Kernel) -> None:
        super().__init__()
        self.axis, self.kernel = axis, kernel

    @torch.compiler.disable  # torch.compile cannot trace messages
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [B, Q, S/n, D], k and v [B, K, S/n, D], cut zigzag -> [B, Q, S/n, D]"""
        return _RingAttention.apply(q, k, v, self.axis, self.kernel)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, axis, kernel):
        kv = torch.stack((k, v))  # before head repetition: few heads travel
        for is_own, rows, _, k, v in visible_blocks(kv, axis):
            block = kernel.attend(q[:, :, rows], k, v, is_own)
            if is_own:  # the first block, and the only causal one
                out, lse = wide(block[0]), block[1]  # merged n-1 times: float32 or better
            else:
                merged = merge_blocks(out[:, :, rows], lse[:, :, rows], *block)
                out[:, :, rows], lse[:, :, rows] = merged
        ctx.axis, ctx.kernel = axis, kernel
        ctx.save_for_backward(q, kv, out := out.to(q.dtype), lse)
        return out

    @staticmethod
    def backward(ctx, gradient):
        # Keys and values travel as in forward. Their gradients follow one hop behind, and each rank
        # adds its block's gradients. With 4 ranks, for the keys of rank 0:
        #     keys         rank 0 -> 1 -> 2     -> 3
        #     gradients              1 -> 1 + 2 -> 1 + 2 + 3 -> rank 0, which adds its own block's
        (q, kv, out, lse), axis = ctx.saved_tensors, ctx.axis
        dq, shift = torch.zeros_like(q, dtype=lse.dtype), None
        for is_own, rows, columns, k, v in visible_blocks(kv, axis):
            d_out, q_rows, out_rows, lse_rows = (x[:, :, rows] for x in (gradient, q, out, lse))
            dq_rows, dk, dv = ctx.kernel.backward(d_out, q_rows, k, v, out_rows, lse_rows, is_own)
            dq[:, :, rows] += dq_rows
            # What arrives is the gradient of this block; the first two blocks start from zeros.
            dkv = shift.wait() if shift else torch.zeros_like(kv, dtype=lse.dtype)
            dkv[0][:, :, columns] += dk
            dkv[1][:, :, columns] += dv
            if is_own:
                own_dkv = dkv
            else:
                shift = Shift(dkv, axis)
        if shift:
            own_dkv += shift.wait()
        return dq.to(q.dtype), *own_dkv.to(kv.dtype), None, None


def visible_blocks(kv: Tensor, axis: Axis) -> Iterator[tuple[bool, slice, slice, Tensor, Tensor]]:
    """Each rank's block: is it our own, our rows that see a part, the columns seen, their kv."""
    half = kv.shape[3] // 2
    for source, (k, v) in ring(kv, axis):
        # Of an earlier rank, the early piece is before both of ours, the late one after both. Of a
        # later rank, both pieces are between ours: only our late piece sees them, and all of them.
        # Cut, not masked: torch's kernels give a fully masked row the weight 1 (lse = 0), not 0.
        rows = slice(half if source > axis.rank else 0, None)
        columns = slice(half if source < axis.rank else None)
        yield source == axis.rank, rows, columns, k[:, :, columns], v[:, :, columns]


class UlyssesAttention(nn.Module):
    """Attention of some heads to the whole sequence, between two all-to-alls each way."""

    def __init__(self, axis: Axis, inner: nn.Module) -> None:
        super().__init__()
        self.axis, self.inner = axis, inner

    @torch.compiler.disable
    def forward(self, q: Tensor, k: Tensor, v: Tensor, *extra) -> Tensor:
        """q [B, Q, S/n, D], k and v [B, K, S/n, D], cut in order -> [B, Q, S/n, D]"""
        repeats = self.axis.size // math.gcd(self.axis.size, k.shape[1])  # to lcm(K, n) heads
        k, v = (x.repeat_interleave(repeats, dim=1) if repeats > 1 else x for x in (k, v))
        q, k, v = (_all_to_all(x, self.axis, 1, 2) for x in (q, k, v))  # [B, heads/n, S, D]
        return _all_to_all(self.inner(q, k, v, *extra), self.axis, 2, 1)


def _all_to_all(x: Tensor, axis: Axis, split_dim: int, gather_dim: int) -> Tensor:
    there = partial(all_to_all, axis=axis, split_dim=split_dim, gather_dim=gather_dim)
    back = partial(all_to_all, axis=axis, split_dim=gather_dim, gather_dim=split_dim)
    return Conjugate.apply(there, back, x)
