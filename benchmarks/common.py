"""What the benchmarks share: a check of equal work, equal weights, facts of the machine."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from importlib.metadata import version
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor, nn

from picotron_min.extensions.settings import ModelConfig
from picotron_min.initialise import initial_std, initial_weight
from picotron_min.runtime.speed import device_name
from train import Run, train_step

CHECKED_STEPS = 3  # before rounding errors have grown: float32 differs after a hundred


class Done(NamedTuple):
    """The result of a step, over all ranks."""

    loss: float  # mean over the tokens
    grad_norm: float  # before clipping


Step = Callable[[int], Done]


def our_step(run: Run) -> Step:
    """The step of train.py."""

    def step(index: int) -> Done:
        result = train_step(run, index)
        return Done(result.loss, result.grad_norm)

    return step


def check_same_work(done: dict[str, list[Done]], tolerance: Done) -> None:
    """ValueError if contenders differ in the loss or gradient norm of an early step."""
    for name, theirs in done.items():
        ours, mine = next(iter(done.items()))
        for a, b in list(zip(mine, theirs, strict=True))[:CHECKED_STEPS]:
            if not all(abs(x - y) <= t * abs(x) for x, y, t in zip(a, b, tolerance, strict=True)):
                why = "they do not do the same work, so their times cannot be compared"
                raise ValueError(f"a step of {ours} came to {a}, of {name} to {b}: {why}")


def facts(device: torch.device) -> dict[str, str]:
    """What one must know to read the numbers."""
    return {
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "device": device_name(device),
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda}",
        "transformers": version("transformers") if find_spec("transformers") else "none",
    }


def initial_weights(model_config: ModelConfig, seed: int) -> Iterator[tuple[str, Tensor]]:
    """By name, one at a time: memory is measured."""
    num_layers = model_config.num_hidden_layers
    for name, shape in model_config.parameter_shapes().items():
        yield name, initial_weight(name, shape, seed, initial_std(name, num_layers))


def fill(parameters: Mapping[str, Tensor], weights: Iterable[tuple[str, Tensor]]) -> None:
    """Names are the same in all contenders: those of Hugging Face."""
    for name, weight in weights:
        parameters[name].data.copy_(weight)


def transformers_model(model_config: ModelConfig) -> nn.Module:
    """Hugging Face's, with SDPA attention."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from picotron_min.runtime.architectures import to_hf  # needs pydantic

    shape = AutoConfig.for_model(**to_hf(model_config))
    return AutoModelForCausalLM.from_config(shape, attn_implementation="sdpa")
