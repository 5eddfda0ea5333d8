"""Models in Hugging Face's form, a folder of safetensors and config.json: read and written."""

import shutil
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor

from picotron_min.checkpoint import load, save
from picotron_min.extensions.settings import ModelConfig
from picotron_min.runtime.architectures import all_shapes, from_hf, our_name, their_name, to_hf
from picotron_min.runtime.folders import complete_or_absent
from picotron_min.runtime.hub import fetch
from picotron_min.runtime.json_file import read_json, write_json
from picotron_min.runtime.tokenizer import Tokenizer

READABLE = ("F64", "F32", "BF16", "F16")
DERIVED = ".rotary_emb.inv_freq"  # follows from rope_theta; transformers once saved it per layer
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
# Numbers that no shape shows: with another rope_theta the weights would be useless.
HIDDEN = {"num_attention_heads", "rope_theta", "rope_scaling", "rms_norm_eps"}
HIDDEN |= {"num_experts_per_tok", "scoring_func", "norm_topk_prob", "n_group", "topk_group"}
HIDDEN |= {"routed_scaling_factor"}


def find_weights(name: str, model_config: ModelConfig, given: set[str]) -> Path:
    """The folder of a model on this machine or on the hub, for load_hf; checked, not read.

    Raises ValueError with the tensors, and the numbers of its config.json, that differ from the
    model's, but for the fields `given` in the run's config.
    """
    folder = Path(name)
    if not folder.exists():
        folder = fetch(name, "*.safetensors", "config.json")
    if (folder / "state.json").exists():
        export = f"python -m picotron_min.runtime.export {folder} FOLDER"
        raise ValueError(f"model.weights={name} is a checkpoint: export it first, with  {export}")
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:  # other files can run code
        problem = f"model.weights={name} is no folder with .safetensors files"
        raise ValueError(f"{problem}: save the model with transformers' save_pretrained")
    problems = _config_problems(folder / "config.json", model_config, given)
    ours, copies = all_shapes(model_config), _copies(model_config)
    found = _tensors(paths, ours, layers_left_out(folder, model_config))
    ours |= {copy: ours[own] for copy, own in copies.items() if copy in found}
    if ours.keys() - found.keys() == {HEAD}:
        tied = f"with model.tie_word_embeddings true {EMBEDDING} would be used"
        problems.append(f"{HEAD} is absent there: {tied}")
    for tensor in sorted(ours | found):
        _, key, there = found.get(tensor) or (None, their_name(tensor, model_config), "absent")
        if there != (here := ours.get(tensor, "absent")):
            problems.append(f"{key} is {there} there, and {here} here")
    if problems:
        about = f"model.weights={name} is not the model of this config: does model.name fit it?"
        further = _prefixes(range(model_config.num_hidden_layers, model_config.num_layers))
        if any(tensor.startswith(further) for tensor in ours.keys() - found.keys()):
            about += " For files without prediction layers set num_nextn_predict_layers to 0."
        more = [f"and {len(problems) - 5} more"] * (len(problems) > 5)
        raise ValueError("\n".join([about, *problems[:5], *more]))
    for copy in copies.keys() & found.keys():
        pair = found[copy], found[copies[copy]]
        first, second = (open_safetensors(path).get_tensor(key) for path, key, _ in pair)
        if not torch.equal(first, second):
            problem = f"{pair[0][0]}: {copy} differs from {copies[copy]}, and this model ties them"
            remedy = "set model.tie_word_embeddings to false" if copy == HEAD else "use other files"
            raise ValueError(f"{problem}: {remedy}")
    return folder


def _tensors(
    paths: list[Path], shapes: dict[str, tuple], left_out: range
) -> dict[str, tuple[Path, str, tuple | str]]:
    """Our name of each tensor -> its file, its name there, and its shape, or why it is unusable."""
    found, ignored = {}, (DERIVED,)
    if not any(".shared_experts." in name for name in shapes):
        ignored += (".shared_expert_gate.weight",)  # transformers writes them also of size 0
    for path in paths:
        file = open_safetensors(path)
        for key in sorted(file.keys()):
            name, tensor = our_name(key), file.get_slice(key)
            shape, dtype = tuple(tensor.get_shape()), tensor.get_dtype()
            if 0 in shape or name.endswith(ignored) or name.startswith(_prefixes(left_out)):
                continue
            if dtype not in READABLE:
                shape = f"of dtype {dtype} (readable: {', '.join(READABLE)})"
            if name in found:
                shape = f"twice, in {found[name][0].name} and in {path.name},"
            found[name] = path, key, shape
    return found


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
    config = folder / "config.json"
    theirs = from_hf(read_json(config)) if config.exists() else model_config
    return range(model_config.num_layers, theirs.num_layers)


def _config_problems(path: Path, model_config: ModelConfig, given: set[str]) -> list[str]:
    """What would compute something else with the same tensors."""
    if not path.exists():
        return []
    content = read_json(path)
    try:
        theirs = from_hf(content)
    except ValueError as error:
        raise ValueError(f"model.weights: {path}: {error}") from None
    both = [(key, getattr(theirs, key), getattr(model_config, key)) for key in HIDDEN - given]
    return [f"{path}: {k} is {a}, and this model's is {b}" for k, a, b in both if a != b]


def load_hf(folder: Path, parts: dict[str, Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Read the weights of a folder that find_weights has checked, on all ranks together."""
    files = map(open_safetensors, sorted(folder.glob("*.safetensors")))
    names = {our_name(key): key for file in files for key in sorted(file.keys())}
    load(folder, {names[name]: part for name, part in parts.items()}, group)


def open_safetensors(path: Path) -> safe_open:
    """A file of named tensors; OSError if it cannot be read, or is damaged."""
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise OSError(f"{path} is damaged, or not a safetensors file: {error}") from None
    except OSError as error:
        raise OSError(f"cannot read {path}: {error}") from None


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
    if any(tokenizer.adds):
        adds = "The tokenizer adds ids before a text: {}; after it: {}.".format(*tokenizer.adds)
        lines += ["", f"{adds} Training did not: call it with `add_special_tokens=False`."]
    (folder / "README.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
