"""config.json: its keys, one class a section.

Most keys are fields of the dataclasses that the code computes with, and declared only there, with
type, default and meaning: `keys_of` takes them over. The others are declared here. Names are those
of picotron, so that its users' configs load; keys are added, none change meaning. A `~` at the
start of a path is the home folder. config_file.py reads the file, and config_checks.py checks that
its keys fit each other and the model.
"""

import os
from dataclasses import MISSING, fields
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, create_model
from pydantic.types import NonNegativeInt, PositiveFloat, PositiveInt

from picotron_min.extensions.settings import Layout, ModelConfig, Recipe, Routing, Workload
from picotron_min.model_config import RopeScaling
from picotron_min.runtime.public_models import tokenizer_of

Text = Annotated[str, Field(min_length=1)]
Name = Annotated[Text, AfterValidator(os.path.expanduser)]  # built-in, path, or hub id owner/name
OptionalName = Annotated[Name | None, BeforeValidator(lambda v: None if v == "" else v)]  # "": null
Beta = Annotated[float, Field(ge=0, lt=1)]

# The keys that are not called as their fields.
AXES = ("pp", "dp", "cp", "tp", "ep", "etp")
KEY = {axis: f"{axis}_size" for axis in AXES}
KEY |= {"num_micro_batches": "gradient_accumulation_steps", "fused": "use_fused_adam"}
KEY |= {"flash_attention": "use_flash_attention", "count_zeros": "log_num_zeros_in_grad"}

# What the types of fields leave open.
MOST = 10**8 - 1  # of any whole number: a step has eight digits in a checkpoint's name
TYPES = {"pp_layers": list[PositiveInt] | None}
TYPES |= {"betas": Annotated[list[Beta], Field(min_length=2, max_length=2)], "momentum": Beta}
TYPES |= {"moe_expert_rank_capacity_factor": Annotated[float | None, Field(ge=1, le=1000)]}
# Above 0, Megatron-LM draws the bias anew in each forward, which every layout has other ones of.
TYPES |= {"moe_router_force_biased": Annotated[float | None, Field(ge=-1000, le=0)]}
# Floats may be 0, but not these: the model divides by them.
TYPES |= dict.fromkeys(
    ("rope_theta", "factor", "low_freq_factor", "high_freq_factor"), PositiveFloat
)


class Section(
    BaseModel, strict=True, extra="forbid", frozen=True, allow_inf_nan=False, validate_default=True
):
    """Strict: "256" is not a number, 1 is not true, and a misspelt key is an error."""


def keys_of(kind: type, *names: str, **defaults) -> dict[str, tuple]:
    """Keys from the fields of a dataclass: all, or those named, some with own defaults."""
    keys, of_kind = {}, {field.name: field for field in fields(kind)}
    for name in (*names, *defaults) or of_kind:
        field = of_kind[name]
        annotation = TYPES.get(name, field.type)
        if annotation == tuple[int, ...]:
            annotation = list[NonNegativeInt]
        if annotation in (int, int | None):  # where 0 is the default, it means none
            least = 0 if field.default == 0 else 1
            annotation = Annotated[annotation, Field(ge=least, le=MOST)]
        elif annotation in (float, float | None):  # null, where it is allowed, means none
            least = {"ge": 0} if annotation is float else {"gt": 0}
            annotation = Annotated[annotation, Field(**least, le=10**12)]
        default = defaults.get(name, field.default)
        default = list(default) if isinstance(default, tuple) else default
        keys[KEY.get(name, name)] = (annotation, ... if default is MISSING else default)
    return keys


def section(keys: dict[str, tuple]) -> type[Section]:
    return create_model("Keys", __base__=Section, **keys)


class Distributed(section(keys_of(Layout))):  # the layout: tp x cp x pp x dp processes
    backend: Literal["auto", "gloo", "nccl"] = "auto"  # auto: nccl on GPUs; gloo can share one
    use_cpu: bool = False  # also where there are GPUs
    timeout_seconds: int = Field(60, ge=1, le=10**6)  # communication that takes longer ends the run


Numbers = section(keys_of(ModelConfig))  # of a model, as they are checked
RopeNumbers = section(keys_of(RopeScaling))  # likewise
OVERRIDES = {key: (kind | None, None) for key, (kind, _) in keys_of(ModelConfig).items()}
del OVERRIDES["rope_scaling"]  # only in a model's own config.json
OF_MODEL = (
    "dtype",
    "flash_attention",
    "compile",
    "recompute",
    "offload",
    "fp8",
    "fp8_experts",
    "fp8_skip",
)


class Model(section(OVERRIDES | keys_of(Workload, *OF_MODEL) | keys_of(Recipe, "fused"))):
    name: Name = "tiny"  # a preset of public_models.py, a Hugging Face folder, or a hub id
    weights: OptionalName = None  # a folder or hub id to start from; null: random

    @property
    def overrides(self) -> dict:
        """The numbers given here that replace the named model's own."""
        return self.model_dump(include=set(OVERRIDES), exclude_none=True)


OF_TRAINING = [f.name for f in fields(Recipe) if f.name not in ("fused", "count_zeros", "dtype")]
A_STEP = keys_of(
    Workload, "num_micro_batches", "mtp_loss_scaling_factor", seq_length=256, micro_batch_size=8
)


