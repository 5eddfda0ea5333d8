"""Train a Llama:  torchrun --nproc_per_node 4 train.py --config config.json

The whole story, top to bottom: `main` reads the config and starts the processes, `train` is what
every process does. The model laid out over them, and its one train step, are in training.py.
Without torchrun, `python train.py --config config.json` starts the processes itself.
"""

import argparse
import contextlib
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from filelock import FileLock

from picotron_min.checkpoint import read_facts
from picotron_min.costs import parameter_count
from picotron_min.data import Batches
from picotron_min.mesh import Axes, build_axes
from picotron_min.model_config import ModelConfig
from picotron_min.optimizer import Diverged
from picotron_min.runtime.config import Config
from picotron_min.runtime.config_checks import resolve_model
from picotron_min.runtime.config_file import load_config
from picotron_min.runtime.console import Console, human
from picotron_min.runtime.folders import (
    check_shared,
    clean_up,
    find_start,
    lock_folder,
    set_aside,
)
from picotron_min.runtime.hugging_face import find_weights
from picotron_min.runtime.launch import (
    Launch,
    choose_backend,
    choose_device,
    open_process_group,
    set_environment,
    torchrun_launch,
)
from picotron_min.runtime.metrics import EvalRecord, MetricsLog, SaveRecord, StepRecord
from picotron_min.runtime.processes import RollCall, how_to_go_on, start_processes
from picotron_min.runtime.speed import Speedometer
from picotron_min.runtime.token_file import TokenFile, prepare_tokens
from picotron_min.runtime.tokenizer import Tokenizer, load_tokenizer
from picotron_min.runtime.trace import Trace
from picotron_min.training import DTYPES, Training, open_data


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a Llama as a config.json says.")
    parser.add_argument("--config", required=True, metavar="FILE", help="see create_config.py")
    path = parser.parse_args().config
    launch = torchrun_launch()
    with mistakes_told_plainly(launch.local_rank if launch else 0):
        config = load_config(path, processes=launch.world_size if launch else None)
    set_environment(config.environment.TOKENIZERS_PARALLELISM)
    if launch:
        train(config, launch)
    else:
        start_processes(partial(train, config), config.world_size)


@contextlib.contextmanager
def mistakes_told_plainly(local_rank: int) -> Iterator[None]:
    """The user's mistakes, ValueError and OSError here, end in their message and exit code 2."""
    try:
        yield
    except (ValueError, OSError) as error:
        if local_rank:
            time.sleep(5)  # rank 0 most likely says the same, and has all others ended by leaving
        print(f"\n{error}\n", file=sys.stderr, flush=True)
        raise SystemExit(2) from None


def train(config: Config, launch: Launch) -> None:
    """What every process does, from finding its place to the finished model."""
    d = config.distributed
    if config.environment.OMP_NUM_THREADS:
        torch.set_num_threads(config.environment.OMP_NUM_THREADS)
    with mistakes_told_plainly(launch.local_rank):  # while no process waits for another
        run = prepare(config, launch)
        store = launch.open_store(d.timeout_seconds)
    roll_call = RollCall(store, launch, d.timeout_seconds)
    with roll_call.failures_told(plainly=(OSError, Diverged), for_good=Diverged):
        open_process_group(launch, run.backend, store, d.timeout_seconds)
        name = roll_call.agree(facts_in_common(config, run))
        save_dir, patience = Path(config.checkpoint.save_dir), d.timeout_seconds / 2
        check_shared(save_dir, name, roll_call.group, patience)
        axes = build_axes(run.device, **run.sizes, timeout_seconds=d.timeout_seconds)
        training = Training(config, run.model_config, axes, run.device, run.data, run.weights)
        if run.start:
            training.load(run.start, run.facts)
            roll_call.note_saved(run.start)
        loop(config, launch, run, training, roll_call)
        dist.barrier(training.saver.group)  # rank 0 may have to upload to wandb
        dist.destroy_process_group()


class Run(NamedTuple):
    """All that can be known before the processes meet."""

    sizes: dict[str, int]  # of the axes
    device: torch.device
    backend: str
    model_config: ModelConfig
    tokenizer: Tokenizer
    text: TokenFile
    data: Batches
    start: Path | None  # the checkpoint to go on from
    facts: dict  # what it says about itself
    weights: dict[str, Path] | None  # else the files of the weights to start from
    lock: FileLock | None  # of save_dir, as long as this lives


