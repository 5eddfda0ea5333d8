"""23 dispatch: tokens travel to their experts, and back

target: extensions.experts.dispatch:AllToAllDispatch.__call__
train: distributed.ep_size=2 model.num_local_experts=4 model.num_experts_per_tok=2

Each pair (token, chosen expert) travels to the rank that has the expert. Get x [n, E], weights and
experts [n, k] of this rank's tokens, and return the weighted sums of what their experts give, and
what meanwhile() returns.
1. Count the rows that leave for each rank and each of its experts. Exchange the counts, so that
   each rank knows what arrives. Give self.limit.check_rows the rows that arrive for each
   expert here, and the tokens of all ranks, as many as here on each: it refuses too many rows
   before they travel. Experts are not padded here: self.limit.rows_each(len(x)) is None.
2. Sort the pairs by expert; send their rows of x and their weights. Call meanwhile() while they
   travel. No expert is divided here: etp is 1, and there are no copies of rows.
3. Rows arrive rank by rank, from each expert by expert: sort them by expert for
   run(rows, sizes, weights), whose sizes are the rows of each expert here, and undo that.
4. Send the results back to where the rows came from. Add each token's k rows.
Axis and sizes: self.axis (over ep), self.ep, self.num_experts. An expert of num_experts marks a
dropped pair, which `Pairs` leaves out.
Read: extensions/experts/dispatch.py, extensions/experts/moe.py.

? Counts, there, experts, back. Pairs sorts on both sides; its collect undoes its spread.
? count, all_to_all, Pairs(experts, num_rows, rows_each) with spread, sort and collect,
  Exchange(axis, to_each, from_each) with start and wait.
? count(...)[:-1], viewed as [ep, X/ep], are the counts that leave; all_to_all with dims 0, 0 gives
  those that arrive. Sums of their rows are Exchange's lists; of
  columns, the sizes. From each rank come experts 0 .. X/ep - 1, each as often as counted: Pairs
  with k = 1 sorts them. Each tensor has its own Exchange; back, the lists are swapped.
! 2 r b + r w bytes forward for r rows that leave, and as much in backward. In production:
  Megatron-LM's `MoEAlltoAllTokenDispatcher`.
"""

import torch

from exercises.exercise import Case, Dice, Sent, draw

E = 3
CHECKS, SIZES = "what self.limit.check_rows gets", "sizes that run gets"


def cases(dice: Dice) -> list[Case]:
    tokens = {ranks: [dice.randint(3, 6) for _ in range(ranks)] for ranks in (2, 3, 4)}
    sizes = (2, 4, 3), (3, 6, 2), (4, 8, 1)
    some = [Case(n, ep=n, experts=X, k=k, tokens=tokens[n]) for n, X, k in sizes]
    some[1].unused = 3  # the last experts get no tokens, so that the last rank gets no rows
    return some


def inputs(case: Case, rank: int):
    """x, weights and experts of a rank's tokens, and the gradient of its result."""
    n = case.tokens[rank]
    x, d_out = (draw(case, name, rank, shape=(n, E)) for name in ("x", "gradient"))
    weights = draw(case, "weights", rank, shape=(n, case.k)).exp()
    used = case.experts - getattr(case, "unused", 0)
    experts = draw(case, "experts", rank, shape=(n, used)).argsort(-1)[:, : case.k].clone()
    experts[0, 0] = case.experts  # dropped
    return x.requires_grad_(), weights.requires_grad_(), experts, d_out


def expert(case: Case, number: int, x):
    return (x @ draw(case, "expert", number, shape=(E, E))).tanh()


