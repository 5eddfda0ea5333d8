"""Context parallelism: every sequence is cut over ranks, and attention reaches across the cuts.

Only attention needs more than a rank's own S/n tokens of a sequence: the keys and values of the
other ranks. There are two ways to bring queries and keys together:

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
from functools import partial

import torch
from torch import Tensor, nn

from picotron_min.block_attention import Kernel, merge_blocks, wide
from picotron_min.collectives import Axis, Shift, all_to_all, ring
from picotron_min.model import Llama


# Cut in order, the last rank's tokens would see all others and the first rank's only themselves. So
# the ring cuts into 2n pieces and gives rank r an early and a late one, r and 2n-1-r:
#     8 pieces, 4 ranks    [0][1][2][3][4][5][6][7]     work of the busiest rank to the mean
#     in order              0  0  1  1  2  2  3  3      n = 2: 1.5    4: 1.75    8: 1.875
#     zigzag                0  1  2  3  3  2  1  0      1        (Dubey et al. 2024, section 3.3.2)
def zigzag_positions(rank: int, size: int, seq_length: int) -> Tensor:
    """[S/n]: where in the sequence the tokens of a rank are, for the ring; 2n must divide S."""
    if size == 1:
        return torch.arange(seq_length)  # nothing is cut, so S may be odd
    assert seq_length % (2 * size) == 0, f"{seq_length} positions in {2 * size} pieces"
    pieces = torch.arange(seq_length).view(2 * size, -1)
    return torch.cat((pieces[rank], pieces[2 * size - 1 - rank]))


def contiguous_positions(rank: int, size: int, seq_length: int) -> Tensor:
    """[S/n]: where in the sequence the tokens of a rank are, for Ulysses; n must divide S."""
    assert seq_length % size == 0, f"{seq_length} positions over {size} ranks"
    return torch.arange(seq_length).view(size, -1)[rank]


POSITIONS = {"ring": zigzag_positions, "ulysses": contiguous_positions}


def apply_context_parallel(model: Llama, axis: Axis, engine: str, kernel: Kernel) -> None:
    """Swap a model's attention for one that reaches over the axis; `kernel` is for the ring."""
    if axis.size == 1:
        return
    for layer in model.model.layers.values():
        inner = layer.self_attn.core_attention
        engines = {"ring": RingAttention(axis, kernel), "ulysses": UlyssesAttention(axis, inner)}
        layer.self_attn.core_attention = engines[engine]


class RingAttention(nn.Module):
    """Causal attention to the keys of all ranks; backward goes round the ring as forward does."""

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
        for source, (k, v) in ring(kv, axis):
            is_own = source == axis.rank  # the first block, and the only causal one
            rows, columns = needed_block(axis.rank, source, q.shape[2])
            block = kernel.attend(q[:, :, rows], k[:, :, columns], v[:, :, columns], is_own)
            if is_own:
                out, lse = wide(block[0]), block[1]  # merged n-1 times: float32 or better
            else:
                merged = merge_blocks(out[:, :, rows], lse[:, :, rows], *block)
                out[:, :, rows], lse[:, :, rows] = merged
        ctx.axis, ctx.kernel = axis, kernel
        ctx.save_for_backward(q, kv, out := out.to(q.dtype), lse)
        return out

    @staticmethod
    def backward(ctx, gradient):
        (q, kv, out, lse), axis = ctx.saved_tensors, ctx.axis
        dq, own_dkv = (torch.zeros_like(x, dtype=lse.dtype) for x in (q, kv))
        arrive = partial(torch.zeros_like, own_dkv)  # the first to add to a gradient starts at 0
        for source, (k, v) in ring(kv, axis):
            is_own = source == axis.rank
            rows, columns = needed_block(axis.rank, source, q.shape[2])
            d_out, q_rows, out_rows, lse_rows = (x[:, :, rows] for x in (gradient, q, out, lse))
            k, v = k[:, :, columns], v[:, :, columns]
            dq_rows, dk, dv = ctx.kernel.backward(d_out, q_rows, k, v, out_rows, lse_rows, is_own)
            dq[:, :, rows] += dq_rows
            # The gradient of a rank's keys starts at the next rank and is back after n-1 more hops.
            dkv = own_dkv if is_own else arrive()
            dkv[0][:, :, columns] += dk
            dkv[1][:, :, columns] += dv
            if not is_own:
                arrive = Shift(dkv, axis).wait
        return dq.to(q.dtype), *own_dkv.add_(arrive()).to(kv.dtype), None, None


def needed_block(rank: int, source: int, length: int) -> tuple[slice, slice]:
    """The rank's rows that see any of the source's columns, and these columns; `length` is S/n."""
    # Cut, not masked: torch's kernels give a fully masked row the weight 1 (lse = 0), not 0.
    everything, early, late = slice(0, length), slice(0, length // 2), slice(length // 2, length)
    if source == rank:
        return everything, everything  # the diagonal, where causality still masks
    return (everything, early) if source < rank else (late, everything)  # half the work each


class UlyssesAttention(nn.Module):
    """Attention of some heads to the whole sequence, between two all-to-alls each way."""

    def __init__(self, axis: Axis, inner: nn.Module) -> None:
        super().__init__()
        self.axis, self.inner = axis, inner

    @torch.compiler.disable
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [B, Q, S/n, D], k and v [B, K, S/n, D], cut in order -> [B, Q, S/n, D]"""
        repeats = self.axis.size // math.gcd(self.axis.size, k.shape[1])  # to lcm(K, n) heads
        k, v = (x.repeat_interleave(repeats, dim=1) if repeats > 1 else x for x in (k, v))
        q, k, v = (_AllToAll.apply(x, self.axis, 1, 2) for x in (q, k, v))  # [B, heads/n, S, D]
        return _AllToAll.apply(self.inner(q, k, v), self.axis, 2, 1)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, axis, split_dim, gather_dim):
        ctx.axis, ctx.dims = axis, (split_dim, gather_dim)
        return all_to_all(x, axis, split_dim, gather_dim)

    @staticmethod
    def backward(ctx, gradient):
        return all_to_all(gradient, ctx.axis, *reversed(ctx.dims)), None, None, None
