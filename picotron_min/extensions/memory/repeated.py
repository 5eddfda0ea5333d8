"""Repeated FLOPs: what recomputation adds to a step. Standard library only."""

from picotron_min.costs import flops_of_layers, model_flops_per_token
from picotron_min.extensions.settings import ModelConfig


def hardware_flops_per_token(model_config: ModelConfig, seq_length: int, recompute: str) -> int:
    """model_flops_per_token plus what `recompute` makes backward run again: the H of HFU."""
    # torch's checkpoint stops as soon as the last tensor that backward needs exists. A linear needs
    # its input, not its output, so the last linear of the part is not run again. What fused
    # attention repeats inside its own backward is not counted, as is usual. Experts count as if one
    # product computed all: one by one, all of them but the last repeat their last linear, too.
    again = {
        "none": lambda parts: 0,
        "selective": lambda parts: parts["q, k, v"] + parts["attention"],
        "full": lambda parts: sum(parts.values()) - parts["down"],
    }[recompute]
    repeated = sum(map(again, flops_of_layers(model_config, seq_length)))
    return model_flops_per_token(model_config, seq_length) + repeated
