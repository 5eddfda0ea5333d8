"""21 route: the best experts of each token, and how much each counts

target: extensions.experts.router:route
train: model.num_local_experts=4 model.num_experts_per_tok=2

From logits [..., X] return three tensors, in this order: for each token the weights of its k best
experts [..., k], these experts [..., k], both with the best first, and every expert's share of all
scores [..., X]. Scores are the softmax of the logits, or their sigmoid. A bias, if any, is added to
the scores to choose, and for nothing else. If config.n_group > 1, experts are in n_group groups,
and only experts in the best config.topk_group groups can be chosen: a group is as good as its two
best experts together, with bias. Nothing is learned through the choice. The weights are the chosen
experts' scores, with config.norm_topk_prob divided by their sum, then multiplied by
config.routed_scaling_factor. Shares are the scores divided by their sum: softmax's have it already.
Add TINY to sums that divide.
Read: extensions/experts/router.py.

? Scores; rank them, with bias and groups, to choose; then take the weights from the scores.
? config.scoring_func, softmax, sigmoid, torch.no_grad, Tensor.topk(k).indices, unflatten, scatter_,
  masked_fill with -math.inf, flatten, gather.
? View the ranked scores as [..., groups, experts of a group]. Of each group add the two best; take
  the best groups; set the others' experts to -inf, not to 0, since a bias may be negative. The k
  best are the experts. Gather their scores, without the bias.
! In DeepSeek-V3 each token uses 8 of 256 experts, from at most 4 of 8 groups, so from few nodes. In
  production: Megatron-LM's `TopKRouter`.
"""

from types import SimpleNamespace

import torch

from exercises.exercise import Case, Dice, draw


def cases(dice: Dice) -> list[Case]:
    # Each line changes what the lines before have as it is.
    plain = {"experts": 8, "k": 3, "groups": 1, "bias": False, "scaling": 1.0}
    variants = [
        {"scoring": "softmax", "norm": False},
        {"scoring": "softmax", "norm": True, "scaling": 2.5},
        {"scoring": "sigmoid", "norm": False, "scaling": 1.5, "bias": True},
        {"scoring": "sigmoid", "norm": True, "scaling": 2.5, "bias": True},
        {"scoring": "sigmoid", "norm": True, "groups": 4, "bias": True},
        {"scoring": "sigmoid", "norm": False, "groups": 2, "experts": 12},
    ]
    return [Case(1, tokens=dice.randint(20, 30), **(plain | v)) for v in variants]


def inputs(case: Case):
    logits = 2 * draw(case, "logits", shape=(2, case.tokens, case.experts))
    # All are far below 0: no number stands for an expert that cannot be chosen.
    bias = 0.5 * draw(case, "bias", shape=(case.experts,)) - 9 if case.bias else None
    return logits, bias, draw(case, "gradient", shape=(2, case.tokens, case.k))


def results_of(route, case: Case) -> dict:
    sizes = {"num_local_experts": case.experts, "num_experts_per_tok": case.k}
    sizes |= {"n_group": case.groups, "topk_group": max(1, case.groups // 2)}
    sizes |= {"norm_topk_prob": case.norm, "routed_scaling_factor": case.scaling}
    logits, bias, d_weights = inputs(case)
    logits.requires_grad_()
    config = SimpleNamespace(scoring_func=case.scoring, **sizes)
    weights, experts, shares = route(logits, config, bias)
    results = {"experts": experts, "weights": weights.detach(), "shares": shares.detach()}
    parts = [("weights", weights, d_weights), ("shares", shares, logits.detach())]
    for name, result, gradient in parts:
        grad = torch.zeros_like(logits)
        if result.requires_grad and result.shape == gradient.shape:
            (grad,) = torch.autograd.grad(result, logits, gradient, retain_graph=True)
        results[f"gradient of logits through the {name}"] = grad
    return results


def on_rank(rank, case: Case) -> dict:
    return results_of(rank.course.router.route, case)


def expected(case: Case) -> list[dict]:
    return [results_of(slow_route, case)]


def slow_route(logits, config, bias):
    """Chooses token by token, and expert by expert."""
    exp = logits.exp()
    scores = exp / (exp.sum(-1, keepdim=True) if config.scoring_func == "softmax" else 1 + exp)
    # Detached: nothing is learned through the choice.
    ranked = scores.detach() + (0 if bias is None else bias)
    tokens = ranked.flatten(0, 1).tolist()
    experts = torch.tensor([best_experts(token, config) for token in tokens])
    experts = experts.unflatten(0, logits.shape[:-1])
    is_chosen = torch.nn.functional.one_hot(experts, logits.shape[-1])
    weights = (scores[..., None, :] * is_chosen).sum(-1)
    if config.norm_topk_prob:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    shares = scores / (scores.sum(-1, keepdim=True) + 1e-20)
    return weights * config.routed_scaling_factor, experts, shares


def best_experts(ranked: list[float], config) -> list[int]:
    size = len(ranked) // config.n_group
    groups = [range(g * size, (g + 1) * size) for g in range(config.n_group)]
    if config.n_group > 1:
        groups.sort(key=lambda group: -sum(sorted(ranked[i] for i in group)[-2:]))
        groups = groups[: config.topk_group]
    allowed = [i for group in groups for i in group]
    return sorted(allowed, key=lambda i: -ranked[i])[: config.num_experts_per_tok]


MISTAKES = """
bias_in_the_weights: The weights contain the bias: it must only choose, not change what is computed.
    scores.gather => (scores if bias is None else scores + bias).gather
bias_added_to_logits: The bias is added to the logits, not to the scores: it changes the weights.
    scores = logits => logits = logits if bias is None else logits + bias; scores = logits
    ranked = scores if bias is None else scores + bias => ranked = scores
bias_ignored: The bias is not used to choose.
    ranked = scores if bias is None else scores + bias => ranked = scores
group_by_its_best: A group is ranked by its best expert alone, not by the two best together.
    groups.topk(2).values.sum(-1) => groups.amax(-1)
others_set_to_zero: Experts of other groups get a score of 0, or another number: where a bias makes
    all scores smaller, it is the best. Set them to -inf.
    -math.inf => 0.0
always_softmax: Scores are always the softmax of the logits, also where scoring_func is sigmoid.
    (-1) if config.scoring_func == "softmax" else logits.sigmoid() => (-1)
"""
