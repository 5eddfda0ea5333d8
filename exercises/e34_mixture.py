"""34 mixture: rows are sorted by expert, and find their tokens again

target: extensions.experts.moe:Pairs
train: model.num_local_experts=4 model.num_experts_per_tok=2

Make rows for experts from tokens, and sums for tokens from what experts return. `experts` [n, k]
has k experts of each of n tokens; num_experts, which is larger than all others, marks a dropped
pair (token, expert). spread(x) returns num_rows rows of x [n, E]: expert 0's, in the order
of tokens, then expert 1's, and so on, and none for dropped pairs. sort(weights) brings [n, k]
into the same order. collect(y) adds for each token the rows y of its pairs, in the order of its
pairs: [n, E]. With rows_each every expert has that many rows, and num_rows is rows_each times
num_experts: its pairs come first, and the others are zeros, also in sort. A result has the dtype of
its argument. Gradients flow back through all three, also if n is 0: a rank may get no rows. Several
Pairs may be in use at once.
Read: extensions/experts/moe.py.

? A stable sort by expert: gather rows by it, and put what comes back where it says.
? argsort(stable=True), places_in_groups, scatter_, F.pad, index_copy_, Conjugate, // k.
? order, the sort, has the pair of each row; its first num_rows are not dropped. With rows_each a
  pair's row is its expert's number times rows_each, plus places_in_groups(...), its place among the
  expert's pairs: put the pairs there, into a tensor of n k, one past the last pair, for empty rows.
  Dropped pairs go to row num_rows, which is cut off. spread takes x[order // k]; collect copies y
  to the places that order has, in zeros [n k + 1, E], and adds k rows each of the first n k. Where
  an index may be one past the end, append a row of zeros first. With Conjugate.apply(there, back,
  x) each has the other as its backward.
! k rows for each token, and 2 gathers, there and back; no row is added atomically, so that results
  repeat. In production: Megatron-LM's `permute` and `unpermute`.
"""

import torch

from exercises.exercise import Case, Dice, draw

E, X = 3, 4
TERMS = 2.0**60, -(2.0**60), 1.0  # in another order, the last one is lost


def cases(dice: Dice) -> list[Case]:
    sizes = (2, 0, None), (1, 0, None), (2, 3, None), (2, 2, 6), (3, 0, None), (1, 9, None)
    some = [Case(1, k=k, dropped=d, rows_each=r, tokens=dice.randint(5, 7)) for k, d, r in sizes]
    return [*some, Case(1, k=1, dropped=0, rows_each=None, tokens=0)]  # a rank that gets no rows


def inputs(case: Case):
    """x, weights and experts of tokens, the gradient of the result; experts get 6 pairs at most."""
    x, gradient = (draw(case, name, shape=(case.tokens, E)) for name in ("x", "gradient"))
    weights = draw(case, "weights", shape=(case.tokens, case.k)).exp()
    experts = draw(case, "experts", shape=(case.tokens, X)).argsort(-1)[:, : case.k].clone()
    for pair in draw(case, "dropped", shape=(experts.numel(),)).argsort()[: case.dropped].tolist():
        experts.view(-1)[pair] = X
    if case.rows_each:
        experts[case.rows_each :] = experts[case.rows_each :].clamp(min=X)  # no expert has more
    return x.requires_grad_(), weights.requires_grad_(), experts, gradient


def sizes_of(case: Case) -> list[int]:
    """How many rows each expert has."""
    experts = inputs(case)[2].flatten().tolist()
    return [case.rows_each or experts.count(e) for e in range(X)]


def run(e: int, x):
    """What an expert makes of rows: a shift, so that rows of zeros are not zeros afterwards."""
    return (x + e + 1).tanh()


def on_rank(rank, case: Case) -> dict:
    (x, weights, experts, gradient), sizes = inputs(case), sizes_of(case)
    pairs = rank.course.moe.Pairs(experts, sum(sizes), case.rows_each)
    rows, sorted_weights = pairs.spread(x), pairs.sort(weights)
    rows_at_first = rows.detach().clone()
    y = torch.cat([run(e, part) for e, part in enumerate(rows.split(sizes))])
    out = pairs.collect(y * (sorted_weights + (sorted_weights == 0))[:, None])  # of empty rows: any
    if out.requires_grad and out.shape == gradient.shape:
        out.backward(gradient)
    grads = {f"gradient of {n}": t.grad for n, t in (("x", x), ("weights", weights))}
    shown = {"dtype": str(out.dtype), "rows": rows_at_first}
    shown |= {"weights of rows": sorted_weights.detach()}
    terms = pairs.sort(torch.tensor(TERMS[: case.k]).double().expand(case.tokens, -1))
    shown["sum in the order of pairs"] = pairs.collect(terms[:, None].repeat(1, E))[:, 0]
    for name, given in {"spread": x, "sort": weights, "collect": y}.items():
        use, leaf = getattr(pairs, name), given.detach().clone().requires_grad_()
        shown[f"dtype of {name} in bfloat16"] = str(use(leaf.detach().bfloat16()).dtype)
        if (result := use(leaf)).requires_grad:
            result.sum().backward()
        grad = None if leaf.grad is None else leaf.grad.clone()
        shown[f"gradient of ones through {name}"] = grad
    second = rank.course.moe.Pairs(experts.flip(0), sum(sizes), case.rows_each)
    shown["sums of a second Pairs"] = second.collect(second.spread(x)).detach()
    rank.course.moe.Pairs(torch.arange(X)[None], X * (case.rows_each or 1), case.rows_each)
    for name, one in (("first", pairs), ("second", second)):
        shown[f"rows of the {name} of three Pairs"] = one.spread(2 * x).detach()
    shown["rows after further calls"] = rows.detach()
    return shown | {"out": out.detach()} | grads


