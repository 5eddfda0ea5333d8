"""Flags -> a checked config.json, and what it will cost before anything starts.

    python create_config.py --out_dir runs --exp_name first --dp 2 --model_name tiny --use_cpu

writes runs/first/config.json. Every key of picotron_min/runtime/config.py is a flag; those that
picotron's create_config.py has go by its names too (`--tp`, `--mbs`, ...). Only what is given is
written, nothing deleted, no other file overwritten without --force, and the network not used.
"""

import argparse
import inspect
import json
import re
import shlex
import signal
import sys
from contextlib import suppress
from dataclasses import replace
from itertools import islice, product
from pathlib import Path

from picotron_min.costs import layer_flops, model_flops_per_token, parameter_count
from picotron_min.extensions.settings import Layout, ModelConfig, Recipe, Routing, Workload
from picotron_min.planner.activations import saved_per_token
from picotron_min.planner.config_files import attended_length, predicted
from picotron_min.planner.memory import memory_per_rank
from picotron_min.planner.show import OTHERS_RUNS, about_documents, measures
from picotron_min.runtime.config import AXES, KEY, KEYS, SECTIONS, Config, ConfigError
from picotron_min.runtime.config_checks import is_known_here, resolve_model
from picotron_min.runtime.config_file import MOST_PROCESSES, nearest, parse_config
from picotron_min.runtime.hardware import GPUS, Gpu
from picotron_min.runtime.json_file import parse_json, read_json
from picotron_min.runtime.public_models import tokenizer_of
from picotron_min.runtime.wording import counted

ALIASES = {f"distributed.{axis}_size": axis for axis in AXES}
ALIASES |= {"model.name": "model_name", "dataset.name": "dataset_name"}
ALIASES |= {"training.micro_batch_size": "mbs", "training.seq_length": "seq_len"}
ALIASES |= {"training.gradient_accumulation_steps": "grad_acc_steps"}
ALIASES |= {"model.num_nextn_predict_layers": "mtp_num_layers"}
HOST_LINK = 50e9  # bytes/s one way over PCIe 5; 25e9 over PCIe 4, of an A100
ASSUMED_GPU = "H100"  # this machine need not have any
GPUS_A_NODE = 8  # a run on at most 8 GPUs is taken to fit one machine


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code: 0 done, 2 the user's mistakes, all reported."""
    try:
        create(arguments)
        return 0
    except OSError as error:
        problems = f"cannot write {error.filename}: {error.strerror}"
    except ValueError as error:
        problems = str(error)  # a line for each
    print("error: " + problems.replace("\n", "\nerror: "), file=sys.stderr)
    return 2


def create(arguments: list[str] | None) -> None:
    """Write the config and print what it means."""
    parser = build_parser()
    flags, words = parser.parse_known_args(arguments)
    has_keys = words or any("." in name for name in vars(flags))
    if (flags.check and has_keys) or (not flags.check and not (flags.out_dir and flags.exp_name)):
        parser.error("give --out_dir, --exp_name and flags, or --check FILE alone")
    unknown = [word for word in words if word.startswith("-")] or words  # not also their values
    raw = read_json(flags.check) if flags.check else to_config(flags)
    config = parse_config(raw, lambda _: [unknown_flag(word, parser) for word in unknown])
    flags.attended = flags.documents and attended_length(flags.documents, config)
    if flags.check:
        return describe(config, flags)
    path = Path(flags.out_dir, flags.exp_name, "config.json")
    if not path.resolve().is_relative_to(Path(flags.out_dir).resolve()):
        raise ConfigError(f"--exp_name {flags.exp_name} is outside --out_dir: name a folder in it")
    text = json.dumps(raw, indent=4) + "\n"
    if path.exists() and path.read_bytes() == text.encode():
        print(f"{path} is already there with the same content")
    elif path.exists() and not flags.force:
        remedy = "choose another --exp_name, or add --force to overwrite it"
        raise ConfigError(f"{path} is already there and differs: {remedy}")
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(f"wrote {path}")
    describe(config, flags)
    print(f"\n{launch_command(config)} --config {shlex.quote(str(path))}")


