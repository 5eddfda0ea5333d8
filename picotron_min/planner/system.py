"""What a step's time depends on: model, GPU, layout and work, and how a code base does that work.

The same layout takes longer in one code base than in another. What makes the difference is a System
here. This project is one of them; the published runs in docs/planner.md are of others.
"""

from dataclasses import dataclass

from picotron_min.extensions.settings import Layout, ModelConfig, Workload
from picotron_min.layout import STRIPE_ROWS
from picotron_min.planner.activations import WIDE
from picotron_min.runtime.hardware import Gpu


@dataclass(frozen=True)
class System:
    """How a code base does its work. The defaults are what large code bases have in common."""

    residual_bytes: int = 2  # of a number that layers pass on
    gradient_bytes: int = 4  # in which gradients are accumulated and sent
    is_fused: bool = True  # a compiler or kernels by hand join what lies between matmuls
    joins_linears: bool = True  # q, k and v are one matmul, gate and up another
    mlp_matrices: int = 3  # 2: without a gate, as GPT's
    logit_bytes: float = 8.0  # read and written for a logit, beside the matmuls
    stripe_rows: int | None = None  # tokens that the head takes at a time; None: all
    optimizer_bytes: tuple[float, float] = (30.0, 4.0)  # a parameter that is owned; any
    hides_tp: bool = True  # backward's messages, behind weight gradients
    hides_dp: bool = True  # gradients' messages, behind the last backward
    hides_gathers: bool = False  # of updated weights, behind the next step's forward
    shares_in_node: bool = False  # sharded parameters: each node has all of them ("hybrid")
    # The head's share of the work: None, as layers_of_stages of costs.py balances it; True, all
    # ranks of a pipeline are equally busy; False, equal layers, and the last rank has the head too.
    is_balanced: bool | None = True
    # The shares of matmuls and of attention that backward runs again; None: by workload.recompute.
    repeats: tuple[float, float] | None = None


def our_system(workload: Workload, device: str = "cuda") -> System:
    """This project as a workload uses it."""
    wide, fused = WIDE[workload.dtype], workload.compile
    # See linear.py (one matmul for each weight), model.py (the residual stream is wide), loss.py
    # (stripes; what is read and written for a logit), adamw (p, m, v twice, g; scale, norm, zero).
    return System(
        residual_bytes=wide,
        gradient_bytes=wide,
        is_fused=fused,
        joins_linears=False,
        logit_bytes=8.0 if fused else 40.0,
        stripe_rows=STRIPE_ROWS[device],
        optimizer_bytes=(50.0, 0.0),
        hides_gathers=True,
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
    attended: float | None = None  # tokens of the rows whose attention costs as much, if not S
