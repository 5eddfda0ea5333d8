"""Watch: what your own functions get, make and keep is noted, by a `Profile`."""

from collections.abc import Iterator
from itertools import count
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from difference.taps import INSIDE, MOST_NUMBERS, Notes, own_of

MOST_OF_ALL = 16  # of a list or a dict
# Methods of extensions and gradients outside forward and backward: there an object's own tensors
# are noted, too. In forward they would be of the micro-batches so far.
BETWEEN = "counts updated weights_changed wait scale"


class Watch:
    """Notes what your functions get and make: a `Profile` calls it at each call and return."""

    def __init__(self, notes: Notes) -> None:
        self.notes, self.count = notes, count()
        self.open: list[tuple[int, str]] = []  # numbers and names of those that run
        self.saved = WeakKeyDictionary()  # for backward, by the ctx of an autograd.Function

    def __call__(self, event: str, name: str, values: dict[str, object]) -> None:
        if event == "call":
            self.open.append((next(self.count), name))
        numbers, names = zip(*reversed(self.open), strict=True)
        caller = numbers[1] if numbers[1:] else ""
        who = f"{numbers[0]} {caller} {','.join(names)} {event}"
        if isinstance(ctx := values.get("ctx"), FunctionCtx):
            values = values | {f"ctx.{of}": one for of, one in vars(ctx).items()}
            if name.endswith(".forward"):  # in backward, recomputation gives them only once
                self.saved[ctx] = getattr(ctx, "to_save", None)
            elif event == "call":
                values["saved"] = self.saved.get(ctx)
        if names[-1].rpartition(".")[2] in BETWEEN.split():
            values = values | {f"self.{of}": one for of, one in own_of(values.get("self"))}
        for variable, value in values.items():
            for text, number in self._numbers_of(variable, value):
                at = self.notes.at._replace(phase=INSIDE, name=f"{who} {text}")
                self.notes.write(at, number, ([], []))
        if event == "return":
            self.open.pop()

    def _numbers_of(self, name: str, value: object) -> Iterator[tuple[str, Tensor]]:
        """Its tensors of floats, those in a small container, and gradients of parameters."""
        several = {name: value}
        if isinstance(value, tuple | list):
            several = {f"{name}[{i}]": one for i, one in enumerate(value[:MOST_OF_ALL])}
        elif isinstance(value, dict):
            few = [*value.items()][:MOST_OF_ALL]
            several = {f"{name}[{key!r}]": one for key, one in few}
        for text, one in several.items():
            if type(one) is float:
                yield text, torch.tensor(one, dtype=torch.float64)
            if type(one) is nn.Parameter and one.grad is not None:
                yield from self._numbers_of(f"{text}.grad", one.grad)
            is_plain = type(one) in (Tensor, nn.Parameter) and one.device.type == "cpu"
            if is_plain and one.is_floating_point() and 0 < one.numel() <= MOST_NUMBERS:
                # A copy: numpy would pin the memory of the tensor, and sharding frees it.
                yield text, one.detach().to(torch.float64, copy=True)