def build_parser() -> argparse.ArgumentParser:
    """One flag for each key of the schema, empty unless given."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0],
        usage="%(prog)s --out_dir DIR --exp_name NAME [--dp N --model_name NAME ...]",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    given = {"metavar": "NAME", "default": None}
    parser.add_argument("--out_dir", help="folder of all experiments", **given)
    parser.add_argument("--exp_name", help="folder of this one, and its run_name", **given)
    parser.add_argument("--force", action="store_true", default=False, help="overwrite the file")
    parser.add_argument("--check", type=Path, metavar="FILE", default=None, help="check this file")
    about = f"whose step is predicted, if the run is on GPUs; default: {ASSUMED_GPU}"
    parser.add_argument("--gpu", choices=GPUS, default=None, help=about)
    parser.add_argument("--documents", type=Path, metavar="FILE", default=None, help="see planner")
    meanings = meanings_of_keys()
    for where, schema in KEYS.items():
        names = [ALIASES.get(where), where.split(".")[1]]
        flags = [f"--{name}" for name in names if name not in (None, "name")]
        values = "|".join(schema.get("enum", map(METAVARS.get, types_of(schema))))
        is_switch = "boolean" in types_of(schema)
        options = {"action": argparse.BooleanOptionalAction} if is_switch else {"metavar": values}
        about = f"{where}, default {json.dumps(schema['default'])}: {meanings[where]}"
        parser.add_argument(*flags, dest=where, help=about.removesuffix(": "), **options)
    return parser


METAVARS = {"integer": "N", "number": "X", "string": "TEXT", "array": "[X,...]", "null": "null"}
METAVARS["boolean"] = "true|false"


def types_of(schema: dict) -> list[str]:
    return [option["type"] for option in schema.get("anyOf", [schema])]


def meanings_of_keys() -> dict[str, str]:
    """Key -> the comment beside or above its field, in config.py or in the class it comes from."""
    fields_of, meanings = {key: name for name, key in KEY.items()} | {"async": "in_background"}, {}
    for section, field in Config.model_fields.items():
        comments = {}  # of one name, the last counts
        for kind in (Workload, Recipe, Layout, Routing, ModelConfig, field.annotation):
            for base in kind.mro()[-2::-1] if kind != field.annotation else [kind]:
                for above, name, beside in FIELD.findall(inspect.getsource(base)):
                    comments[name] = (beside or above).replace("None", "null")
        for key in SECTIONS[section]:
            meanings[f"{section}.{key}"] = comments.get(fields_of.get(key, key), "")
    return meanings


FIELD = re.compile(r"(?:^ +# (.+)\n)?^    (\w+): [^#\n]+(?:  # (.+))?$", re.M)


def to_config(flags: argparse.Namespace) -> dict:
    """The config as it is written: a small base, and over it the flags that were given."""
    raw = {name: {} for name in SECTIONS}
    raw["checkpoint"]["save_dir"] = str(Path(flags.out_dir, flags.exp_name, "checkpoints"))
    raw["logging"]["run_name"] = flags.exp_name
    raw["environment"] = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    for where, value in vars(flags).items():
        section, _, key = where.partition(".")
        if key:
            raw[section][key] = parse_value(where, value)
    return {name: keys for name, keys in raw.items() if keys}


def parse_value(where: str, value: str | bool) -> object:
    """A flag's text as JSON (3, 1e-4, [0.9, 0.95], null), or as it is where the key takes text."""
    if isinstance(value, bool) or "string" in types_of(KEYS[where]):
        return value
    with suppress(ValueError):  # stays text, and the schema reports what it expected
        return parse_json(value)
    return value


def unknown_flag(word: str, parser: argparse.ArgumentParser) -> str:
    """The remedy for an unknown flag: the nearest."""
    word = word.split("=")[0]
    flags = [f for f in parser._option_string_actions if ("--no-" in f) == ("--no-" in word)]
    names = {flag.lstrip("-"): flag for flag in flags if flag != "--mtp_num_layers"}
    meant = names.get(nearest(word.lstrip("-"), names))
    return f"{word} is not known: {f'did you mean {meant}?' if meant else 'see --help'}"


