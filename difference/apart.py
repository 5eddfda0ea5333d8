"""Apart: one process once more, with each sequence in a micro-batch of its own.

The right run has the layout's own micro-batches. A function that mixes the sequences of one, or
adds up micro-batches wrongly, does so there, too; but the model then depends on how dp and
micro-batches cut the batch. The second step shows what the first has left in a state.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from difference.calls import Call, calls_of, counters_of
from difference.compare import TOLERANCE, error_of
from difference.suspects import look_at
from difference.taps import INSIDE, RAN, RESULT, Record, is_yours
from difference.tiny import Trial
from difference.whole import Whole, right_whole

UNCHECKED = "             whether sequences of a micro-batch are mixed is not checked: "


def mixing(trial: Trial, whole: Whole) -> tuple[bool, list[str]]:
    """Whether a function of yours knows how the batch is cut, and what to print about that, if so.

    `whole` can be of another version, with `--right`, and then has other tensors, too.
    """
    work, experts = trial.workload, trial.model_config.num_local_experts
    if work.micro_batch_size == 1:
        return False, []
    if experts and work.routing.moe_aux_loss_coeff:
        return False, [f"{UNCHECKED}moe_aux_loss_coeff balances the experts of each micro-batch"]
    count = work.num_micro_batches * work.micro_batch_size
    of_each = replace(work, micro_batch_size=1, num_micro_batches=count)
    try:
        apart = right_whole(trial._replace(workload=of_each), steps=min(2, trial.steps))
    except ValueError as error:
        return False, [f"{UNCHECKED}with one sequence {error}"]
    sums = [key for key in apart if key in whole and key.phase in ("loss", "summed gradient")]
    sums.sort(key=lambda key: (key.step, key.phase))
    wrong = next((key for key in sums if _differs(whole[key], apart[key])), None)
    if not wrong:
        return False, []
    name = "loss" if wrong.phase == "loss" else f"{wrong.phase} of {wrong.name}"
    ran = (key.name for key in whole if key.phase == RAN and is_yours(key.name))
    backward = [function for function in ran if function.endswith(".backward")]
    names = [*dict.fromkeys([*_functions(trial, whole, apart), *backward * wrong.step])]
    return True, [
        f"MIXED        step {wrong.step + 1}, {name}: the ranks have what one process has, but it",
        "             changes if each sequence is a micro-batch of its own: something mixes",
        "             sequences, or adds up micro-batches wrongly",
        *([look_at(names)] if names else []),
    ]


def _differs(got: Tensor, right: Tensor) -> bool:
    return not error_of(got, right, right) <= TOLERANCE  # NaN differs


def _functions(trial: Trial, whole: Whole, apart: Whole) -> Iterator[str]:
    """Those that get what single sequences give, and return something else, in their order."""
    B, dp = trial.workload.micro_batch_size, trial.layout.dp
    calls = _calls(whole)
    single = {call[:2]: call for call in _calls(apart) if RESULT in call.made}
    for call in calls:
        if call.key.step or RESULT not in call.made:
            continue
        alone = single.get((call.key, call.which))
        if call.is_in((".counts",)) and alone and _differs(call.made[RESULT], alone.made[RESULT]):
            yield call.key.name
            yield from counters_of(call, calls)
        first = (call.key.micro_batch * dp + call.key.dp) * B
        places = (divmod(first + j, dp) for j in range(B))
        keys = (call.key._replace(micro_batch=m, dp=d) for m, d in places)
        of_each = [single.get((key, call.which)) for key in keys]
        if None in of_each:
            continue
        got = (_is_joined(t, [c.got.get(v) for c in of_each]) for v, t in call.got.items())
        made = _is_joined(call.made[RESULT], [c.made[RESULT] for c in of_each])
        if made is False and False not in got:
            yield call.key.name


def _is_joined(tensor: Tensor, of_each: list[Tensor | None]) -> bool | None:
    """Whether a tensor is those of single sequences behind each other; None if it has no rows."""
    rows = [t.shape[1:] for t in of_each if t is not None and t.ndim]
    if not tensor.ndim or rows != [tensor.shape[1:]] * len(of_each):
        return None
    together = torch.cat(of_each)
    return None if len(together) != len(tensor) else not _differs(tensor, together)


def _calls(whole: Whole) -> list[Call]:
    return calls_of([Record(key, of, [], []) for key, of in whole.items() if key.phase == INSIDE])
