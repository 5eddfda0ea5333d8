"""A stream of token ids -> `batch(step, micro_batch)`. The stream is made in token_file.py.

All documents stand in one row, an end-of-text token (E) after each. Sequence i is a slice of S + 1
tokens: every token but the first is the target of the token before it, in exactly one sequence
(but for a rest shorter than a sequence, at the end). Documents are not kept apart in attention.

    stream      t h e   c a t E a   d o g E r a i n E ...         S = 4
    sequence 0  [t h e _]c            inputs  t h e _    targets  h e _ c
    sequence 1          [c a t E]a    inputs  c a t E    targets  a t E a

Nobody deals out data and nobody remembers where it was. Each epoch has an order of the sequences,
a permutation drawn from (seed, epoch), and who takes what is arithmetic. With two data-parallel
ranks, two micro-batches and two rows each, a step uses up G = 8 sequences of the order:

    order         7  2 |  9  4 |  0  5 |  1  8 ||  3  6 | 11 10 | ...
    dp rank         0  |   1   |   0   |   1   ||   0   |   1   | ...
    micro-batch         0      |       1       ||       0       | ...
    step                       0               ||            1

So a batch is a function of (seed, step, micro-batch, dp rank), and from that follow, for free:
resuming needs the step and nothing else; the ranks of a pipeline, a tensor-parallel or a context
group, which must all see the same sequences, compute the same answer instead of broadcasting it;
and any layout with the same G trains on the same sequences in the same step.
In production: a streaming loader such as `torchdata.stateful_dataloader`, once the text no longer
fits on a disk, at the price of state to save.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

from picotron_min.loss import IGNORE_INDEX


class Batch(NamedTuple):
    """One micro-batch of one rank, int64 on the CPU."""

    tokens: torch.Tensor  # [B, S/cp]
    targets: torch.Tensor  # [B, S/cp], IGNORE_INDEX where nothing is to be predicted
    positions: torch.Tensor  # [S/cp], where in the sequence these columns are
    num_targets: int  # that are not ignored

    def to(self, device: torch.device) -> "Batch":
        """A GPU copies the tokens from pinned memory by itself, while the host continues."""
        if device.type == "cpu":
            return self
        tokens, targets = (
            x.pin_memory().to(device, non_blocking=True) for x in (self.tokens, self.targets)
        )
        return self._replace(tokens=tokens, targets=targets)


class Batches:
    """Cuts the stream into sequences and deals them out; keeps no state between calls.

    `positions` are the columns of a sequence that this context-parallel rank holds (default: all).
    `eval_batches` global batches, but at most a tenth of the sequences, are held out for
    validation: the same ones for every seed, and never trained on.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        *,
        seq_length: int,
        seed: int,
        micro_batch_size: int,
        num_micro_batches: int,
        dp_rank: int,
        dp_size: int,
        positions: torch.Tensor | None = None,
        eval_batches: int = 0,
    ) -> None:
        assert 0 <= dp_rank < dp_size, f"dp_rank={dp_rank} is not below dp_size={dp_size}"
        num_sequences = (len(tokens) - 1) // seq_length
        needed = 2 if eval_batches else 1
        if num_sequences < needed:
            raise ValueError(
                f"the dataset has {len(tokens)} tokens, but training needs at least {needed} x"
                f" seq_length + 1 = {needed * seq_length + 1}"
                + (" (1 sequence to train on, 1 to validate on)" if eval_batches else "")
                + ": use more text or a shorter training.seq_length"
            )
        self.tokens, self.seq_length = tokens, seq_length
        self.micro_batch_size, self.num_micro_batches = micro_batch_size, num_micro_batches
        self.dp_rank, self.dp_size = dp_rank, dp_size
        self.global_batch = dp_size * num_micro_batches * micro_batch_size  # sequences per step
        self.positions = torch.arange(seq_length) if positions is None else positions

        # Seeded with a constant: a run with another seed must be judged on the same text.
        shuffled = np.random.default_rng(0).permutation(num_sequences)
        num_held_out = min(eval_batches * self.global_batch, num_sequences // 10)
        if eval_batches:
            num_held_out = max(num_held_out, 1)
        self._held_out, train = shuffled[:num_held_out], shuffled[num_held_out:]
        self.num_sequences = len(train)
        self.num_eval_sequences = num_held_out
        self.num_eval_batches = -(-num_held_out // self.global_batch)
        self.tokens_per_step = self.global_batch * seq_length

        # Two orders are kept, because a step can begin in one epoch and end in the next.
        @lru_cache(maxsize=2)
        def order(epoch: int) -> np.ndarray:
            return np.random.default_rng((seed, epoch)).permutation(train)

        self._order = order

    def batch(self, step: int, micro_batch: int) -> Batch:
        """What this rank trains on in one micro-batch of a step, counted from 0."""
        sequences = []
        for j in self._places(micro_batch):
            epoch, place = divmod(step * self.global_batch + j, self.num_sequences)
            sequences.append(self._order(epoch)[place])
        return self._cut(sequences)

    def eval_batch(self, index: int, micro_batch: int) -> Batch:
        """The same for validation, index in range(num_eval_batches).

        The last batch is filled up with rows whose targets are all IGNORE_INDEX, so that over all
        ranks and batches each held-out token counts once. Add up loss sums and target counts; a
        mean over the batches would weigh the last one wrongly.
        """
        places = [index * self.global_batch + j for j in self._places(micro_batch)]
        there = [self._held_out[n] for n in places if n < self.num_eval_sequences]
        batch = self._cut(there + [self._held_out[-1]] * (len(places) - len(there)))
        batch.targets[len(there) :] = IGNORE_INDEX
        return batch._replace(num_targets=batch.targets[: len(there)].numel())

    def _places(self, micro_batch: int) -> range:
        """Which places of the global batch are this rank's rows."""
        assert 0 <= micro_batch < self.num_micro_batches, f"there is no micro-batch {micro_batch}"
        first = (micro_batch * self.dp_size + self.dp_rank) * self.micro_batch_size
        return range(first, first + self.micro_batch_size)

    def _cut(self, sequences: list[int]) -> Batch:
        S = self.seq_length
        rows = np.stack([self.tokens[i * S : i * S + S + 1] for i in sequences])
        rows = torch.from_numpy(rows.astype(np.int64))  # [B, S + 1]
        tokens, targets = rows[:, self.positions], rows[:, self.positions + 1]
        return Batch(tokens, targets, self.positions, targets.numel())
