"""Models in Hugging Face's form, a folder of safetensors and config.json: read and written."""

import shutil
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor

from picotron_min.checkpoint import load, save
from picotron_min.extensions.settings import ModelConfig
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
REMEDIES = (
    "Does model.name fit it? For files without lm_head set model.tie_word_embeddings to true, "
)
REMEDIES += "for files without prediction layers set num_nextn_predict_layers to 0."
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
# Numbers that may differ: the tensors themselves show whether weights fit. Not so the others: with
# another rope_theta they would be useless.
MAY_DIFFER = UNUSED | {"tie_word_embeddings", "num_nextn_predict_layers", "max_position_embeddings"}


def find_weights(name: str, model_config: ModelConfig, given: set[str]) -> Path:
    """The folder of a model on this machine or on the hub, for load_hf; checked, not read.

    Raises ValueError with the tensors, and the numbers of its config.json, that differ from the
    model's, but for the fields `given` in the run's config.
    """
    folder = fetch(name, "*.safetensors", "config.json")
    if (folder / "state.json").exists():
        export = f"python -m picotron_min.runtime.export {folder} FOLDER"
        raise ValueError(f"model.weights={name} is a checkpoint: export it first, with  {export}")
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:  # other files can run code
        problem = f"model.weights={name} is no folder with .safetensors files"
        raise ValueError(f"{problem}: save the model with transformers' save_pretrained")
    left_out = _prefixes(layers_left_out(folder, model_config))
    found = {key: t for key, t in _open_tensors(paths).items() if not key.startswith(left_out)}
    copies = {copy: own for copy, own in _copies(model_config).items() if copy in found}
    numbers, theirs = {*vars(model_config)} - MAY_DIFFER - given, _their_config(folder, model_config)
    here, there = ({key: getattr(c, key) for key in numbers} for c in (model_config, theirs))
    here |= (ours := all_shapes(model_config)) | {copy: ours[own] for copy, own in copies.items()}
    there |= {key: _form(tensor) for key, tensor in found.items()}
    differ = [key for key in sorted(here | there) if here.get(key) != there.get(key)]
    if differ:
        differ.sort(key=numbers.__contains__, reverse=True)  # they explain most
        lines = [f"model.weights={name} is not the model of this config. {REMEDIES}"]
        for key in differ[:5]:
            both = there.get(key, "absent"), here.get(key, "absent")
            lines.append("{} is {} there, and {} here".format(their_name(key, model_config), *both))
        lines += [f"and {len(differ) - 5} more"] * (len(differ) > 5)
        raise ValueError("\n".join(lines))
    for copy, own in copies.items():
        if not torch.equal(found[copy][:], found[own][:]):
            problem = f"{copy} differs from {own}, and this model ties them"
            raise ValueError(f"{problem}: set model.tie_word_embeddings to false, or use others")
    return folder


def _open_tensors(paths: list[Path]) -> dict[str, object]:
    """All tensors of files by our names, not read yet; without what follows from others."""
    found = {}
    for path in paths:
        file = open_safetensors(path)
        for key in sorted(file.keys()):
            name, tensor = our_name(key), file.get_slice(key)
            if name in found:
                raise ValueError(f"{key} of {path} is in another file, too: keep one of them")
            if 0 not in tensor.get_shape() and not name.endswith(DERIVED):
                found[name] = tensor
    return found


def _form(tensor) -> tuple | str:
    """The shape of a tensor, or why it is unusable."""
    if (dtype := tensor.get_dtype()) in READABLE:
        return tuple(tensor.get_shape())
    return f"of dtype {dtype} (readable: {', '.join(READABLE)})"


def _copies(c: ModelConfig) -> dict[str, str]:
    """What files may have twice: of a tied model, and the ends of a prediction layer."""
    head = {HEAD: EMBEDDING} if c.tie_word_embeddings else {}
    ends = {"embed_tokens.weight": EMBEDDING, "shared_head.head.weight": head.get(HEAD, HEAD)}
    prefixes = _prefixes(range(c.num_hidden_layers, c.num_layers))
    return head | {prefix + name: own for prefix in prefixes for name, own in ends.items()}


def _prefixes(layers: range) -> tuple[str, ...]:
    return tuple(f"model.layers.{layer}." for layer in layers)


def layers_left_out(folder: Path, model_config: ModelConfig) -> range:
    """The prediction layers of a folder that the model does not have."""
    return range(model_config.num_layers, _their_config(folder, model_config).num_layers)


def _their_config(folder: Path, model_config: ModelConfig) -> ModelConfig:
    """The model of a folder's config.json; if it has none, this model."""
    if not (path := folder / "config.json").exists():
        return model_config
    with explained(f"model.weights: {path}"):
        return from_hf(read_json(path))


def load_hf(folder: Path, parts: dict[str, Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Read the weights of a folder that find_weights has checked, on all ranks together."""
    files = map(open_safetensors, sorted(folder.glob("*.safetensors")))
    names = {our_name(key): key for file in files for key in sorted(file.keys())}
    load(folder, {names[name]: part for name, part in parts.items()}, group)


def open_safetensors(path: Path) -> safe_open:
    """A file of named tensors; ValueError if it cannot be read, or is damaged."""
    with explained(f"cannot read {path}", "it may be damaged: copy it again"):
        return safe_open(path, framework="pt")


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

    complete_or_absent(folder, write, group)


def write_card(folder: Path, rows: dict[str, str], tokenizer: Tokenizer) -> None:
    """README.md beside a model, which the hub shows: what was trained on what, and its losses."""
    lines = ["---", "library_name: transformers", "pipeline_tag: text-generation", "---", ""]
    lines += ["A language model trained with picotron-min.", "", "| what | |", "|---|---|"]
    lines += [f"| {key} | {value} |".replace("\n", " ") for key, value in rows.items()]
    if tokenizer.adds:
        adds = f"The tokenizer adds ids to a text: {[*tokenizer.adds]}."
        lines += ["", f"{adds} Training did not: call it with `add_special_tokens=False`."]
    (folder / "README.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
