"""04 shift: all ranks send first, and all receive

target: collectives:Shift.__init__
train: distributed.cp_size=4 distributed.tp_size=1

Begin to send a tensor to the rank `distance` after this one, and to receive one from the rank as
far before it; after the last rank comes the first. Start both in one batch: otherwise NCCL runs one
after the other, and where all ranks send first, none receives. Return at once. `wait`, which you
need not write, waits for all of `self.works` and returns `self.arriving`. Keep the tensor that is
sent alive in `self.sent`, and record the shift in the ledger of the axis.
Read: collectives.py.

? A send to one rank and a receive from another, begun together, and neither of them awaited.
? axis.rank, axis.size, axis.ledger.record, torch.empty_like, dist.P2POp, dist.isend, dist.irecv,
  dist.batch_isend_irecv.
? Record it: axis.ledger.record("shift", tensor). Make self.arriving, an empty tensor of the same
  shape. The peers are axis.rank plus and minus distance, modulo axis.size. Describe both messages
  as P2POps, with group=axis.group and group_peer, and start both as one batch: it returns
  self.works.
! Per rank, 1 message and b bytes, however many ranks there are. In production:
  `torch.distributed.batch_isend_irecv`.
"""

from exercises.exercise import Case, Dice, Sent, draw


def cases(dice: Dice) -> list[Case]:
    # Of 2 ranks the next one is also the previous one; of 4, distance 3 is one back.
    sizes = (2, 1), (3, 1), (4, 1), (4, 3)
    some = [Case(n, dp=1, cp=n, rows=dice.randint(2, 4), columns=3, distance=d) for n, d in sizes]
    # Two axes, of ranks 0 and 1 and of ranks 2 and 3: places on an axis are not ranks of the world.
    return [*some, Case(4, dp=2, cp=2, rows=2, columns=3, distance=1)]


def tensor_of(case: Case, rank: int):
    return draw(case, rank, shape=(case.rows, case.columns))


def on_rank(rank, case: Case) -> dict:
    tensor = tensor_of(case, rank.number)
    axes = rank.axes(rank.course.layout.Layout(dp=case.dp, cp=case.cp))
    distance = [case.distance][: case.distance != 1]  # without one it is 1
    shift = rank.course.collectives.Shift(tensor, axes.cp, *distance)
    rank.mark("Shift returns")
    kept = getattr(shift, "sent", None)  # so that its memory is not freed while it travels
    return {"what wait() returns": shift.wait(), "self.sent": kept}


def expected(case: Case) -> list[dict]:
    size, tensors = case.cp, [tensor_of(case, r) for r in range(case.ranks)]
    results = [{"self.sent": own} for own in tensors]
    for rank, result in enumerate(results):
        source = rank // size * size + (rank - case.distance) % size  # on the same axis
        result["what wait() returns"] = tensors[source]
    return results


def traffic(case: Case, rank: int) -> dict[str, Sent]:
    return {"send as shift": Sent(1, 8 * case.rows * case.columns)}


ORDER = (
    ("wait send", 0, 0, "Shift returns", "nothing can be computed meanwhile"),
    ("wait receive", 0, 0, "Shift returns", "nothing can be computed meanwhile"),
    ("batch 2 messages", 1, 1, "Shift returns", "start the send and the receive as one batch"),
)


MISTAKES = """
backwards: It sends to the previous rank and receives from the next: the ring turns the wrong way.
    to, source => source, to
send_awaited_first: It waits for its send before it posts its receive: all ranks do, none receives.
- send = dist.P2POp(dist.isend, tensor, group=axis.group, group_peer=to)
+ dist.isend(tensor, group=axis.group, group_dst=to).wait()
    send, receive => receive
one_by_one: The send and the receive are not one batch: NCCL does one after the other, and where all
    ranks send first, none receives.
    dist.batch_isend_irecv([send, receive]) => [send(), receive()]
awaited_at_once: It waits until the tensor has arrived: nothing can be computed meanwhile.
    [send, receive]) => [send, receive]); self.wait()
into_what_is_sent: It receives into the tensor that it sends: what arrives overwrites what leaves.
    torch.empty_like(tensor) => tensor
ranks_of_the_world: These are ranks of the world: in an axis use group_dst, group_src, group_peer.
    group_peer=to => peer=to
    group_peer=source => peer=source
"""
