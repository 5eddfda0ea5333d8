"""15 messages: a total order cannot deadlock

target: pipeline_messages:insert_messages
train: distributed.pp_size=2 distributed.tp_size=1

Add the sends and receives to the plans of all ranks. Whatever is computed on one rank and needed on
another is sent, as soon as it is there: an action of a kind in SENDS, with the rank that it goes
to as `peer`; and received, an action of a kind in RECEIVES with the micro-batch and chunk of the
action that needs it, and the rank that it comes from. `place(stage, ranks)` is the rank and chunk
of a stage. Even if a send waits for its receive and a receive for its send, nothing may deadlock.
And no rank may wait for a receive that is posted late: where a message takes half a forward, the
step takes as long as if all receives were posted at once. So write down what all ranks do in the
order of its ends, as `spans_of` has it for messages that take a moment, and post both ends there.
Read: pipeline_schedule.py, pipeline_messages.py.

? Write one list of what all ranks do, in an order in which it can be done. Where does a message
  stand in it? A rank's plan is its part of the list.
? inputs_of (the input of a W needs no message), in_order, textbook_times, spans_of(needs, times,
  send_time=2**-20), span.end, SENDS, RECEIVES, _replace.
? With a small send_time, of two ranks that would end together the one upstream ends first. Sort the
  events of all ranks by their end, and of equal ones the lower rank first. Append each action to
  its rank's plan; if what needs it is on another rank, append a send to this plan, and at once a
  receive to the other.
! 2 (p - 1) messages per micro-batch, one forward and one back between neighbours. In production:
  `_PipelineScheduleRuntime` of `torch.distributed.pipelining`.
"""

import torch

from exercises.exercise import Case, Dice
from picotron_min.extensions.schedules.registry import SCHEDULES
from picotron_min.extensions.schedules.simulator import simulate
from picotron_min.pipeline_schedule import Action, Place, Plan

SEND_TIME = 0.5  # F takes 1
Stages = dict[tuple[int, int], int]  # rank, chunk -> stage


def cases(dice: Dice) -> list[Case]:
    sizes = [(p, dice.choice((m, m + 1))) for p, m in ((2, 3), (3, 4), (5, 5))]
    engines = ("afab", 1), ("1f1b", 1), ("interleaved", 2), ("zb_h1", 1), ("zb_v", 2)
    return [Case(p, engine=e, micro_batches=m, chunks=v) for p, m in sizes for e, v in engines]


def plans_of(case: Case, schedules=SCHEDULES) -> tuple[list[Plan], Stages, Place]:
    """What each rank computes; the stage of each rank and chunk, and the reverse."""
    p, m, v, schedule = case.ranks, case.micro_batches, case.chunks, schedules[case.engine]
    stages = {schedule.place(stage, p): stage for stage in range(p * v)}
    return [schedule.plan(rank, p, m, v) for rank in range(p)], stages, schedule.place


def on_rank(rank, case: Case) -> dict:
    plans, stages, place = plans_of(case, rank.course.registry.SCHEDULES)
    complete = rank.course.pipeline_messages.insert_messages(plans, place)
    computed = [[a for a in plan if a.peer is None] for plan in complete]
    results = {"what is computed": texts(computed)}
    if is_pictured(case):  # elsewhere the order of messages is seen by the time
        results["plans"] = texts(complete)
    results["messages"] = [sorted(str(a) for a in plan if a.peer is not None) for plan in complete]
    early = [early_action(plan, number, stages) for number, plan in enumerate(complete)]
    results["what comes before its input"] = next(filter(None, early), "nothing")
    if any(early):  # all ranks see it, and none waits for the others
        return results | {"time": 0.0}
    numbers, time = run_messages(rank, complete[rank.number], stages)
    return results | {"numbers": numbers, "time": time}


def early_action(plan: Plan, rank: int, stages: Stages) -> str:
    """The first action that comes before its input, if any."""
    there = {None}
    for action in plan:
        item, kind = needed(action, rank, stages), action.kind.value
        if not kind.startswith("receive") and item not in there:
            return f"'{action}' of rank {rank}"
        is_computed = action.peer is None
        there.add((kind, action.micro_batch, stages[rank, action.chunk]) if is_computed else item)
    return ""


def needed(action: Action, rank: int, stages: Stages) -> tuple[str, int, int] | None:
    """What an action begins with, a send sends, and a receive brings: F or B, i, and the stage."""
    kind, i, stage = action.kind.value, action.micro_batch, stages[rank, action.chunk]
    if kind == "W":
        return "B", i, stage
    if kind.startswith("send"):
        return kind[-1], i, stage
    if kind[-1] == "F":
        return ("F", i, stage - 1) if stage else None
    is_last = stage == max(stages.values())
    return ("F", i, stage) if is_last else ("B", i, stage + 1)


def run_messages(rank, plan: Plan, stages: Stages) -> tuple[dict[str, float], float]:
    """Run a rank's plan on the simulated network, where both ends of a message wait.

    Each action adds 1 to what it gets, and returns it by its name: F0's begins at 0, F1's at
    1000, ... Also the time on paper when the rank ends: F takes 1, B 2, or B 1 and W 1. A message
    travels once both its ends are posted, and carries with it when it was sent.
    """
    collectives, axis = rank.course.collectives, rank.axis("pp")
    splits = any(action.kind.value == "W" for action in plan)
    times = {"F": 1.0, "B": 1.0 if splits else 2.0, "W": 1.0}
    values, numbers, clock = {}, {}, 0.0  # an item -> its number, and when it is here
    for action in plan:
        item, kind = needed(action, rank.number, stages), action.kind.value
        if kind.startswith("receive"):
            message = torch.zeros(2, dtype=torch.float64)
            collectives.start_receive(message, axis, action.peer).wait()
            number, posted = message.tolist()
            values[item] = number, max(posted, clock) + SEND_TIME
            continue
        number, ready = values[item] if item else (1000.0 * action.micro_batch - 1, 0.0)
        if action.peer is not None:
            message = torch.tensor([number, clock], dtype=torch.float64)
            collectives.start_send(message, axis, action.peer).wait()
        else:
            clock = max(clock, ready) + times[kind]
            stage = stages[rank.number, action.chunk]
            values[kind, action.micro_batch, stage] = number + 1, clock
            numbers[f"{kind}{action.micro_batch}.{action.chunk}"] = number + 1
    return numbers, clock


