"""What a step's time depends on: model, GPU, layout and work, and how a code base does that work.

The same layout takes longer in one code base than in another. What makes the difference is a System
here. This project is one of them; the published runs in docs/planner.md are of others.
"""

from dataclasses import dataclass
from typing import Literal

from picotron_min.extensions.settings import Layout, ModelConfig, Workload
from picotron_min.layout import BUCKET_BYTES, STRIPE_ROWS
from picotron_min.planner.activations import WIDE
from picotron_min.runtime.hardware import Gpu


@dataclass(frozen=True)
class System:
    """How a code base does its work. The defaults are what large code bases have in common."""

    precision: Literal["bf16", "fp8", "mxfp8"] = "bf16"  # of layers' linears; fp8: a scale a tensor
    layers_in_8_bits: float = 1.0  # the share of layers, if precision is not bf16
    experts_in_8_bits: bool | None = None  # None: with them
    attention_kernel: Literal["fa2", "cudnn"] = "fa2"  # cudnn: also FlashAttention-3
    residual_bytes: int = 2  # of a number that layers pass on
    gradient_bytes: int = 4  # in which gradients are accumulated and sent
    is_fused: bool = True  # a compiler or kernels by hand join what lies between matmuls
    joins_linears: bool = True  # q, k and v are one matmul, gate and up another
    mlp_matrices: int = 3  # 2: without a gate, as GPT's
    logit_bytes: float = 8.0  # read and written for a logit, beside the matmuls
    stripe_rows: int | None = None  # tokens that the head takes at a time; None: all
    optimizer_bytes: tuple[float, float] = (30.0, 4.0)  # a parameter that is owned; any
    # Messages of tensor parallelism in a layer's forward and backward: 4 where a sublayer has one
    # boundary; 7 where q, k, v, gate and up each gather their input, and the head its logits.
    tp_messages: tuple[int, int] = (4, 4)
    tp_gather_bytes: int = 2  # of a number; 1: half of the messages travel in 8 bits
    hides_tp: bool = True  # backward's messages, behind weight gradients
    overlap: Literal["none", "tp", "ep"] = "none"  # tp: products hide messages in both directions
    hides_dp: bool = True  # gradients' messages, behind the last backward
    hides_gathers: bool = False  # of updated weights, behind the next step's forward
    exposed_bucket: float = 0.0  # bytes of gradients that are sent last, behind nothing
    # Of sharded parameters.
    reduces: Literal["micro-batch", "step"] = "micro-batch"  # when gradients are added up
    gather_bytes: int = 2  # of a weight that is gathered
    # Of mixtures. fused: one kernel sends, permutes and sends once to each node (DeepEP); products
    # with quantisation and permutation inside.
    dispatcher: Literal["alltoall", "fused"] = "alltoall"
    expert_kernels: Literal["grouped", "fused"] = "grouped"
    shares_in_node: bool = False  # sharded parameters: each node has all of them ("hybrid")
    # The head's share of the work: None, as layers_of_stages of costs.py balances it; True, all
    # ranks of a pipeline are equally busy; False, equal layers, and the last rank has the head too.
    is_balanced: bool | None = True
    # The shares of matmuls and of attention that backward runs again; None: by workload.recompute.
    repeats: tuple[float, float] | None = None


def our_system(c: ModelConfig, workload: Workload) -> System:
    """This project as a model and a workload use it."""
    wide, fused = WIDE[workload.dtype], workload.compile
    # See linear.py (one matmul for each weight), model.py (the residual stream is wide), loss.py
    # (stripes; what is read and written for a logit), adamw (p, m, v twice, g; scale, norm, zero).
    return System(
        precision="fp8" if workload.fp8 else "bf16",
        layers_in_8_bits=(c.num_hidden_layers - 2 * workload.fp8_skip) / c.num_layers,
        experts_in_8_bits=workload.fp8_experts,
        tp_gather_bytes=1 if workload.fp8 else 2,
        residual_bytes=wide,
        gradient_bytes=wide,
        is_fused=fused,
        joins_linears=False,
        logit_bytes=8.0 if fused else 40.0,
        stripe_rows=STRIPE_ROWS["cuda"],
        optimizer_bytes=(50.0, 0.0),
        hides_gathers=True,
        exposed_bucket=BUCKET_BYTES,
        is_balanced=None,
    )


@dataclass(frozen=True)
class Setting:
    """All that a prediction is made from."""

    model_config: ModelConfig
    gpu: Gpu
    layout: Layout
    workload: Workload
    system: System
