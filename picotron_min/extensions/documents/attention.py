"""Attention inside documents: plain attention to each, or, over a ring, rectangle by rectangle."""

from collections.abc import Sequence
from functools import lru_cache
from inspect import signature
from itertools import accumulate

import torch
from torch import Tensor, nn

from picotron_min.attention import merge_blocks
from picotron_min.collectives import Shift, ring
from picotron_min.context_parallel import RingAttention, UlyssesAttention
from picotron_min.extension import Extension
from picotron_min.extensions.documents.rectangles import Documents, ring_plan
from picotron_min.loss import wide
from picotron_min.model import FlashAttention, Llama
from picotron_min.placement import Table


class DocumentMask(Extension):
    def __init__(self, device: torch.device) -> None:
        self.device = device

    def connect(self, model: Llama, table: Table) -> None:
        for attention in (layer.self_attn for layer in model.model.layers.values()):
            attention.core_attention = inside_documents(attention.core_attention, self.device)


def inside_documents(attention: nn.Module, device: torch.device) -> nn.Module:
    """What takes the place of an attention that knows no documents."""
    if isinstance(attention, RingAttention):
        return DocumentRing(attention.axis, attention.kernel)
    if isinstance(attention, UlyssesAttention):
        attention.inner = inside_documents(attention.inner, device)
        return attention
    if device.type == "cuda" and isinstance(attention, FlashAttention):
        return VarlenAttention()
    return DocumentAttention(attention)


class DocumentAttention(nn.Module):
    """Causal attention of q [B, Q, S, D] to k and v [B, K, S, D], one document after another.

    Rows whose documents have the same lengths are attended together, if they follow each other.
    """

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    @torch.compiler.disable  # the lengths change in every call
    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Documents) -> Tensor:
        alike = documents.alike()
        groups = _split((q, k, v), [rows.stop - rows.start for rows, _ in alike], dim=0)
        outs = [
            _join([self.inner(*part) for part in _split(group, lengths, dim=2)], dim=2)
            for group, (_, lengths) in zip(groups, alike, strict=True)
        ]
        return _join(outs, dim=0)


def _split(tensors: Sequence[Tensor], sizes: Sequence[int], dim: int) -> list[Sequence[Tensor]]:
    if len(sizes) == 1:  # as they are: a split into one part would copy the gradient
        return [tensors]
    return list(zip(*(x.split(sizes, dim) for x in tensors), strict=True))


def _join(parts: Sequence[Tensor], dim: int) -> Tensor:
    return torch.cat(parts, dim) if len(parts) > 1 else parts[0]


class VarlenAttention(nn.Module):
    """Causal attention inside documents in one kernel call; torch has it for GPUs, in 16 bits."""

    @torch.compiler.disable
    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Documents) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        borders, longest = _borders(documents, q.device)
        B, _, S, _ = q.shape
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))  # [B S, heads, D]
        options = {"window_size": (-1, 0)}  # causal
        # Fewer key heads must be allowed; torch 2.11 allows them always, and has no such argument.
        if "enable_gqa" in signature(varlen_attn).parameters:
            options["enable_gqa"] = True
        out = varlen_attn(q, k, v, borders, borders, longest, longest, **options)
        return out.unflatten(0, (B, S)).transpose(1, 2)


@lru_cache(maxsize=256)
def _borders(documents: Documents, device: torch.device) -> tuple[Tensor, int]:
    lengths = [length for row in documents.lengths for length in row]
    borders = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32).pin_memory()
    return borders.to(device, non_blocking=True), max(lengths)


class DocumentRing(RingAttention):
    """But a rank computes only the rectangles inside documents.

    It sends what RingAttention sends: a block that this rank does not see still travels. Each
    rectangle is a call of the kernel: on a GPU, many short ones where documents are short.
    """

    @torch.compiler.disable
    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Documents) -> Tensor:
        plan = ring_plan(documents, self.axis.rank, self.axis.size, q.shape[2] // 2)
        return _DocumentRing.apply(q, k, v, self.axis, self.kernel, plan)


class _DocumentRing(torch.autograd.Function):  # _RingAttention explains the order of messages
    @staticmethod
    def forward(ctx, q, k, v, axis, kernel, plan):
        kv = torch.stack((k, v))
        out = wide(torch.empty_like(q))
        lse = torch.empty_like(out[..., 0])
        for source, block in ring(kv, axis):
            for ours, theirs, is_causal in plan[source]:
                part = kernel.attend(q[ours], *block[theirs], is_causal)
                if not is_causal:  # every query is in one square, and these came first
                    part = merge_blocks(out[ours], lse[ours], *part)
                out[ours], lse[ours] = part
        ctx.axis, ctx.kernel, ctx.plan = axis, kernel, plan
        ctx.save_for_backward(q, kv, out := out.to(q.dtype), lse)
        return out

    @staticmethod
    def backward(ctx, gradient):
        (q, kv, out, lse), axis = ctx.saved_tensors, ctx.axis
        dq, shift = torch.zeros_like(q, dtype=lse.dtype), None
        for source, block in ring(kv, axis):
            dkv = torch.zeros_like(kv, dtype=lse.dtype)  # while other ranks' travel
            for ours, theirs, is_causal in ctx.plan[source]:
                tensors = gradient[ours], q[ours], *block[theirs], out[ours], lse[ours]
                dq_part, *dkv_part = ctx.kernel.backward(*tensors, is_causal)
                dq[ours] += dq_part
                dkv[theirs] += torch.stack(dkv_part)
            if shift:
                dkv += shift.wait()
            if source == axis.rank:
                own_dkv = dkv
            else:
                shift = Shift(dkv, axis)
        if shift:
            own_dkv += shift.wait()
        return dq.to(q.dtype), *own_dkv.to(kv.dtype), None, None, None
