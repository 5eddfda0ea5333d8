"""Apart: one process once more, with each sequence in a micro-batch of its own.

The right run has the layout's own micro-batches. A function that mixes the sequences of one does so
there, too; but the model then depends on how dp and micro-batches cut the batch.
"""

from dataclasses import replace

import torch

from difference.calls import Call, calls_of
from difference.compare import TOLERANCE, error_of
from difference.taps import INSIDE, RESULT, Record
from difference.tiny import Trial
from difference.whole import Whole, right_whole


def mixes(trial: Trial, whole: Whole) -> list[str]:
    """What of the first step differs, if something does; and yours that mixes sequences first."""
    work, experts = trial.workload, trial.model_config.num_local_experts
    if work.micro_batch_size == 1 or (experts and work.routing.moe_aux_loss_coeff):
        return []  # such a loss is of a micro-batch
    count = work.num_micro_batches * work.micro_batch_size
    of_each = replace(work, micro_batch_size=1, num_micro_batches=count)
    apart = right_whole(trial._replace(workload=of_each), steps=1)
    both = [key for key in apart if key in whole]  # which --right may have of another version
    sums = [key for phase in ("loss", "summed gradient") for key in both if key.phase == phase]
    wrong = (key for key in sums if error_of(apart[key], whole[key], whole[key]) > TOLERANCE)
    names = ["loss" if key.phase == "loss" else f"{key.phase} of {key.name}" for key in wrong][:1]
    return [*names, *(_mixing(trial, whole, apart) if names else [])]


def _mixing(trial: Trial, whole: Whole, apart: Whole) -> list[str]:
    """The functions whose result is not that of each sequence, those first that returned first."""
    B, dp, found = trial.workload.micro_batch_size, trial.layout.dp, {}
    for call in _calls(apart):
        found[call[:2]] = call.made[RESULT]
    names = []
    for call in (call for call in _calls(whole) if not call.key.step):
        first = (call.key.micro_batch * dp + call.key.dp) * B
        places = (divmod(first + j, dp) for j in range(B))
        keys = (call.key._replace(micro_batch=m, dp=d) for m, d in places)
        of_each = [found.get((key, call.which)) for key in keys]
        if all(t is not None and t.ndim for t in of_each):
            together, mine = torch.cat(of_each), call.made[RESULT]
            if error_of(mine, together, together) > TOLERANCE:
                names.append(call.key.name)
    return [*dict.fromkeys(names)]


def _calls(whole: Whole) -> list[Call]:
    """Those that return a tensor."""
    records = [Record(key, of, [], []) for key, of in whole.items() if key.phase == INSIDE]
    return [call for call in calls_of(records) if RESULT in call.made]
