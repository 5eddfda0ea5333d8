"""Interleaved 1F1B: several stages a rank make the bubble smaller, for more messages.

    rank 0  F0 F1 F0.1 F1.1 B0.1 B1.1 B0 B1    F0.1: micro-batch 0 through this rank's second chunk
    rank 1  F0 F1 F0.1 B0.1 F1.1 B1.1 B0 B1

Source: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training", section 2.2. In
production: `torch.distributed.pipelining.ScheduleInterleaved1F1B`.
"""

from picotron_min.pipeline_schedule import Plan, alternating


def interleaved(rank: int, ranks: int, num_micro_batches: int, chunks: int = 1) -> Plan:
    """1F1B over v chunks: a bubble of (p - 1) / (m v + p - 1), with p v - 1 boundaries, not p - 1.

    Groups of micro-batches take turns (Narayanan et al. 2021, 2.2.2: groups of exactly `ranks`).
    """
    sizes = group_sizes(ranks, num_micro_batches)
    warmup = 2 * (ranks - rank - 1)  # 1F1B has half as many: the others hide the time of the sends
    warmup += (chunks - 1) * sizes[0]  # the first group must have reached the last chunk
    return alternating(sizes, chunks, warmup)


def group_sizes(ranks: int, num_micro_batches: int) -> list[int]:
    """As many groups as possible of at least `ranks`: then the last rank is done just in time."""
    groups = max(1, num_micro_batches // ranks)  # of about one size: a small one delays all ranks
    # The largest come first, so that the warm-up, counted for the first group, suffices for all.
    return [num_micro_batches // groups + (g < num_micro_batches % groups) for g in range(groups)]
