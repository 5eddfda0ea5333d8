"""Balance: how evenly a step used the experts, from what the routers have counted."""

from collections.abc import Mapping
from statistics import fmean

from torch import Tensor

from picotron_min.extensions.experts.router import LOSSES, RoutingCounts
from picotron_min.extensions.settings import ModelConfig, Routing


def measure_balance(
    routed: Tensor, model_config: ModelConfig, routing: Routing
) -> Mapping[str, float | list[float | None] | None]:
    """Means over the layers with experts, and lists of all layers; see RoutingCounts for `routed`.

    Losses are means over tokens, without their coefficient; None if the coefficient is 0. With
    equal scores a balance loss is 1 however uneven the choices are. Hence `load_imbalance`: the
    tokens of the busiest expert, divided by the mean. `dropped` is a share of (token, expert).
    """
    layers = [
        _of_layer(row, model_config, routing) if model_config.has_experts(i) else {}
        for i, row in enumerate(routed.tolist())
    ]
    mixtures, measures = [layer for layer in layers if layer], {}
    for name in mixtures[0] if mixtures else ():
        values = [layer[name] for layer in mixtures]
        measures[name] = None if None in values else fmean(values)
        measures[f"{name}_per_layer"] = [layer.get(name) for layer in layers]
    return measures


def _of_layer(
    row: list[float], model_config: ModelConfig, routing: Routing
) -> dict[str, float | None]:
    X, k = model_config.num_local_experts, model_config.num_experts_per_tok
    counts, rest = row[:X], dict(zip(RoutingCounts.COLUMNS, row[X:], strict=True))
    measures = {
        name: rest[name] / rest["tokens"] if getattr(routing, coefficient) else None
        for name, coefficient in LOSSES.items()
    }
    measures["load_imbalance"] = max(counts) / fmean(counts)
    return measures | {"dropped": rest["dropped"] / (k * rest["tokens"])}
