"""One rank's run as an object, for tests: what train.py does, without files and console."""

from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

import train
from picotron_min.data import Batches
from picotron_min.extensions.build import build_model
from picotron_min.extensions.experts.extension import Experts
from picotron_min.extensions.overlap.linear import Linear, linears
from picotron_min.extensions.settings import ModelConfig
from picotron_min.extensions.sharding.units import ShardedUnit
from picotron_min.mesh import Axes
from picotron_min.model import Llama
from picotron_min.runtime.config import KEY, SECTIONS, Config
from picotron_min.runtime.config_file import parse_config
from picotron_min.runtime.inputs import Inputs, fill_weights
from picotron_min.runtime.saver import Saver
from picotron_min.runtime.token_file import TokenFile
from picotron_min.runtime.tokenizer import BytesTokenizer
from train import StepResult

SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def config_of(**keys) -> Config:
    """A config with keys of any section; an axis stands for its size."""
    keys = {KEY.get(key, key): value for key, value in keys.items()}
    assert keys.keys() <= set().union(*SECTIONS.values()), "no section has such a key"
    return parse_config(
        {
            section: {key: keys[key] for key in names if key in keys}
            for section, names in SECTIONS.items()
        }
    )


def new_linear(inputs: int, outputs: int, kind: type[Linear] = Linear) -> Linear:
    return kind(nn.Linear(inputs, outputs, bias=False).weight)


def with_autograd(model: Llama) -> Llama:
    """The model without the queue of weight gradients, as torch.autograd.grad needs it."""
    for linear in linears(model).values():
        del linear.forward
    return model


class Training:
    """Builds a rank's part of a run, fills its weights in, and steps it."""

    def __init__(
        self,
        config: Config,
        model_config: ModelConfig,
        axes: Axes,
        device: torch.device,
        batches: Batches,
        weights: Path | None = None,
    ) -> None:
        tokenizer, start = BytesTokenizer(), (None, None, weights, None)
        text = TokenFile(batches.tokens, None, 1)
        self.inputs = Inputs(config, device, "gloo", model_config, tokenizer, text, batches, *start)
        self.config, self.model_config, self.axes, self.device = config, model_config, axes, device
        # Drawing weights on the meta device, which has none, takes as long as the rest together.
        with ExitStack() as stack:
            for kind in (nn.Linear, nn.Embedding, nn.RMSNorm):
                nothing = mock.patch.object(kind, "reset_parameters", lambda _: None)
                stack.enter_context(nothing)
            sizes = model_config, config.layout, config.workload
            self.model = build_model(*sizes, axes, device)
        self.run = train.build_run(self.model, config.recipe, batches)
        self.data, self.skipped, self.optimizer = batches, self.run.skipped, self.run.optimizer
        self.parameters, self.chunks = self.model.parameters, self.model.pipeline.chunks
        self.saver = Saver(self.run, self.inputs, dist.new_group(backend="gloo"))
        fill_weights(self.run, self.inputs, self.saver.group)
        dist.barrier(self.saver.group)  # as train does

    @property
    def modules(self) -> list[nn.Module]:
        return [module for chunk in self.chunks for module in chunk.model.modules()]

    @property
    def units(self) -> list[ShardedUnit]:
        return [unit for unit in self.model.gradients if isinstance(unit, ShardedUnit)]

    @property
    def experts(self) -> list[Experts]:  # one, or none
        return [e for e in self.model.extensions if isinstance(e, Experts)]

    def step(self, step: int, watch=None) -> StepResult:
        return train.train_step(self.run, step, watch)

    def evaluate(self) -> float:
        return train.evaluate(self.run)

    def save(self, save_dir: Path, step: int) -> None:
        self.saver.folder = save_dir
        self.saver.save(step)

    def load(self, folder: Path, step: int, skipped_steps: int = 0) -> None:
        metadata = SimpleNamespace(step=step, skipped_steps=skipped_steps)
        inputs = self.inputs._replace(start=folder, metadata=metadata)
        fill_weights(self.run, inputs, self.saver.group)

    def export(self, folder: Path, tokenizer) -> None:
        self.saver.inputs = self.inputs._replace(tokenizer=tokenizer)
        self.saver.export(folder)