def prepare(config: Config, launch: Launch) -> Run:
    """Read what there is to read; here the user's mistakes come to light, as ValueErrors."""
    d, save_dir = config.distributed, Path(config.checkpoint.save_dir)
    sizes = {"pp": d.pp_size, "dp": d.dp_size, "cp": d.cp_size, "tp": d.tp_size}
    device = choose_device(launch, d.use_cpu)
    model_config = resolve_model(config)
    text = open_text(config, model_config)
    here = config.layout.coordinates(launch.rank)
    start, facts, weights = find_start(config.checkpoint.load_path, save_dir), {"step": 0}, None
    if start:
        facts = read_facts(start, model_config, config.training.optimizer)
    elif config.model.weights:
        weights = find_weights(config.model.weights, model_config, set(config.model.overrides))
    return Run(
        sizes=sizes,
        device=device,
        backend=choose_backend(device, d.backend),
        model_config=model_config,
        tokenizer=load_tokenizer(config.dataset.tokenizer),
        text=text,
        data=open_data(config, text, here.dp, here.cp),
        start=start,
        facts=facts,
        weights=weights,
        lock=lock_folder(save_dir) if launch.rank == 0 else None,
    )


def open_text(config: Config, model_config: ModelConfig) -> TokenFile:
    """The tokens of the dataset, made now if no run has made them before."""
    dataset = config.dataset
    return prepare_tokens(
        dataset.name,
        subset_name=dataset.subset_name,
        split=dataset.split,
        text_column=dataset.text_column,
        num_samples=config.training.num_samples,
        num_proc=dataset.num_proc,
        tokenizer=dataset.tokenizer,
        vocab_size=model_config.vocab_size,
        cache_dir=dataset.cache_dir,
    )


def facts_in_common(config: Config, run: Run) -> dict[str, object]:
    """What must be the same on all nodes, or they would train different models."""
    sections = config.model_dump(include={"distributed", "model", "training"})
    sections["model"] |= asdict(run.model_config)
    flat = {f"{section}.{key}": v for section, of in sections.items() for key, v in of.items()}
    del flat["model.name"]  # may be a folder, in another place on each node
    flat["model.weights"] = "given" if config.model.weights else None
    flat["logging.trace_file"] = "given" if config.logging.trace_file else None
    flat["checkpoint.save_frequency"] = config.checkpoint.save_frequency
    return flat | {"step": run.facts["step"], "tokens of the dataset": len(run.text.tokens)}


def loop(config: Config, launch: Launch, run: Run, training: Training, roll_call: RollCall) -> None:
    """Step after step, with all that is told and saved on the way; then the finished model."""
    t, data, save_dir = config.training, run.data, Path(config.checkpoint.save_dir)
    first_step, last_step = run.facts["step"], t.total_train_steps
    if t.max_tokens:
        last_step = min(last_step, math.ceil(t.max_tokens / data.tokens_per_step))
    is_writer = launch.rank == 0
    if is_writer:
        make_room(save_dir, run.start)
    log = MetricsLog(
        Path(config.metrics_file), writes=is_writer, wandb_options=wandb_options(config)
    )
    speedometer = Speedometer(
        run.model_config,
        t.seq_length,
        config.model.recompute,
        run.device,
        DTYPES[config.model.dtype],
    )
    traced_steps = 3 if config.logging.trace_file else 0  # after two that warm up
    trace = Trace(
        range(first_step + 2, first_step + 2 + traced_steps), training.axes.pp, run.device
    )
    roll_call.listen_for_sigterm()
    with Console(first_step + 1, last_step, prints=is_writer) as console:
        console.header("picotron-min", describe(config, run))
        for warning in doubts(config, run, last_step):
            console.warn(warning)
        for step in range(first_step, last_step):
            roll_call.note_step(step + 1)
            began = time.perf_counter()
            result = training.step(step, trace.watch(step))
            done = step + 1
            seconds = time.perf_counter() - began
            record = StepRecord(
                step=done,
                loss=result.loss,
                grad_norm=result.grad_norm,
                learning_rate=result.learning_rate,
                tokens=done * data.tokens_per_step,
                step_seconds=seconds,
                comm_bytes=take_bytes(training.axes),
                **speedometer.measure(data.tokens_per_step / seconds, config.world_size),
            )
            log.write(record)
            console.step(record)
            if result.skipped:
                console.warn(f"step {done} changed nothing: its gradient is not finite")
            if data.num_eval_batches and due(done, t.eval_frequency, last_step):
                record = evaluate(training, done, run.text)
                log.write(record)
                console.evaluation(record)
            training.saver.check()
            stops = roll_call.stop_agreed()
            is_last = stops or done == last_step
            saves = is_last or due(done, config.checkpoint.save_frequency, last_step)
            # What a skipped step leaves has learned nothing, or may have diverged: to save it could
            # cost a good checkpoint, by `keep`.
            if saves and training.skipped.has_learned and (is_last or not result.skipped):
                began = time.perf_counter()
                training.save(save_dir, done)
                log.write(SaveRecord(done, time.perf_counter() - began))
            if stops or done == last_step:
                training.saver.wait()
            if training.saver.latest:
                roll_call.note_saved(training.saver.latest)
            if stops and done < last_step:
                how = how_to_go_on(training.saver.latest or run.start)
                console.warn(f"stopped by SIGTERM after step {done}: {how}")
                log.close()
                return
    training.export(save_dir / "hf", run.tokenizer)
    if config.logging.trace_file and training.axes.dp_cp_tp.rank == 0:  # one of each stage
        trace.write(Path(config.logging.trace_file))
    console.summary(save_dir / "hf", training.saver.latest or run.start)
    log.close()


