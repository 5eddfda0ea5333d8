"""Balance: how evenly a step used the experts, from what the routers have counted."""

from collections.abc import Mapping
from statistics import fmean

from torch import Tensor

from picotron_min.extensions.experts.router import Tally
from picotron_min.extensions.settings import ModelConfig, Routing

# Losses as metrics, each with its column of the tally and its coefficient.
LOSSES = {
    "load_balancing_loss": ("load_balancing_loss", "moe_aux_loss_coeff"),
    "seq_load_balancing_loss": ("seq_load_balancing_loss", "moe_seq_aux_loss_coeff"),
    "global_load_balancing_loss": ("global_load_balancing_loss", "moe_global_aux_loss_coeff"),
    "z_loss": ("z", "moe_z_loss_coeff"),
}


def measure_balance(
    routed: Tensor, model_config: ModelConfig, routing: Routing, per_layer: bool = False
) -> Mapping[str, float | list[float | None] | None]:
    """Means over the layers with experts, and, `per_layer`, lists; of StepResult.routed.

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
        if per_layer:
            measures[f"{name}_per_layer"] = [layer.get(name) for layer in layers]
    return measures


def _of_layer(
    row: list[float], model_config: ModelConfig, routing: Routing
) -> dict[str, float | None]:
    X, k = model_config.num_local_experts, model_config.num_experts_per_tok
    counts, rest = row[:X], dict(zip(Tally.COLUMNS, row[X:], strict=True))
    measures = {
        name: rest[column] / rest["tokens"] if getattr(routing, coefficient) else None
        for name, (column, coefficient) in LOSSES.items()
    }
    measures["load_imbalance"] = max(counts) / fmean(counts)
    return measures | {"dropped": rest["dropped"] / (k * rest["tokens"])}
