"""Turn a checkpoint into a Hugging Face folder, in one process that holds the whole model:

python -m picotron_min.checkpoint export CHECKPOINT FOLDER
"""

import argparse
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from picotron_min.checkpoint import load
from picotron_min.runtime.hugging_face import export_hf
from picotron_min.runtime.metadata import read_metadata
from picotron_min.runtime.tokenizer import load_tokenizer


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="picotron_min.checkpoint", description=__doc__)
    parser.add_argument("command", choices=["export"])
    parser.add_argument("checkpoint", type=Path, help="a folder like checkpoints/step-00000200")
    parser.add_argument("folder", type=Path, help="where the model is written; must not exist")
    options = parser.parse_args(arguments)
    try:
        export(options.checkpoint, options.folder)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    print(f"wrote {options.folder}")


def export(checkpoint: Path, folder: Path) -> None:
    if folder.exists():
        raise ValueError(f"{folder} exists: name another folder, or delete it")
    metadata = read_metadata(checkpoint, option="the argument `checkpoint`")
    dtype = getattr(torch, metadata.config.model.dtype)
    shapes = metadata.model.parameter_shapes()
    weights = {name: torch.empty(shape, dtype=dtype) for name, shape in shapes.items()}
    tokenizer = load_tokenizer(metadata.config.tokenizer)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    load(checkpoint, weights)  # rounds each tensor to its dtype
    export_hf(folder, weights, metadata.model, tokenizer)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
