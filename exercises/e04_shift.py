"""04 shift: all ranks send first, and all receive

Every rank gets the tensor of one before it. The simulated network completes a send only when
its receive is posted, so that the order of the two matters, as with gloo and NCCL.
"""

import random

from exercises.exercise import Case, Exercise, Sent, Wrong, draw
from exercises.pictures import messages

TASK = """
Begin to send a tensor to the rank `distance` after this one, and to receive that of the rank as far
before it; after the last rank comes the first. Return at once. `wait`, which you need not write,
waits for all of `self.works` and returns `self.arriving`. Keep the tensor that is sent alive in
`self.sent`, and record the shift in the ledger of the axis.
Read: collectives.py.
"""

HINTS = (
    "A send to one rank and a receive from another, begun together, and neither of them awaited.",
    "axis.rank, axis.size, axis.ledger.record, torch.empty_like, dist.P2POp, dist.isend,"
    " dist.irecv, dist.batch_isend_irecv.",
    "Record it. Make an empty tensor of the same shape for what arrives. The peers are"
    " axis.rank plus and minus distance, modulo axis.size. Describe both messages as P2POps, with"
    " group=axis.group and group_peer, and start both as one batch.",
)


def cases(dice: random.Random) -> list[Case]:
    sizes = (2, 1), (3, 1), (4, 1), (4, 3)
    return [Case(ranks, rows=dice.randint(2, 4), columns=3, distance=d) for ranks, d in sizes]


def tensor_of(case: Case, rank: int):
    return draw(case, rank, shape=(case.rows, case.columns))


def on_rank(rank, case: Case) -> dict:
    tensor = tensor_of(case, rank.number)
    shift = rank.course.collectives.Shift(tensor, rank.axis("cp"), case.distance)
    rank.mark("Shift returns")
    return {"what wait() returns": shift.wait(), "the tensor that was sent": tensor}


def expected(case: Case) -> list[dict]:
    names = "what wait() returns", "the tensor that was sent"
    tensors = [tensor_of(case, rank) for rank in range(case.ranks)]
    pairs = [(tensors[rank - case.distance], tensors[rank]) for rank in range(case.ranks)]
    return [dict(zip(names, pair, strict=True)) for pair in pairs]


def traffic(case: Case) -> list[dict[str, Sent]]:
    return [{"send": Sent(1, 8 * case.rows * case.columns)}] * case.ranks


def order(case: Case, records) -> str:
    for rank, record in enumerate(records):
        waits = [i for i, event in enumerate(record.events) if event.kind == "wait"]
        if min(waits, default=len(record.events)) < record.place("mark", "Shift returns"):
            return f"rank {rank} waits inside of Shift(...): nothing can be computed meanwhile"
    return ""


def picture(runs) -> str:
    return messages(runs[-1][1])


SEND = "send = dist.P2POp(dist.isend, tensor, group=axis.group, group_peer=to)"
RECEIVE_PEER = "self.arriving, group=axis.group, group_peer=source)"
BATCH = "self.works = dist.batch_isend_irecv([send, receive])"

EXERCISE = Exercise(
    __name__,
    target="collectives:Shift.__init__",
    task=TASK,
    hints=HINTS,
    cases=cases,
    on_rank=on_rank,
    expected=expected,
    layout={"cp_size": 2, "tp_size": 1},
    traffic=traffic,
    order=order,
    picture=picture,
    remember="Per rank, 1 message and b bytes, however many ranks there are. In production:"
    " `torch.distributed.batch_isend_irecv`.",
    wrong=(
        Wrong(
            "backwards",
            "It sends to the rank before it and receives from the one after it: the ring turns the"
            " wrong way.",
            "to, source = (",
            "source, to = (",
        ),
        Wrong(
            "both_before",
            "It sends to the rank before it, and receives from it, too: with two ranks both are"
            " one, with more no message arrives.",
            SEND,
            SEND.replace("=to)", "=source)"),
        ),
        Wrong(
            "always_the_next",
            "It ignores the distance: every tensor goes to the next rank.",
            "in (distance, -distance)",
            "in (1, -1)",
        ),
        Wrong(
            "send_awaited_first",
            "It waits for its send before it posts its receive. All ranks do, and none receives.",
            SEND,
            "dist.isend(tensor, group=axis.group, group_dst=to).wait()",
            BATCH,
            "self.works = dist.batch_isend_irecv([receive])",
        ),
        Wrong(
            "awaited_at_once",
            "It waits until the tensor has arrived: nothing can be computed meanwhile.",
            BATCH,
            f"{BATCH}\n    self.wait()",
        ),
        Wrong(
            "into_what_is_sent",
            "It receives into the tensor that it sends: what arrives overwrites what leaves.",
            "torch.empty_like(tensor)",
            "tensor",
        ),
        Wrong(
            "not_in_the_ledger",
            "The bytes are sent, but the ledger does not count them.",
            'axis.ledger.record("shift", tensor)',
            "pass",
        ),
        Wrong(
            "own_tensor",
            "What wait() returns is the rank's own tensor: nothing was exchanged.",
            BATCH,
            "self.works, self.arriving = [], tensor",
        ),
    ),
    also_right=(
        """
def __init__(self, tensor, axis, distance=1):
    to, source = (axis.rank + distance) % axis.size, (axis.rank - distance) % axis.size
    self.sent, self.arriving = tensor, tensor.new_empty(tensor.shape)
    receive = dist.irecv(self.arriving, group=axis.group, group_src=source)
    send = dist.isend(tensor, group=axis.group, group_dst=to)
    axis.ledger.record("shift", tensor)
    self.works = send, receive
""",
    ),
)