def make_room(save_dir: Path, start: Path | None) -> None:
    """Move an earlier run out of the way, but for what this one goes on from."""
    goes_on_here = start is not None and start.resolve().parent == save_dir.resolve()
    if leftovers := clean_up(save_dir):
        print(f"deleted what a killed save has left: {', '.join(map(str, leftovers))}")
    if aside := set_aside(save_dir, newer_than=start if goes_on_here else None):
        print(f"{save_dir} held an earlier run: it is now in {aside}")


def wandb_options(config: Config) -> dict | None:
    if not config.logging.use_wandb:
        return None
    return {
        "project": config.logging.project_name,
        "name": config.logging.run_name,
        "config": config.model_dump(),
        "dir": config.checkpoint.save_dir,
    }


def describe(config: Config, run: Run) -> dict[str, str]:
    """What is being trained, for the console's header."""
    d, t, data, text = config.distributed, config.training, run.data, run.text
    return {
        "model": f"{config.model.name}, {human(parameter_count(run.model_config))} parameters"
        f" in {config.model.dtype}",
        "layout": f"{config.world_size} x {run.device.type} over {run.backend}:"
        f" dp {d.dp_size} x pp {d.pp_size} x cp {d.cp_size} x tp {d.tp_size}",
        "step": f"{human(data.tokens_per_step)} tokens: {data.global_batch} sequences of"
        f" {t.seq_length}, {t.micro_batch_size} a micro-batch,"
        f" {t.gradient_accumulation_steps} micro-batches a rank",
        "data": f"{config.dataset.name}, {human(len(text.tokens))} tokens in"
        f" {human(text.num_documents)} documents; {data.num_eval_sequences} sequences held out",
        "start": f"resumed from {run.start}"
        if run.start
        else config.model.weights or f"random weights, seed {t.seed}",
    }


def doubts(config: Config, run: Run, last_step: int) -> Iterator[str]:
    """What the user may not have meant when resuming."""
    for name, before in run.facts.get("data", {}).items():
        if before != (now := config.data_order.get(name)):
            yield f"{name} was {before} and is {now}: from here on other data is seen"
    if (done := run.facts["step"]) >= last_step:
        yield f"no step is left: {run.start} has {done} of {last_step}; its model is written anew"


def evaluate(training: Training, step: int, text: TokenFile) -> EvalRecord:
    loss = training.evaluate()
    take_bytes(training.axes)  # they are not the next step's
    return EvalRecord(step, loss, loss / math.log(2) * text.tokens_per_byte)


def take_bytes(axes: Axes) -> dict[str, int]:
    """Bytes that this rank has sent over each axis since the last time, without the silent ones."""
    return {axis.name: sent for axis in axes if (sent := axis.ledger.take_bytes())}


def due(done: int, every: int, last_step: int) -> bool:
    """After every so many steps (0: none), and always after the last."""
    return done == last_step or (every > 0 and done % every == 0)


if __name__ == "__main__":
    main()
