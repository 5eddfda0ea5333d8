"""20 ulysses: all heads of a part, or some heads of the whole

target: context_parallel:UlyssesAttention.forward
train: distributed.cp_size=2 distributed.tp_size=1 distributed.cp_engine="ulysses"

Write the forward of Ulysses attention. A rank has q [B, Q, S/n, D], k and v [B, K, S/n, D]: all
heads of its part of the sequence. Exchange them, so that it has all of the sequence for Q/n query
heads, with the key and value heads that these use; call self.inner(q, k, v, *extra); and turn the
result back. Where n does not divide K, repeat keys and values first, no more than needed: to
lcm(K, n) heads. It must be differentiable: `_all_to_all` is, the `all_to_all` of collectives.py is
not.
Read: context_parallel.py, collectives.py.

? Repeat key heads if need be; exchange three tensors; attend; exchange one tensor back.
? self.axis.size, math.gcd, Tensor.repeat_interleave(repeats, dim=1), _all_to_all(x, axis,
  split_dim, gather_dim), self.inner.
? On the way in, the heads, dim 1, are split and the positions, dim 2, are gathered; on the way back
  it is the reverse. lcm(K, n) / K is n / gcd(n, K).
! Per rank (n-1)/n (2 q + 2 k') bytes: with more ranks each sends less, where a ring's rank sends 2
  (n-1) k. In production: DeepSpeed's `DistributedAttention`.
"""

from exercises.attention import full_attention, with_gradients
from exercises.exercise import Case, Dice, Sent, draw

D, EXTRA = 2, ["documents"]


def cases(dice: Dice) -> list[Case]:
    # Ranks divide the key heads, or do not; of one rank, and of one key head.
    sizes = [(2, 4, 2), (3, 6, 2), (4, 8, 2), (2, 6, 3), (1, 2, 1), (2, 6, 1)]
    cases = [Case(n, query_heads=q, key_heads=k, batch=1 + (n > 2)) for n, q, k in sizes]
    for case in cases:
        case.length = case.ranks * dice.randint(1, 3)
    return cases


def whole_tensors(case: Case):
    heads = {"q": case.query_heads, "k": case.key_heads, "v": case.key_heads}
    heads["gradient of out"] = case.query_heads
    return [draw(case, name, shape=(case.batch, n, case.length, D)) for name, n in heads.items()]


def on_rank(rank, case: Case) -> dict:
    whole, softmax, held = whole_tensors(case), rank.course.attention.SoftmaxAttention(), []

    def inner(q, k, v, *extra):
        held.append(list(extra))
        return softmax(q, k, v)

    *qkv, d_out = (x.chunk(case.ranks, 2)[rank.number] for x in whole)
    for tensor in qkv:
        tensor.requires_grad_()
    ulysses = rank.course.context_parallel.UlyssesAttention(rank.axis("cp"), inner)
    results = with_gradients(ulysses(*qkv, *EXTRA), qkv, d_out)
    return results | {"what inner gets after q, k and v": held[0]}


def expected(case: Case) -> list[dict]:
    *qkv, d_out = whole_tensors(case)
    # All heads and positions at once, on one rank.
    out = full_attention(*(tensor.requires_grad_() for tensor in qkv))
    results = with_gradients(out, qkv, d_out)
    parts = {name: x.chunk(case.ranks, 2) for name, x in results.items()}
    extra = {"what inner gets after q, k and v": EXTRA}
    return [extra | {name: part[r] for name, part in parts.items()} for r in range(case.ranks)]


def traffic(case: Case, rank: int) -> dict[str, Sent]:
    n = case.ranks
    key_heads = next(h for h in range(n, 100, n) if h % case.key_heads == 0)
    one_head = 8 * case.batch * case.length // n * D
    size = (n - 1) / n * (2 * case.query_heads + 2 * key_heads) * one_head
    # Forward, and as much in backward; keys and values may travel in one message.
    return {"all_to_all": Sent(None, 2 * size)}


MISTAKES = """
repeated_to_query_heads: Keys and values are repeated to all query heads before they travel: more
    bytes than needed. lcm(K, n) heads are enough.
    self.axis.size // math.gcd(self.axis.size, k.shape[1]) => q.shape[1] // k.shape[1]
repeated_as_a_whole: Key heads are 0 1 0 1, and query heads use 0 0 1 1: repeat each.
    x.repeat_interleave(repeats, dim=1) => x.repeat(1, repeats, 1, 1)
keys_not_exchanged: Queries are exchanged, but keys and values are not: a rank has the whole
    sequence of queries, and the keys of its own part.
    _all_to_all(x, self.axis, 1, 2) for x => _all_to_all(x, self.axis, 1, 2) if x is q else x for x
concatenated: q, k and v are exchanged as one tensor that has their heads one after the other: a
    rank gets a part of them all, not the same part of each.
- q, k, v = (_all_to_all(x, self.axis, 1, 2) for x in (q, k, v))
+ heads = [x.shape[1] // self.axis.size for x in (q, k, v)]
+ q, k, v = _all_to_all(torch.cat((q, k, v), 1), self.axis, 1, 2).split(heads, 1)
extra_dropped: What comes after q, k and v is not passed on: self.inner needs it, too.
    self.inner(q, k, v, *extra) => self.inner(q, k, v)
"""
