"""Records: what a process computes, written to a file at once, in case the process dies."""

import pickle
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

# In the order in which a run computes them.
PHASES = ("built", "initial", "forward", "backward", "summed gradient", "loss", "gradient norm")
PHASES += ("scaled gradient", "optimizer state", "weights")


class Key(NamedTuple):
    step: int  # counted from 0
    phase: str
    name: str
    micro_batch: int = 0
    dp: int = 0  # of a whole batch's tensors; 0 where all dp ranks have the same


class Record(NamedTuple):
    key: Key
    tensor: Tensor
    ran: list[str]  # functions of the project since the record before, the last call first
    running: list[str]  # those that have not returned, the innermost first
    note: dict


class Writer:
    def __init__(self, path: Path) -> None:
        self.file = path.open("wb", buffering=0)

    def write(self, key: Key, tensor: Tensor, ran: Sequence = ((), ()), **note) -> None:
        record = tuple(key), tensor.detach().numpy(), *ran, note | {"time": time.time()}
        self.file.write(pickle.dumps(record))


def read(path: Path) -> Iterator[Record]:
    """All records that are complete."""
    with path.open("rb") as file:
        while True:
            try:
                key, values, ran, running, note = pickle.load(file)
            except (EOFError, pickle.UnpicklingError):  # the process died while it wrote
                return
            yield Record(Key(*key), torch.from_numpy(values), ran, running, note)
