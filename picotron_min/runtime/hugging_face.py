"""Models in and out in Hugging Face's form: a folder of safetensors and config.json.

in     model.weights of config.json, read straight into the parts that each rank has
out    every finished run; or later, from any checkpoint, in one process:

       python -m picotron_min.checkpoint export CHECKPOINT FOLDER
"""

import argparse
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from picotron_min.checkpoint import (
    load,
    model_of,
    open_safetensors,
    read_state,
    write_tensors,
)
from picotron_min.mesh import Axes
from picotron_min.model_config import ModelConfig
from picotron_min.placement import Placement, part
from picotron_min.runtime.folders import complete_or_absent
from picotron_min.runtime.json_file import read_json, write_json
from picotron_min.runtime.public_models import from_hf, to_hf
from picotron_min.runtime.tokenizer import Tokenizer, load_tokenizer

READABLE = ("F64", "F32", "BF16", "F16")
# transformers once saved this table with every layer; it follows from rope_theta.
DERIVED = ".rotary_emb.inv_freq"


def find_weights(name: str, model: ModelConfig, given: set[str]) -> dict[str, Path]:
    """The file of every parameter, in a local folder or on the hub.

    Checks that the folder holds this very model, reading no weights yet: names, shapes, and what
    the folder's config.json says. `given` are the fields that the run's config sets on purpose.
    Raises ValueError with every tensor that is missing, unexpected or misshapen, and OSError if a
    file is damaged.
    """
    folder = Path(name).expanduser()
    if folder.is_file():
        raise ValueError(f"model.weights={name} is a file: name its folder")
    if not folder.is_dir():
        folder = _fetch(name)
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise ValueError(
            f"model.weights={name} has no .safetensors file, and other files are not read: they can"
            " run code. transformers' save_pretrained writes safetensors"
        )
    problems = _config_problems(folder, model, given)
    shapes, found, unfit = model.parameter_shapes(), {}, set()
    for path in paths:
        with open_safetensors(path) as file:
            for key in file.keys():  # noqa: SIM118 (it is no dict)
                tied = key == "lm_head.weight" and model.tie_word_embeddings
                expected = shapes.get("model.embed_tokens.weight" if tied else key)
                part = file.get_slice(key)
                shape, dtype = tuple(part.get_shape()), part.get_dtype()
                if key.endswith(DERIVED):
                    continue
                unfit.add(key)
                if expected is None:
                    problems.append(f"{path}: {key} {shape} is no tensor of this model")
                elif shape != expected:
                    problems.append(f"{path}: {key} is {shape}, and this model's is {expected}")
                elif dtype not in READABLE:
                    problems.append(f"{path}: {key} is {dtype}, not one of {', '.join(READABLE)}")
                elif key in found:
                    problems.append(f"{path}: {key} is also in {found[key].name}")
                else:
                    found[key] = path
    missing = shapes.keys() - found.keys() - unfit
    problems += [f"{folder}: {key} {shapes[key]} is missing" for key in missing]
    if missing == {"lm_head.weight"}:
        problems.append("with model.tie_word_embeddings true it would be model.embed_tokens.weight")
    if problems:
        more = [f"and {len(problems) - 20} more"] if len(problems) > 20 else []
        about = f"model.weights={name} is not the model of this config: does model.name fit it?"
        raise ValueError("\n".join([about, *sorted(problems)[:20], *more]))
    if "lm_head.weight" in found and model.tie_word_embeddings:
        _refuse_unequal(found["lm_head.weight"], found["model.embed_tokens.weight"])
    return found


def _fetch(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=["*.safetensors", "config.json"]))
    except Exception as error:  # a dozen kinds, from no network to a gated model
        raise ValueError(
            f"model.weights={name} is no folder here, and cannot be fetched from the hub"
            f" ({str(error).strip().partition(chr(10))[0]}): check the spelling, the network and"
            " your access"
        ) from None


