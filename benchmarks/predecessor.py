"""Predecessor: the train step of picotron, unchanged but for what a CPU needs.

A folder has a copy of github.com/huggingface/picotron. Empty modules stand in for flash-attn, and
no GPU is waited for; weights and tokens are ours. Gradients are also summed over context
parallelism, which it forgets where dp is 1. The gradient's norm, which its step does not have, is
measured in the first steps only, for the comparison.
"""

import ast
import math
import os
import sys
from collections.abc import Callable
from importlib import import_module
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.common import CHECKED_STEPS, Done, Step, initial_weights
from benchmarks.ours import CPU, Place
from picotron_min.collectives import all_reduce
from picotron_min.runtime.config_file import parse_config
from picotron_min.runtime.inputs import open_data

FLASH = " .flash_attn_interface .layers .layers.rotary .ops .ops.triton .ops.triton.layer_norm"
RENAMED = {"model.layers": "decoder_layers", "self_attn": "attention", "o_proj": "out_proj"}
RENAMED |= {"model.embed_tokens": "embedding", "model.norm": "final_norm", "lm_head": "final_proj"}


def picotron(place: Place, folder: Path) -> Step:
    """The loop of picotron's train.py around its own step."""
    d, t, c = place.config.distributed, place.config.training, place.model_config
    os.environ |= {"FLASH_ATTEN": "0", "DEVICE": "cpu", "DTYPE": "float32", "LOCAL_RANK": "0"}
    sys.modules |= {f"flash_attn{name}": MagicMock() for name in FLASH.split(" ")}
    sys.path.insert(0, str(folder))
    torch.cuda.synchronize = lambda: None
    sizes = d.tp_size, d.cp_size, d.pp_size, d.dp_size
    found("process_group_manager.setup_process_group_manager")(*sizes)
    mean_loss = found("utils.average_loss_across_dp_cp_ranks")
    model = build(place)
    optimizer = torch.optim.AdamW(model.parameters(), lr=t.learning_rate)
    run, arguments = step_of_train_py(folder), (model, Loader(place), CPU)
    if d.pp_size > 1:
        run = found(f"pipeline_parallel.pipeline_parallel.train_step_pipeline_{d.pp_engine}")
        shape = t.micro_batch_size, t.seq_length // d.cp_size, c.hidden_size
        arguments = model, Loader(place), shape, CPU, torch.float32

    def step(index: int) -> Done:
        optimizer.zero_grad()
        loss = mean_loss(run(*arguments), CPU)
        done = measured(place, loss, model) if index < CHECKED_STEPS else Done(math.nan, math.nan)
        optimizer.step()
        if hasattr(model, "reset"):
            model.reset()
        return done

    return step


def found(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(import_module(f"picotron.{module}"), attribute)


def step_of_train_py(folder: Path) -> Callable:
    """train.py itself cannot be imported: it has the name of our own."""
    body = ast.parse((folder / "train.py").read_text()).body
    function = next(node for node in body if getattr(node, "name", None) == "train_step")
    names = {"pgm": import_module("picotron.process_group_manager"), "F": F}
    exec(compile(ast.Module([function], []), "picotron's train.py", "exec"), names)
    return names["train_step"]


def build(place: Place) -> nn.Module:
    d, S = place.config.distributed, place.config.training.seq_length
    shape = SimpleNamespace(**vars(place.model_config) | {"max_position_embeddings": S})

    with found("checkpoint.init_model_with_dematerialized_weights")():
        model = found("model.Llama")(shape)
        if d.tp_size > 1:
            model = found("tensor_parallel.tensor_parallel.apply_tensor_parallel")(model)
        if d.pp_size > 1:
            model = found("pipeline_parallel.pipeline_parallel.PipelineParallel")(model, shape)
    model, tp = model.to_empty(device=CPU), place.axes.tp
    parameters = dict(model.named_parameters())
    for name, weight in initial_weights(place.model_config, place.config.training.seed):
        for ours, theirs in RENAMED.items():
            name = name.replace(ours, theirs)
        if name in parameters:  # else it is of another stage
            for dim, size in enumerate(parameters[name].shape):
                weight = weight.narrow(dim, tp.rank * size if size < weight.shape[dim] else 0, size)
            parameters[name].data.copy_(weight)
    model = found("context_parallel.context_parallel.apply_context_parallel")(model)
    if d.dp_size * d.cp_size > 1:
        model = found("data_parallel.data_parallel.DataParallelBucket")(model)
    return model


class Loader:
    """Our micro-batches in the form of picotron's; a rank of a ring has one piece of each row."""

    def __init__(self, place: Place) -> None:
        whole = place.sections | {"distributed": {"dp_size": place.axes.dp.size, "use_cpu": True}}
        self.data = open_data(parse_config(whole), place.text, place.axes.dp.rank)
        self.grad_acc_steps, self.numbers = self.data.num_micro_batches, count()
        self.cp = place.axes.cp

    def __next__(self) -> dict[str, Tensor]:
        batch = self.data.batch(*divmod(next(self.numbers), self.grad_acc_steps))
        tokens, targets, positions = (
            x.chunk(self.cp.size, dim=-1)[self.cp.rank].contiguous()
            for x in (batch.tokens, batch.targets, batch.positions)
        )
        return {"input_ids": tokens, "target_ids": targets, "position_ids": positions}


def measured(place: Place, loss: float, model: nn.Module) -> Done:
    """Over all ranks. In its pipelines, gradients are larger by the number of micro-batches."""
    axes, squares = place.axes, torch.zeros(2)  # of matrices, which tp cuts, and of norms
    for p in model.parameters():
        squares[int(p.ndim == 1)] += p.grad.pow(2).sum()
    total = all_reduce(all_reduce(squares[:1].clone(), axes.tp) + squares[1:], axes.pp)
    count = place.data.num_micro_batches if axes.pp.size > 1 else 1
    return Done(all_reduce(torch.tensor([loss]), axes.pp).item(), total.sqrt().item() / count)
