"""config.json: its schema, one class a section and one line a key, each with its default.

Names are those of picotron, so that its users' configs load; keys are added, none change meaning.
A `~` at the start of a path is the home folder. Upper limits are far above any use: they stop slips
such as 10**12. config_file.py reads the file, config_checks.py checks that its keys fit each other.
"""

import os
from dataclasses import fields
from operator import attrgetter
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field
from pydantic.types import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from picotron_min.extensions.settings import (
    SCHEDULES,
    Layout,
    ModelConfig,
    Recipe,
    Routing,
    Workload,
)
from picotron_min.runtime.public_models import tokenizer_of

Text = Annotated[str, Field(min_length=1, max_length=4096, pattern=r"^[^\x00]*$")]
Name = Annotated[Text, AfterValidator(os.path.expanduser)]  # built-in, path, or hub id owner/name
OptionalName = Annotated[Name | None, BeforeValidator(lambda v: None if v == "" else v)]  # "": null
Beta = Annotated[float, Field(ge=0, lt=1)]
Count = Annotated[int, Field(ge=1, le=10**6)]


class Section(
    BaseModel, strict=True, extra="forbid", frozen=True, allow_inf_nan=False, validate_default=True
):
    """Strict: "256" is not a number, 1 is not true, and a misspelt key is an error."""


class Distributed(Section):  # the layout: tp x cp x pp x dp processes
    tp_size: Count = 1  # tensor parallel: every matrix is split
    cp_size: Count = 1  # context parallel: every sequence is split
    pp_size: Count = 1  # pipeline parallel: each rank has some of the layers
    dp_size: Count = 1  # data parallel: each rank has some of the batch
    sharding: Literal["none", "optimizer", "layerwise", "gradients", "parameters"] = "none"
    ep_size: Count = 1  # expert parallel: each rank has some of the experts
    etp_size: Count = 1  # and each expert is split over so many ranks
    ep_engine: Literal["alltoall", "allgather"] = "alltoall"  # how tokens reach their experts
    pp_engine: Literal[tuple(SCHEDULES)] = "1f1b"  # see pipeline_schedule.py
    pp_chunks: Count = 1  # stages of a rank, for schedules that take several
    pp_layers: list[PositiveInt] | None = None  # of each stage, pp_size x pp_chunks; null: balanced
    cp_engine: Literal["ring", "ulysses"] = "ring"
    sequence_parallel: bool = False  # with tp: norms and residuals are split along the sequence
    overlap: bool = True  # weight gradients are computed while messages travel; false: simple forms
    tp_overlap: bool = False  # with sequence_parallel: its messages travel during matmuls
    backend: Literal["auto", "gloo", "nccl"] = "auto"  # auto: nccl on GPUs, gloo on CPUs
    use_cpu: bool = False  # also where there are GPUs; gloo works only on CPUs
    timeout_seconds: Count = 60  # communication that takes longer ends the run


class Model(Section):  # a public model's shape, with any of its numbers changed
    name: Name = "tiny"  # a preset of public_models.py, a Hugging Face folder, or a hub id
    vocab_size: PositiveInt | None = None  # null, here and below: as in the named model
    hidden_size: PositiveInt | None = None
    intermediate_size: PositiveInt | None = None
    num_hidden_layers: PositiveInt | None = None
    num_attention_heads: PositiveInt | None = None
    num_key_value_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    rope_theta: PositiveFloat | None = None
    rms_norm_eps: PositiveFloat | None = None
    tie_word_embeddings: bool | None = None
    max_position_embeddings: PositiveInt | None = None
    qk_norm: bool | None = None  # queries and keys are normalised, each head by itself
    num_local_experts: NonNegativeInt | None = None  # 0: none; see ModelConfig for these keys
    num_experts_per_tok: PositiveInt | None = None
    moe_intermediate_size: PositiveInt | None = None
    n_shared_experts: NonNegativeInt | None = None
    moe_shared_expert_gate: bool | None = None
    mlp_only_layers: list[NonNegativeInt] | None = None
    scoring_func: Literal["softmax", "sigmoid"] | None = None
    norm_topk_prob: bool | None = None
    n_group: PositiveInt | None = None
    topk_group: PositiveInt | None = None
    routed_scaling_factor: PositiveFloat | None = None
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"  # of matmuls
    fp8: bool = False  # layers' linears multiply in 8 bits, the rest stays in dtype
    fp8_skip: NonNegativeInt = 0  # so many first and last layers stay in dtype, too
    weights: OptionalName = None  # a folder or hub id to start from; null: random
    use_flash_attention: bool = True
    use_fused_adam: bool = True
    compile: bool = False
    recompute: Literal["none", "full", "selective"] = "none"  # selective: attention only
    offload: NonNegativeInt = 0  # layers of each stage whose activations wait in the host's memory

    @property
    def overrides(self) -> dict:
        """The numbers given here that replace the named model's own."""
        return self.model_dump(include={f.name for f in fields(ModelConfig)}, exclude_none=True)


