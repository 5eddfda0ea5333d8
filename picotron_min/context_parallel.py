"""Context parallelism: every sequence is cut, and attention looks across the cuts.

A rank has S/n tokens of each sequence, with their true positions, and does with them alone all that
treats tokens one by one: norms, projections, MLP, loss. Only attention needs the other ranks' keys
and values. Two ways to bring queries and keys together:

**Ring attention.** Queries stay; keys and values go round. After n-1 hops every query has met every
key, a block at a time, and the blocks are merged (block_attention.py). While a block is computed
the next is on its way. Backward sends keys and values round again, and behind them their gradients,
each rank adding its share, until they are home.

Causality makes cutting in order unfair: the last rank's tokens see all others, the first rank's
only themselves. So cut into 2n chunks and give rank r chunks r and 2n-1-r ("zigzag"), an early one
and a late one:

    8 chunks, 4 ranks   [0][1][2][3][4][5][6][7]     work of the busiest rank to the mean
    contiguous           0  0  1  1  2  2  3  3      n = 2: 1.5    4: 1.75    8: 1.875
    zigzag               0  1  2  3  3  2  1  0      1

and what a rank computes of another's block is always half of it, without any mask:

    its own keys               all rows, causal
    keys of an earlier rank    all rows    x  the early half of the columns
    keys of a later rank       late rows   x  all columns

**Ulysses.** An all-to-all turns [all heads, S/n] into [heads/n, all of S]; attention is then that
of a single rank, for some of the heads; a second all-to-all turns the result back. The sequence is
cut in order. n must divide the query heads; fewer key-value heads than ranks are repeated as often
as it takes, and no more.

Bytes that a rank sends per layer, with q and k the bytes of a local [B, Q, S/n, D] and
[B, K, S/n, D], and k' those of k when it is repeated to lcm(K, n) heads:

                forward                     backward
    ring        2 (n-1) k                   2 (n-1) k, and the same in float32 (or better)
    Ulysses     (n-1)/n (2 q + 2 k')        the same

The ring hides its bytes behind compute and takes any number of heads; Ulysses sends less with many
ranks (for fixed S/n the ring's bytes grow with n). Recomputation repeats the forward's. At a fixed
S/n memory does not grow with n: the ring saves for backward the rank's own q, k, v, output and lse,
Ulysses what attention saves of heads/n and S, and the output a second time, as [all heads, S/n].

Gradients of weights are sums over tokens, so they are summed over (dp, cp), see data_parallel.py.

Source: Liu et al. 2023, "Ring Attention with Blockwise Transformers"; Brandon et al. 2023, "Striped
Attention", for the balance; Dubey et al. 2024, "The Llama 3 Herd of Models", section 3.3.2, for 2n
chunks; Jacobs et al. 2023, "DeepSpeed Ulysses". In production:
`torch.distributed.tensor.experimental.context_parallel`.
"""

import math

import torch
from torch import Tensor, nn

from picotron_min.block_attention import Kernel, merge_blocks, wide
from picotron_min.collectives import Axis, Shift, all_to_all, ring
from picotron_min.model import Llama


def zigzag_positions(rank: int, size: int, seq_length: int) -> Tensor:
    """[S/n]: where in the sequence the tokens of a rank are. 2n must divide S: see config.py."""
    assert seq_length % (2 * size) == 0, f"{seq_length} positions in {2 * size} chunks"
    early, late = rank, 2 * size - 1 - rank
    chunks = torch.arange(seq_length).view(2 * size, -1)
    return torch.cat((chunks[early], chunks[late]))


def contiguous_positions(rank: int, size: int, seq_length: int) -> Tensor:
    """The same, cut in order; n must divide S."""
    assert seq_length % size == 0, f"{seq_length} positions over {size} ranks"
    return torch.arange(seq_length).view(size, -1)[rank]


POSITIONS = {"ring": zigzag_positions, "ulysses": contiguous_positions}


def whole_sequence(parts: list[Tensor], positions: list[Tensor], dim: int) -> Tensor:
    """Put what the ranks have of a sequence in order again: the inverse of the split."""
    return torch.cat(parts, dim).index_select(dim, torch.cat(positions).argsort())


def causal_work(positions: Tensor) -> int:
    """Pairs of a query at these positions and a key that it sees."""
    return (positions + 1).sum().item()


