"""Balance: how evenly a step used the experts, from what the routers have counted."""

from statistics import fmean

import torch
from torch import Tensor

from picotron_min.extensions.experts.router import LOSSES, RoutingCounts
from picotron_min.extensions.settings import ModelConfig, Routing


def measure_balance(
    routed: Tensor, model_config: ModelConfig, routing: Routing, ep: int
) -> dict[str, object]:
    """Means over the layers with experts, and lists of all layers; see RoutingCounts for `routed`.

    Losses are means over tokens, without their coefficient; None if the coefficient is 0. With
    equal scores a balance loss is 1 however uneven the choices are. Hence `load_imbalance`: the
    tokens of the busiest expert, divided by the mean; and `rank_imbalance`, the rows of the busiest
    of `ep` ranks, divided by an even share of all. `dropped` is a share of (token, expert).
    """
    X, k = model_config.num_local_experts, model_config.num_experts_per_tok
    counts, columns = routed[:, :X], dict(zip(RoutingCounts.COLUMNS, routed[:, X:].T, strict=True))
    tokens, measures = columns["tokens"], {}
    of_layers = {name: columns[name] / tokens for name in LOSSES if getattr(routing, LOSSES[name])}
    of_layers["load_imbalance"] = counts.amax(1) / counts.mean(1)
    rows = counts.unflatten(1, (ep, -1)).sum(2)
    of_layers["rank_imbalance"] = rows.amax(1) * ep / (k * tokens)
    of_layers["dropped"] = columns["dropped"] / (k * tokens)
    lists = dict(zip(of_layers, torch.stack([*of_layers.values()]).tolist(), strict=True))
    has_experts = [*map(model_config.has_experts, range(len(routed)))]
    for name in LOSSES | of_layers:  # also the losses that are not used
        values = lists.get(name, [None] * len(routed))
        values = [value if has else None for value, has in zip(values, has_experts, strict=True)]
        known = [value for value in values if value is not None]
        measures |= {name: fmean(known) if known else None, f"{name}_per_layer": values}
    return measures
