"""Records: what a process has seen of its run, written to a file at once, in case it dies.

Each record is a line of JSON, then the tensor's bytes.
"""

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
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
        values = np.ascontiguousarray(tensor.detach().numpy())
        head = {"key": key, "shape": tuple(tensor.shape), "dtype": values.dtype.str}
        head |= {"ran": ran, "note": note | {"time": time.time()}}
        self.file.write(json.dumps(head).encode() + b"\n" + values.tobytes())


def read(path: Path) -> Iterator[Record]:
    """All records that are complete."""
    data, at = path.read_bytes() if path.exists() else b"", 0
    while (end := data.find(b"\n", at)) >= 0:
        head = json.loads(data[at:end])
        values = np.empty(head["shape"], head["dtype"])
        at = end + 1 + values.nbytes
        if at > len(data):
            return
        flat = np.frombuffer(data[end + 1 : at], head["dtype"]).copy()
        tensor = torch.from_numpy(flat.reshape(head["shape"]))
        yield Record(Key(*head["key"]), tensor, *head["ran"], head["note"])
