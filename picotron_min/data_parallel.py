"""Data parallelism: every rank has the whole model and its own part of the global batch.

The only thing to share are gradients: the sum over all ranks must reach every rank before the step.
One all-reduce per parameter after backward would do; it has two faults, and buckets mend both:

    backward runs      layer 3    layer 2    layer 1    layer 0    step
    one by one                                                     [3][2][1][0]
    in buckets                    [ 3 + 2 ]             [ 1 + 0 ]

Many small messages cost latency, so gradients live side by side in a few flat buffers, and a buffer
is one message. And the network idles while backward computes, so a bucket is sent as soon as its
last gradient has arrived: parameters are laid out in reverse order of use, the order in which
backward finishes them. `p.grad` is a view into its bucket, so nothing is ever copied. Only where a
bfloat16 copy computes in place of p, the copy's gradient is made apart, and added to p's.

Gradients are summed, never averaged: the loss is a sum over tokens, and the step divides once by
the number of target tokens in the whole global batch. The axis is (dp, cp): the ranks of a context-
parallel group see different tokens of the same sequences, which is all the same to a weight.

Cost: an all-reduce of the gradients, 2 (n-1)/n x 4 bytes per parameter and step, however many
micro-batches are accumulated. Memory: 4 bytes per parameter, the gradients themselves.

Source: Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training",
sections 3.2 and 4.2. In production: `torch.nn.parallel.DistributedDataParallel`.
"""

import weakref
from collections.abc import Iterable, Mapping

import torch
from torch import nn

from picotron_min.collectives import Axis, start_all_reduce

BUCKET_BYTES = 25 * 2**20


class GradientBuckets:
    """Owns the gradients of some parameters and sums them over an axis while backward still runs.

    Per step: `zero()`, any number of backward passes, `reduce_in_next_backward()` before the last
    of them, and `wait()` after it.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        axis: Axis,
        bucket_bytes: int = BUCKET_BYTES,
        masters: Mapping[nn.Parameter, nn.Parameter] | None = None,
    ) -> None:
        """named_parameters in order of use; the ranks of the axis must give the same ones.

        A parameter larger than `bucket_bytes` gets a bucket to itself. `masters` has, for those
        that are copies, the parameters that want their gradients.
        """
        self.axis = axis
        self.buckets: list[_Bucket] = []
        self.reducing = False
        for name, used in reversed(list(named_parameters)):
            parameter = (masters or {}).get(used, used)  # used is a copy, or the parameter itself
            # A sum of bfloat16 gradients over many ranks loses the small ones.
            assert parameter.dtype in (torch.float32, torch.float64), f"{name}: {parameter.dtype}"
            if not self.buckets or self.buckets[-1].num_bytes + parameter.nbytes > bucket_bytes:
                self.buckets.append(_Bucket())
            self.buckets[-1].add(name, parameter)
            used.register_post_accumulate_grad_hook(self._arrival(self.buckets[-1], name))
        for bucket in self.buckets:
            bucket.allocate()

    def zero(self) -> None:
        for bucket in self.buckets:
            bucket.gradients.zero_()

    def scale(self, factor: float) -> None:
        for bucket in self.buckets:
            bucket.gradients.mul_(factor)

    def reduce_in_next_backward(self) -> None:
        """The next backward pass is the step's last: send each bucket when it is complete."""
        self.reducing = True
        self.num_started = 0
        for bucket in self.buckets:
            bucket.missing = set(bucket.parameters)

    def wait(self) -> None:
        """Return when every gradient is the sum over the axis; RuntimeError names those without."""
        assert self.reducing, "reduce_in_next_backward() was not called: nothing was summed"
        self.reducing = False
        if missing := [name for bucket in self.buckets for name in sorted(bucket.missing)]:
            raise RuntimeError(
                f"no gradient reached {', '.join(missing)}:"
                " every parameter must take part in the loss"
            )
        for bucket in self.buckets:
            bucket.work.wait()

    def _arrival(self, bucket: "_Bucket", name: str):
        # Weak, because Python's collector does not see a cycle that goes through such a hook.
        me, its_bucket = weakref.ref(self), weakref.ref(bucket)

        def gradient_is_complete(used: nn.Parameter) -> None:
            buckets, bucket = me(), its_bucket()
            parameter = bucket.parameters[name]
            if parameter is not used:
                parameter.grad += used.grad
                used.grad = None
            if buckets.reducing:
                bucket.missing.discard(name)
                buckets._start_complete_buckets()

        return gradient_is_complete

    def _start_complete_buckets(self) -> None:
        # In order, also if a later bucket is complete first: collectives must match on all ranks.
        while self.num_started < len(self.buckets) and not self.buckets[self.num_started].missing:
            bucket = self.buckets[self.num_started]
            bucket.work = start_all_reduce(bucket.gradients, self.axis)
            self.num_started += 1


class _Bucket:
    """Some parameters, and one flat tensor that their gradients are views of."""

    def __init__(self) -> None:
        self.parameters: dict[str, nn.Parameter] = {}
        self.missing: set[str] = set()  # parameters whose last gradient is still to come
        self.num_bytes = 0

    def add(self, name: str, parameter: nn.Parameter) -> None:
        self.parameters[name] = parameter
        self.num_bytes += parameter.nbytes

    def allocate(self) -> None:
        parameters = list(self.parameters.values())
        sizes = [parameter.numel() for parameter in parameters]
        self.gradients = parameters[0].new_zeros(sum(sizes))
        for parameter, view in zip(parameters, self.gradients.split(sizes), strict=True):
            parameter.grad = view.view_as(parameter)
