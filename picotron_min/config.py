"""config.json: its schema, every mistake in it told at once, and the model that it names.

The classes below are the documentation of config.json: one class a section, one line a key. Section
and key names are picotron's, so that its users' configs load; keys are added, none change meaning.
Every key has a default. A `~` at the start of a path is the home folder.

torch is not imported here: a mistake is told at once, before any process starts.
"""

import difflib
import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
)

from picotron_min.llama_config import PRESETS, LlamaConfig, find_preset

Text = Annotated[str, Field(min_length=1)]
Name = Annotated[Text, AfterValidator(os.path.expanduser)]  # built-in, path, or hub id owner/name
# picotron writes "" for "none".
OptionalName = Annotated[Name | None, BeforeValidator(lambda value: None if value == "" else value)]
Beta = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """Strict: "256" is no number, 1 is not true, and a misspelt key is an error, not a default."""

    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, allow_inf_nan=False, validate_default=True
    )


class Distributed(Section):
    """The layout: tp x cp x pp x dp processes."""

    tp_size: PositiveInt = 1  # tensor parallel: every matrix is cut
    cp_size: PositiveInt = 1  # context parallel: every sequence is cut
    pp_size: PositiveInt = 1  # pipeline parallel: the layers are dealt out
    dp_size: PositiveInt = 1  # data parallel: the batch is dealt out
    pp_engine: Literal["afab", "1f1b", "interleaved"] = "1f1b"
    pp_chunks: PositiveInt = 1  # stages a rank has, for afab and interleaved
    pp_layers: list[PositiveInt] | None = None  # of each stage, pp_size x pp_chunks; null: balanced
    cp_engine: Literal["ring", "ulysses"] = "ring"
    sequence_parallel: bool = False  # with tp: norms and residuals are cut along the sequence
    backend: Literal["auto", "gloo", "nccl"] = "auto"  # auto: nccl on GPUs, gloo on CPUs
    use_cpu: bool = False
    timeout_seconds: PositiveInt = 60  # a collective that takes longer ends the run


class Model(Section):
    """What is trained: a public model's shape, with any of its numbers changed, and how."""

    name: Name = "tiny"  # a preset of llama_config.py, a Hugging Face folder, or a hub id
    vocab_size: PositiveInt | None = None  # from here on null: as in the named model
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
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"  # of matmuls
    weights: OptionalName = None  # a folder or hub id to start from; null: random
    use_flash_attention: bool = True
    use_fused_adam: bool = True
    compile: bool = False
    recompute: Literal["none", "full", "selective"] = "none"  # selective: attention only

    @property
    def overrides(self) -> dict:
        """The numbers given here that replace the named model's own."""
        given = self.model_dump(exclude_none=True)
        return {f.name: given[f.name] for f in fields(LlamaConfig) if f.name in given}


class Training(Section):
    """How it is trained. `Config.global_batch` says what a step is."""

    seed: NonNegativeInt = 42
    learning_rate: PositiveFloat = 3e-4
    min_learning_rate: NonNegativeFloat = 0.0  # where cosine and wsd end
    schedule: Literal["constant", "cosine", "wsd"] = "constant"  # after the warm-up
    warmup_steps: NonNegativeInt = 0
    weight_decay: NonNegativeFloat = 0.1  # of matrices only
    betas: list[Beta] = Field([0.9, 0.95], min_length=2, max_length=2)
    grad_clip: PositiveFloat | None = 1.0  # largest norm of the whole gradient; null: no clipping
    optimizer: Literal["adamw", "sgd"] = "adamw"
    total_train_steps: PositiveInt = 200
    max_tokens: PositiveInt | None = None  # stops earlier; the schedule does not see it
    seq_length: PositiveInt = 256  # tokens
    micro_batch_size: PositiveInt = 8  # sequences
    gradient_accumulation_steps: PositiveInt = 1  # micro-batches a step
    num_samples: PositiveInt | None = None  # documents read of the dataset; null: all
    eval_frequency: NonNegativeInt = 0  # steps between validations; 0: only at the end
    eval_batches: NonNegativeInt = 4  # steps' worth of sequences held out; 0: no validation


class Dataset(Section):
    """What is read."""

    name: Name = "stdlib"  # Python's own library, a local file or folder, or a hub id
    subset_name: Text | None = None
    split: Text = "train"
    text_column: Text = "text"
    tokenizer: Name = "bytes"  # 256 bytes and end of text, a local folder, or a hub id
    num_workers: NonNegativeInt = 0  # picotron's; nothing to do: tokens are read from mapped memory
    num_proc: PositiveInt = 1  # processes that tokenize
    cache_dir: Name = "~/.cache/picotron_min"  # tokenized text, kept between runs


