"""Turn a checkpoint into a Hugging Face folder, in one process that holds the whole model:

python -m picotron_min.runtime.export CHECKPOINT FOLDER
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist

from picotron_min.checkpoint import load
from picotron_min.runtime.architectures import all_shapes
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
        dtype, model = getattr(torch, config.model.dtype), metadata.model
        # The biases of routers are not rounded: their steps are below bfloat16's precision.
        dtypes = dict.fromkeys(model.buffer_shapes(), torch.promote_types(dtype, torch.float32))
        shapes = all_shapes(model).items()
        weights = {
            name: torch.empty(shape, dtype=dtypes.get(name, dtype)) for name, shape in shapes
        }
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        load(options.checkpoint, weights)  # rounds each tensor to its dtype
        export_hf(options.folder, weights, model, tokenizer)
        dist.destroy_process_group()
        rows = {"model": config.model.name, "step": metadata.step, "tokens": metadata.tokens_seen}
        rows |= {"data": config.dataset.name, "tokenizer": config.tokenizer}
        write_card(options.folder, rows, tokenizer)
    print(f"wrote {options.folder}")


if __name__ == "__main__":
    begin_process()
    main()
