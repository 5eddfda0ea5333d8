"""Whole: the right run: a plain Llama in one process, autograd, torch's own optimizers.

It uses no parallelism, pipeline, gradient bucket, boundary, striped loss or train_step: so what is
wrong with one rank, too, is seen. Micro-batches run one by one, since the tensors of each are
compared. Experts, norms of queries and keys, and extensions that you add, are the course's own in
one process: what they do wrong there, too, is not seen.
"""

import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor

from difference.records import Key, Writer, read
from difference.taps import attach
from difference.tiny import Text, Trial, text_of, trial_of
from picotron_min.collectives import Axis
from picotron_min.extensions.build import extensions_of
from picotron_min.extensions.settings import Layout
from picotron_min.initialise import initial_std, initial_weight
from picotron_min.loss import IGNORE_INDEX
from picotron_min.mesh import Axes
from picotron_min.model import Llama
from picotron_min.placement import placements
from picotron_min.runtime.config_file import load_config

Whole = dict[Key, Tensor]


class Batch:
    """The sequences of one micro-batch of one data-parallel rank."""

    def __init__(self, trial: Trial, text: Text, step: int, micro_batch: int, dp: int) -> None:
        B, S = trial.workload.micro_batch_size, trial.workload.seq_length
        first = (micro_batch * trial.layout.dp + dp) * B
        rows = [text.tokens[i : i + S + 1].astype(int) for i in text.rows[step][first : first + B]]
        rows = torch.tensor([row.tolist() for row in rows])
        self.tokens, self.targets, self.positions = rows[:, :-1], rows[:, 1:].clone(), None
        self.positions, self.extra = torch.arange(S), ()
        if trial.workload.document_mask:
            self._cut_documents(text, text.rows[step][first : first + B], S)

    def _cut_documents(self, text: Text, starts: list[int], S: int) -> None:
        from picotron_min.extensions.documents.rectangles import Documents

        ends, lengths, self.positions = set(text.ends.tolist()), [], torch.zeros(len(starts), S)
        for row, start in enumerate(starts):
            begins = [0, *(i for i in range(1, S) if start + i in ends)]
            lengths.append(tuple(b - a for a, b in zip(begins, [*begins[1:], S], strict=True)))
            for a, length in zip(begins, lengths[-1], strict=True):
                self.positions[row, a : a + length] = torch.arange(length)
            last = [
                i for i in range(S) if start + i + 1 in ends
            ]  # no token follows in its document
            self.targets[row, last] = IGNORE_INDEX
        self.extra = (Documents(tuple(lengths)),)


def plain_model(trial: Trial) -> Llama:
    """A Llama in float64 with its initial weights, and what its extensions put into a model."""
    config = trial.model_config
    model = Llama(config).double()
    alone = SimpleNamespace(rank=lambda: 0, size=lambda: 1)
    names = {name for grid in trial.layout.grids for name in grid.axes} | {"ends"}
    axes = Axes(**{name: Axis(name, alone, torch.device("cpu")) for name in names})
    layout, workload = Layout(), SimpleNamespace(**vars(trial.workload) | {"recompute": "none"})
    workload.offload = 0
    table = placements(config.parameter_shapes() | config.buffer_shapes(), layout, False)
    for extension in extensions_of(config, layout, workload, axes, torch.device("cpu")):
        extension.swap(model)
        if hasattr(extension, "tally"):  # experts: neither messages nor grouped products
            model.to_empty(device="cpu")
            [buffer.zero_() for buffer in model.buffers()]
        else:
            model.to_empty(device="cpu")
            extension.connect(model, table)
            extension.wrap(model)
    model.tie_weights()
    for name, parameter in model.named_parameters():
        std = initial_std(name, config.num_hidden_layers)
        parameter.data.copy_(initial_weight(name, tuple(parameter.shape), trial.seed, std))
    model.lm_head.loss = lambda x, targets: _token_losses(model.lm_head(x), targets)
    return model


def _token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    options = {"ignore_index": IGNORE_INDEX, "reduction": "none"}
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), **options).view_as(targets)