def apply_context_parallel(model: Llama, axis: Axis, engine: str, kernel: Kernel) -> None:
    """Swap a model's attention for one that reaches over the axis, in place.

    The model must then be given this rank's `POSITIONS[engine]` and the tokens there. `kernel` is
    the ring's; Ulysses goes on with the attention that it finds.
    """
    if axis.size == 1:
        return
    for layer in model.model.layers.values():
        attention = layer.self_attn
        if engine == "ring":
            attention.core_attention = RingAttention(axis, kernel)
        else:
            attention.core_attention = UlyssesAttention(axis, attention.core_attention)


class RingAttention(nn.Module):
    """Causal attention of this rank's queries to the keys of all ranks of the axis.

    torch.compile goes round it, as round Ulysses: it cannot look into messages.
    """

    def __init__(self, axis: Axis, kernel: Kernel) -> None:
        super().__init__()
        self.axis, self.kernel = axis, kernel

    @torch.compiler.disable
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [B, Q, S/n, D], k and v [B, K, S/n, D], cut zigzag -> [B, Q, S/n, D]

        Forward and backward each send keys and values round the ring.
        """
        return _RingAttention.apply(q, k, v, self.axis, self.kernel)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, axis, kernel):
        kv = torch.stack((k, v))
        for source, (k, v) in ring(kv, axis):
            rows, columns = needed_block(axis.rank, source, q.shape[2])
            block = kernel.attend(
                q[:, :, rows], k[:, :, columns], v[:, :, columns], source == axis.rank
            )
            if source == axis.rank:  # the first
                out, lse = wide(block[0]), block[1]
            else:
                out[:, :, rows], lse[:, :, rows] = merge_blocks(
                    out[:, :, rows], lse[:, :, rows], *block
                )
        out = out.to(q.dtype)
        ctx.save_for_backward(q, kv, out, lse)
        ctx.axis, ctx.kernel = axis, kernel
        return out

    @staticmethod
    def backward(ctx, gradient):
        (q, kv, out, lse), axis = ctx.saved_tensors, ctx.axis
        dq, own_dkv = (torch.zeros_like(x, dtype=lse.dtype) for x in (q, kv))
        arriving = None
        for source, (k, v) in ring(kv, axis):
            rows, columns = needed_block(axis.rank, source, q.shape[2])
            dq_part, dk_part, dv_part = ctx.kernel.backward(
                gradient[:, :, rows],
                q[:, :, rows],
                k[:, :, columns],
                v[:, :, columns],
                out[:, :, rows],
                lse[:, :, rows],
                source == axis.rank,
            )
            dq[:, :, rows] += dq_part
            # The gradient of a rank's keys starts at the next rank and comes home at the end.
            if source == axis.rank:
                dkv = own_dkv
            else:
                dkv = arriving.wait() if arriving else torch.zeros_like(own_dkv)
            dkv[0][:, :, columns] += dk_part
            dkv[1][:, :, columns] += dv_part
            if source != axis.rank:
                arriving = Shift(dkv, axis)
        if arriving:
            own_dkv += arriving.wait()
        dk, dv = own_dkv.to(kv.dtype)
        return dq.to(q.dtype), dk, dv, None, None


def needed_block(rank: int, source: int, length: int) -> tuple[slice, slice]:
    """Which of a rank's rows see which of the source's columns, `length` = S/n of each.

    Cut, not masked: torch's kernels give a row that is masked in full the weight 1 (lse = 0), not
    none. Only the block of source == rank is causal.
    """
    everything, early, late = slice(0, length), slice(0, length // 2), slice(length // 2, length)
    if source == rank:
        return everything, everything
    return (everything, early) if source < rank else (late, everything)


class UlyssesAttention(nn.Module):
    """Attention of some heads to the whole sequence, between two all-to-alls."""

    def __init__(self, axis: Axis, inner: nn.Module) -> None:
        super().__init__()
        self.axis, self.inner = axis, inner

    @torch.compiler.disable
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [B, Q, S/n, D], k and v [B, K, S/n, D], cut in order -> [B, Q, S/n, D]

        Backward communicates as forward does, the other way round.
        """
        repeats = self.axis.size // math.gcd(self.axis.size, k.shape[1])
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
        split_dim, gather_dim = ctx.dims
        return all_to_all(gradient, ctx.axis, gather_dim, split_dim), None, None, None