def _config_problems(folder: Path, model: ModelConfig, given: set[str]) -> list[str]:
    """Numbers that no shape betrays: with another rope_theta the weights would be useless."""
    path = folder / "config.json"
    if not path.exists():
        return []
    content = read_json(path)
    try:
        theirs = from_hf(content)
    except ValueError as error:
        raise ValueError(f"model.weights: {path}: {error}") from None
    silent = ("num_attention_heads", "rope_theta", "rope_scaling", "rms_norm_eps")
    return [
        f"{path}: {name} is {getattr(theirs, name)}, and this model's is {getattr(model, name)}"
        for name in silent
        if name not in given and getattr(theirs, name) != getattr(model, name)
    ]


def _refuse_unequal(head: Path, embedding: Path) -> None:
    with open_safetensors(head) as one, open_safetensors(embedding) as other:
        if not torch.equal(
            one.get_tensor("lm_head.weight"), other.get_tensor("model.embed_tokens.weight")
        ):
            raise ValueError(
                f"{head}: lm_head.weight differs from model.embed_tokens.weight, and this model"
                " ties them: set model.tie_word_embeddings to false"
            )


def read_weights(
    files: dict[str, Path],
    parameters: dict[str, nn.Parameter],
    placements: Mapping[str, Placement],
    axes: Axes,
) -> None:
    """Fill parameters, by their names in the whole model; of each only this rank's part is read."""
    for name, parameter in parameters.items():
        with open_safetensors(files[name]) as file:
            whole = file.get_slice(name)
            cuts = placements[name].cuts
            weight = whole[part(whole.get_shape(), cuts, axes.ranks, axes.sizes)]
        parameter.data.copy_(weight)


def export_hf(
    folder: Path,
    weights: dict[str, Tensor],
    model: ModelConfig,
    tokenizer: Tokenizer,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write a model as a Hugging Face folder, on all ranks together.

    The others wait in `group` for rank 0, which puts the parts together: a patient one is wanted.
    `AutoModelForCausalLM.from_pretrained` and `AutoTokenizer.from_pretrained` load it.
    """
    dtype = next(iter(weights.values())).dtype
    about = to_hf(model) | {"dtype": str(dtype).removeprefix("torch.")}
    end_of_text = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.eos_token_id}

    def write(folder: Path) -> None:
        write_tensors(folder, weights, group, enable_consolidation=True)
        if dist.get_rank() == 0:
            shutil.rmtree(folder / "sharded")  # what the consolidated files were made from
            write_json(folder / "config.json", about | end_of_text)
            write_json(folder / "generation_config.json", end_of_text)
            tokenizer.save(folder)

    complete_or_absent(folder, write, group)


def main(arguments: list[str] | None = None) -> None:
    """Turn a checkpoint into a Hugging Face folder."""
    parser = argparse.ArgumentParser(prog="picotron_min.checkpoint", description=main.__doc__)
    parser.add_argument("command", choices=["export"])
    parser.add_argument("checkpoint", type=Path, help="a folder like checkpoints/step-00000200")
    parser.add_argument("folder", type=Path, help="where the model goes; must not exist")
    options = parser.parse_args(arguments)
    try:
        if options.folder.exists():
            raise ValueError(f"{options.folder} exists: name another folder, or delete it")
        export_checkpoint(options.checkpoint, options.folder, read_state(options.checkpoint))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    print(f"wrote {options.folder}")


def export_checkpoint(checkpoint: Path, folder: Path, facts: dict) -> None:
    """In one process, which holds the whole model in memory."""
    model, settings = model_of(facts), facts["config"]
    dtype = getattr(torch, settings["model"]["dtype"])
    kept_as = torch.float64 if dtype == torch.float64 else torch.float32
    weights = {
        name: torch.empty(shape, dtype=kept_as) for name, shape in model.parameter_shapes().items()
    }
    tokenizer = load_tokenizer(settings["dataset"]["tokenizer"])
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    load(checkpoint, weights)
    export_hf(folder, {name: w.to(dtype) for name, w in weights.items()}, model, tokenizer)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
