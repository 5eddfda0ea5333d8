"""Flags -> a checked config.json, and what it will cost before anything starts.

    python create_config.py --out_dir runs --exp_name first --dp 2 --model_name tiny --use_cpu

writes runs/first/config.json. Every key of picotron_min/runtime/config.py is a flag; those that
picotron's create_config.py has go by its names too (`--tp`, `--mbs`, ...). Only what is given is
written, nothing deleted, no other file overwritten without --force, and the network not used.
"""

import argparse
import json
import os
import shlex
import signal
import sys
from contextlib import suppress
from pathlib import Path

from picotron_min.planner.describe import ASSUMED_GPU, describe
from picotron_min.runtime.config import AXES, KEYS, SECTIONS, Config, ConfigError
from picotron_min.runtime.config_file import MOST_PROCESSES, parse_config
from picotron_min.runtime.hardware import GPUS
from picotron_min.runtime.json_file import parse_json, read_json

# picotron's flags, where they are not called as our keys.
ALIASES = {f"distributed.{axis}_size": axis for axis in AXES}
ALIASES |= {"model.name": "model_name", "dataset.name": "dataset_name"}
ALIASES |= {"training.micro_batch_size": "mbs", "training.seq_length": "seq_len"}
ALIASES |= {"training.gradient_accumulation_steps": "grad_acc_steps"}
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
    flags = parser.parse_args(arguments)
    # A key keeps the dot of its section: the flags of this program have none.
    has_keys = any("." in name for name in vars(flags))
    if (flags.check and has_keys) or (not flags.check and not (flags.out_dir and flags.exp_name)):
        parser.error("give --out_dir, --exp_name and flags, or --check FILE alone")
    raw = read_json(flags.check) if flags.check else to_config(flags)
    config = parse_config(raw)
    if flags.check:
        return describe(config, flags.gpu, flags.check)
    path = folder_of(flags) / "config.json"
    text = json.dumps(raw, indent=4) + "\n"
    if not flags.force and path.exists() and path.read_bytes() != text.encode():
        remedy = "choose another --exp_name, or add --force to overwrite it"
        raise ConfigError(f"{path} is already there and differs: {remedy}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    print(f"wrote {path}")
    describe(config, flags.gpu, path)
    print(f"\n{launch_command(config)} --config {shlex.quote(str(path))}")


def build_parser() -> argparse.ArgumentParser:
    """One flag for each key of the schema, empty unless given."""
    parser = argparse.ArgumentParser(
        description="A checked config.json from flags, and what it will cost.",
        usage="%(prog)s --out_dir DIR --exp_name NAME [flags; --help lists them]",
        epilog="What keys mean: docs/config.md, and beside each in picotron_min/runtime/config.py.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    given = {"metavar": "NAME", "default": None}
    parser.add_argument("--out_dir", help="folder of all experiments", **given)
    parser.add_argument("--exp_name", help="folder of this one, and its run_name", **given)
    parser.add_argument("--force", action="store_true", default=False, help="overwrite the file")
    parser.add_argument("--check", type=Path, default=None, help="check this file")
    about = f"whose step is predicted, if the run is on GPUs; default: {ASSUMED_GPU}"
    parser.add_argument("--gpu", choices=GPUS, default=None, help=about)
    for where, schema in KEYS.items():
        # picotron's name first. `--name` alone would not tell the model's from the dataset's.
        names = [ALIASES.get(where), where.split(".")[1]]
        flags = [f"--{name}" for name in names if name not in (None, "name")]
        values = "|".join(schema.get("enum", ["VALUE"]))
        is_switch = "boolean" in types_of(schema)
        options = {"action": argparse.BooleanOptionalAction} if is_switch else {"metavar": values}
        about = f"{where}, default {json.dumps(schema['default'])}"
        parser.add_argument(*flags, dest=where, help=about, **options)
    return parser


def types_of(schema: dict) -> list[str]:
    return [option["type"] for option in schema.get("anyOf", [schema])]


def to_config(flags: argparse.Namespace) -> dict:
    """The config as it is written: a small base, and over it the flags that were given."""
    raw = {name: {} for name in SECTIONS}
    raw["checkpoint"]["save_dir"] = str(folder_of(flags) / "checkpoints")
    raw["logging"]["run_name"] = flags.exp_name
    # A thread a process, or the ranks of one machine compete for its cores.
    raw["environment"] = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    for where, value in vars(flags).items():
        section, _, key = where.partition(".")
        if key:
            raw[section][key] = parse_value(where, value)
    return {name: keys for name, keys in raw.items() if keys}


def folder_of(flags: argparse.Namespace) -> Path:
    """The folder of the experiment; ValueError if it is not inside the folder of all."""
    folder = Path(flags.out_dir, flags.exp_name)
    if Path(os.path.abspath(flags.out_dir)) not in Path(os.path.abspath(folder)).parents:
        where = f"--exp_name {flags.exp_name} is not inside --out_dir {flags.out_dir}"
        raise ValueError(f"{where}: use a name without ..")
    return folder


def parse_value(where: str, value: str | bool) -> object:
    """A flag's text as JSON (3, 1e-4, [0.9, 0.95], null), or as it is where the key takes text."""
    if isinstance(value, bool) or "string" in types_of(KEYS[where]):
        return value
    with suppress(ValueError):  # stays text, and the schema reports what it expected
        return parse_json(value)
    return value


def launch_command(config: Config) -> str:
    """What starts the run: `python` on one machine, else `torchrun` on each of several."""
    processes = config.world_size
    if processes <= (MOST_PROCESSES if config.distributed.use_cpu else GPUS_A_NODE):
        return "python train.py"
    # As many processes on each node as it has GPUs, if they divide the ranks.
    of = max(n for n in range(1, GPUS_A_NODE + 1) if processes % n == 0)
    nodes = f"--nnodes {processes // of} --node-rank NODE --master-addr ADDRESS"
    print("\non each node, with its number, from 0, and the address of node 0:")
    return f"torchrun {nodes} --nproc_per_node {of} train.py"


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` has read enough: end in silence
    sys.exit(main())
