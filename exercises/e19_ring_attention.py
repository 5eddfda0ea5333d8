"""19 ring attention: keys go round, and the means of their blocks are merged

target: context_parallel:_RingAttention.forward
train: distributed.cp_size=2 distributed.tp_size=1

Write the forward of ring attention. q is [B, Q, S/n, D], k and v are [B, K, S/n, D], cut zigzag:
the first half of a rank's tokens is early in the sequence, the second half late. Each rank attends
to its own keys first, then to one rank's after the other, and merges the blocks into out,
like q, and lse [B, Q, S/n]. Keys and values travel as [2, B, K, S/n, D], and the next ones are
already on their way while a block is computed. Merge in float32 or better.
End with what backward, which is written, needs: ctx.axis, ctx.kernel, and
ctx.save_for_backward(q, kv, out, lse) with out as it is returned. Return out in the dtype of q.
Read: context_parallel.py, attention.py.

? A loop over the ranks' blocks: attend to each, and merge its out and lse into those so far.
? torch.stack, visible_blocks(kv, axis), kernel.attend(q, k, v, is_causal), merge_blocks, wide.
? visible_blocks gives, hop by hop, five values: is this our own block (the first, and the only
  causal one); our rows that see a part; the columns that they see, for backward alone; and the k
  and v of these columns. Attend with q[:, :, rows]. The first block gives out, made wide, and lse.
  Later blocks are merged into their rows of both.
! Per rank 2 (n-1) k bytes, with k bytes of its keys; and at every hop all ranks have the same work.
  In production: `ring_flash_attn_func` of ring-flash-attention.
"""

import torch

from exercises.attention import full_attention, with_gradients
from exercises.exercise import Case, Dice, Sent, draw

B, D = 2, 4
OFF = "numbers that are off by more than one rounding"


def cases(dice: Dice) -> list[Case]:
    heads = dice.randint(1, 2)
    # Two query heads for each key head: mixed up, they get the wrong keys.
    sizes = {"query_heads": 2 * heads, "key_heads": heads}
    halves = {n: dice.randint(1, 3) for n in (2, 1, 3, 4)}
    some = [Case(n, **sizes, half=h, dtype="float64") for n, h in halves.items()]
    return [*some, Case(3, **sizes, half=4, dtype="bfloat16")]


def positions(case: Case, rank: int) -> list[int]:
    pieces = rank, 2 * case.ranks - 1 - rank
    return [piece * case.half + i for piece in pieces for i in range(case.half)]


def whole_tensors(case: Case):
    """q, k, v of the whole sequence, and the gradient of out: values of the case's dtype."""
    S = 2 * case.half * case.ranks
    names = {"q": case.query_heads, "k": case.key_heads, "v": case.key_heads}
    names["d_out"] = case.query_heads
    tensors = (draw(case, name, shape=(B, heads, S, D)) for name, heads in names.items())
    q, k, v, d_out = (tensor.to(getattr(torch, case.dtype)).double() for tensor in tensors)
    if case.dtype == "bfloat16":  # the mean of a rank's values is one of them, and is not rounded
        for mine in (positions(case, rank) for rank in range(case.ranks)):
            v[:, :, mine] = v[:, :, mine[:1]]
    return q, k, v, d_out


def on_rank(rank, case: Case) -> dict:
    attention, kernels = rank.course.context_parallel, rank.course.attention
    dtype = getattr(torch, case.dtype)

    def attend(q, k, v, is_causal):
        rank.mark(f"{q.shape[2]} x {k.shape[2]}{' causal' if is_causal else ''}")
        out, lse = kernels.attend_block(q.double(), k.double(), v.double(), is_causal)
        return out.to(q.dtype), lse.to(kernels.wide(q).dtype)  # rounded, as kernels on GPUs do

    kernel = kernels.Kernel(attend, kernels.attend_block_backward)
    *qkv, d_out = (x[:, :, positions(case, rank.number)].to(dtype) for x in whole_tensors(case))
    for tensor in qkv:
        tensor.requires_grad_(case.dtype == "float64")
    out = attention.RingAttention(rank.axis("cp"), kernel)(*qkv)
    if case.dtype == "bfloat16":  # between two numbers there are 2^-7 to 2^-8 of their size
        exact = full_attention(*whole_tensors(case)[:3])[:, :, positions(case, rank.number)]
        off = (out.double() - exact).abs() > 2**-8 * exact.abs() + 1e-6  # of float32
        return {"dtype": str(out.dtype), OFF: int(off.sum())}
    return with_gradients(out, qkv, d_out)


def expected(case: Case) -> list[dict]:
    parts = [positions(case, rank) for rank in range(case.ranks)]
    if case.dtype == "bfloat16":
        return [{"dtype": "torch.bfloat16", OFF: 0}] * case.ranks
    *qkv, d_out = whole_tensors(case)
    out = full_attention(*(tensor.requires_grad_() for tensor in qkv))
    results = with_gradients(out, qkv, d_out)
    return [{name: x[:, :, part] for name, x in results.items()} for part in parts]


def traffic(case: Case, rank: int) -> dict[str, Sent]:
    # The case in bfloat16 has no backward, which sends keys, values, and their gradients.
    itemsize, times = (2, 1) if case.dtype == "bfloat16" else (8, 3)
    k = B * case.key_heads * 2 * case.half * D * itemsize
    hops = times * (case.ranks - 1)
    return {"send as shift": Sent(hops, hops * 2 * k)}


def order(case: Case, rank: int, record) -> str | None:
    if (blocks := sum(event.kind == "mark" for event in record.events)) != case.ranks:
        return f"rank {rank} attends to {blocks} blocks, not to {case.ranks}"
    return record.hop_problem(rank, case.ranks - 1)


MISTAKES = """
merged_without_lse: Blocks are merged as a plain mean: a block with more weight must count more.
- merged = merge_blocks(out[:, :, rows], lse[:, :, rows], *block)
+ merged = (out[:, :, rows] + block[0]) / 2, torch.logaddexp(lse[:, :, rows], block[1])
lse_not_updated: out is updated at each merge, and lse is not: the next block is weighed against the
    first one alone, and backward gets the lse of one block.
    out[:, :, rows], lse[:, :, rows] = merged => out[:, :, rows] = merged[0]
last_block_saved: The k and v of the last block are saved for backward, which sends the own round.
    save_for_backward(q, kv, => save_for_backward(q, torch.stack((k, v)),
own_not_causal: Attention to the own keys is not causal: queries see keys behind them.
    v, is_own => v, False
rounded_each_time: The running mean has the dtype of q: in bfloat16 it is rounded at every merge.
    wide(block[0]) => block[0]
all_arrive_first: All blocks have arrived before the first is computed: nothing travels meanwhile.
    in visible_blocks(kv, axis): => in list(visible_blocks(kv, axis)):
"""
