"""Models in Hugging Face's form, a folder of safetensors and config.json: read and written.

in     model.weights: each rank reads its parts of the tensors, and nothing else
out    every finished run; export.py does the same for any checkpoint
"""

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from picotron_min.checkpoint import complete_or_absent, save
from picotron_min.mesh import Axes
from picotron_min.model_config import ModelConfig
from picotron_min.placement import Placement, part
from picotron_min.runtime.json_file import read_json, write_json
from picotron_min.runtime.public_models import from_hf, to_hf
from picotron_min.runtime.tokenizer import Tokenizer

READABLE = ("F64", "F32", "BF16", "F16")
# transformers once saved this table with every layer; it follows from rope_theta.
DERIVED = ".rotary_emb.inv_freq"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def find_weights(name: str, model_config: ModelConfig, given: set[str]) -> dict[str, Path]:
    """The file of every parameter, in a local folder or on the hub.

    Reads no weights yet, but checks that the folder holds this very model: names, shapes, and what
    its config.json says. `given` are the fields that the run's config sets on purpose.
    Raises ValueError with all tensors that are missing, unexpected or misshapen, and OSError if a
    file is damaged or cannot be read.
    """
    folder = _find_folder(name)
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise ValueError(
            f"model.weights={name} has no .safetensors file, and other files are not read: they can"
            " run code. transformers' save_pretrained writes safetensors"
        )
    found, problems = _match(folder, paths, model_config)
    problems += _config_problems(folder, model_config, given)
    if problems:
        more = [f"and {len(problems) - 20} more"] if len(problems) > 20 else []
        about = f"model.weights={name} is not the model of this config: does model.name fit it?"
        raise ValueError("\n".join([about, *sorted(problems)[:20], *more]))
    if HEAD in found and model_config.tie_word_embeddings:
        _check_tied(found)
    return found


def _find_folder(name: str) -> Path:
    folder = Path(name).expanduser()
    if folder.is_file():
        raise ValueError(f"model.weights={name} is a file: name its folder")
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=["*.safetensors", "config.json"]))
    except Exception as error:  # a dozen kinds, from no network to a gated model
        raise ValueError(
            f"model.weights={name} is not a folder here, and cannot be fetched from the hub"
            f" ({str(error).strip().partition(chr(10))[0]}): check the spelling, the network and"
            " your access"
        ) from None


def _match(
    folder: Path, paths: list[Path], model_config: ModelConfig
) -> tuple[dict[str, Path], list[str]]:
    """The file of every tensor that fits, and what is wrong with the others."""
    shapes, found, unfit, problems = model_config.parameter_shapes(), {}, set(), []
    for path, key, shape, dtype in _tensors(paths):
        # The file of a tied model may have its head, too.
        tied = key == HEAD and model_config.tie_word_embeddings
        expected = shapes.get(EMBEDDING if tied else key)
        if expected is None:
            problems.append(f"{path}: {key} {shape} is not a tensor of this model")
        elif shape != expected:
            problems.append(f"{path}: {key} is {shape}, and this model's is {expected}")
        elif dtype not in READABLE:
            problems.append(f"{path}: {key} is {dtype}, not one of {', '.join(READABLE)}")
        elif key in found:
            problems.append(f"{path}: {key} is also in {found[key].name}")
        else:
            found[key] = path
        unfit.add(key)
    missing = shapes.keys() - unfit
    problems += [f"{folder}: {key} {shapes[key]} is missing" for key in missing]
    if missing == {HEAD}:
        problems.append(f"with model.tie_word_embeddings true it would be {EMBEDDING}")
    return found, problems


def _tensors(paths: list[Path]) -> Iterator[tuple[Path, str, tuple[int, ...], str]]:
    for path in paths:
        with open_safetensors(path) as file:
            for key in file.keys():  # noqa: SIM118 (it is not a dict)
                if not key.endswith(DERIVED):
                    tensor = file.get_slice(key)
                    yield path, key, tuple(tensor.get_shape()), tensor.get_dtype()


def _config_problems(folder: Path, model_config: ModelConfig, given: set[str]) -> list[str]:
    """Numbers that no shape shows: with another rope_theta the weights would be useless."""
    path = folder / "config.json"
    if not path.exists():
        return []
    content = read_json(path)
    try:
        theirs = from_hf(content)
    except ValueError as error:
        raise ValueError(f"model.weights: {path}: {error}") from None
    hidden = {"num_attention_heads", "rope_theta", "rope_scaling", "rms_norm_eps"} - given
    pairs = {name: (getattr(theirs, name), getattr(model_config, name)) for name in hidden}
    return [
        f"{path}: {name} is {their}, and this model's is {our}"
        for name, (their, our) in pairs.items()
        if their != our
    ]


def _check_tied(files: dict[str, Path]) -> None:
    with open_safetensors(files[HEAD]) as one, open_safetensors(files[EMBEDDING]) as other:
        if not torch.equal(one.get_tensor(HEAD), other.get_tensor(EMBEDDING)):
            raise ValueError(
                f"{files[HEAD]}: {HEAD} differs from {EMBEDDING}, and this model ties them: set"
                " model.tie_word_embeddings to false"
            )


def open_safetensors(path: Path) -> safe_open:
    """A file of named tensors; OSError if it cannot be read, or is damaged."""
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise OSError(f"{path} is damaged, or not a safetensors file: {error}") from None
    except OSError as error:
        raise OSError(f"cannot read {path}: {error}") from None


def read_weights(
    files: Mapping[str, Path],
    parameters: Mapping[str, nn.Parameter],
    placements: Mapping[str, Placement],
    axes: Axes,
) -> None:
    """Fill parameters, by their saved names; of each tensor only this rank's part is read."""
    ranks, sizes = axes.ranks, axes.sizes
    for name, parameter in parameters.items():
        with open_safetensors(files[name]) as file:
            whole = file.get_slice(name)
            mine = part(whole.get_shape(), placements[name].cuts, ranks, sizes)
            parameter.data.copy_(whole[mine])


def export_hf(
    folder: Path,
    weights: dict[str, Tensor],
    model_config: ModelConfig,
    tokenizer: Tokenizer,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write a model as a Hugging Face folder, on all ranks together.

    The others wait in `group`, which needs a long timeout, for rank 0 to join the parts.
    `AutoModelForCausalLM.from_pretrained` and `AutoTokenizer.from_pretrained` load the folder.
    """
    dtype = next(iter(weights.values())).dtype
    about = to_hf(model_config) | {"dtype": str(dtype).removeprefix("torch.")}
    end_of_text = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.eos_token_id}

    def write(partial: Path) -> None:
        save(partial, weights, group, enable_consolidation=True)
        if dist.get_rank() == 0:
            shutil.rmtree(partial / "sharded")  # what the consolidated files were made from
            write_json(partial / "config.json", about | end_of_text)
            write_json(partial / "generation_config.json", end_of_text)
            tokenizer.save(partial)

    complete_or_absent(folder, write, group)
