"""Run a plan: the one train step, whatever the layout.

This is the interpreter in its one-stage form; stages that send and receive come with pipeline
parallelism. It knows two actions. FORWARD reads a micro-batch and keeps its loss, and with it the
graph; BACKWARD turns the kept loss into gradients and lets the graph go.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from picotron_min.pipeline_schedule import Action, Kind


class MicroBatch(Protocol):
    """What `data.Batch` is; this file needs no more of it."""

    tokens: Tensor  # [B, S/cp]
    positions: Tensor  # [S/cp]
    targets: Tensor  # [B, S/cp]
    num_targets: int  # that are not ignored


def run_plan(
    plan: list[Action],
    model: nn.Module,
    read: Callable[[int], MicroBatch],
    before_last_backward: Callable[[], None],
) -> Tensor:
    """Do the plan's actions in order; gradients are added to `p.grad`.

    read(i) gives micro-batch i. `before_last_backward` is called when every further gradient is
    final, so that their summation over ranks can overlap with that backward.
    Returns [summed loss, number of targets] of this rank's micro-batches, float64, on the model's
    device: nothing here waits for the device.
    """
    totals = torch.zeros(2, dtype=torch.float64, device=next(model.parameters()).device)
    losses: dict[int, Tensor] = {}
    last_backward = max((i for i, a in enumerate(plan) if a.kind is Kind.BACKWARD), default=None)
    for i, action in enumerate(plan):
        match action.kind:
            case Kind.FORWARD:
                batch = read(action.micro_batch)
                loss = model(batch.tokens, batch.positions, batch.targets)
                losses[action.micro_batch] = loss
                totals[0] += loss.detach()
                totals[1] += batch.num_targets
            case Kind.BACKWARD:
                if i == last_backward:
                    before_last_backward()
                losses.pop(action.micro_batch).backward()
    return totals
