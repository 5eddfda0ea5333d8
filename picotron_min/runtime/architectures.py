"""Architectures: how transformers names the numbers and tensors of models that we compute.

                          ours                         mixtral
    a number              moe_intermediate_size        intermediate_size
    a tensor's name       mlp.experts.0.gate_proj      block_sparse_moe.experts.0.w1
    not computed                                       sliding_window, unless it is null

Each is a row of ARCHITECTURES. A family of extensions/ has its rows in its own folder.
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import asdict, fields
from functools import lru_cache
from typing import NamedTuple

from picotron_min.extensions.settings import FAMILIES, SIZES, ModelConfig, numbers_of
from picotron_min.model_config import RopeScaling
from picotron_min.runtime.config import Numbers, RopeNumbers
from picotron_min.runtime.wording import choice, shown

# What all of them have: fields of ModelConfig, and keys with the only value that we compute.
NUMBERS = (*SIZES, "head_dim", "rope_theta", "rms_norm_eps", "tie_word_embeddings")
NUMBERS += ("max_position_embeddings",)
FIXED = {"hidden_act": "silu", "partial_rotary_factor": 1.0}
# Fields that can be anything where no layer has such an MLP; else shapes of tensors show them.
UNUSED = {"intermediate_size", "moe_intermediate_size"}


class Architecture(NamedTuple):
    """What the config.json and the tensors of one `model_type` mean for our model."""

    class_name: str
    fixed: dict[str, object]  # keys with the only value that we compute, beside FIXED
    fields: tuple[str, ...] = ()  # of ModelConfig, beside NUMBERS
    renamed: tuple[tuple[str, str], ...] = ()  # fields with another key in config.json
    read: Callable[[dict], dict] = lambda hf: {}  # what other keys make of fields
    write: Callable[[ModelConfig], dict] = lambda model_config: {}
    tensors: tuple[tuple[str, str], ...] = ()  # parts of our names, and of theirs

    @property
    def keys(self) -> dict[str, str]:
        """Field of ModelConfig -> key of config.json."""
        return {name: name for name in NUMBERS + self.fields} | dict(self.renamed)


LLAMA = {
    "class_name": "LlamaForCausalLM",
    "fixed": {"attention_bias": False, "mlp_bias": False},
}


def _rows() -> dict[str, dict]:
    rows = {"llama": LLAMA}
    for family in FAMILIES.values():
        for name, row in family.architectures.items():
            before = rows.get(name, {})  # a family may add to another's row
            assert not before.keys() & row.keys(), f"two families say {[*row]} of {name}"
            rows[name] = before | row
    return rows


ARCHITECTURES = {name: Architecture(**row) for name, row in _rows().items()}


def from_hf(hf: dict) -> ModelConfig:
    """Read a Hugging Face `config.json`.

    ValueError for what this model would not compute; transformers has errors of its own kinds.
    """
    from transformers import AutoConfig

    name = hf.get("model_type", "llama")
    if str(name) not in ARCHITECTURES:
        raise ValueError(
            f"model_type={name!r:.60} is not supported: "
            f"only {', '.join(map(repr, ARCHITECTURES))} can be trained"
        )
    # It checks types, fills in what is absent, and reads both spellings of rope.
    hf = AutoConfig.for_model(**deepcopy(hf) | {"model_type": name}).to_dict()
    return _model(name, hf | hf["rope_parameters"])


def _model(name: str, hf: dict) -> ModelConfig:
    """The model of a config.json that has every key, rope's at the top level."""
    architecture = ARCHITECTURES[name]
    hf = {"head_dim": None} | hf  # not every class of transformers has it; None: as ModelConfig's
    fixed = {key: [value] for key, value in (FIXED | architecture.fixed).items()}
    fixed["rope_type"] = ["default", "llama3"]
    fixed["layer_types"] = [None, ["full_attention"] * hf["num_hidden_layers"]]  # others: windows
    for key, good in fixed.items():
        if (value := hf.get(key, good[0])) not in [*good, None]:
            only = choice(map(repr, good))
            raise ValueError(f"{key}={value!r:.60} is not supported: only {only:.60}")
    numbers = {field: hf[key] for field, key in architecture.keys.items()} | architecture.read(hf)
    if hf["rope_type"] == "llama3":
        given = {field.name: hf.get(field.name) for field in fields(RopeScaling)}
        numbers["rope_scaling"] = RopeScaling(**dict(RopeNumbers(**given)))
    return ModelConfig(**dict(Numbers(**numbers)))


def to_hf(model_config: ModelConfig) -> dict:
    """The `config.json` that `transformers.AutoModelForCausalLM` loads (any version).

    ValueError if no architecture describes the model, as after a change of our own.
    """
    if problem := without_form(model_config):
        raise ValueError(problem)
    return _written(model_type(model_config), model_config)


def without_form(model_config: ModelConfig) -> str | None:
    """Why a model has no Hugging Face form, if so, and what would give it one."""
    if model_type(model_config):
        return None
    other = {name: _differences(name, model_config) for name in ARCHITECTURES}
    fewest = min(map(len, other.values()))
    ways = (f"{' and '.join(d)} for {name!r}" for name, d in other.items() if len(d) == fewest)
    why = f"no model of transformers is like it: set {', or '.join(ways)}"
    return f"{why}; or add an architecture for it"


def _written(name: str, model_config: ModelConfig) -> dict:
    """What a config.json of this `model_type` can say of a model."""
    architecture = ARCHITECTURES[name]
    hf = {"architectures": [architecture.class_name], "model_type": name}
    hf |= FIXED | architecture.fixed
    hf |= {key: getattr(model_config, field) for field, key in architecture.keys.items()}
    scaling = model_config.rope_scaling
    hf["rope_scaling"] = asdict(scaling) | {"rope_type": "llama3"} if scaling else None
    return hf | architecture.write(model_config)


@lru_cache
def _differences(name: str, c: ModelConfig) -> list[str]:
    """What a model would have instead if it were written as this `model_type`, and read again."""
    hf = _written(name, c)
    try:
        theirs = _model(name, hf | (hf["rope_scaling"] or {"rope_type": "default"}))
    except ValueError as error:
        return [str(error)]
    values = {key: value for key, value in numbers_of(theirs).items() if key not in UNUSED}
    other = [f"{key}={shown(value)}" for key, value in values.items() if value != getattr(c, key)]
    unlike = {*all_shapes(c).items()} ^ {*all_shapes(theirs).items()}
    return other or [f"another {tensor}" for tensor, _ in sorted(unlike)[:1]]


def all_shapes(model_config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor that is saved."""
    return model_config.parameter_shapes() | model_config.buffer_shapes()


def model_type(model_config: ModelConfig) -> str | None:
    """The first architecture that says all of a model: what it has written is read as the same."""
    return next((name for name in ARCHITECTURES if not _differences(name, model_config)), None)


def their_name(tensor: str, model_config: ModelConfig) -> str:
    """What transformers calls a tensor of the model in its files."""
    if name := model_type(model_config):
        for ours, theirs in ARCHITECTURES[name].tensors:
            tensor = tensor.replace(ours, theirs)
    return tensor


def our_name(tensor: str) -> str:
    """What we call a tensor of a file of any of the architectures."""
    for architecture in ARCHITECTURES.values():
        for ours, theirs in architecture.tensors:
            tensor = tensor.replace(theirs, ours)
    return tensor
