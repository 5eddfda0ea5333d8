"""A whole run of a tiny model on simulated ranks, as train.py would build it: for `on_rank`."""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from exercises.ranks import Rank

if TYPE_CHECKING:
    from picotron_min.extensions.settings import Layout
    from train import Run

SEQ_LENGTH, GLOBAL_BATCH = 16, 4
SHAPE = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 29}
# SGD: AdamW divides by the gradient's size, and hides a wrong factor.
RECIPE = {"optimizer": "sgd", "learning_rate": 0.5, "weight_decay": 0.0, "grad_clip": None}
RECIPE |= {"dtype": "float64", "fused": False, "total_train_steps": 100}


def tiny_run(rank: Rank, layout: "Layout", num_micro_batches: int = 1, **recipe: Any) -> "Run":
    """This rank's part of a run in float64, with initial weights: `rank.course.train.train_step`.

    `recipe` changes the training: SGD at a rate of 0.5 without clipping. A step has 4 sequences in
    any layout.
    """
    course, axes, device = rank.course, rank.axes(layout), torch.device("cpu")
    recipe = RECIPE | recipe
    sizes = {"seq_length": SEQ_LENGTH, "num_micro_batches": num_micro_batches}
    sizes["micro_batch_size"] = GLOBAL_BATCH // (layout.dp * num_micro_batches)
    config = course.settings.ModelConfig(**SHAPE)
    place = {"dp_rank": axes.dp.rank, "dp_size": layout.dp}
    positions = course.context_parallel.POSITIONS[layout.cp_engine]
    place["positions"] = positions(axes.cp.rank, layout.cp, SEQ_LENGTH)
    batches = course.data.Batches(text(config.vocab_size), **sizes, seed=0, **place)
    workload = course.settings.Workload(**sizes, dtype="float64", optimizer=recipe["optimizer"])
    parallel = course.build.build_model(config, layout, workload, axes, device)
    run = course.train.build_run(parallel, course.settings.Recipe(**recipe), batches)
    # In place: the optimizer has these tensors already.
    course.initialise.initialise(parallel.parameters, config, 0, parallel.placements, axes)
    parallel.weights_changed()
    return run


def text(vocab_size: int) -> np.ndarray:
    """A text that can be learned."""
    return (np.arange(4000) ** 2 % vocab_size).astype(np.uint16)