def describe(config: Config, flags: argparse.Namespace) -> None:
    """Print what the config means: processes, batch, parameters, and bytes per rank."""
    gpu = GPUS[flags.gpu or ASSUMED_GPU]
    t, sizes, tokenizer = config.training, config.layout.sizes, config.tokenizer
    layout = " x ".join(f"{axis} {size}" for axis, size in sizes._asdict().items())
    print(f"\nprocesses        {config.world_size} = {layout}")
    print_rank_grid(sizes)
    sequences = counted(t.micro_batch_size, "sequence")
    batches = counted(t.gradient_accumulation_steps, "micro-batch")
    product = f"{sizes.dp} dp x {sequences} x {batches} x {t.seq_length}"
    print(f"tokens per step  {config.tokens_per_step:,} = {product}")
    own = ", the model's own" if tokenizer == tokenizer_of(config.model.name) else ""
    print(f"tokenizer        {tokenizer}{own}")
    if not is_known_here(name := config.model.name):  # a hub id, checked when the run fetches it
        remedy = f"download {name} and name its folder"
        print(f"parameters       not known without the network: {remedy}")
        return
    model_config = resolve_model(config)
    count, matmul = parameter_count(model_config), model_flops_per_token(model_config, 0) // 6
    print(f"parameters       {count:,}, {matmul:,} a token is multiplied with")
    if model_config.num_local_experts:
        print_experts(config, model_config)
    print_memory(config, model_config)
    if config.distributed.use_cpu and config.model.offload:
        print("offload          saves nothing on a CPU: the copies are in the same memory")
    if not config.distributed.use_cpu and config.model.dtype in gpu.peaks:
        if config.model.offload:
            print_offload(config, model_config, gpu)
        print_prediction(config, gpu, flags)


def print_rank_grid(sizes: tuple[int, ...], most_rows: int = 8) -> None:
    *rows, tp = sizes
    for row, (pp, dp, cp) in enumerate(islice(product(*map(range, rows)), most_rows)):
        ranks = f"rank {row * tp}" if tp == 1 else f"ranks {row * tp} to {row * tp + tp - 1} (tp)"
        print(f"  pp {pp}  dp {dp}  cp {cp}   {ranks}")
    if (more := rows[0] * rows[1] * rows[2] - most_rows) > 0:
        print(f"  and {counted(more, 'more row')}")


def print_experts(config: Config, c: ModelConfig) -> None:
    layout, X, t = config.layout, c.num_local_experts, config.training
    layers = counted(sum(map(c.has_experts, range(c.num_hidden_layers))), "layer")
    parts = f", each cut over {layout.etp} (etp)" if layout.etp > 1 else ""
    print(f"experts          {X} in each of {layers}, {c.num_experts_per_tok} of them a token")
    print(f"  {X // layout.ep} of a layer on a rank (ep {layout.ep}){parts}")
    if not (t.moe_expert_capacity_factor or t.moe_expert_rank_capacity_factor):
        print("  without moe_expert_capacity_factor their activations have no bound: all tokens")
        print("  may choose the same experts; the memory below is for tokens spread evenly")


def print_memory(config: Config, model_config: ModelConfig) -> None:
    m, t, sharding = config.model, config.training, config.layout.sharding
    device = "cpu" if config.distributed.use_cpu else "cuda"
    memory = memory_per_rank(model_config, config.layout, config.workload, device)
    print("memory per rank  by the formulas of picotron_min/planner/memory.py, memory_per_rank:")
    each = f"{8 if m.dtype == 'float64' else 4} bytes a parameter"
    each += " of this rank" if sharding == "none" else f', sharding "{sharding}"'
    copy = ", + 2 bytes for bfloat16 copies" if m.dtype == "bfloat16" else ""
    copy = ", + 2 bytes for copies to multiply with" if m.fp8 else copy
    states = {"adamw": "two more", "muon": "one more for a hidden matrix, else two", "sgd": "none"}
    offload = f", offload {m.offload}" if m.offload else ""
    formulas = {
        "weights": each + copy,
        "gradients": each,
        "optimizer_state": f"{states[t.optimizer]} ({t.optimizer})",
        "activations": f"saved_per_token, recompute {m.recompute}{offload}",
        "loss": "logits of a stripe, gradients of lm_head and its input",
        "total": "without torch itself and temporaries",
    }
    for what, formula in formulas.items():
        count = getattr(memory, what)
        size = f"{count / 1e9:>9.3f} GB" if count >= 1e8 else f"{count / 1e6:>9.3f} MB"
        print(f"  {what.replace('_', ' ').replace('total', 'together'):<15}{size}   {formula}")
    sent = {"gradients": "gradients are", "parameters": "weights and gradients are"}
    if sharding in sent and (batches := t.gradient_accumulation_steps) > 1:
        print(f"  {sent[sharding]} sent for each micro-batch: {batches} times a step")