class Checkpoint(Section):
    """What is kept."""

    save_dir: Name = "checkpoints"
    save_frequency: NonNegativeInt = 0  # steps; 0: only at the end
    keep: NonNegativeInt = 2  # the newest so many; 0: all
    in_background: bool = Field(False, alias="async")  # steps go on while files are written
    # A checkpoint's folder, or "latest": the newest complete one in save_dir, or a fresh start.
    load_path: OptionalName = None


class Logging(Section):
    """What is told."""

    use_wandb: bool = False
    project_name: Text = "picotron-min"
    run_name: Text | None = None
    metrics_file: Name | None = None  # null: metrics.jsonl in checkpoint.save_dir
    trace_file: Name | None = None  # a Chrome trace of a few steps of the first pipeline


class Environment(Section):
    """Variables of every process. Not strict, since picotron writes them as text: "1", "false"."""

    model_config = ConfigDict(strict=False)

    OMP_NUM_THREADS: PositiveInt | None = None
    TOKENIZERS_PARALLELISM: bool | None = None
    FLASH_ATTEN: bool | None = None  # false: model.use_flash_attention is off, whatever it says
    HF_TOKEN: None = None  # picotron's template has it, as null


class Config(Section):
    """The whole of config.json."""

    distributed: Distributed = Distributed()
    model: Model = Model()
    training: Training = Training()
    dataset: Dataset = Dataset()
    checkpoint: Checkpoint = Checkpoint()
    logging: Logging = Logging()
    environment: Environment = Environment()

    @property
    def world_size(self) -> int:
        """Processes."""
        return math.prod(getattr(self.distributed, axis) for axis in AXES)

    @property
    def global_batch(self) -> int:
        """Sequences a step: dp_size x micro_batch_size x gradient_accumulation_steps."""
        t = self.training
        return self.distributed.dp_size * t.micro_batch_size * t.gradient_accumulation_steps

    @property
    def data_order(self) -> dict[str, object]:
        """All that decides which sequences a step sees; the layout does not."""
        keys = ("name", "subset_name", "split", "text_column", "tokenizer")
        order = {f"dataset.{key}": getattr(self.dataset, key) for key in keys}
        keys = ("seed", "seq_length", "num_samples", "eval_batches")
        order |= {f"training.{key}": getattr(self.training, key) for key in keys}
        return order | {"sequences a step": self.global_batch}

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch * self.training.seq_length

    @property
    def use_flash_attention(self) -> bool:
        """Whether both of picotron's switches, model's and environment's, allow it."""
        return self.model.use_flash_attention and self.environment.FLASH_ATTEN is not False

    @property
    def metrics_file(self) -> str:
        default = os.path.join(self.checkpoint.save_dir, "metrics.jsonl")
        return self.logging.metrics_file or default


AXES = ("dp_size", "pp_size", "cp_size", "tp_size")
SECTIONS = {name: field.annotation for name, field in Config.model_fields.items()}


def keys_of(section: str) -> dict:
    """The keys of a section as they are written; none of an unknown one."""
    known = SECTIONS[section].model_fields if section in SECTIONS else {}
    return {field.alias or name: field for name, field in known.items()}


class ConfigError(ValueError):
    """The user's mistakes, each a sentence with its numbers and the remedy."""

    def __init__(self, *problems: str) -> None:
        self.problems = list(problems)
        super().__init__("\n".join(problems))


def load_config(path: str | os.PathLike, processes: int | None = None) -> Config:
    """Read and check a config.json. Raises ConfigError with every problem in it.

    `processes` is how many were started, if somebody else started them.
    """
    raw, repeated = _read_json(Path(path))
    problems = [f"{key} is given more than once: keep one" for key in repeated]
    return parse_config(raw, problems, lambda config: _launch_problems(config, processes, path))


def _read_json(path: Path) -> tuple[dict, list[str]]:
    """The object in a JSON file, and its repeated keys, which Python's reader would hide."""
    repeated = []

    def collect(pairs: list[tuple]) -> dict:
        repeated.extend(key for key, count in Counter(k for k, _ in pairs).items() if count > 1)
        return dict(pairs)

    try:
        text = path.read_text(encoding="utf-8-sig")
        raw = json.loads(text, object_pairs_hook=collect)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except json.JSONDecodeError as e:
        # A column counts characters, so a tab is shown as one, or the caret would miss.
        line = text.split("\n")[e.lineno - 1].replace("\t", " ")
        where = f"{path} is not JSON: line {e.lineno}, column {e.colno}: {e.msg}"
        raise ConfigError(f"{where}\n    {line}\n    {' ' * (e.colno - 1)}^") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON in UTF-8: {error}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} must hold one object, {{ ... }}, not {_shown(raw)}")
    return raw, repeated


