"""Data parallelism: every rank has the whole model, and its own part of the global batch.

The ranks share only gradients: the sum over all of them must reach each before the update. One
all-reduce a parameter after backward would do. It has two faults, which buckets mend:

    backward runs      layer 3    layer 2    layer 1    layer 0    update
    one by one                                                     [3][2][1][0]
    in buckets                    [ 3 + 2 ]             [ 1 + 0 ]

Many small messages cost latency, so gradients lie side by side in a few flat buffers, and a buffer
is one message. And the network idles while backward computes, so a bucket is sent as soon as its
last gradient has arrived. `p.grad` is a view of its bucket: nothing is ever copied.

Gradients are summed, never averaged: the loss is a sum over tokens, and the step divides once by
the number of target tokens in the global batch. Ranks of a context-parallel group see different
tokens of the same sequences, which is the same to a weight: the axis is (dp, cp).

Cost: a step sends 2 (n-1)/n of the gradients' bytes, once, however many micro-batches there are.
Source: Li et al. 2020, "PyTorch Distributed", section 3.2: buckets, overlap, no sync between
micro-batches. In production: `torch.nn.parallel.DistributedDataParallel`.
"""

import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import nn

from picotron_min.collectives import Axis, all_reduce, start_all_reduce

BUCKET_BYTES = 25 * 2**20  # as in DDP


class GradientBuckets:
    """Gradients of some parameters in flat buffers, summed over an axis while backward runs.

    `parameters`, by name, must be in the order in which the forward uses them. After the axis they
    are summed over the axes of `then`, which may not start before all backwards have ended.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        axis: Axis,
        then: Sequence[Axis] = (),
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self.axis, self.then = axis, then
        self.buckets: list[_Bucket] = []
        self.bucket_of: dict[str, _Bucket] = {}
        # In reverse, because backward makes gradients final from the last layer to the first.
        for name, parameter in reversed(parameters.items()):
            # A sum of bfloat16 gradients over many ranks loses the small ones.
            assert parameter.dtype in (torch.float32, torch.float64), f"{name}: {parameter.dtype}"
            full = self.buckets and self.buckets[-1].num_bytes + parameter.nbytes > bucket_bytes
            if full or not self.buckets:
                self.buckets.append(_Bucket())
            self.buckets[-1].parameters[name] = parameter
            self.bucket_of[name] = self.buckets[-1]
            # Weak: Python's garbage collector does not see a cycle that goes through such a hook.
            hook = partial(_gradient_of_autograd, weakref.ref(self), name)
            parameter.register_post_accumulate_grad_hook(hook)
        for bucket in self.buckets:
            bucket.allocate()
        self.num_started = 0

    def begin(self, num_backwards: int) -> None:
        """Zero the gradients; each parameter will get so many, one from each backward pass."""
        self.num_started = 0
        for bucket in self.buckets:
            bucket.gradients.zero_()
            bucket.missing = Counter(dict.fromkeys(bucket.parameters, num_backwards))

    def arrived(self, name: str) -> None:
        """A gradient has been added to a parameter's. Its last one may complete a bucket."""
        missing = self.bucket_of[name].missing
        missing[name] -= 1
        if not missing[name]:
            del missing[name]
            self._start_complete_buckets()

    def _start_complete_buckets(self) -> None:
        # In order, also if a later bucket is complete first: collectives must match on all ranks.
        while self.num_started < len(self.buckets) and not self.buckets[self.num_started].missing:
            bucket = self.buckets[self.num_started]
            bucket.work = start_all_reduce(bucket.gradients, self.axis)
            self.num_started += 1

    def wait(self) -> None:
        """Return when every gradient is the sum over all axes; RuntimeError names missing ones."""
        if missing := {n: count for b in self.buckets for n, count in sorted(b.missing.items())}:
            names = ", ".join(f"{name} ({count})" for name, count in missing.items())
            raise RuntimeError(
                f"gradients (so many) did not reach {names}: every parameter must take part in the"
                " loss of each micro-batch"
            )
        for bucket in self.buckets:
            bucket.work.wait()
            for axis in self.then:
                all_reduce(bucket.gradients, axis)

    def scale(self, factor: float) -> None:
        for bucket in self.buckets:
            bucket.gradients.mul_(factor)


def _gradient_of_autograd(buckets: weakref.ref, name: str, _: nn.Parameter) -> None:
    buckets().arrived(name)


class _Bucket:
    """Some parameters, and one flat tensor that their gradients are views of."""

    def __init__(self) -> None:
        self.parameters: dict[str, nn.Parameter] = {}
        self.missing: Counter[str] = Counter()  # gradients that are still to come

    @property
    def num_bytes(self) -> int:
        return sum(parameter.nbytes for parameter in self.parameters.values())

    def allocate(self) -> None:
        parameters = list(self.parameters.values())
        sizes = [parameter.numel() for parameter in parameters]
        self.gradients = parameters[0].new_zeros(sum(sizes))
        for parameter, view in zip(parameters, self.gradients.split(sizes), strict=True):
            parameter.grad = view.view_as(parameter)
