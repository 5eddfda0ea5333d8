"""Turn a checkpoint into a Hugging Face folder, in one process that holds the whole model:

python -m picotron_min.runtime.export CHECKPOINT FOLDER
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist

from picotron_min.checkpoint import load
from picotron_min.runtime.hugging_face import export_hf, write_card
from picotron_min.runtime.launch import begin_process, exit_on_usage_error, set_environment
from picotron_min.runtime.metadata import read_metadata
from picotron_min.runtime.tokenizer import load_tokenizer


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path, help="a folder like checkpoints/step-00000200")
    parser.add_argument("folder", type=Path, help="where the model is written; must not exist")
    options = parser.parse_args(arguments)
    with exit_on_usage_error():
        if options.folder.exists():
            raise ValueError(f"{options.folder} exists: name another folder, or delete it")
        metadata = read_metadata(options.checkpoint, option="the argument `checkpoint`")
        config = metadata.config
        set_environment()
        tokenizer = load_tokenizer(config.tokenizer)
        dtype = getattr(torch, config.model.dtype)
        weights = _empty(metadata.model.parameter_shapes(), dtype)
        # The biases of routers are not rounded: their steps are below bfloat16's precision.
        precise = torch.promote_types(dtype, torch.float32)
        weights |= _empty(metadata.model.buffer_shapes(), precise)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        load(options.checkpoint, weights)  # rounds each tensor to its dtype
        export_hf(options.folder, weights, metadata.model, tokenizer)
        dist.destroy_process_group()
        layout = " x ".join(f"{axis} {n}" for axis, n in config.layout.sizes._asdict().items())
        rows = {"model": config.model.name, "layout": layout, "step": metadata.step}
        rows |= {"tokens": metadata.tokens_seen, "data": config.dataset.name}
        write_card(options.folder, rows | {"tokenizer": config.tokenizer}, tokenizer)
    print(f"wrote {options.folder}")


def _empty(shapes: dict[str, tuple], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {name: torch.empty(shape, dtype=dtype) for name, shape in shapes.items()}


if __name__ == "__main__":
    begin_process()
    main()