def expected(case: Case) -> list[dict]:
    (x, weights, experts, gradient), sizes = inputs(case), sizes_of(case)
    out, in_order = 0 * x * weights.sum(), x.new_zeros(case.tokens)
    (rows, of_second), sorted_weights = x.new_zeros(2, sum(sizes), E), x.new_zeros(sum(sizes))
    for e in range(X):
        for row, (t, j) in enumerate((experts == e).nonzero().tolist(), sum(sizes[:e])):
            rows[row], sorted_weights[row] = x[t].detach(), weights[t, j].detach()
            out[t] += weights[t, j] * run(e, x[t])
        for row, (t, _) in enumerate((experts.flip(0) == e).nonzero().tolist(), sum(sizes[:e])):
            of_second[row] = 2 * x[t].detach()
    for t, chosen in enumerate(experts.tolist()):
        in_order[t] = sum(term for term, e in zip(TERMS, chosen, strict=False) if e < X)
    out.backward(gradient)
    result = {"rows": rows, "out": out.detach(), "weights of rows": sorted_weights}
    result |= {"sum in the order of pairs": in_order, "dtype": "torch.float64"}
    kept, has_pair = (experts < X).double(), (sorted_weights != 0).double()[:, None].expand(-1, E)
    ones = {"spread": kept.sum(1, keepdim=True).expand(-1, E), "sort": kept, "collect": has_pair}
    for name, of_ones in ones.items():
        result[f"dtype of {name} in bfloat16"] = "torch.bfloat16"
        result[f"gradient of ones through {name}"] = of_ones
    result["rows after further calls"] = rows
    result["sums of a second Pairs"] = x.detach() * (experts.flip(0) < X).sum(1, keepdim=True)
    result["rows of the first of three Pairs"] = 2 * rows
    result["rows of the second of three Pairs"] = of_second
    return [result | {"gradient of x": x.grad, "gradient of weights": weights.grad}]


def picture(runs):
    for case, _ in (runs[2], runs[3]):  # with dropped pairs; filled up
        experts, name = inputs(case)[2], f"rows_each {case.rows_each}"
        yield f"{name}: the token of each row, expert by expert (-: dropped, .: zeros)"
        for t, chosen in enumerate(experts.tolist()):
            yield f"    token {t} chooses {' '.join('-' if e == X else str(e) for e in chosen)}"
        for e, size in enumerate(sizes_of(case)):
            own = [str(t) for t in (experts == e).any(1).nonzero().flatten().tolist()]
            yield f"    expert {e}  | " + " ".join([*own, *"." * (size - len(own))])


VERSIONS = """
not_sorted: Rows are in the order of tokens: experts need theirs one after the other.
    flat.argsort(stable=True) => torch.arange(len(flat))
order_of_the_class: The order is kept in the class: the Pairs that was made last decides for all.
    self.order = order[ => Pairs.order = order[
order_for_places: What tells which pair is in a row is used as what tells in which row a pair is:
    one is the inverse of the other.
    (0, self.order, y) => (0, self.order.argsort(), y)
token_of_pair: The number of a pair is taken modulo n for its token's number: a token's k pairs lie
    side by side, so it is the number // k.
    1))[self.order // self.shape[1]] => 1))[self.order % len(x)]
one_pair_only: A token gets the row of its first expert only.
    sum(1) => select(1, 0)
weights_not_sorted: The weights are in the order of tokens: rows get the weights of others.
    1))[self.order] => len(self.order)))[: len(self.order)]
dropped_get_a_row: Dropped pairs get the last row, which is of another pair: they must get nothing.
    y.new_zeros(self.shape.numel() + 1, y.shape[1]) => y[-1:].repeat(self.shape.numel() + 1, 1)
no_gaps: With rows_each an expert's pairs begin at its number times rows_each: leave gaps.
    ranked * rows_each + places_in_groups(ranked, num_rows // rows_each) => torch.arange(len(flat))
dropped_into_the_last: With rows_each dropped pairs overwrite the last row: it is the last expert's.
- order = empty.scatter_(0, places.clamp(max=num_rows), order)
+ order = empty[1:].scatter_(0, places.clamp(max=num_rows - 1), order)
empty_rows_added: collect adds what is in empty rows to a token: they are of no pair.
    index_copy_(0, self.order, y) => index_add_(0, self.order % self.shape.numel(), y)
weights_in_empty_rows: sort gives empty rows the weight of a pair: they must be zeros.
    F.pad(weights.flatten(), (0, 1)) => torch.cat([weights.flatten(), weights[-1, -1:]])
added_by_expert: A token's rows are added in the order of experts: the order of its pairs is wanted.
    And a GPU adds them atomically, in any order: results do not repeat.
- pairs = y.new_zeros(self.shape.numel() + 1, y.shape[1]).index_copy_(0, self.order, y)
- return pairs[:-1].unflatten(0, self.shape).sum(1)
+ sums = y.new_zeros(self.shape[0] + 1, y.shape[1])
+ return sums.index_add_(0, self.order // self.shape[1], y)[:-1]
filled_with_a_token: Rows left over are the first token's, with its gradients: use zeros.
    order.new_full((num_rows + 1,), len(flat)) => order.new_zeros(num_rows + 1)
also_right:
    Conjugate.apply(self._spread, self._collect, x) => self._spread(x)
    Conjugate.apply(self._collect, self._spread, y) => self._collect(y)
- return F.pad(x, (0, 0, 0, 1))[self.order // self.shape[1]]
+ every = x.repeat_interleave(self.shape[1], 0)
+ return torch.cat([every, torch.zeros_like(every[:1])])[self.order]
    index_copy_(0, self.order, y) => index_add(0, self.order, y)
"""