def parse_config(
    raw: dict,
    problems: Iterable[str] = (),
    more_checks: Callable[[Config], list[str]] | None = None,
) -> Config:
    """Check a config given as a dict. Raises ConfigError with every problem, `problems` first."""
    problems, bad = list(problems), set()
    try:
        config = Config.model_validate(raw)
    except ValidationError as error:
        for e in error.errors():
            section, *key = e["loc"][:2]
            problems.append(_describe(e, raw))
            bad |= {(section, name) for name in key or [None, *keys_of(section)]}
        # The rest is checked with defaults in place of what is bad, so that the user hears of
        # everything in one go.
        config = Config.model_validate(
            {
                section: {key: value for key, value in keys.items() if (section, key) not in bad}
                for section, keys in raw.items()
                if (section, None) not in bad
            }
        )
    # What is now said about a bad key is about its default: left out.
    bad_names = {name for section, key in bad for name in (key, f"{section}.{key}")}
    for problem in problems_of(config) + (more_checks(config) if more_checks else []):
        if bad_names.isdisjoint(re.findall(r"([\w.]+)=", problem)):
            problems.append(problem)
    if problems:
        raise ConfigError(*dict.fromkeys(problems))
    return config


def _describe(error: dict, raw: dict) -> str:
    """One of pydantic's errors as a sentence: the key, its value, what is expected."""
    (section, *key), kind = error["loc"][:2], error["type"]
    if kind == "extra_forbidden":
        return _unknown(section, *key)
    if kind == "none_required":  # HF_TOKEN: not shown, since it is a secret and this may be logged
        return (
            "environment.HF_TOKEN must be null: a token belongs in the environment, not in a file."
            " Delete it here and run  export HF_TOKEN=..."
        )
    where, value = section, raw[section]
    expected = error["msg"].replace("Input should", "must")
    expected = expected.replace("a valid boolean", "true or false")
    if kind == "model_type":
        expected = "must be a section, { ... }"
    if key:
        where, value = f"{section}.{key[0]}", value[key[0]]
        if type(None) in get_args(keys_of(section)[key[0]].annotation):
            expected += " or null"
    is_quoted = isinstance(value, str) and re.fullmatch(r"[-+.\de]+|true|false", value.lower())
    if kind in ("int_type", "float_type", "bool_type") and is_quoted:
        expected += ", without quotes"
    if kind in ("too_short", "too_long"):
        expected = "must be a list of 2 numbers"  # betas
    if kind == "int_type" and isinstance(value, float) and value.is_integer():
        expected += f", written {int(value)}"
    if value == "float16":
        expected += "; float16 overflows without loss scaling, use bfloat16"
    return f"{where}={_shown(value)}: {expected}"


def _unknown(section: str, key: str | None = None) -> str:
    """What to say of a key (or section) that is not known: where it belongs, or the nearest."""
    where, own = (f"{section}.{key}", keys_of(section)) if key else (section, SECTIONS)
    word = key or section
    if homes := [name for name in SECTIONS if word in keys_of(name)]:
        return f"{where} is in the wrong place: {word} belongs in {_choice(homes)}"
    everywhere = {key.lower(): f"{name}.{key}" for name in SECTIONS for key in keys_of(name)}
    for known in ({name.lower(): name for name in own}, everywhere):
        if near := difflib.get_close_matches(word.lower(), known, n=1):
            return f"{where} is not known: did you mean {known[near[0]]}?"
    return f"{where} is not known: use {_choice(own)}"