def texts(plans: list[Plan]) -> list[list[str]]:
    return [[str(action) for action in plan] for plan in plans]


def expected(case: Case) -> list[dict]:
    plans, stages, _ = plans_of(case)
    by_stage = {stage: place for place, stage in stages.items()}
    messages = [[] for _ in plans]
    for (rank, chunk), stage in stages.items():
        for way, letter in ((1, "F"), (-1, "B")):
            to, to_chunk = by_stage.get(stage + way, (rank, 0))
            for i in range(case.micro_batches if to != rank else 0):
                names = [f"{letter}{i}" + (f".{c}" if c else "") for c in (chunk, to_chunk)]
                messages[rank].append(f"send {names[0]} to rank {to}")
                messages[to].append(f"receive {names[1]} from rank {rank}")
    common = {"what is computed": texts(plans), "what comes before its input": "nothing"}
    common["messages"] = [sorted(names) for names in messages]
    results, last = [], len(stages) - 1
    for rank, plan in enumerate(plans):
        numbers = {}
        for kind, i, chunk, _ in plan:
            stage = stages[rank, chunk]  # 1000 i, and 1 for each action on the way
            passed = {"F": stage, "B": 2 * last + 1 - stage, "W": 2 * last + 2 - stage}[kind.value]
            numbers[f"{kind.value}{i}.{chunk}"] = 1000.0 * i + passed
        results.append(common | {"numbers": numbers})
    return results


def order(case: Case, rank: int, record) -> str | None:
    plans, _, place = plans_of(case)
    best = simulate(plans, send_time=SEND_TIME, place=place).makespan
    takes = record.values["time"]
    if takes > best + 1e-9:
        what = f"with messages that take {SEND_TIME:g} forwards, the step takes {takes:g}"
        return f"{what}; it takes {best:g} if every receive is posted in time"


def is_pictured(case: Case) -> bool:
    return (case.engine, case.ranks) == ("1f1b", 2)


def picture(runs):
    case, records = next((c, r) for c, r in runs if is_pictured(c))
    columns = records[0].values["plans"]
    height = max(map(len, columns))
    rows = [[*column, *[""] * (height - len(column))] for column in columns]
    yield from [f"1f1b, 2 ranks, {case.micro_batches} micro-batches", f"{'rank 0':30}rank 1"]
    yield from (f"{a:30}{b}".rstrip() for a, b in zip(*rows, strict=True))


VERSIONS = """
each_by_itself: Each rank receives right before an action and sends right behind it. One rank waits
    to send a forward while the next one waits to send it a gradient.
- return complete
+ alone = []
+ for rank, plan in enumerate(plans):
+     alone.append([])
+     for action in plan:
+         mine = [m for m in complete[rank] if m[1:3] == action[1:3] and m.peer is not None]
+         alone[-1] += [m for m in mine if m.kind is RECEIVES.get(action.kind)]
+         alone[-1].append(action)
+         alone[-1] += [m for m in mine if m.kind is SENDS.get(action.kind)]
+ return alone
when_needed: A message is posted only when its receiver needs it: right, but it does not travel
    while the ranks compute, and all of its time is lost.
- complete[rank].append(action)
+ for source, made in inputs[rank, action]:
+     if source != rank:
+         complete[source].append(made._replace(kind=SENDS[made.kind], peer=rank))
+         complete[rank].append(action._replace(kind=RECEIVES[made.kind], peer=source))
+ complete[rank].append(action)
    if peer != rank: => if False:
no_gradients: Gradients are not sent: only the last stage can run its backwards.
    if peer != rank: => if peer != rank and action.kind is Kind.FORWARD:
chunk_of_the_sender: A receive has the chunk of the action that made the message: it must have that
    of the one that needs it.
    receiver. => action.
w_for_the_receiver: A W, which needs its B, is taken for the receiver of this B's gradient: where
    there are W, gradients are not sent.
- for event, sources in inputs.items()
+ for event, sources in reversed(inputs.items())
    if event[1].kind is not Kind.WEIGHT =>
neighbours: Messages go to the next or the previous rank in a ring: `place` says where a stage is.
    in inputs.items() => in inputs_of(plans, loop).items()
no_receives: Messages are sent, but not received.
    complete[peer].append(receiver._replace(kind=RECEIVES[action.kind], peer=rank)) => pass
no_time: The order is of messages that take no time: of two ranks that end together the one
    downstream can come first, and the other's receive is posted late.
    send_time=2**-20 => send_time=0
any_order: The order is one in which every input comes first, not of the moments at which actions
    end: receives are posted late.
    sorted(spans, key=lambda event: (spans[event].end, event[0])) => in_order(plans, inputs)
also_right:
    send_time=2**-20 => send_time=1e-6
- peer, receiver = receiver_of.get((rank, action), (rank, None))
+ to = [event for event in inputs if (rank, action) in inputs[event] and event[0] != rank]
+ peer, receiver = to[0] if to else (rank, None)
- complete[rank].append(action._replace(kind=SENDS[action.kind], peer=peer))
+ complete[rank].append(Action(SENDS[action.kind], *action[1:3], peer))
"""
