"""What a rank reads before it connects to the others: model, tokens, checkpoint or weights."""

from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import torch
from filelock import FileLock

from picotron_min.context_parallel import POSITIONS
from picotron_min.data import Batches
from picotron_min.model_config import ModelConfig
from picotron_min.runtime.config import Config
from picotron_min.runtime.config_checks import resolve_model
from picotron_min.runtime.folders import find_start, lock_folder
from picotron_min.runtime.hugging_face import find_weights
from picotron_min.runtime.launch import Launch, choose_backend, choose_device
from picotron_min.runtime.metadata import Metadata, read_to_resume
from picotron_min.runtime.token_file import TextSource, TokenFile, prepare_tokens
from picotron_min.runtime.tokenizer import Tokenizer, load_tokenizer


class Inputs(NamedTuple):
    """All that a rank knows before it connects to the others."""

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
        return self.metadata.step if self.metadata else 0

    def in_common(self, config: Config) -> dict[str, object]:
        """The settings that must be the same on all nodes: else they train different models."""
        sections = config.model_dump(include={"distributed", "model", "training"})
        sections["model"] |= asdict(self.model_config)
        flat = {f"{section}.{key}": v for section, of in sections.items() for key, v in of.items()}
        del flat["model.name"]  # may be a folder, in another place on each node
        flat["model.weights"] = "given" if config.model.weights else None
        flat["logging.trace_file"] = "given" if config.logging.trace_file else None
        flat["checkpoint.save_frequency"] = config.checkpoint.save_frequency
        return flat | {"step": self.first_step, "tokens of the dataset": len(self.text.tokens)}


def read_inputs(config: Config, launch: Launch) -> Inputs:
    """Read and check everything; ValueError or OSError for the user's mistakes."""
    d, save_dir = config.distributed, Path(config.checkpoint.save_dir)
    device = choose_device(launch, d.use_cpu)
    model_config = resolve_model(config)
    text = open_text(config, model_config)
    here = config.layout.coordinates(launch.rank)
    start, metadata, weights = find_start(config.checkpoint.load_path, save_dir), None, None
    if start:
        metadata = read_to_resume(start, model_config, config.training.optimizer)
    elif config.model.weights:
        weights = find_weights(config.model.weights, model_config, set(config.model.overrides))
    seen = (metadata.step, metadata.tokens) if metadata else (0, 0)
    return Inputs(
        device=device,
        backend=choose_backend(device, d.backend),
        model_config=model_config,
        tokenizer=load_tokenizer(config.tokenizer),
        text=text,
        batches=open_data(config, text, here.dp, here.cp, *seen),
        start=start,
        metadata=metadata,
        weights=weights,
        lock=lock_folder(save_dir) if launch.rank == 0 else None,
    )


def open_text(config: Config, model_config: ModelConfig) -> TokenFile:
    """The tokens of the dataset, made now if no run has made them before."""
    dataset = config.dataset
    source = TextSource(
        dataset.name,
        dataset.subset_name,
        dataset.split,
        dataset.text_column,
        config.training.num_samples,
        config.tokenizer,
    )
    return prepare_tokens(
        source,
        vocab_size=model_config.vocab_size,
        cache_dir=dataset.cache_dir,
        num_proc=dataset.num_proc,
    )


def open_data(
    config: Config,
    text: TokenFile,
    dp_rank: int,
    cp_rank: int = 0,
    first_step: int = 0,
    seen_before: int = 0,
) -> Batches:
    """The micro-batches of this rank; for a resumed run see Batches."""
    d, t = config.distributed, config.training
    return Batches(
        text.tokens,
        seq_length=t.seq_length,
        seed=t.seed,
        micro_batch_size=t.micro_batch_size,
        num_micro_batches=t.gradient_accumulation_steps,
        dp_rank=dp_rank,
        dp_size=d.dp_size,
        positions=POSITIONS[d.cp_engine](cp_rank, d.cp_size, t.seq_length),
        eval_batches=t.eval_batches,
        first_step=first_step,
        seen_before=seen_before,
    )