def _shown(value: object) -> str:
    """A value as it stands in the file, cut to a readable length."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def _choice(options: Iterable) -> str:
    """1, 2 or 4"""
    *most, last = map(str, options)
    return f"{', '.join(most)} or {last}" if most else last


def problems_of(config: Config) -> list[str]:
    """Why the sections do not fit each other, or the files that are there."""
    problems = _run_problems(config) + _path_problems(config)
    # A model on the hub is fetched, and checked, when the run starts.
    if find_preset(config.model.name) or not _on_hub(config.model.name):
        try:
            resolve_model(config)
        except ConfigError as error:
            problems += error.problems
    return problems


def _run_problems(config: Config) -> list[str]:
    d, t = config.distributed, config.training
    # The ring cuts a sequence into two chunks a rank, tensor parallelism cuts a rank's part again.
    chunks = d.cp_size * (2 if d.cp_engine == "ring" and d.cp_size > 1 else 1)
    pieces = math.lcm(chunks, d.cp_size * (d.tp_size if d.sequence_parallel else 1))
    shorter = t.seq_length // pieces * pieces
    checks = [
        (
            t.warmup_steps >= t.total_train_steps,
            f"warmup_steps={t.warmup_steps} leaves nothing of"
            f" total_train_steps={t.total_train_steps}: use at most {t.total_train_steps - 1}",
        ),
        (
            t.min_learning_rate > t.learning_rate,
            f"min_learning_rate={t.min_learning_rate} is above learning_rate={t.learning_rate}:"
            f" use at most {t.learning_rate}",
        ),
        (
            t.max_tokens and t.max_tokens < config.tokens_per_step,
            f"max_tokens={t.max_tokens} is less than the {config.tokens_per_step} tokens of one"
            " step: raise it, or make the step smaller",
        ),
        (
            d.use_cpu and d.backend == "nccl",
            "backend=nccl needs GPUs but use_cpu=true: set distributed.backend to auto or gloo,"
            " or distributed.use_cpu to false",
        ),
        (
            t.seq_length % pieces,
            f"seq_length={t.seq_length} cannot be cut into {pieces} equal pieces, as"
            f' cp_size={d.cp_size} with cp_engine="{d.cp_engine}", and tp_size={d.tp_size} with'
            f" sequence_parallel={_shown(d.sequence_parallel)} need: use"
            f" {_choice(n for n in (shorter, shorter + pieces) if n)}",
        ),
        (
            config.logging.trace_file and t.total_train_steps < 5,
            f"trace_file={config.logging.trace_file} gets the third to the fifth step, and"
            f" total_train_steps={t.total_train_steps}: use at least 5, or no trace_file",
        ),
        (
            d.pp_chunks > 1 and d.pp_size == 1,
            f"pp_chunks={d.pp_chunks} needs more than one rank to deal the stages to, and"
            f" pp_size={d.pp_size}: use pp_chunks 1, or a larger pp_size",
        ),
        (
            d.pp_chunks > 1 and d.pp_engine == "1f1b",
            f'pp_engine="1f1b" has one stage a rank, not pp_chunks={d.pp_chunks}:'
            " use pp_chunks 1, or the engine interleaved",
        ),
    ]
    return [message for wrong, message in checks if wrong]


def _path_problems(config: Config) -> list[str]:
    problems = _missing("dataset.name", config.dataset.name, ["stdlib"])
    if config.model.weights:
        problems += _missing("model.weights", config.model.weights, [])
    problems += _missing("dataset.tokenizer", config.dataset.tokenizer, ["bytes"])
    save_dir, load_path = config.checkpoint.save_dir, config.checkpoint.load_path
    if os.path.isfile(save_dir):
        problems.append(f"checkpoint.save_dir={save_dir} is a file: name a folder")
    if load_path not in (None, "latest") and not Path(load_path, "state.json").is_file():
        there = sorted(Path(save_dir).glob("step-*/state.json"))
        example = there[-1].parent if there else f"{save_dir}/step-00000010"
        problems.append(
            f"checkpoint.load_path={load_path} is no checkpoint (it has no state.json):"
            f" use latest, or a folder like {example}"
        )
    return problems


FILES = (".txt", ".json", ".jsonl", ".parquet")


def _on_hub(name: str) -> bool:
    """Whether a name can only be an id on the Hugging Face hub: owner/name, and nothing local."""
    local = name.endswith(FILES) or os.path.exists(name)
    return not local and bool(re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name))


def _missing(key: str, name: str, built_in: list[str]) -> list[str]:
    if name in built_in or os.path.exists(name) or _on_hub(name):
        return []
    if "/" in name or name.endswith(FILES):
        return [f"{key}={name} does not exist: there is no {os.path.abspath(name)}"]
    near = difflib.get_close_matches(name, built_in, cutoff=0.3) or built_in
    return [f"{key}={name} is not known: use {_choice(near)}, a local path, or a hub id owner/name"]


def resolve_model(config: Config) -> LlamaConfig:
    """The model's numbers: those that `model.name` stands for, with the overrides applied.

    Raises ConfigError where they are no Llama's, cannot be found, or do not fit the run. A preset
    comes before a folder of the same name (write ./name), a folder before a hub id. Only a hub id
    needs the network.
    """
    preset = find_preset(config.model.name)
    hf = None if preset else _hugging_face_config(config.model.name)
    try:
        llama = (preset or LlamaConfig.from_hf(hf)).override(**config.model.overrides)
    except ValueError as error:
        raise ConfigError(f"model.name={config.model.name}: {error}") from None
    if problems := model_problems(config, llama):
        raise ConfigError(*problems)
    return llama


def _hugging_face_config(name: str) -> dict:
    """The config.json of a local folder, or of a model on the hub."""
    if not _on_hub(name):
        if missing := _missing("model.name", name, [preset.split("/")[-1] for preset in PRESETS]):
            raise ConfigError(*missing)
        return _read_json(Path(name, "config.json"))[0]
    from huggingface_hub import hf_hub_download

    try:
        path = hf_hub_download(name, "config.json")
    except Exception as error:  # a dozen kinds, from no network to a gated model
        raise ConfigError(
            f"cannot fetch config.json of model.name={name} from the hub"
            f" ({str(error).strip().partition(chr(10))[0]}): check the spelling, the network and"
            " your access, or use a preset or a local folder"
        ) from None
    return _read_json(Path(path))[0]


def model_problems(config: Config, llama: LlamaConfig) -> list[str]:
    """Why the run does not fit the model's numbers."""
    d, seq_length, problems = config.distributed, config.training.seq_length, []
    cut = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
    common = math.gcd(*(getattr(llama, name) for name in cut))
    good = _choice(n for n in range(1, common + 1) if common % n == 0)
    for name in cut:
        if (size := getattr(llama, name)) % d.tp_size:
            problems.append(f"tp_size={d.tp_size} does not divide {name}={size}: use {good}")
    heads = llama.num_attention_heads // d.tp_size
    if d.cp_engine == "ulysses" and heads % d.cp_size:
        good = _choice(n for n in range(1, heads + 1) if heads % n == 0)
        problems.append(
            f'cp_engine="ulysses" with cp_size={d.cp_size} does not divide the {heads} heads of a'
            f" rank (num_attention_heads={llama.num_attention_heads} / tp_size={d.tp_size}):"
            f' use cp_size {good}, or cp_engine "ring"'
        )
    if (d.tp_size - 1) * math.ceil(llama.vocab_size / d.tp_size) >= llama.vocab_size:
        problems.append(
            f"tp_size={d.tp_size} leaves a rank without rows of vocab_size={llama.vocab_size},"
            f" dealt out {math.ceil(llama.vocab_size / d.tp_size)} a rank: use a smaller tp_size"
        )
    stages, layers = d.pp_size * d.pp_chunks, llama.num_hidden_layers
    if d.pp_layers and (len(d.pp_layers), sum(d.pp_layers)) != (stages, layers):
        problems.append(
            f"pp_layers={d.pp_layers} has {len(d.pp_layers)} stages with {sum(d.pp_layers)} layers,"
            f" not pp_size={d.pp_size} x pp_chunks={d.pp_chunks} = {stages} stages with"
            f" num_hidden_layers={layers}: correct it, or set it to null"
        )
    if stages > layers:
        problems.append(
            f"pp_size={d.pp_size} x pp_chunks={d.pp_chunks} makes {stages} stages of"
            f" num_hidden_layers={layers}: use at most {layers} stages"
        )
    if seq_length > (longest := llama.max_position_embeddings):
        problems.append(
            f"seq_length={seq_length} is above max_position_embeddings={longest} of"
            f" model.name={config.model.name}: use at most {longest}, or set"
            f" model.max_position_embeddings to {seq_length}"
        )
    if config.dataset.tokenizer == "bytes" and llama.vocab_size < 257:
        problems.append(
            f"vocab_size={llama.vocab_size} is too small for dataset.tokenizer=bytes"
            " (256 bytes and end of text): use at least 257"
        )
    return problems


def _launch_problems(config: Config, processes: int | None, path: str | os.PathLike) -> list[str]:
    needed, rest = config.world_size, config.world_size // config.distributed.dp_size
    if processes in (None, needed):
        return []
    layout = " x ".join(f"{axis}={getattr(config.distributed, axis)}" for axis in AXES)
    also = "" if processes % rest else f", or set distributed.dp_size to {processes // rest}"
    return [
        f"this config needs {needed} process{'es' if needed > 1 else ''} ({layout})"
        f" but was started with {processes}: run"
        f"  torchrun --nproc_per_node {needed} train.py --config {path}{also}"
    ]
