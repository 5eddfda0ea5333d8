"""07 overlap: send while backward runs, and in the same order everywhere

target: data_parallel:GradientBuckets._start_complete_buckets
train: distributed.dp_size=2 distributed.tp_size=1

Called when a parameter has received its last gradient of the step. Begin to sum, over self.axis,
all buckets that are complete and not yet begun, in the order of `self.buckets`: a bucket waits for
all before it. Append the works to `self.works`, which has the first buckets' already.
`self.missing[name]` is how many gradients a parameter still waits for.
Read: data_parallel.py.

? Which buckets have been begun is known from the number of works. Continue with the next one.
? self.buckets, len(self.works), self.missing, bucket.names, start_all_reduce(bucket.gradients,
  self.axis).
? Go through the buckets that are not begun. Stop at the first in which any parameter still waits
  for a gradient. Else begin its all-reduce, append the work, and do not wait for it.
! All buckets but 1 can be on their way before backward ends. In production:
  `torch.nn.parallel.DistributedDataParallel`.
"""

import torch

from exercises.compare import SumOf
from exercises.exercise import Case, Dice, Sent, draw

BUCKETS, OF_BUCKET, MICRO_BATCHES = 4, 2, 2


def cases(dice: Dice) -> list[Case]:
    n = dice.randint(8, 12)  # so that three of the smallest exceed the limit of a bucket
    return [Case(2, sizes=[n, n + 1, n + 3, n + 2]), Case(3, sizes=[n] * 4)]


def names_of(bucket: int) -> list[str]:
    return [f"b{bucket}.{i}" for i in range(OF_BUCKET)]


NAMES = [name for b in reversed(range(BUCKETS)) for name in names_of(b)]  # in forward order


def arrivals(rank: int) -> list[str]:
    """The order in which gradients arrive: the first three buckets take turns by rank.

    The last of a bucket arrives first on some ranks.
    """
    first = [names_of(b) for b in ((0, 1, 2), (1, 0, 2), (2, 1, 0))[rank % 3]]
    turns = range(OF_BUCKET) if rank % 2 else reversed(range(OF_BUCKET))
    early = [names[i] for i in turns for names in first]
    return [*early, *names_of(BUCKETS - 1)]


def gradient(case: Case, rank: int, micro_batch: int, name: str):
    return draw(case, rank, micro_batch, name, shape=(case.sizes[int(name[1])],))


def on_rank(rank, case: Case) -> dict:
    parameters = {n: torch.nn.Parameter(torch.zeros(case.sizes[int(n[1])]).double()) for n in NAMES}
    kind, most = rank.course.data_parallel.GradientBuckets, 8 * OF_BUCKET * max(case.sizes)
    buckets = kind(parameters, rank.axis("dp"), [], most)
    buckets.begin(MICRO_BATCHES)
    for micro_batch in range(MICRO_BATCHES):
        for name in arrivals(rank.number):
            if micro_batch == MICRO_BATCHES - 1:
                rank.mark("last gradient" if name == arrivals(rank.number)[-1] else "gradient")
            # In place: the gradient is a view of its bucket.
            parameters[name].grad += gradient(case, rank.number, micro_batch, name)
            buckets.arrived(name)
    rank.mark("backward ends")
    for work in buckets.works:  # buckets.wait() would fail if there are too few
        work.wait()
    results = {"sums begun": len(buckets.works)}
    return results | {f"{n}.grad": parameter.grad for n, parameter in parameters.items()}


def expected(case: Case) -> list[dict]:
    parts = [(rank, i) for rank in range(case.ranks) for i in range(MICRO_BATCHES)]
    right = {f"{n}.grad": SumOf(gradient(case, *part, n) for part in parts) for n in NAMES}
    return [{"sums begun": BUCKETS} | right] * case.ranks


def traffic(case: Case, rank: int) -> dict[str, Sent]:
    share = 2 * (case.ranks - 1) / case.ranks
    return {"all_reduce": Sent(BUCKETS, share * 8 * OF_BUCKET * sum(case.sizes))}


WAITS = "backward stands still meanwhile"
ORDER = (
    ("start all_reduce", BUCKETS - 1, BUCKETS, "last gradient", "all other buckets are complete"),
    ("wait all_reduce", 0, 0, "backward ends", WAITS),
)


MISTAKES = """
sent_too_early: A bucket is sent when its first parameter is complete: later gradients are lost.
    any => all
all_at_the_end: All buckets are sent after the last gradient: nothing travels while backward runs.
    [len(self.works) :]: => [len(self.works) :] if not any(self.missing.values()) else []:
one_each_call: A call begins at most one bucket: where it could begin two, the last is never sent.
    self.axis)) => self.axis)); break
sent_again: Every call sends all complete buckets again, also those that are on their way.
    [len(self.works) :] =>
awaited_at_once: A sum is awaited while backward still runs: it stands still while a bucket
    travels.
    bucket.gradients, self.axis)) => bucket.gradients, self.axis)); self.works[-1].wait()
past_an_incomplete_one: A complete bucket is sent though one before it still waits: the number of
    works then no longer tells which have been sent, and one is sent twice, another never.
    break => continue
"""