def on_rank(rank, case: Case) -> dict:
    course = rank.course
    axes = rank.axes(course.settings.Layout(dp=case.ranks, ep=case.ep))
    limit = course.moe.Limit(case.experts, case.k, course.settings.Routing())
    checks, calls, each = [], [], case.experts // case.ep

    def run(rows, sizes, weights):
        calls.append([int(size) for size in sizes])
        parts = zip(rows.split(sizes), weights.split(sizes), strict=True)
        first = rank.number * each  # of this rank's experts
        outs = [w[:, None] * expert(case, first + i, r) for i, (r, w) in enumerate(parts)]
        return torch.cat(outs)

    def check_rows(sizes, num_tokens):
        rank.mark("checked")
        checks.append([[int(size) for size in sizes], num_tokens])

    limit.check_rows = check_rows
    x, weights, experts, d_out = inputs(case, rank.number)
    dispatch = course.dispatch.AllToAllDispatch(limit, axes)
    out, shared = dispatch(x, weights, experts, run, lambda: rank.mark("meanwhile") or "shared")
    results = {"out": out.detach(), "shared": shared, SIZES: calls, CHECKS: checks}
    gradients = torch.autograd.grad(out, (x, weights), d_out, allow_unused=True)
    return results | dict(zip(("gradient of x", "gradient of weights"), gradients, strict=True))


def expected(case: Case) -> list[dict]:
    results, each = [], case.experts // case.ep
    all_experts = torch.cat([inputs(case, rank)[2] for rank in range(case.ranks)])
    for rank in range(case.ranks):
        x, weights, experts, d_out = inputs(case, rank)
        out, first = torch.zeros_like(x), rank * each
        # Pair by pair, without sorting or sending anything.
        for t, j in (experts < case.experts).nonzero().tolist():  # but for dropped ones
            out[t] += weights[t, j] * expert(case, int(experts[t, j]), x[t])
        dx, dw = torch.autograd.grad(out, (x, weights), d_out)
        sizes = [int((all_experts == first + i).sum()) for i in range(each)]
        result = {SIZES: [sizes], CHECKS: [[sizes, len(x) * case.ranks]], "shared": "shared"}
        result |= {"out": out.detach(), "gradient of x": dx, "gradient of weights": dw}
        results.append(result)
    return results


def traffic(case: Case, rank: int) -> dict[str, Sent]:
    each, others = case.experts // case.ep, [r for r in range(case.ranks) if r != rank]

    def moves(source: int, to: int) -> int:
        """Rows from a rank to another; of a dropped pair there is no such rank."""
        return int((inputs(case, source)[2] // each == to).sum())

    rows = sum(moves(rank, other) + moves(other, rank) for other in others)
    # There: x, weights, and the gradient of what comes back. Back: results, two gradients.
    counts, size = Sent(1, 8 * each * len(others)), 8 * (2 * E + 1) * rows
    return {"all_to_all as exchange": Sent(6, size), "all_to_all": counts}


TRAVEL = "rows and weights should be on their way, and nothing else"
ORDER = (
    ("start all_to_all", 1, 1, "checked", "numbers of rows are checked before rows travel"),
    ("start all_to_all", 3, 3, "meanwhile", TRAVEL),
    ("wait all_to_all", 1, 1, "meanwhile", TRAVEL),
)


MISTAKES = """
sizes_of_what_leaves: The rows of each expert are counted from what leaves, not from what arrives.
    *arriving => *leaving
not_sorted_on_arrival: Arrived rows are in the order of the ranks they came from, and run needs the
    order of experts: rows get another expert than they chose.
- out = by_expert.collect(run(by_expert.spread(x), sizes, by_expert.sort(weights)))
+ out = run(x, sizes, weights)
weights_not_sorted: Rows are sorted by expert, and weights are not: rows get the weights of others.
    by_expert.sort(weights) => weights
awaited_before_meanwhile: meanwhile() is called after the rows have arrived: it hides nothing.
    shared = meanwhile() => pass
    there_too.wait(weights) => there_too.wait(weights); shared = meanwhile()
weighted_twice: Results are weighted on return: run has weighted them already.
    rows_each) => rows_each); own = pairs.sort(weights)[:, None]
    add_chunks(out, lengths, self.etp) => own * add_chunks(out, lengths, self.etp)
"""
