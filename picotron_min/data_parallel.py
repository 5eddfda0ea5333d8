"""Data parallelism: every rank has the whole model, and its own part of the global batch.

The ranks share only gradients: the sum over all of them must reach each before the update. One
all-reduce a parameter after backward would do. It has two faults, which buckets mend:

    backward runs      layer 3    layer 2    layer 1    layer 0    update
    one by one                                                     [3][2][1][0]
    in buckets                    [ 3 + 2 ]             [ 1 + 0 ]

Many small messages cost latency, so gradients lie side by side in a few flat buffers of
BUCKET_BYTES (layout.py), and a buffer is one message. And the network idles while backward
computes, so a bucket is sent as soon as its last gradient has arrived. Gradients are summed, never
averaged: the step divides once by the number of target tokens in the global batch. Context-parallel
ranks, too, see other tokens with the same weights: the axis is (dp, cp).

Cost: a step sends 2 (n-1)/n of the gradients' bytes, however many micro-batches there are. Source:
Li et al. 2020, "PyTorch Distributed", section 3.2. In production: `DistributedDataParallel`.
"""

import weakref
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from picotron_min.collectives import Axis, all_reduce, start_all_reduce
from picotron_min.layout import BUCKET_BYTES
from picotron_min.mesh import Axes
from picotron_min.model import Llama
from picotron_min.placement import Table, saved_name


class GradientBuckets:
    """Gradients of some parameters in flat buffers, summed over an axis while backward runs.

    `parameters`, by name, must be in the order in which the forward uses them. After the axis they
    are summed over the axes of `then`, which may not start before all backwards have ended.
    `uses`: in how many chunks of this rank a parameter is, if not in one.
    """

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        axis: Axis,
        then: Sequence[Axis] = (),
        bucket_bytes: int = BUCKET_BYTES,
        uses: Mapping[str, int] | None = None,
    ) -> None:
        self.axis, self.then, self.uses, groups = axis, then, uses or {}, [{}]
        this = weakref.proxy(self)  # the garbage collector does not see a cycle through a hook
        # In reverse, because backward makes gradients final from the last layer to the first.
        for name, parameter in reversed(parameters.items()):
            # A sum of bfloat16 gradients over many ranks loses the small ones.
            assert parameter.dtype in (torch.float32, torch.float64), f"{name}: {parameter.dtype}"
            # Autograd calls it. Code that adds to p.grad without autograd must do so, too.
            parameter.arrived = lambda name=name: this.arrived(name)
            parameter.register_post_accumulate_grad_hook(lambda p: p.arrived())
            if sum(p.nbytes for p in [*groups[-1].values(), parameter]) > bucket_bytes:
                groups.append({})  # a parameter above the limit has a bucket of its own
            groups[-1][name] = parameter
        # A bucket has the order of the forward: alike matrices lie at equal distances.
        self.buckets = [Bucket(dict(reversed(group.items()))) for group in groups if group]
        self.flat = [bucket.gradients for bucket in self.buckets]
        self.begin(0)

    def begin(self, num_backwards: int) -> None:
        """Zero the gradients; each parameter will receive `num_backwards` of them for each use."""
        names = [name for bucket in self.buckets for name in bucket.names]
        self.missing = {name: num_backwards * self.uses.get(name, 1) for name in names}
        self.works: list[dist.Work] = []  # of the first buckets, which are already sent
        # All at once, on a GPU. Not by zero_grad, which would replace the views by None.
        torch._foreach_zero_(self.flat)

    def arrived(self, name: str) -> None:
        """A gradient has been added to a parameter's; the last one may complete a bucket."""
        self.missing[name] -= 1
        if not self.missing[name]:
            self._start_complete_buckets()

    def _start_complete_buckets(self) -> None:
        # In order, also if a later bucket is complete first: collectives must match on all ranks.
        for bucket in self.buckets[len(self.works) :]:
            if any(self.missing[name] for name in bucket.names):
                break  # later ones wait for it
            self.works.append(start_all_reduce(bucket.gradients, self.axis))

    def wait(self) -> None:
        """Return when every gradient is the sum over all axes; RuntimeError names missing ones."""
        refuse_missing(self.missing)
        for gradients, work in zip(self.flat, self.works, strict=True):
            work.wait()
            for axis in self.then:  # a tied embedding: the two ends of a pipeline
                all_reduce(gradients, axis)

    def scale(self, factor: float) -> None:
        torch._foreach_mul_(self.flat, factor)


class Bucket:
    """Some parameters, and one flat tensor that their gradients are views of."""

    def __init__(self, parameters: dict[str, nn.Parameter]) -> None:
        self.names = list(parameters)
        sizes = [parameter.numel() for parameter in parameters.values()]
        self.gradients = next(iter(parameters.values())).new_zeros(sum(sizes))  # same dtype, device
        views = self.gradients.split(sizes)
        for parameter, view in zip(parameters.values(), views, strict=True):
            parameter.grad = view.view_as(parameter)  # autograd adds to it in place


def refuse_missing(missing: dict[str, int]) -> None:
    """Raise RuntimeError if gradients have not arrived; `missing`: how many, by parameter."""
    if names := ", ".join(f"{name} ({n})" for name, n in sorted(missing.items()) if n):
        why = "every parameter must take part in the loss of each micro-batch"
        raise RuntimeError(f"gradients are missing (how many) for {names}: {why}")


def build_buckets(models: Sequence[Llama], table: Table, axes: Axes) -> list[GradientBuckets]:
    """Gradient buckets for each model of this rank, and each choice of axes to sum over."""
    uses = Counter(p for model in models for p in model.parameters())
    all_buckets, has_bucket = [], set()
    for model in models:
        tied, by_axes = model.config.tie_word_embeddings, defaultdict(dict)
        for name, parameter in model.named_parameters():
            if parameter not in has_bucket:  # of an earlier chunk
                by_axes[table[saved_name(name, tied)].sums][name] = parameter
                has_bucket.add(parameter)
        for names, parameters in by_axes.items():
            axis, *then = (axes[name] for name in names)
            times = {name: uses[parameter] for name, parameter in parameters.items()}
            all_buckets.append(GradientBuckets(parameters, axis, then, uses=times))
    return all_buckets
