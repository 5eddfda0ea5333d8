"""Peers: the same train step by torch and transformers, with the same weights on the same tokens.

All but `transformers_model` train our model class, so that only what a row is about differs.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import torch
import torch.distributed.tensor.parallel as torch_tp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from benchmarks import common
from benchmarks.common import Done, Step
from benchmarks.ours import CPU, Place
from picotron_min.collectives import all_reduce
from picotron_min.costs import layers_of_stages
from picotron_min.data import Batch
from picotron_min.model import Llama
from picotron_min.optimizer import build_optimizer
from picotron_min.pipeline_parallel import keep_stage, my_stages

Loss = Callable[[nn.Module, Batch, Tensor], Tensor]


def train_loop(place: Place, model: nn.Module, accumulate: Callable[[int], Tensor]) -> Step:
    """The usual step around `accumulate`, which fills the gradients in and returns the loss."""
    parameters, axes = list(model.parameters()), place.axes
    optimizer = build_optimizer(parameters, place.config.recipe)

    def step(index: int) -> Done:
        # As set_to_none does: the first micro-batch writes, the others add.
        for parameter in parameters:
            parameter.grad = None
        loss = accumulate(index)
        norm = clip(parameters, place)
        optimizer.step()
        all_reduce(loss, axes.pp)  # zero on all stages but the last
        all_reduce(loss, axes.dp_cp)
        return Done(loss.item() / axes.dp_cp.size, norm.item())

    return step


def clip(parameters: list[nn.Parameter], place: Place) -> Tensor:
    """`clip_grad_norm_`, also where only some parameters are DTensors, or some on other stages."""
    kinds = [[p for p in parameters if isinstance(p, DTensor) is kind] for kind in (False, True)]
    # torch stacks no norms of DTensors and of plain tensors together.
    norms = [whole(get_total_norm([p.grad for p in kind])) for kind in kinds if kind]
    total = all_reduce(torch.stack(norms).norm() ** 2, place.axes.pp).sqrt()
    for kind in kinds:
        clip_grads_with_norm_(kind, place.config.training.grad_clip, total)
    return total


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def our_loss(model: nn.Module, batch: Batch, positions: Tensor) -> Tensor:
    return model(batch.tokens, positions, batch.targets) / batch.num_targets


def eager_loop(place: Place, model: nn.Module, mean_loss: Loss = our_loss) -> Step:
    """One micro-batch after another; DDP sends gradients only after the last."""
    data, count = place.data, place.data.num_micro_batches
    accumulating = getattr(model, "no_sync", nullcontext)

    def accumulate(index: int) -> Tensor:
        total = torch.zeros(())
        for i in range(count):
            with nullcontext() if i == count - 1 else accumulating():
                loss = mean_loss(model, data.batch(index, i), data.positions) / count
                loss.backward()
            total += whole(loss.detach())
        return total

    return train_loop(place, model, accumulate)


def fill(model: nn.Module, place: Place) -> nn.Module:
    """Copy the weights that all contenders start from, one at a time: memory is measured."""
    weights = common.initial_weights(place.model_config, place.config.training.seed)
    common.fill(dict(model.named_parameters()), weights)
    return model


def transformers_model(place: Place) -> Step:
    """Hugging Face's model and loss, in the eager loop that its users write."""
    model = fill(common.transformers_model(place.model_config), place)
    return eager_loop(place, model, transformers_loss)


def transformers_loss(model: nn.Module, batch: Batch, positions: Tensor) -> Tensor:
    # Our targets are shifted already. Without a cache: generation needs one, training does not.
    targets = batch.targets
    return model(batch.tokens, labels=targets, shift_labels=targets, use_cache=False).loss


def torch_ddp(place: Place) -> Step:
    model = fill(Llama(place.model_config), place)
    model = DistributedDataParallel(model, process_group=place.axes.dp_cp.group)
    return eager_loop(place, model)


def torch_fsdp(place: Place) -> Step:
    """FSDP2: each layer by itself, the embedding and lm_head together."""
    model = fill(Llama(place.model_config), place)
    mesh = DeviceMesh.from_group(place.axes.dp_cp.group, "cpu")
    # The model last: its own unit is what the layers leave.
    for module in (*model.model.layers.values(), model):
        fully_shard(module, mesh=mesh)
    return eager_loop(place, model)


def torch_tensor_parallel(place: Place) -> Step:
    """torch's own plan, and the loss that torch has for split logits."""
    rows, columns, whole_ = torch_tp.RowwiseParallel, torch_tp.ColwiseParallel, Replicate()
    # As torch's tutorial has it. Logits stay cut: loss_parallel never gathers the vocabulary.
    plan = {
        "model.embed_tokens": rows(input_layouts=whole_, output_layouts=whole_),
        "model.layers.*.self_attn.[qkv]_proj": columns(),
        "model.layers.*.self_attn.o_proj": rows(),
        "model.layers.*.mlp.[gu]*_proj": columns(),
        "model.layers.*.mlp.down_proj": rows(),
        "lm_head": columns(output_layouts=Shard(-1), use_local_output=False),
    }
    model = fill(Llama(place.model_config), place)
    mesh = DeviceMesh.from_group(place.axes.tp.group, "cpu")
    torch_tp.parallelize_module(model, mesh, plan)
    return torch_tp.loss_parallel()(eager_loop(place, model, split_loss))


def split_loss(model: nn.Module, batch: Batch, positions: Tensor) -> Tensor:
    return F.cross_entropy(model(batch.tokens, positions).flatten(0, 1), batch.targets.flatten())


def torch_pipeline(place: Place) -> Step:
    """Our stages under torch's 1F1B."""
    axis, data, layout = place.axes.pp, place.data, place.config.layout
    num_layers = layers_of_stages(place.model_config, layout, data.seq_length)
    (mine,) = my_stages(num_layers, layout.schedule, axis)
    model = fill(Llama(place.model_config), place)
    keep_stage(model, mine)
    # torch computes the loss outside of the stage.
    model.head, model.lm_head = model.lm_head, nn.Identity()
    model.forward = partial(model.forward, positions=data.positions)

    def loss(x: Tensor, targets: Tensor) -> Tensor:
        return model.head.loss(x, targets) / targets.numel()

    stage = PipelineStage(model, axis.rank, axis.size, CPU, group=axis.group)
    runner = Schedule1F1B(stage, data.num_micro_batches, loss_fn=loss)

    def accumulate(index: int) -> Tensor:
        batches = [data.batch(index, i) for i in range(data.num_micro_batches)]
        tokens, targets = (torch.cat([batch[i] for batch in batches]) for i in range(2))
        # The schedule cuts the batch into its micro-batches again.
        inputs, losses = [tokens] if mine.is_first else [], []
        runner.step(*inputs, target=targets, losses=losses, return_outputs=False)
        return sum(losses, torch.zeros(())).detach() / data.num_micro_batches

    return train_loop(place, model, accumulate)