class Training(Section):  # Config.global_batch has the size of a step
    seed: int = Field(42, ge=0, le=2**63 - 1)
    learning_rate: PositiveFloat = 3e-4
    min_learning_rate: NonNegativeFloat = 0.0  # where cosine and wsd end
    schedule: Literal["constant", "cosine", "wsd"] = "constant"  # after the warm-up
    warmup_steps: NonNegativeInt = 0
    weight_decay: NonNegativeFloat = 0.1  # of matrices only
    betas: list[Beta] = Field([0.9, 0.95], min_length=2, max_length=2)  # of adamw
    momentum: Beta = 0.95  # of muon; adamw, with its betas, updates the rest
    moments: Literal["float32", "bfloat16"] = "float32"  # dtype in which adamw keeps its averages
    grad_clip: PositiveFloat | None = 1.0  # largest norm of the whole gradient; null: no clipping
    optimizer: Literal["adamw", "muon", "sgd"] = "adamw"  # muon: of hidden matrices
    moe_seq_aux_loss_coeff: NonNegativeFloat = 0.001  # balance of experts in each sequence
    moe_aux_loss_coeff: NonNegativeFloat = 0.0  # in each micro-batch of a data-parallel rank
    moe_global_aux_loss_coeff: NonNegativeFloat = 0.0  # in the step so far, over all ranks
    moe_z_loss_coeff: NonNegativeFloat = 0.0  # keeps the router's logits small
    moe_router_bias_update_rate: NonNegativeFloat = 0.001  # of sigmoid routers
    moe_expert_capacity_factor: PositiveFloat | None = None  # null: no token is dropped
    moe_token_drop_policy: Literal["probs", "position"] = "probs"  # which tokens an expert keeps
    moe_pad_expert_input_to_capacity: bool = False
    moe_router_force_load_balancing: bool = False  # random experts, for benchmarks
    total_train_steps: int = Field(200, ge=1, le=10**8 - 1)  # a checkpoint's name has eight digits
    max_tokens: PositiveInt | None = None  # stops earlier; the schedule ignores it
    seq_length: int = Field(256, ge=1, le=10**9)  # tokens
    micro_batch_size: Count = 8  # sequences
    gradient_accumulation_steps: int = Field(1, ge=1, le=10**5)  # micro-batches a step
    num_samples: PositiveInt | None = None  # documents read of the dataset; null: all
    eval_frequency: NonNegativeInt = 0  # steps between validations; 0: only at the end
    eval_batches: NonNegativeInt = 4  # steps' worth of the held-out end of the text; 0: none


class Dataset(Section):  # the text
    name: Name = "stdlib"  # Python's own library, a local file or folder, or a hub id
    subset_name: Text | None = None
    split: Text = "train"
    text_column: Text = "text"
    tokenizer: OptionalName = None  # bytes, a folder, a .json file, or a hub id; null: the model's
    num_workers: NonNegativeInt = 0  # picotron's; unused: tokens are read from mapped memory
    num_proc: int = Field(1, ge=1, le=1024)  # processes that tokenize
    cache_dir: Name = "~/.cache/picotron_min"  # tokenized text, kept between runs


class Checkpoint(Section):  # what is saved, and what a run starts from
    save_dir: Name = "checkpoints"
    save_frequency: NonNegativeInt = 0  # steps; 0: only at the end
    keep: NonNegativeInt = 2  # how many of the newest; 0: all
    in_background: bool = Field(False, alias="async")  # training continues during a save
    load_path: OptionalName = None  # a folder, or "latest": the newest in save_dir, if any


class Logging(Section):  # what is recorded
    use_wandb: bool = False
    project_name: Text = "picotron-min"
    run_name: Text | None = None
    metrics_file: Name | None = None  # null: metrics.jsonl in checkpoint.save_dir
    trace_file: Name | None = None  # a Chrome trace of a few steps of the first pipeline
    moe_per_layer_logging: bool = False  # metrics of experts also for each layer, as lists
    log_num_zeros_in_grad: bool = False  # how many elements of the gradient are exactly zero


class Environment(Section, strict=False):  # of every process; picotron writes "1" and "false"
    OMP_NUM_THREADS: int | None = Field(None, ge=1, le=1024)  # threads of each process
    TOKENIZERS_PARALLELISM: bool | None = None
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
    def data_order(self) -> dict[str, object]:
        """All that decides which sequences a step trains on; the layout does not."""
        order = {key: attrgetter(key)(self) for key in DATA_ORDER}
        return order | {"dataset.tokenizer": self.tokenizer, "sequences a step": self.global_batch}

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
        return _build(Layout, {key.removesuffix("_size"): v for key, v in self.distributed})

    @property
    def workload(self) -> Workload:
        """What one data-parallel rank computes in a step, and how."""
        m, t = self.model, self.training
        flash = m.use_flash_attention and self.environment.FLASH_ATTEN is not False
        own = {"flash_attention": flash, "num_micro_batches": t.gradient_accumulation_steps}
        own["routing"] = _build(Routing, dict(t))
        return _build(Workload, dict(m) | dict(t) | own)

    @property
    def recipe(self) -> Recipe:
        """How the weights are updated."""
        more = {"fused": self.model.use_fused_adam, "dtype": self.model.dtype}
        more["count_zeros"] = self.logging.log_num_zeros_in_grad
        return _build(Recipe, dict(self.training) | more)


DATA_ORDER = [f"dataset.{key}" for key in ("name", "subset_name", "split", "text_column")]
DATA_ORDER += [f"training.{key}" for key in ("seed", "seq_length", "num_samples", "eval_batches")]


def _build(kind: type, values: dict):
    """A dataclass of the course from those of the values that are its fields."""
    given = {field.name: values[field.name] for field in fields(kind)}
    return kind(**{key: tuple(v) if isinstance(v, list) else v for key, v in given.items()})


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
