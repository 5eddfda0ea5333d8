"""Inputs: what a rank starts from: device, model, tokens, and a checkpoint or initial weights."""

from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from filelock import FileLock

from picotron_min.checkpoint import load, set_optimizer_steps, training_tensors
from picotron_min.context_parallel import POSITIONS
from picotron_min.data import Batches
from picotron_min.extensions.build import open_batches
from picotron_min.extensions.settings import ModelConfig
from picotron_min.initialise import initialise
from picotron_min.mesh import Axes, build_axes
from picotron_min.runtime.config import Config
from picotron_min.runtime.config_checks import resolve_model
from picotron_min.runtime.failures import RankMonitor
from picotron_min.runtime.folders import check_shared, find_start, lock_folder
from picotron_min.runtime.hugging_face import find_weights, load_hf
from picotron_min.runtime.launch import Launch, choose_device, open_communicators
from picotron_min.runtime.metadata import Metadata, read_to_resume
from picotron_min.runtime.token_file import TokenFile, open_text
from picotron_min.runtime.tokenizer import Tokenizer, load_tokenizer
from picotron_min.runtime.wording import counted


class Inputs(NamedTuple):
    """All that a rank knows before it connects to the others."""

    config: Config
    device: torch.device
    backend: str
    model_config: ModelConfig
    tokenizer: Tokenizer
    text: TokenFile
    batches: Batches
    start: Path | None  # the checkpoint to resume from
    metadata: Metadata | None  # of that checkpoint
    weights: Path | None  # else the folder of the weights to start from
    lock: FileLock | None  # of save_dir, as long as this lives

    @property
    def first_step(self) -> int:
        return self.batches.first_step

    @property
    def last_step(self) -> int:
        """The total of steps, or the first one after which max_tokens have been seen."""
        t, batches = self.config.training, self.batches
        if not t.max_tokens:
            return t.total_train_steps
        left = max(0, t.max_tokens - batches.seen_before)
        return min(t.total_train_steps, self.first_step + -(-left // batches.tokens_per_step))

    def is_due(self, step: int, every: int) -> bool:
        """True every `every` steps (0: never), and after the last step."""
        return step == self.last_step or (every > 0 and step % every == 0)

    def evaluates_after(self, step: int) -> bool:
        is_due = self.is_due(step, self.config.training.eval_frequency)
        return is_due and self.batches.num_eval_batches > 0

    @property
    def data(self) -> dict[str, str]:
        """What a checkpoint keeps of the text, so that a resume notices another one."""
        text = f"{len(self.text.tokens):,} tokens, checksum {self.text.checksum}"
        return {"the text": text, "the tokenizer": f"checksum {self.tokenizer.checksum}"}

    def in_common(self) -> dict[str, object]:
        """What must be the same on all nodes: else they train different models."""
        settings = {f"{name}.{key}": v for name, section in self.config for key, v in section}
        settings |= {f"model.{key}": v for key, v in asdict(self.model_config).items()}
        return settings | {"step": self.first_step, "the text": self.data["the text"]}


def start_up(config: Config, monitor: RankMonitor) -> tuple[Inputs, Axes]:
    """Read this rank's inputs, connect it to the other ranks, and check that all fit together."""
    inputs, timeout = read_inputs(config, monitor.launch), config.distributed.timeout_seconds
    monitor.connect(inputs.backend)
    check_same(inputs.in_common(), monitor.group)
    check_shared(Path(config.checkpoint.save_dir), monitor.group, timeout / 2)  # by all nodes
    axes = build_axes(inputs.device, config.layout, timeout)
    open_communicators(axes)  # in the same order on all ranks
    return inputs, axes


def check_same(settings: dict[str, object], group: dist.ProcessGroup) -> None:
    """OSError on a rank whose settings are not rank 0's."""
    of_rank_0 = [settings]
    dist.broadcast_object_list(of_rank_0, group=group)
    expected = of_rank_0[0]
    keys = [key for key in settings if settings[key] != expected.get(key)]
    if listed := ", ".join(f"{k}={settings[k]!r}, not {expected.get(k)!r}" for k in keys):
        raise OSError(
            f"rank {dist.get_rank()} was not started as rank 0: it has {listed}. "
            "Use the same config.json and files on all nodes"
        )


def read_inputs(config: Config, launch: Launch) -> Inputs:
    """Read and check everything; ValueError or OSError for the user's mistakes."""
    if launch.rank == 0:  # at once: tokens and weights may take long
        started = counted(launch.world_size, "process")
        print(f"starting {started}, reading {config.dataset.name} ...", flush=True)
    save_dir = Path(config.checkpoint.save_dir)
    metadata, weights, lock, resumed = None, None, None, {}
    d = config.distributed
    device, backend = choose_device(launch, d.backend, d.use_cpu)
    check_fp8(config, device)
    model_config = resolve_model(config)
    if launch.rank == 0:  # the one that writes
        lock = lock_folder(save_dir)
    if start := find_start(config.checkpoint.load_path, save_dir):
        metadata = read_to_resume(start, model_config, config.training.optimizer)
        resumed = {"first_step": metadata.step, "seen_before": metadata.tokens_seen}
    elif config.model.weights:
        weights = find_weights(config.model.weights, model_config, set(config.model.overrides))
    tokenizer, here = load_tokenizer(config.tokenizer), config.layout.coordinates(launch.rank)
    text = open_text(config, tokenizer, model_config.vocab_size)  # may take hours
    depths = model_config.num_nextn_predict_layers
    batches = open_data(config, text, here.dp, here.cp, depths, **resumed)
    data = (tokenizer, text, batches, start, metadata, weights, lock)
    return Inputs(config, device, backend, model_config, *data)


def fill_weights(run, inputs: Inputs, group: dist.ProcessGroup) -> None:
    """Load a checkpoint, read the weights to start from, or initialise them; `run`: train.Run."""
    model = run.model
    if inputs.start:
        tensors = training_tensors(model.parameters, model.buffers, run.optimizer)
        load(inputs.start, model.parts_of_whole(tensors), group)
        run.skipped.total = inputs.metadata.skipped_steps
        set_optimizer_steps(run.optimizer, inputs.metadata.step - run.skipped.total)
    elif inputs.weights:
        weights = {name: p.data for name, p in model.parameters.items()} | model.buffers
        load_hf(inputs.weights, model.parts_of_whole(weights), group)
    else:
        seed = inputs.config.training.seed
        initialise(model.parameters, inputs.model_config, seed, model.placements, model.axes)
    model.weights_changed()


def check_fp8(config: Config, device: torch.device) -> None:
    """Raise ValueError if the GPU cannot multiply 8-bit numbers; a CPU can."""
    if device.type == "cpu" or not (config.model.fp8 or config.model.fp8_experts):
        return
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < (8, 9):
        raise ValueError(
            f"FP8 needs GPUs of compute capability 8.9 or more, not {major}.{minor}: "
            "set model.fp8 and fp8_experts to false, or use newer ones, such as L4, RTX 40 or H100"
        )


def open_data(
    config: Config, text: TokenFile, dp_rank: int, cp_rank=0, depths=0, **resumed: int
) -> Batches:
    """The micro-batches of this rank, for a model that predicts `depths` tokens beside the next.

    For a resumed run see Batches.
    """
    d, t = config.distributed, config.training
    return open_batches(
        config.workload,
        depths,
        text,
        **t.model_dump(include={"seq_length", "seed", "micro_batch_size", "eval_batches"}),
        num_micro_batches=t.gradient_accumulation_steps,
        dp_rank=dp_rank,
        dp_size=d.dp_size,
        positions=POSITIONS[d.cp_engine](cp_rank, d.cp_size, t.seq_length),
        **resumed,
    )
