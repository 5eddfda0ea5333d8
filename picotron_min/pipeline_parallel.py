"""Pipeline parallelism: each rank has some consecutive layers, and activations travel.

    rank 0                      -- activations [B, S, E] -->    rank 1
    embedding, layers 0-4       <-- their gradients --------    layers 5-7, norm, lm_head

What is done when is decided beforehand, as a plan (pipeline_schedule.py). This file cuts the model
and runs plans. A single stage's plan has no messages. Rank 1's, for 3 micro-batches, begins

    receive F0 from rank 0, receive F1 from rank 0, F0, B0, send B0 to rank 0, F1, B1, ...

so that messages overlap with compute: a receive is posted while its rank has other work to do, and
a send runs in the background until the next one of its kind and chunk.

Cost: per micro-batch and boundary between stages one activation [B, S/cp, E] in the dtype of the
residual stream (S/(cp tp) with sequence parallelism), and one gradient of the same size back.

Tied embeddings: the first and the last stage each have a copy. The copies start equal, get the same
sum of both gradients at the end of the plan, and so stay equal to the last bit (placement.py,
`ends`). Where both stages are on one rank, it has the embedding once.

Source: Huang et al. 2019, "GPipe". In production: `torch.distributed.pipelining`.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from picotron_min.collectives import Axis, start_receive, start_send
from picotron_min.data import Batch
from picotron_min.pipeline_schedule import RECEIVES, SENDS, Action, Kind, Plan, Schedule, stages_of

Watch = Callable[[Action], AbstractContextManager]  # to time actions, see runtime/trace.py


class Stage(NamedTuple):
    """Which part of the model a stage is."""

    layers: range
    is_first: bool
    is_last: bool


class Chunk(NamedTuple):
    """One of the stages of this rank, with its part of the model."""

    stage: Stage
    model: nn.Module


def my_stages(num_layers: list[int], schedule: Schedule, axis: Axis) -> list[Stage]:
    """The stages of this rank, given how many layers every stage has."""
    ends, last = list(accumulate(num_layers)), len(num_layers) - 1
    mine = stages_of(schedule, axis.rank, axis.size, len(num_layers) // axis.size)
    return [Stage(range(ends[s] - num_layers[s], ends[s]), s == 0, s == last) for s in mine]


def keep_stage(model: nn.Module, stage: Stage) -> None:
    """Delete, in place, what other stages have. What is left keeps its names."""
    for name in list(model.model.layers):
        if int(name) not in stage.layers:
            del model.model.layers[name]  # a dict of modules: the others keep their numbers
    if not stage.is_first:
        model.model.embed_tokens = nn.Identity()  # its input is an activation
    if not stage.is_last:
        model.model.norm, model.lm_head = nn.Identity(), nn.Identity()


def tie_ends(chunks: list[Chunk]) -> None:
    """Make both embeddings one parameter where two chunks of this rank have them."""
    first, last = chunks[0], chunks[-1]
    if first.model.config.tie_word_embeddings and first.stage.is_first and last.stage.is_last:
        last.model.lm_head.weight = first.model.model.embed_tokens.weight


@dataclass
class Pipeline:
    """Runs plans over the chunks of this rank."""

    chunks: list[Chunk]
    axis: Axis
    device: torch.device  # that computes
    new_activation: Callable[[], Tensor]  # an empty one, of the shape of those that travel

    def run(self, plan: Plan, read: Callable[[int], Batch], watch: Watch | None = None) -> Tensor:
        """Run the plan's actions in order; gradients are added to `p.grad`.

        read(i) gives micro-batch i. Compute actions run within
        `watch(action)`, which excludes waiting for their input. Returns [summed loss, number of
        targets] in float64, on the device, without waiting for it; zeros but on the last stage.
        """
        self.read, self.watch = read, watch or nullcontext
        self.totals = torch.zeros(2, dtype=torch.float64, device=self.device)
        self.live: dict[tuple, tuple] = {}  # micro-batch, chunk -> its input and the graph's end
        self.arriving: dict[tuple, tuple] = {}  # kind, micro-batch, chunk -> buffer, its receive
        self.leaving: dict[tuple, Tensor] = {}  # kind, micro-batch, chunk -> what is to be sent
        self.sending: dict[tuple, dist.Work] = {}  # kind, chunk -> the latest send
        methods = self.methods()
        for action in plan:
            methods[action.kind](action)
        for work in self.sending.values():
            work.wait()  # the last send of each kind
        return self.totals

    def methods(self) -> dict[Kind, Callable[[Action], None]]:
        methods = {Kind.FORWARD: self._forward, Kind.BACKWARD: self._backward}
        methods |= dict.fromkeys(SENDS.values(), self._send)
        return methods | dict.fromkeys(RECEIVES.values(), self._receive)

    def _forward(self, action: Action) -> None:
        _, i, c, _ = action
        stage, model = self.chunks[c]
        batch = self.read(i).to(self.device)
        x = batch.tokens if stage.is_first else self._arrived(Kind.RECEIVE_ACTIVATION, i, c)
        if not stage.is_first:
            x.requires_grad_(torch.is_grad_enabled())  # a leaf: the graph of a stage begins here
        with self.watch(action):
            targets = batch.targets if stage.is_last else None
            out = model(x, batch.positions, targets, *batch.extra)
        if stage.is_last:
            self.totals[0] += out.detach()
            self.totals[1] += batch.num_targets
        else:
            self.leaving[Kind.SEND_ACTIVATION, i, c] = out.detach()
        if torch.is_grad_enabled():  # backward needs the graph behind `out`, not its values:
            self.live[i, c] = x, get_gradient_edge(out)  # they can go once they are sent

    def _backward(self, action: Action) -> None:
        _, i, c, _ = action
        stage = self.chunks[c].stage
        x, end = self.live.pop((i, c))
        gradient = None if stage.is_last else self._arrived(Kind.RECEIVE_GRADIENT, i, c)
        with self.watch(action):
            torch.autograd.backward(end, gradient)  # of the last stage's loss: 1
        if not stage.is_first:
            self.leaving[Kind.SEND_GRADIENT, i, c] = x.grad

    def _send(self, action: Action) -> None:
        kind, i, c, peer = action
        if older := self.sending.get((kind, c)):
            older.wait()  # so at most one activation and one gradient a chunk are leaving
        self.sending[kind, c] = start_send(self.leaving.pop((kind, i, c)), self.axis, peer)

    def _receive(self, action: Action) -> None:
        kind, i, c, peer = action
        buffer = self.new_activation()
        self.arriving[kind, i, c] = buffer, start_receive(buffer, self.axis, peer)

    def _arrived(self, kind: Kind, i: int, c: int) -> Tensor:
        if (kind, i, c) in self.arriving:
            buffer, work = self.arriving.pop((kind, i, c))
            work.wait()  # on a GPU its stream waits, not this process
            return buffer
        # It comes from another chunk of this rank, and no message brings it.
        if kind is Kind.RECEIVE_ACTIVATION:
            return self.leaving.pop((Kind.SEND_ACTIVATION, i, c - 1))
        return self.leaving.pop((Kind.SEND_GRADIENT, i, c + 1))
