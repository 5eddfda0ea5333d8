"""Data: a batch is a function of (seed, step, micro-batch, rank), so no rank needs a message.

All documents are joined into one stream, an end-of-text token (E) after each. Its end is held out.
Sequences are slices of S + 1 tokens; each token but the first is the target of the one before it.

    stream      t h e   c a t E a   d o g E r a i n E ...  | ... f o x E        S = 4
    sequence 0  [t h e _]c                     to train on | to validate on
    sequence 1          [c a t E]a    inputs  c a t E    targets  a t E a

Each epoch has its own order of the training sequences, a permutation drawn from (seed, epoch). With
two dp ranks, two micro-batches and two rows each, a step uses its next G = 8 sequences:

    order         7  2 |  9  4 |  0  5 |  1  8 ||  3  6 | 11 10 | ...
    dp rank         0  |   1   |   0   |   1   ||   0   |   1   | ...
    micro-batch         0      |       1       ||       0       | ...

So a batch is a function of (seed, tokens seen before, micro-batch, dp rank), and needs no message.
Layouts with the same G train alike. In production: `torchdata.stateful_dataloader`.
"""

from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

from picotron_min.loss import IGNORE_INDEX

MOST_HELD_OUT = 10_000_000  # tokens; else a tenth of the text
EVAL_BATCH = 16  # sequences; not the global batch, or runs would validate on different ones


class Batch(NamedTuple):
    """One micro-batch of one rank, int64 on the CPU."""

    tokens: torch.Tensor  # [B, S/cp]
    targets: torch.Tensor  # [B, S/cp], IGNORE_INDEX where there is nothing to predict
    positions: torch.Tensor  # [S/cp] of every row, or [B, S/cp]
    extra: tuple = ()  # what attention takes beside q, k and v, where an extension changes it

    @property
    def num_targets(self) -> torch.Tensor:
        return (self.targets != IGNORE_INDEX).sum()  # on a GPU: the host does not wait for it

    def to(self, device: torch.device) -> "Batch":
        """A GPU copies the tokens from pinned memory by itself, while the host continues."""
        if device.type == "cpu":
            return self
        tensors = (x.pin_memory().to(device, non_blocking=True) for x in self[:3])
        return type(self)(*tensors, self.extra)


@dataclass(eq=False)
class Batches:
    """Any micro-batch of any step; keeps no state between calls."""

    tokens: np.ndarray  # the stream, made by runtime/token_file.py
    _: KW_ONLY
    seq_length: int
    seed: int
    micro_batch_size: int
    num_micro_batches: int
    dp_rank: int
    dp_size: int
    positions: torch.Tensor | None = None  # of a context-parallel rank in a sequence; None: all
    eval_batches: int = 0  # of 16 sequences to validate on, at most; 0: hold nothing out
    first_step: int = 0  # of this run: not 0 after a resume
    seen_before: int = 0  # tokens until then, maybe in batches of another size

    def __post_init__(self) -> None:
        assert self.dp_rank < self.dp_size, f"dp_rank={self.dp_rank}, dp_size={self.dp_size}"
        S, num_tokens, needed = self.seq_length, len(self.tokens), 2 if self.eval_batches else 1
        if num_tokens < needed * (S + 1):
            both = " (1 sequence to train on, 1 to validate on)" if self.eval_batches else ""
            raise ValueError(
                f"the text has {num_tokens} tokens, but needs at least {needed} x (seq_length + 1)"
                f" = {needed * (S + 1)}{both}: use more text or a shorter training.seq_length"
            )
        self.positions = torch.arange(S) if self.positions is None else self.positions
        self.global_batch = self.dp_size * self.num_micro_batches * self.micro_batch_size
        self.tokens_per_step = self.global_batch * S

        # Cut the stream, not the list of sequences, in which neighbours share a token. Batch size,
        # seed and step do not move the cut: a run never trains on what it is validated on.
        held_out = max(min(num_tokens // 10, MOST_HELD_OUT), S + 1) if self.eval_batches else 0
        self.cut = num_tokens - held_out
        self.num_sequences = (self.cut - 1) // S  # to train on
        # In a random but fixed order: the first few are a fair sample of all that is held out, and
        # the same in every layout and batch size.
        sample = np.random.default_rng(0).permutation(max(0, held_out - 1) // S)
        self._eval_starts = self.cut + S * sample[: self.eval_batches * EVAL_BATCH]
        self.num_eval_sequences = len(self._eval_starts)
        self.num_eval_batches = -(-self.num_eval_sequences // self.global_batch)  # rounded up

        self._order = lru_cache(maxsize=2)(  # a step can begin in one epoch and end in the next
            lambda epoch: np.random.default_rng((self.seed, epoch)).permutation(self.num_sequences)
        )

    def tokens_seen(self, step: int) -> int:
        """Tokens that the model has been trained on when `step` steps are done."""
        return self.seen_before + (step - self.first_step) * self.tokens_per_step

    def batch(self, step: int, micro_batch: int) -> Batch:
        """What this rank trains on in one micro-batch of a step, both counted from 0."""
        return self._read(self._starts(step, self._places(micro_batch)))

    def _starts(self, step: int, rows: Iterable[int]) -> list[int]:
        """Where in the stream these rows of a step's global batch begin."""
        first = self.tokens_seen(step) // self.seq_length  # place, counted over all epochs
        places = (divmod(first + j, self.num_sequences) for j in rows)
        return [self.seq_length * self._order(epoch)[place] for epoch, place in places]

    def eval_batch(self, index: int, micro_batch: int) -> Batch:
        """One micro-batch of held-out text, index in range(num_eval_batches)."""
        places = index * self.global_batch + self._places(micro_batch)
        batch = self._read(self._eval_starts.take(places, mode="clip"))
        # Some rows of the last batch only fill it. So sum up losses and numbers of targets: a mean
        # of the batches' means would weigh the last one wrongly.
        batch.targets[places >= self.num_eval_sequences] = IGNORE_INDEX
        return batch

    def _places(self, micro_batch: int) -> np.ndarray:
        """This rank's rows in the global batch."""
        assert 0 <= micro_batch < self.num_micro_batches, f"there is no micro-batch {micro_batch}"
        first = (micro_batch * self.dp_size + self.dp_rank) * self.micro_batch_size
        return np.arange(first, first + self.micro_batch_size)

    def _read(self, starts: list[int] | np.ndarray) -> Batch:
        rows = np.stack([self.tokens[i : i + self.seq_length + 1] for i in starts], dtype=np.int64)
        rows = torch.from_numpy(rows)  # [B, S + 1]
        return Batch(rows[:, self.positions], rows[:, self.positions + 1], self.positions)