def print_offload(config: Config, c: ModelConfig, gpu: Gpu) -> None:
    """What offload saves, and whether its copies are hidden."""
    m, t, layout, work = config.model, config.training, config.layout, config.workload
    most, least = (memory_per_rank(c, layout, replace(work, offload=n)) for n in (0, m.offload))
    tokens = t.micro_batch_size * t.seq_length // layout.cp
    fp8 = work.in_fp8(0, c.num_hidden_layers)
    saved = tokens * saved_per_token(c, m.dtype, m.recompute, layout, 0, fp8)
    flops = tokens * sum(layer_flops(c, t.seq_length, 0).values()) / layout.tp
    copy, forward = saved / HOST_LINK, flops / (gpu.matmul_share * gpu.peaks[m.dtype])
    fewer = f"{(most.activations - least.activations) / 1e9:.3f} GB fewer activations"
    print(f"offload          {fewer} on the GPU")
    times = f"{1e3 * copy:.3g} ms at {HOST_LINK / 1e9:.0f} GB/s, forward {1e3 * forward:.3g} ms"
    verdict = "hidden" if copy <= forward else f"waits {1e3 * (copy - forward):.3g} ms"
    print(f"  of a layer {saved / 1e6:.1f} MB, which take {times}: {verdict}")


def print_prediction(config: Config, gpu: Gpu, flags: argparse.Namespace) -> None:
    request, candidate = predicted(config, gpu, attended=flags.attended)
    step, number = candidate.prediction.step, measures(request, candidate)
    low, high = number["interval"]
    speed = f"{number['tokens_per_second_per_device']:,.0f} tokens/s a GPU, MFU {number['mfu']:.1%}"
    on = f"{gpu.name}{'' if gpu.validated else ', which is not validated'}"
    print(f"predicted step   {step:.3g} s, {speed} on {on}: see python -m picotron_min.planner")
    print(f"  {low:,.0f} to {high:,.0f} tokens/s a GPU in nine of ten runs. {OTHERS_RUNS}")
    chosen = {"offload": config.model.offload, "tp_overlap": config.distributed.tp_overlap}
    if left_out := " and ".join(key for key, value in chosen.items() if value):
        print(f"  as without {left_out}, whose effect on the time is not modelled")
    if about := about_documents(request):
        print(f"  {about}")
    if not flags.gpu:
        print(f"  {gpu.name} is assumed: name another with --gpu, or add --use_cpu")


def launch_command(config: Config) -> str:
    """What starts the run: `python` on one machine, else `torchrun` on each of several."""
    processes = config.world_size
    if processes <= (MOST_PROCESSES if config.distributed.use_cpu else GPUS_A_NODE):
        return "python train.py"
    of = max(n for n in range(1, GPUS_A_NODE + 1) if processes % n == 0)
    nodes = processes // of
    places = f"NODE from 0 to {nodes - 1} and ADDRESS of node 0"
    print(f"\non each of {nodes} nodes with {counted(of, 'process')}, {places}:")
    node = "--node-rank NODE --master-addr ADDRESS --master-port 29500"
    return f"torchrun --nnodes {nodes} {node} --nproc_per_node {of} train.py"


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` has read enough: end in silence
    sys.exit(main())
