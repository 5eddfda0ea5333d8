"""How a run is laid out over processes, and what a step computes, as plain numbers.

Ranks are numbered row by row over (pp, dp, cp, tp):

    pp 2, dp 2, tp 2     pp 0   dp 0: ranks 0 1    dp 1: ranks 2 3
                         pp 1   dp 0: ranks 4 5    dp 1: ranks 6 7

So tensor-parallel ranks, which communicate most, are neighbours and share a node.
Standard library only.
"""

import math
from collections import namedtuple
from dataclasses import dataclass
from itertools import product

# Rows (tokens) that loss.py takes at a time. Each stripe reads and writes the gradient of lm_head,
# 12 bytes an element, beside 6 FLOPs a row. A GPU does 230 FLOPs in the time of a byte: that adds
# 45% to the products of 1024 rows, 11% to 4096.
STRIPE_ROWS = {"cpu": 1024, "cuda": 4096}

# Bytes below which a saved tensor is not offloaded: to start a copy takes as long as to make it.
LEAST_OFFLOAD = 2**20

LARGEST_BETA2 = 0.99  # of bfloat16 moments: see optimizers/adamw.py

Coordinates = namedtuple("Coordinates", ["pp", "dp", "cp", "tp"])  # of a rank in the grid


@dataclass(frozen=True)
class Layout:
    """The size of each axis of the mesh, and what belongs to it."""

    pp: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1
    pp_engine: str = "1f1b"  # a name in pipeline_schedule.SCHEDULES
    pp_chunks: int = 1  # stages of a rank
    pp_layers: tuple[int, ...] | None = None  # of each stage; None: balanced, see costs.py
    cp_engine: str = "ring"  # or "ulysses"
    sequence_parallel: bool = False  # with tp: norms and residuals are cut along the sequence
    tp_overlap: bool = False  # and its messages travel during products: see overlap/ring.py
    sharding: str = "none"  # what the dp x cp ranks divide: see sharding/units.py
    ep: int = 1  # ranks that share out the experts of a layer
    etp: int = 1  # ranks that share each of them
    ep_engine: str = "alltoall"  # or "allgather": see experts/dispatch.py

    @property
    def sizes(self) -> Coordinates:
        return Coordinates(self.pp, self.dp, self.cp, self.tp)

    @property
    def axis_sizes(self) -> dict[str, int]:
        """Also of the joint axes, and of the grid in which a stage's ranks hold experts."""
        edp = self.dp * self.cp * self.tp // (self.ep * self.etp)
        joint = {"dp_cp": self.dp * self.cp, "ep": self.ep, "etp": self.etp, "edp": edp}
        return self.sizes._asdict() | joint

    @property
    def world_size(self) -> int:
        return math.prod(self.sizes)

    @property
    def num_stages(self) -> int:
        return self.pp * self.pp_chunks

    def coordinates(self, rank: int) -> Coordinates:
        """Where a rank is in the grid; known before there is any process group."""
        return Coordinates(*list(product(*map(range, self.sizes)))[rank])  # the last is fastest


@dataclass(frozen=True)
class Routing:
    """How tokens choose experts in training: see moe.py. Each coefficient is that of a loss."""

    moe_seq_aux_loss_coeff: float = 0.001  # balance within each sequence
    moe_aux_loss_coeff: float = 0.0  # within each micro-batch of a data-parallel rank
    moe_global_aux_loss_coeff: float = 0.0  # within the step so far, over all ranks
    moe_z_loss_coeff: float = 0.0  # keeps the router's logits small
    moe_router_bias_update_rate: float = 0.001  # of the bias that sigmoid routers have
    moe_expert_capacity_factor: float | None = None  # None: no token is dropped
    moe_token_drop_policy: str = "probs"  # or "position": whom an expert keeps
    moe_pad_expert_input_to_capacity: bool = False
    moe_router_force_load_balancing: bool = False  # random experts, for benchmarks


@dataclass(frozen=True)
class Workload:
    """What one data-parallel rank computes in a step."""

    seq_length: int  # tokens
    micro_batch_size: int = 1  # sequences
    num_micro_batches: int = 1
    dtype: str = "float32"  # of matmuls: float32, bfloat16 or float64
    recompute: str = "none"  # or "selective", "full": see parallelize.py
    optimizer: str = "adamw"  # or "muon", "sgd"
    moments: str = "float32"  # or "bfloat16": of AdamW
    flash_attention: bool = True
    compile: bool = False
    offload: int = 0  # layers of each stage whose activations wait on the host: see offload.py
    fp8: bool = False  # layers' linears multiply in 8 bits: see precision/float8.py
    fp8_skip: int = 0  # but not those of so many first and last layers
    routing: Routing = Routing()

    def in_fp8(self, layer: int, num_layers: int) -> bool:
        return self.fp8 and self.fp8_skip <= layer < num_layers - self.fp8_skip


@dataclass(frozen=True)
class Recipe:
    """How the weights are updated; the defaults and their meaning are those of config.json."""

    optimizer: str = "adamw"  # or "muon", "sgd"
    learning_rate: float = 3e-4
    min_learning_rate: float = 0.0
    schedule: str = "constant"  # or "cosine", "wsd": after the warm-up
    warmup_steps: int = 0
    total_train_steps: int = 200
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    momentum: float = 0.95
    moments: str = "float32"
    grad_clip: float | None = 1.0
    count_zeros: bool = False  # record how many elements of the gradient are 0
    fused: bool = True
    dtype: str = "float32"  # of matmuls; Muon has some
