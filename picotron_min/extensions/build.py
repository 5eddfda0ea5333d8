"""Build: the extensions that a run needs, in their order; each is imported only if it is used."""

from functools import partial
from importlib import import_module
from typing import NamedTuple

import numpy as np
import torch

from picotron_min.data import Batches
from picotron_min.extension import Extension
from picotron_min.extensions.settings import FAMILIES, Layout, ModelConfig, Recipe, Workload
from picotron_min.mesh import Axes
from picotron_min.optimizer import build_optimizer, parameter_groups
from picotron_min.parallelize import ParallelModel, Parts, parallelize, simple_parts


def build_model(
    model_config: ModelConfig,
    layout: Layout,
    workload: Workload,
    axes: Axes,
    device: torch.device,
) -> ParallelModel:
    """This rank's part of a model, with the extensions of its settings."""
    settings = model_config, layout, workload
    parts = parts_of(*settings, device)
    extensions = extensions_of(*settings, axes, device)
    return parallelize(*settings, axes, device, parts, extensions)


def parts_of(
    model_config: ModelConfig, layout: Layout, workload: Workload, device: torch.device
) -> Parts:
    parts, splits = simple_parts(layout), layout.schedule.splits_backward
    dtype = getattr(torch, workload.dtype)
    if layout.overlap or workload.fp8 or model_config.num_local_experts or splits:
        from picotron_min.extensions.kernels.products import apply_products, is_faster
        from picotron_min.extensions.overlap import boundary, ring

        kind = ring.RingBoundary if layout.tp_overlap else boundary.SequenceBoundary
        kind = kind if layout.sequence_parallel and layout.tp > 1 else boundary.Boundary
        options = {"kind": kind, "splits": splits, "compiles": workload.compile}
        apply = apply_products if is_faster(device.type, dtype) else boundary.apply_overlap
        parts = parts._replace(tensor_parallel=partial(apply, **options))
    if workload.flash_attention:
        from picotron_min.extensions.kernels.attention import choose_attention

        capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
        attention, kernel = choose_attention(device.type, capability, dtype, model_config.head_dim)
        parts = parts._replace(attention=attention, kernel=kernel)
    if splits:
        from picotron_min.extensions.schedules.split_backward import SplitBackwardPipeline

        parts = parts._replace(pipeline=SplitBackwardPipeline)
    return parts


def extensions_of(
    model_config: ModelConfig, layout: Layout, workload: Workload, axes: Axes, device: torch.device
) -> list[Extension]:
    """In the order in which they change a model."""
    chosen, paused = [], None
    if model_config.num_nextn_predict_layers:
        from picotron_min.extensions.multi_token.extension import MultiToken

        chosen.append(MultiToken(model_config, workload, device))
    if workload.document_mask:
        from picotron_min.extensions.documents.attention import DocumentMask

        chosen.append(DocumentMask(device))
    if workload.fp8 or workload.fp8_experts or workload.dtype == "bfloat16":
        from picotron_min.extensions.precision.extension import Precision

        chosen.append(Precision(workload, device))
    for folder, family in FAMILIES.items():
        if family.extension and family.is_used(model_config):
            module = import_module(f"picotron_min.extensions.{folder}.extension")
            chosen.append(getattr(module, family.extension)())
    if model_config.num_local_experts:
        from picotron_min.extensions.experts.extension import Experts

        rows = None
        if workload.fp8_experts:
            from picotron_min.extensions.precision.float8_rows import RowProducts

            rows = RowProducts(device.type, getattr(torch, workload.dtype))
        chosen.append(Experts(model_config, layout, workload, axes, device, rows))
        paused = chosen[-1].tally.paused
    if workload.recompute != "none" or workload.compile or workload.offload:
        from picotron_min.extensions.memory.extension import SavedMemory

        chosen.append(SavedMemory(workload, device, paused))
    if model_config.post_norm:
        from picotron_min.extensions.post_norm.extension import PostNorm

        chosen.append(PostNorm(axes.tp))
    if layout.sharding != "none":
        from picotron_min.extensions.sharding.extension import Sharding

        chosen.append(Sharding(layout, workload, axes, device))
    return chosen


def open_batches(workload: Workload, depths: int, text: NamedTuple, **options) -> Batches:
    """Any micro-batch of a rank; `text` is a TokenFile, `depths` are further tokens to predict."""
    if not workload.document_mask:
        batches = Batches(text.tokens, **options)
    else:
        from picotron_min.extensions.documents.batches import DocumentBatches, PackedBatches

        kind = DocumentBatches if workload.packing == "wrapped" else PackedBatches
        batches = kind(text.tokens, ends=text.ends, **options)
    if depths:
        from picotron_min.extensions.multi_token.targets import look_ahead

        whole = np.array([len(text.tokens)])
        look_ahead(batches, depths, batches.ends if workload.document_mask else whole)
    return batches


def optimizer_of(model: ParallelModel, recipe: Recipe) -> torch.optim.Optimizer:
    """Muon for hidden matrices, and AdamW for the rest; or one optimizer for all parameters."""
    parameters, hidden = model.parameters.values(), []
    if recipe.optimizer == "muon":
        from picotron_min.extensions.optimizers.muon import Muon, hidden_matrices

        hidden = hidden_matrices(model)
        updated = {parameter for batch in hidden for parameter in batch.parameters}
        parameters = [parameter for parameter in parameters if parameter not in updated]
    if recipe.moments == "float32" or recipe.optimizer == "sgd":
        rest = build_optimizer(parameters, recipe)  # AdamW unless it is SGD
    else:
        from picotron_min.extensions.optimizers.adamw import NarrowAdamW

        groups = parameter_groups(parameters, recipe)
        rest = NarrowAdamW(groups, recipe.learning_rate, recipe.betas)
    return Muon(hidden, rest, recipe) if recipe.optimizer == "muon" else rest
