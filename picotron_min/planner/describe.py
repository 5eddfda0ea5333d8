"""What a config means, as create_config.py prints it: ranks, batch, memory, a predicted step."""

import shlex
from pathlib import Path

from picotron_min.costs import model_flops_per_token, parameter_count
from picotron_min.extensions.settings import ModelConfig
from picotron_min.planner.config_files import predicted
from picotron_min.planner.memory import gb, memory_per_rank
from picotron_min.planner.show import OTHERS_RUNS, about_documents, measures, memory_lines
from picotron_min.runtime.config import Config
from picotron_min.runtime.config_checks import is_known_here, resolve_model
from picotron_min.runtime.hardware import GPUS, Gpu
from picotron_min.runtime.public_models import tokenizer_of
from picotron_min.runtime.wording import counted

ASSUMED_GPU = "H100"  # this machine need not have any


def describe(config: Config, gpu_name: str | None, path: Path) -> None:
    """Print what the config means, and the predicted step if the run is on GPUs."""
    gpu = GPUS[gpu_name or ASSUMED_GPU]
    t, sizes, tokenizer = config.training, config.layout.sizes, config.tokenizer
    layout = " x ".join(f"{axis} {size}" for axis, size in sizes._asdict().items())
    print(f"\nprocesses        {config.world_size} = {layout}")
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
    device = "cpu" if config.distributed.use_cpu else "cuda"
    memory = memory_per_rank(model_config, config.layout, config.workload, device)
    print(f"memory           {gb(memory.total)}, on the fullest rank")
    print("\n".join(memory_lines(memory, device)))
    if config.distributed.use_cpu and config.model.offload:
        print("offload          saves nothing on a CPU: the copies are in the same memory")
    if not config.distributed.use_cpu and config.model.dtype in gpu.peaks:
        print_prediction(config, gpu)
        if not gpu_name:
            print(f"  {ASSUMED_GPU} is assumed: name another with --gpu, or add --use_cpu")
        command = f"python -m picotron_min.dry_run --config {shlex.quote(str(path))}"
        print(f"  a rank's memory and messages, from its real step, without a GPU:  {command}")


def print_experts(config: Config, c: ModelConfig) -> None:
    layout, X, t = config.layout, c.num_local_experts, config.training
    here = f"{X // layout.ep} of a layer on a rank (ep {layout.ep}, etp {layout.etp})"
    print(f"experts          {X} a layer, {c.num_experts_per_tok} of them a token; {here}")
    if not (t.moe_expert_capacity_factor or t.moe_expert_rank_capacity_factor):
        print("  without moe_expert_capacity_factor their activations have no bound: all tokens")
        print("  may choose the same experts; the memory below is for tokens spread evenly")


def print_prediction(config: Config, gpu: Gpu) -> None:
    request, candidate = predicted(config, gpu)
    on = f"{gpu.name}{'' if gpu.validated else ', which is not validated'}"
    if (needed := candidate.memory.total) > request.budget:
        print(f"does not fit     {gb(needed)} of {request.budget_text}, on {on}")
        print(f"  the planner looks for a layout that fits:  {planner_command(config, gpu)}")
    else:
        each, (low, high), mfu, _ = measures(request, candidate)
        step = f"{candidate.prediction.step:.3g} s, {each:,.0f} tokens/s a GPU, MFU {mfu:.1%}"
        print(f"predicted step   {step} on {on}: see python -m picotron_min.planner")
        print(f"  {low:,.0f} to {high:,.0f} tokens/s a GPU in nine of ten runs. {OTHERS_RUNS}")
        chosen = {"offload": config.model.offload, "tp_overlap": config.distributed.tp_overlap}
        if left_out := " and ".join(key for key, value in chosen.items() if value):
            print(f"  as without {left_out}, whose effect on the time is not modelled")
        if about := about_documents(request):
            print(f"  {about}")


def planner_command(config: Config, gpu: Gpu) -> str:
    """The same run, whose layout is to be planned."""
    m, t, command = config.model, config.training, "python -m picotron_min.planner search"
    if m.overrides:  # which the planner cannot be told
        return f"{command} --help"
    command += f" --model {shlex.quote(m.name)} --gpu {gpu.name} --gpus {config.world_size}"
    command += f" --seq_length {t.seq_length} --global_batch {config.global_batch}"
    command += f" --dtype {m.dtype} --optimizer {t.optimizer}"
    return command + " --precision fp8" * m.fp8 + " --compile" * m.compile
