"""Settings: what extensions add to a run's layout, model, work and recipe.

Each class has the fields of the core's class of the same name, and these. With their defaults a run
uses overlap/ and kernels/ alone. Standard library only, so that a run can be planned anywhere.
"""

from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from functools import partial
from typing import Literal

from picotron_min import layout
from picotron_min.extensions.experts import mixture
from picotron_min.extensions.experts.mixture import Mixture as Mixture
from picotron_min.extensions.experts.stages import split_unequal
from picotron_min.extensions.multi_token import shape as multi_token
from picotron_min.extensions.no_rope import shape as no_rope
from picotron_min.extensions.post_norm import shape as post_norm
from picotron_min.extensions.qk_norm import shape as qk_norm
from picotron_min.extensions.qkv_bias import shape as qkv_bias
from picotron_min.extensions.schedules.registry import SCHEDULES
from picotron_min.extensions.schedules.registry import chunks_problem as chunks_problem
from picotron_min.extensions.sharding.rows import sharded_rows
from picotron_min.layout import Grid
from picotron_min.pipeline_schedule import Schedule

# Bytes below which a saved tensor is not offloaded: to start a copy takes as long as to make it.
LEAST_OFFLOAD = 2**20

LARGEST_BETA2 = 0.99  # of bfloat16 moments, and of momentum: see optimizers/adamw.py


# Kinds of models. A prediction layer comes first, since it has what the others give to a layer.
FAMILIES = {"multi_token": multi_token.FAMILY, "experts": mixture.FAMILY}
FAMILIES |= {"qk_norm": qk_norm.FAMILY, "qkv_bias": qkv_bias.FAMILY, "no_rope": no_rope.FAMILY}
FAMILIES |= {"post_norm": post_norm.FAMILY}


@dataclass(frozen=True)
class ModelConfig(*(family.shape for family in FAMILIES.values())):
    """The shape of a model. ValueError if its numbers contradict each other."""


def numbers_of(model_config: ModelConfig) -> dict[str, object]:
    """Its fields by name."""
    return {field.name: getattr(model_config, field.name) for field in fields(model_config)}


SIZES = tuple(field.name for field in fields(ModelConfig) if field.default is MISSING)


@dataclass(frozen=True)
class Layout(layout.Layout):
    """The size of each axis of the mesh, and what belongs to it."""

    pp_engine: Literal[tuple(SCHEDULES)] = "1f1b"  # see schedules/registry.py
    overlap: bool = True  # weight gradients are computed while messages travel: see overlap/
    tp_overlap: bool = False  # with sequence_parallel: messages during products, see overlap/
    # What the dp x cp ranks divide: see sharding/.
    sharding: Literal["none", "optimizer", "layerwise", "gradients", "parameters"] = "none"
    ep: int = 1  # ranks among which the experts of a layer are divided: see experts/
    etp: int = 1  # ranks that have a part of each of them
    ep_engine: Literal["alltoall", "allgather"] = "alltoall"  # how tokens reach their experts

    @property
    def schedule(self) -> Schedule:
        return SCHEDULES[self.pp_engine]

    @property
    def grids(self) -> list[Grid]:
        """Experts lie on a grid of their own: with ep 2, ranks 4 and 5 can have different ones."""
        (core,) = super().grids
        core.axes["cp_tp"] = ("cp", "tp")  # different tokens of the same sequences
        edp = self.dp * self.cp * self.tp // (self.ep * self.etp)
        sizes = {"pp": self.pp, "edp": edp, "ep": self.ep, "etp": self.etp}
        axes = {name: (name,) for name in ("edp", "ep", "etp")} | {"ep_etp": ("ep", "etp")}
        axes["edp_etp"] = ("edp", "etp")  # all that have a part of the same experts
        return [core, Grid(sizes, axes)]

    def split(self, layers: list[int], head: int) -> list[int]:
        if len(set(layers)) == 1:
            return super().split(layers, head)
        return split_unequal(layers, head, self.num_stages)

    @property
    def rules(self) -> list[Callable]:
        rules = [partial(family.rows, layout=self) for family in FAMILIES.values()]
        if self.sharding != "none":
            rules.append(partial(sharded_rows, layout=self))
        return rules


@dataclass(frozen=True)
class Routing:
    """How tokens choose experts in training: see experts/. Each coefficient is a loss's."""

    moe_seq_aux_loss_coeff: float = 0.001  # balance within each sequence
    moe_aux_loss_coeff: float = 0.0  # within each micro-batch of a data-parallel rank
    moe_global_aux_loss_coeff: float = 0.0  # within the step so far, over all ranks
    moe_z_loss_coeff: float = 0.0  # keeps the router's logits small
    moe_router_bias_update_rate: float = 0.001  # of the bias that sigmoid routers have
    moe_expert_capacity_factor: float | None = None  # None: no token is dropped
    moe_token_drop_policy: Literal["probs", "position"] = "probs"  # which tokens an expert keeps
    moe_pad_expert_input_to_capacity: bool = False  # so that shapes never change
    moe_expert_rank_capacity_factor: float | None = None  # more rows on a rank end the run
    moe_router_force_load_balancing: bool = False  # random experts, for benchmarks
    moe_router_force_biased: float | None = None  # below 0: uneven experts, for benchmarks


@dataclass(frozen=True)
class Workload(layout.Workload):
    """What one data-parallel rank computes in a step."""

    compile: bool = False  # see memory/
    recompute: Literal["none", "full", "selective"] = "none"  # selective: attention only
    offload: int = 0  # layers of each stage whose activations wait on the host
    fp8: bool = False  # layers' linears multiply in 8 bits: see precision/
    fp8_experts: bool = False  # routed experts do: a key of its own, see precision/
    fp8_skip: int = 0  # number of first and last layers that stay in `dtype`
    mtp_loss_scaling_factor: float = 0.1  # of the mean loss of further tokens: see multi_token/
    document_mask: bool = False  # attention stays inside documents: see documents/
    packing: Literal["wrapped", "bfd"] = "wrapped"  # bfd: whole documents in rows, best fit
    optimizer: str = "adamw"  # this and moments as in Recipe
    moments: str = "float32"
    routing: Routing = Routing()

    def in_fp8(self, layer: int, num_layers: int) -> bool:
        return self.fp8 and self._is_inside(layer, num_layers)

    def experts_in_fp8(self, layer: int, num_layers: int) -> bool:
        return self.fp8_experts and self._is_inside(layer, num_layers)

    def _is_inside(self, layer: int, num_layers: int) -> bool:
        return self.fp8_skip <= layer < num_layers - self.fp8_skip


@dataclass(frozen=True)
class Recipe(layout.Recipe):
    """How the weights are updated."""

    optimizer: Literal["adamw", "muon", "sgd"] = "adamw"  # muon: of hidden matrices
    momentum: float = 0.95  # of Muon; AdamW, with its betas, updates the rest
    moments: Literal["float32", "bfloat16"] = "float32"  # in which the averages are kept
    dtype: str = "float32"  # of matmuls; Muon has some
