"""Metadata: state.json of a checkpoint, which shows if it is complete and fits the run."""

from dataclasses import asdict
from operator import attrgetter
from pathlib import Path

from pydantic import BaseModel, Field, NonNegativeInt

from picotron_min.extensions.settings import ModelConfig
from picotron_min.runtime.config import ORDER, Config
from picotron_min.runtime.wording import explained, shown


class Metadata(BaseModel, strict=True, extra="forbid", frozen=True):
    """The content of state.json, which the Saver writes."""

    step: int = Field(ge=0, lt=10**8)
    skipped_steps: NonNegativeInt
    files: dict[str, int] = Field(min_length=1)  # bytes
    model: ModelConfig
    config: Config
    tokens_seen: int = Field(ge=0, le=10**18)  # in training so far
    data: dict[str, str] = {}  # of the text and the tokenizer: see Inputs


def read_metadata(folder: Path) -> Metadata:
    """ValueError, with the remedy, unless the checkpoint is whole."""
    remedy = "name another folder step-... in checkpoint.load_path, or move this one away"
    with explained(f"cannot use the checkpoint {folder}", remedy):
        metadata = Metadata.model_validate_json((folder / "state.json").read_bytes())
        for name, size in metadata.files.items():
            # If one were missing, torch would load the rest, and leave a gap in a tensor.
            if (found := (folder / name).stat().st_size) != size:
                raise ValueError(f"{name} has {found} bytes, not {size}")
    return metadata


def read_to_resume(folder: Path, model_config: ModelConfig, optimizer: str) -> Metadata:
    """The metadata of the checkpoint to resume; ValueError if its model or optimizer differs."""
    metadata = read_metadata(folder)
    before = asdict(metadata.model) | {"optimizer": metadata.config.training.optimizer}
    if changes := _changes(before, asdict(model_config) | {"optimizer": optimizer}):
        raise ValueError(
            f"the checkpoint {folder} is of another run: {'; '.join(changes.values())}. "
            "Set them as they were, or start anew with checkpoint.load_path null"
        )
    return metadata


def _changes(before: dict, now: dict) -> dict[str, str]:
    """Key -> what was changed; of settings as they were and as they are now."""
    return {
        key: f"{key} was {shown(before[key])} and is {shown(value)}"
        for key, value in now.items()
        if before[key] != value
    }


# Not all that a step's result depends on: the keys that are most often changed by mistake.
LEARNED = ["training.learning_rate", "training.schedule", "training.total_train_steps"]
LEARNED += ["training.weight_decay", "training.betas", "model.dtype"]
EFFECTS = dict.fromkeys(LEARNED, "the new value counts") | {"the tokenizer": "ids mean other text"}
EFFECTS["the text"] = (
    "other data is seen; held-out text has moved, so that what was validated on may be trained on"
)


def resume_warnings(metadata: Metadata, config: Config, data: dict[str, str]) -> list[str]:
    """What changes the order of the data, or what a step learns, and differs from the saved run.

    Where the text is read from makes no difference, if it is the same text.
    """
    was, now = (
        {key: attrgetter(key)(c) for key in LEARNED + ORDER} | {"sequences a step": c.global_batch}
        for c in (metadata.config, config)
    )
    changes = _changes(was | metadata.data, now | (data if metadata.data else {}))
    seen = "other data is seen"
    return [f"{change}: from here on {EFFECTS.get(k, seen)}" for k, change in changes.items()]
