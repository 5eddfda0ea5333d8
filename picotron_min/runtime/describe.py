"""Describe: what each sublayer of a rank runs, in order, with its messages and their bytes.

    python -m picotron_min.runtime.describe --config config.json

builds the model of a config in all its processes, runs one step on zeros, and prints micro-batch 0
of the first rank of each stage. Replaced methods are shown: `forward: _between` is what an instance
calls in place of its class's forward. No dataset is read, and nothing is written.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import MethodType

import numpy as np
import torch.distributed as dist
from torch import Tensor, nn

from picotron_min.extensions.build import build_model
from picotron_min.initialise import initialise
from picotron_min.mesh import Axes, build_axes
from picotron_min.parallelize import ParallelModel
from picotron_min.pipeline_schedule import Action
from picotron_min.runtime.config import Config
from picotron_min.runtime.config_checks import resolve_model
from picotron_min.runtime.failures import RankMonitor
from picotron_min.runtime.inputs import open_data
from picotron_min.runtime.launch import choose_device
from picotron_min.runtime.processes import start_run
from picotron_min.runtime.token_file import TokenFile

METHODS = ("forward", "project", "loss")  # that a parallelism or an extension may replace


class Log:
    """Lines about the actions of micro-batch 0, each with the number of its layer, or ""."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []
        self.layer, self.is_on = "", False

    def note(self, line: str) -> None:
        if self.is_on:
            self.lines.append((self.layer, line))

    def note_module(self, name: str, kind: str, *_) -> None:
        self.layer = name.split(".")[2] if name.startswith("model.layers.") else ""
        self.note(f"  {name}: {kind}")

    def note_message(
        self, axis: str, record: Callable, collective: str, tensor: Tensor, share: float = 1.0
    ) -> None:
        """In place of the `record` of an axis' ledger."""
        record(collective, tensor, share)
        if share:
            sent = f"{share * tensor.nbytes:,.0f} bytes"
            self.note(f"      {collective} over {axis}: {sent}, of {[*tensor.shape]}")

    @contextmanager
    def watch(self, action: Action) -> Iterator[None]:
        self.is_on, self.layer = action.micro_batch == 0, ""
        self.note(str(action))
        yield
        self.is_on = False

    def without_repetition(self) -> Iterator[str]:
        """A layer that does what the one before it does becomes one line."""
        before = []
        for layer, group in itertools.groupby(self.lines, key=lambda pair: pair[0]):
            block = [line for _, line in group]
            alike = [line.replace(f"layers.{layer}.", "") for line in block]
            yield from [f"  model.layers.{layer}: the same"] if layer and alike == before else block
            before = alike


def describe(config: Config, monitor: RankMonitor) -> None:
    d = config.distributed
    device, backend = choose_device(monitor.launch, d.backend, d.use_cpu)
    monitor.connect(backend)
    axes = build_axes(device, config.layout, d.timeout_seconds)
    model_config = resolve_model(config)
    model = build_model(model_config, config.layout, config.workload, axes, device)
    initialise(model.parameters, model_config, 0, model.placements, axes)
    model.weights_changed()
    lines = lines_of_a_step(model, axes, config)
    all_lines = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(lines, all_lines, group=monitor.group)
    others = config.world_size // config.layout.pp  # ranks of a stage, of which the first is shown
    for rank, of_rank in enumerate(all_lines or []):
        if rank % others == 0:
            print("\n".join([f"rank {rank}", *of_rank, ""]))


def lines_of_a_step(model: ParallelModel, axes: Axes, config: Config) -> list[str]:
    log, workload = Log(), config.workload
    for axis in axes:
        axis.ledger.record = partial(log.note_message, axis.name, axis.ledger.record)
    for chunk in model.pipeline.chunks:
        for name, module in chunk.model.named_modules():
            if name.count(".") in (1, 3) or "forward" in vars(module):
                module.register_forward_pre_hook(partial(log.note_module, name, _kind(module)))
        head = chunk.model.lm_head
        if loss := getattr(head, "loss", None):  # what training calls instead of forward
            note = partial(log.note_module, "lm_head", _kind(head))
            head.loss = lambda *args, note=note, loss=loss: note() or loss(*args)
    size = 4 * (workload.seq_length + 1)  # tokens, enough for a batch to be read
    depths = model.pipeline.chunks[0].model.config.num_nextn_predict_layers
    text = TokenFile(np.zeros(size, np.uint16), size, 1, np.array([size]))
    batches = open_data(config, text, axes.dp.rank, axes.cp.rank, depths)
    for gradients in model.gradients:
        gradients.begin(workload.num_micro_batches)
    with model.autocast():
        model.pipeline.run(model.plan, partial(batches.batch, 0), log.watch)
    for gradients in model.gradients:
        gradients.wait()
    axes_of_gradients = {axis for placement in model.placements.values() for axis in placement.sums}
    return [
        f"plan: {', '.join(str(action) for action in model.plan if action.micro_batch == 0)}",
        *log.without_repetition(),
        "all of the step, of gradients and weights",
        *(
            f"  {collective} over {name}: {size:,.0f} bytes"
            for name in sorted(axes_of_gradients)
            for collective, size in sorted(axes[name].ledger.bytes.items())
            if size
        ),
    ]


def _kind(module: nn.Module) -> str:
    """A module's class, and the methods that are replaced on this instance."""
    replaced = [f"{name}: {_name(vars(module)[name])}" for name in METHODS if name in vars(module)]
    return ", ".join([type(module).__name__, *replaced])


def _name(function) -> str:
    """A function's name, and the names of what it wraps: `_gathering of _recomputed of forward`."""
    function = getattr(function, "_torchdynamo_orig_callable", function)  # of compiler.disable
    outer = getattr(function, "func", function)  # of a partial
    owner = getattr(outer, "__self__", None)  # a Function's apply is bound to its class
    name = (owner if isinstance(owner, type) else outer).__qualname__.split(".<locals>")[0]
    cells = getattr(outer, "__closure__", None) or ()
    held = [*getattr(function, "args", ()), *(cell.cell_contents for cell in cells)]
    inner = [f for f in held if isinstance(f, partial | MethodType) or getattr(f, "__closure__", 0)]
    return " of ".join([name, *map(_name, inner[:1])])


if __name__ == "__main__":
    start_run(describe, "Print what each sublayer of a rank runs, with its messages.")