class RightRun:
    """Everything that the right run has computed, by step, phase, name, micro-batch and dp rank."""

    def __init__(self, trial: Trial, text: Text) -> None:
        self.trial, self.text, self.whole = trial, text, {}
        self.model, self.at = plain_model(trial), Key(0, "", "")
        self.parameters = dict(self.model.named_parameters())
        self.note("initial", {name: p.data for name, p in self.parameters.items()})
        attach(self.model, self._tap)
        self.optimizer = self._optimizer()
        for step in range(trial.steps):
            self._step(step)

    def note(self, phase: str, tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            key = self.at._replace(phase=phase, name=name)
            self.whole[key] = tensor.detach().clone()

    def _tap(self, name: str, out: Tensor, wants_gradient: bool) -> None:
        self.note("forward", {name: out})
        if wants_gradient and out.requires_grad:
            out.register_hook(lambda gradient: self.note("backward", {name: gradient}))

    def _optimizer(self) -> torch.optim.Optimizer:
        recipe, all_of_them = self.trial.recipe, self.parameters.values()
        groups = [
            {"params": [p for p in all_of_them if p.ndim > 1], "weight_decay": recipe.weight_decay},
            {"params": [p for p in all_of_them if p.ndim == 1], "weight_decay": 0.0},
        ]
        if recipe.optimizer == "sgd":
            return torch.optim.SGD(groups, recipe.learning_rate)
        return torch.optim.AdamW(groups, recipe.learning_rate, recipe.betas)

    def _step(self, step: int) -> None:
        sums = {name: torch.zeros_like(p) for name, p in self.parameters.items()}
        loss, num_targets = 0.0, 0
        for micro_batch, dp in self.trial.micro_batches:
            self.at = Key(step, "", "", micro_batch, dp)
            batch = Batch(self.trial, self.text, step, micro_batch, dp)
            self.optimizer.zero_grad()
            out = self.model(batch.tokens, batch.positions, batch.targets, *batch.extra)
            out.sum().backward()
            self.note("part", gradients := {name: p.grad for name, p in self.parameters.items()})
            sums = {name: total + gradients[name] for name, total in sums.items()}
            loss += out.sum().detach()
            num_targets += int((batch.targets != IGNORE_INDEX).sum())
        self.at = Key(step, "", "")
        self.note("summed gradient", sums)
        squares = sum(total.square().sum() for total in sums.values())
        norm = squares.sqrt() / num_targets
        self.note("loss", {"loss": loss / num_targets})
        self.note("gradient norm", {"gradient norm": norm})
        clip = self.trial.recipe.grad_clip
        factor = (min(1.0, clip / (norm.item() + 1e-6)) if clip else 1.0) / num_targets
        for name, parameter in self.parameters.items():
            parameter.grad = sums[name] * factor
        self.note("scaled gradient", {n: p.grad for n, p in self.parameters.items()})
        self.optimizer.step()
        state = {n: self.optimizer.state[p] for n, p in self.parameters.items()}
        for moment in ("exp_avg", "exp_avg_sq"):
            of_all = {n: s[moment] for n, s in state.items() if moment in s}
            self.note("optimizer state", {f"{moment} of {n}": t for n, t in of_all.items()})
        self.note("weights", {name: p.data for name, p in self.parameters.items()})


def whole_of(folder: Path, config: Path, steps: int, own_sizes: bool) -> Whole:
    """What the right run of another copy of the course computes, in a process of its own."""
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary, "whole")
        command = [sys.executable, "-m", "difference.whole", config, steps, own_sizes, out]
        subprocess.run([*map(str, command)], cwd=folder, check=True)
        return {record.key: record.tensor for record in read(out)}


def main(config: str, steps: str, own_sizes: str, out: str) -> None:
    trial = trial_of(load_config(config), int(steps), own_sizes == "True")
    writer = Writer(Path(out))
    for key, tensor in RightRun(trial, text_of(trial)).whole.items():
        writer.write(key, tensor)


if __name__ == "__main__":
    main(*sys.argv[1:])
