"""Models in Hugging Face's form, a folder of safetensors and config.json: read and written."""

import shutil
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor

from picotron_min.checkpoint import load, save
from picotron_min.extensions.settings import ModelConfig, numbers_of
from picotron_min.runtime.architectures import (
    UNUSED,
    all_shapes,
    from_hf,
    our_name,
    their_name,
    to_hf,
)
from picotron_min.runtime.folders import complete_or_absent
from picotron_min.runtime.hub import fetch
from picotron_min.runtime.json_file import read_json, write_json
from picotron_min.runtime.tokenizer import Tokenizer
from picotron_min.runtime.wording import explained

READABLE = ("F64", "F32", "BF16", "F16")
DERIVED = ".rotary_emb.inv_freq"  # follows from rope_theta; transformers once saved it per layer
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
# A run may have shorter sequences; the other numbers show in the tensors, if they matter.
MAY_DIFFER = UNUSED | {"max_position_embeddings", "tie_word_embeddings", "num_nextn_predict_layers"}
REMEDIES = (
    "Does model.name fit it? For files without lm_head set model.tie_word_embeddings to true, "
    "for files without our prediction layers set num_nextn_predict_layers to 0."
)


def find_weights(name: str, model_config: ModelConfig, given: set[str]) -> Path:
    """The folder of a model on this machine or on the hub, for load_hf; checked, not read.

    Raises ValueError with the numbers of its config.json, and the tensors, that differ from the
    model's, but for the numbers `given` in the run's config.
    """
    folder = fetch(name, "*.safetensors", "config.json")
    # Other files can run code. A checkpoint has weights, and no config.json.
    if not (any(folder.glob("*.safetensors")) and (folder / "config.json").exists()):
        raise ValueError(
            f"model.weights={name} is no folder with config.json and .safetensors files: "
            "name the hf folder of a run, or save the model with transformers' save_pretrained"
        )
    left_out = tuple(f"model.layers.{layer}." for layer in layers_left_out(folder, model_config))
    tensors = _open_tensors(folder).items()
    found = {key: tensor for key, (_, tensor) in tensors if not key.startswith(left_out)}
    shapes, repeats = all_shapes(model_config), model_config.tie_word_embeddings and HEAD in found
    shapes |= {HEAD: shapes[EMBEDDING]} if repeats else {}
    of_files = {name: _form(tensor) for name, tensor in found.items()}
    # Numbers first: they explain most.
    here, there = numbers_of(model_config) | shapes, numbers_of(_their_config(folder)) | of_files
    lines = [
        f"{their_name(key, model_config)} is {there.get(key, 'absent')} there, "
        f"and {here.get(key, 'absent')} here"
        for key in here | there
        if key not in given | MAY_DIFFER and here.get(key) != there.get(key)
    ]
    if lines:
        lines[5:] = [f"and {len(lines) - 5} more"] if len(lines) > 5 else []
        what = f"model.weights={name} is not the model of this config. {REMEDIES}"
        raise ValueError("\n".join([what, *lines]))
    if repeats and not torch.equal(found[HEAD][:], found[EMBEDDING][:]):
        raise ValueError(
            f"{HEAD} differs from {EMBEDDING}, and this model ties them: "
            "set model.tie_word_embeddings to false, or use others"
        )
    return folder


def _open_tensors(folder: Path) -> dict[str, tuple[str, object]]:
    """Of each tensor in the files, by our name: the file's name for it, and itself, not read."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with explained(f"cannot read {path}", "it may be damaged: copy it again"):
            file = safe_open(path, framework="pt")
        for key in sorted(file.keys()):
            if (name := our_name(key)) in found:
                raise ValueError(f"{key} of {path} is in another file, too: keep one of them")
            tensor = file.get_slice(key)
            if not name.endswith(DERIVED) and 0 not in tensor.get_shape():  # experts of size 0
                found[name] = key, tensor
    return found


def _form(tensor) -> tuple | str:
    """The shape of a tensor, or why it is unusable: whole numbers may be a quantised model's."""
    if (dtype := tensor.get_dtype()) in READABLE:
        return tuple(tensor.get_shape())
    return f"of dtype {dtype} (readable: {', '.join(READABLE)})"


def layers_left_out(folder: Path, model_config: ModelConfig) -> range:
    """The prediction layers of a folder that the model does not have."""
    return range(model_config.num_layers, _their_config(folder).num_layers)


def _their_config(folder: Path) -> ModelConfig:
    with explained(f"model.weights: {folder}"):
        return from_hf(read_json(folder / "config.json"))


def load_hf(folder: Path, parts: dict[str, Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Read the weights of a folder that find_weights has checked, on all ranks together."""
    found = _open_tensors(folder)
    load(folder, {found[name][0]: part for name, part in parts.items()}, group)


def export_hf(
    folder: Path,
    weights: dict[str, Tensor],
    model_config: ModelConfig,
    tokenizer: Tokenizer,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write a folder that transformers' `from_pretrained` loads, on all ranks together.

    The others wait in `group`, which needs a long timeout, for rank 0 to join the parts. ValueError
    if transformers has no such model.
    """
    dtype = str(next(iter(weights.values())).dtype).removeprefix("torch.")
    special = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.eos_token_id}
    special["bos_token_id"] = tokenizer.bos_token_id  # also if null: without it, 1 is assumed
    config = to_hf(model_config) | {"dtype": dtype} | special
    weights = {their_name(name, model_config): part for name, part in weights.items()}

    def write(partial: Path) -> None:
        save(partial, weights, group, enable_consolidation=True)
        if dist.get_rank() == 0:
            shutil.rmtree(partial / "sharded")  # what the consolidated files were made from
            write_json(partial / "config.json", config)
            write_json(partial / "generation_config.json", special)
            tokenizer.save(partial)
            (partial / "README.md").write_text(card(tokenizer), encoding="utf-8")

    complete_or_absent(folder, write, group)


def card(tokenizer: Tokenizer) -> str:
    """README.md beside a model, which the hub shows."""
    about = "---\nlibrary_name: transformers\npipeline_tag: text-generation\n---\n\n"
    about += "A language model trained with picotron-min.\n"
    if tokenizer.adds:
        about += f"\nThe tokenizer adds ids to a text: {[*tokenizer.adds]}. "
        about += "Training did not: call it with `add_special_tokens=False`.\n"
    return about
