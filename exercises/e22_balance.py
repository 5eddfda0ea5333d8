"""22 balance: experts are to be used alike, in a sequence, a batch or a step

target: extensions.experts.router:Router._balance
train: model.num_local_experts=4 model.num_experts_per_tok=2

Return the gradient of the balance losses for every token's shares of the scores, which is the same
for all tokens of a sequence: [B, S, X] -> [B, 1, X]. A loss is the sum over tokens of
X sum_i f_i s_i, with s_i a token's share of expert i, and f_i the expert's part of all choices, in
which a token's k best experts by share are counted. f_i is no function of the shares.
There are three losses, with the coefficients moe_seq_aux_loss_coeff (f_i of each sequence),
moe_aux_loss_coeff (of this micro-batch's sequences) and moe_global_aux_loss_coeff (of all that the
step has seen so far, on all ranks). self.sum_over_sequences adds up counts [B, X] over ranks with
other tokens of the same sequences, self.sum_over_batch counts [X] over those with other sequences:
call the latter for the third loss only, whose counts self.tally.counts_of_step[self.layer] keeps.
Report each loss that has a coefficient, without it, of this rank's tokens, by self.tally.add(
self.layer, name, loss): "seq_load_balancing_loss", "load_balancing_loss",
"global_load_balancing_loss".
Read: extensions/experts/router.py.

? Count choices by sequence; sum them over three scopes; each scope gives the f of one loss.
? shares.topk(self.config.num_experts_per_tok).indices, scatter_, self.sum_over_sequences,
  self.sum_over_batch, self.tally.counts_of_step[self.layer], self.tally.add, self.routing.
? The first scope is counts [B, X], after self.sum_over_sequences; the second is counts.sum(0); the
  third is tally.counts_of_step[self.layer], to which self.sum_over_batch(counts.sum(0)) is added in
  place. f is X times a scope, divided by the scope's sum over experts. A loss is the sum of f times
  shares; its gradient is coefficient times f. Add up all losses' gradients.
! X sum_i f_i s_i is 1 where experts are used alike, and X / k where always the same k are chosen.
  In production: Megatron-LM's `TopKRouter`.
"""

from collections import Counter
from functools import partial
from types import SimpleNamespace

import torch

from exercises.exercise import Case, Dice, Sent, draw

NAMES = {"batch": "", "seq": "seq_", "global": "global_"}
COEFFICIENTS = {"batch": 0.05, "seq": 0.3, "global": 0.7}
REPORTED = "{}load_balancing_loss of layer 1".format
MICRO_BATCHES = 2


def cases(dice: Dice) -> list[Case]:
    # Each loss alone, and several; ranks that cut sequences, that have others, and both.
    some = [(1, 1, "seq"), (1, 1, "batch"), (1, 1, "global"), (1, 2, "seq batch")]
    some += [(2, 1, "batch"), (2, 1, "batch global"), (2, 2, "seq batch global")]
    sizes = {"experts": dice.randint(4, 6), "sequences": 2}
    found = [Case(dp * cp, dp=dp, cp=cp, losses=losses, **sizes) for dp, cp, losses in some]
    for i, case in enumerate(found):
        # With k = 1 it is right to count only the best expert.
        case.k, case.tokens = i % 3 + 1, 2 * dice.randint(3, 5)
    return found


def shares_of(case: Case, dp: int, cp: int, micro_batch: int):
    shape = case.sequences, case.tokens // case.sequences, case.experts
    return draw(case, "shares", dp, cp, micro_batch, shape=shape).softmax(-1)


def on_rank(rank, case: Case) -> dict:
    course, used = rank.course, case.losses.split()
    axes = rank.axes(course.settings.Layout(dp=case.dp, cp=case.cp))
    sizes = {"num_local_experts": case.experts, "num_experts_per_tok": case.k, "hidden_size": 1}
    config = SimpleNamespace(num_layers=2, scoring_func="sigmoid", **sizes)
    values = {f"moe_{NAMES[k]}aux_loss_coeff": x * (k in used) for k, x in COEFFICIENTS.items()}
    losses, counts = Counter(), torch.zeros(2, case.experts, dtype=torch.float64)

    def add(layer: int, name: str, loss: torch.Tensor) -> None:
        losses[f"{name} of layer {layer}"] += float(loss)

    tally = SimpleNamespace(counts_of_step=counts, add=add)
    router = course.router.Router(config, SimpleNamespace(**values), tally, layer=1)
    router.sum_over_sequences = partial(course.collectives.all_reduce, axis=axes.cp_tp)
    router.sum_over_batch = partial(course.collectives.all_reduce, axis=axes.dp)
    place, results = (axes.dp.rank, axes.cp.rank), {}
    for i in range(MICRO_BATCHES):
        gradient = router._balance(shares_of(case, *place, i))
        results[f"gradient, micro-batch {i}"] = gradient.clone()
    return results | losses


def counts_of(case: Case, dp: int, sequence: int, micro_batch: int) -> torch.Tensor:
    counts = torch.zeros(case.experts, dtype=torch.float64)
    for cp in range(case.cp):
        for token in shares_of(case, dp, cp, micro_batch)[sequence]:
            counts[token.argsort(descending=True)[: case.k]] += 1
    return counts


def expected(case: Case) -> list[dict]:
    results, used, sequences = [], case.losses.split(), range(case.sequences)
    for rank in range(case.ranks):
        dp, cp = divmod(rank, case.cp)
        seen, losses = 0, Counter()
        result = {}
        for i in range(MICRO_BATCHES):
            of = [[counts_of(case, d, b, i) for b in sequences] for d in range(case.dp)]
            seen = seen + sum(map(sum, of))
            rows = []
            for b in sequences:
                f = {"seq": of[dp][b], "batch": sum(of[dp]), "global": seen}
                f = {name: case.experts * f[name] / f[name].sum() for name in used}
                rows.append(sum(COEFFICIENTS[name] * f[name] for name in used))
                for name in used:
                    loss = float((shares_of(case, dp, cp, i)[b] * f[name]).sum())
                    losses[REPORTED(NAMES[name])] += loss
            result[f"gradient, micro-batch {i}"] = torch.stack(rows)[:, None]
        results.append(result | losses)
    return results


def traffic(case: Case, rank: int) -> dict[str, Sent]:
    sums = [(case.cp, case.sequences * case.experts)]  # over how many ranks, of how many numbers
    sums += [(case.dp, case.experts)] * ("global" in case.losses)
    sizes = [2 * (n - 1) / n * numbers * 8 for n, numbers in sums if n > 1] * MICRO_BATCHES
    return {"all_reduce": Sent(len(sizes), sum(sizes))}


MISTAKES = """
part_of_a_sequence: Each rank counts its own tokens of a sequence alone: a sequence that is cut over
    ranks has another loss than a whole one.
    self.sum_over_sequences(counts) => counts
step_forgotten: The global loss counts this micro-batch alone, not what the step has seen before.
    of_step += => of_step =
own_batch_only: The global loss counts this rank's sequences alone, not other ranks'.
    of_step += self.sum_over_batch(counts.sum(0)) => of_step += counts.sum(0)
sequence_for_batch: The loss over the batch takes each sequence by itself.
    , counts.sum(0) => , counts
one_expert_counted: Only the best expert of a token is counted: it uses k.
    self.config.num_experts_per_tok => 1
coefficient_reported: The reported losses are multiplied by their coefficients: losses of two runs
    with different coefficients could not be compared.
    (f[:, None] * shares).sum() => coefficient * (f[:, None] * shares).sum()
"""