class Training(section(keys_of(Recipe, *OF_TRAINING) | A_STEP | keys_of(Routing))):
    seed: int = Field(42, ge=0, le=2**63 - 1)  # of weights and of the order of the data
    deterministic: bool = False  # on GPUs the same bits in each run; slower
    max_tokens: PositiveInt | None = None  # stops earlier; the schedule ignores it
    num_samples: PositiveInt | None = None  # documents read of the dataset; null: all
    eval_frequency: NonNegativeInt = 0  # steps between validations; 0: only at the end
    eval_batches: NonNegativeInt = 4  # of 16 sequences of the text's held-out end; 0: none


class Dataset(section(keys_of(Workload, "document_mask", "packing"))):  # the text
    name: Name = "stdlib"  # Python's own library, a local file or folder, or a hub id
    subset_name: Text | None = None  # of a dataset on the hub
    split: Text = "train"  # of the dataset
    text_column: Text = "text"  # of documents
    tokenizer: OptionalName = None  # bytes, a folder, or a hub id; null: the model's
    num_workers: NonNegativeInt = 0  # picotron's; unused: tokens are read from mapped memory
    num_proc: int = Field(1, ge=1, le=1024)  # threads that tokenize
    cache_dir: Name = "~/.cache/picotron_min"  # tokenized text, kept between runs


class Checkpoint(Section):  # what is saved, and what a run starts from
    save_dir: Name = "checkpoints"  # of checkpoints, records and the finished model
    save_frequency: NonNegativeInt = 0  # steps; 0: only at the end
    keep: NonNegativeInt = 2  # how many of the newest; 0: all
    in_background: bool = Field(False, alias="async")  # training continues during a save
    load_path: OptionalName = None  # a folder, or "latest": the newest in save_dir, if any


class Logging(section(keys_of(Recipe, "count_zeros"))):  # what is recorded
    use_wandb: bool = False  # the same records there, too
    project_name: Text = "picotron-min"  # for wandb
    run_name: Text | None = None  # for wandb; null: it chooses one
    metrics_file: Name | None = None  # null: metrics.jsonl in checkpoint.save_dir
    trace_file: Name | None = None  # a Chrome trace of a few steps of the first pipeline
    log_energy: bool = False  # no effect: kept so that older files load
    log_bound: bool = False  # likewise
    moe_per_layer_logging: bool = False  # metrics of experts also for each layer, as lists


class Environment(Section, strict=False):  # of every process; picotron writes "1" and "false"
    OMP_NUM_THREADS: int | None = Field(None, ge=1, le=1024)  # threads of each process
    TOKENIZERS_PARALLELISM: bool | None = None  # threads of a tokenizer
    FLASH_ATTEN: bool | None = None  # false: as use_flash_attention false
    HF_TOKEN: None = None  # picotron's template has it, as null


class Config(Section):  # the whole of config.json
    distributed: Distributed = Distributed()
    model: Model = Model()
    training: Training = Training()
    dataset: Dataset = Dataset()
    checkpoint: Checkpoint = Checkpoint()
    logging: Logging = Logging()
    environment: Environment = Environment()

    @property
    def tokenizer(self) -> str:
        return self.dataset.tokenizer or tokenizer_of(self.model.name)

    @property
    def metrics_file(self) -> str:
        return self.logging.metrics_file or os.path.join(self.checkpoint.save_dir, "metrics.jsonl")

    @property
    def world_size(self) -> int:
        return self.layout.world_size

    @property
    def global_batch(self) -> int:
        """Sequences a step: dp_size x micro_batch_size x gradient_accumulation_steps."""
        t = self.training
        return self.distributed.dp_size * t.micro_batch_size * t.gradient_accumulation_steps

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch * self.training.seq_length

    @property
    def layout(self) -> Layout:
        """The sizes of the axes, and the choices that belong to them."""
        return _build(Layout, self.distributed)

    @property
    def workload(self) -> Workload:
        """What one data-parallel rank computes in a step, and how."""
        flash = self.model.use_flash_attention and self.environment.FLASH_ATTEN is not False
        own = {"flash_attention": flash, "routing": _build(Routing, self.training)}
        return _build(Workload, self.model, self.training, self.dataset, **own)

    @property
    def recipe(self) -> Recipe:
        """How the weights are updated."""
        return _build(Recipe, self.model, self.training, self.logging)


# What decides which text is read, and, with the global batch, which of its sequences a step has.
SOURCE = [f"dataset.{key}" for key in ("name", "subset_name", "split", "text_column")]
ORDER = ["dataset.packing", "training.seed", "training.seq_length", "training.eval_batches"]
DATA_ORDER = [*SOURCE, "training.num_samples", *ORDER]


def _build(kind: type, *sections: Section, **own):
    """A dataclass from the keys that are its fields; JSON has lists for tuples."""
    values = {key: value for section in sections for key, value in section}
    for name in (field.name for field in fields(kind) if field.name not in own):
        value = values[KEY.get(name, name)]
        own[name] = tuple(value) if isinstance(value, list) else value
    return kind(**own)


# Each section's keys as they are written, with their JSON schemas; and all keys: "training.seed".
SECTIONS = {
    name: field.annotation.model_json_schema()["properties"]
    for name, field in Config.model_fields.items()
}
KEYS = {f"{name}.{key}": schema for name, keys in SECTIONS.items() for key, schema in keys.items()}


class ConfigError(ValueError):
    """The user's mistakes, each a sentence with its numbers and the remedy."""

    def __init__(self, *problems: str) -> None:
        self.problems = list(problems)
        super().__init__("\n".join(problems))
