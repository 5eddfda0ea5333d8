"""All layouts that could be chosen: which values each choice has, and which fit each other.

    grids           (tp, cp, pp, dp) whose product is the number of GPUs
    groups          x sequence parallelism, cp engine, experts, recompute, micro-batch: how long the
                    compute of a step takes, and so how fast it can be at best
    schedules, shardings    the bubble, messages of dp, memory

The rules of what fits are those of config files.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

from picotron_min.extensions.schedules.registry import SCHEDULES
from picotron_min.extensions.settings import Layout, ModelConfig, Workload
from picotron_min.planner.memory import RankMemory, memory_per_rank
from picotron_min.planner.system import Setting, our_system
from picotron_min.runtime.config import KEYS, Config, Distributed, Model, Training
from picotron_min.runtime.config_checks import layout_problems, model_problems
from picotron_min.runtime.hardware import Gpu

LIBRARY_BYTES = 1e9  # of CUDA and NCCL, on each GPU
# What is chosen, by the names of Layout and Workload; each also has a key in config.json.
CHOICES = (
    *("tp", "cp", "pp", "dp", "ep", "etp", "sequence_parallel", "pp_engine", "pp_chunks"),
    *("cp_engine", "ep_engine", "sharding", "recompute", "micro_batch_size"),
)


@dataclass(frozen=True)
class Request:
    """What a plan is asked for."""

    model_config: ModelConfig
    gpu: Gpu
    gpus: int
    seq_length: int
    global_batch: int  # sequences a step
    model_name: str = "tiny"
    dtype: str = "bfloat16"
    compile: bool = False
    optimizer: str = "adamw"
    fill: float = 0.92  # share of the memory that may be planned
    max_tp: int = 8
    fixed: Mapping[str, object] = field(default_factory=dict)  # some of CHOICES

    @property
    def device(self) -> str:
        return "cpu" if self.gpu.name == "cpu" else "cuda"

    @property
    def budget(self) -> float:
        """Bytes of a GPU that a plan may use."""
        return self.fill * self.gpu.memory - (LIBRARY_BYTES if self.device == "cuda" else 0)

    def setting(self, layout: Layout, workload: Workload) -> Setting:
        system = our_system(workload, self.device)
        return Setting(self.model_config, self.gpu, layout, workload, system)

    def memory(self, layout: Layout, workload: Workload) -> RankMemory:
        return memory_per_rank(self.model_config, layout, workload, self.device)

    def values(self, name: str, all_values: Iterable) -> list:
        """Those that a choice may have: all, unless it is fixed."""
        return [self.fixed[name]] if name in self.fixed else list(all_values)


def groups(request: Request) -> Iterator[tuple[Layout, Workload]]:
    """All choices but those of the pipeline's schedule and of sharding."""
    X = request.model_config.num_local_experts
    for grid in grids(request):
        sequences = request.global_batch // grid.dp
        cuts = request.values("sequence_parallel", [False, True] if grid.tp > 1 else [False])
        engines = request.values("cp_engine", ["ring", "ulysses"] if grid.cp > 1 else ["ring"])
        ranks = grid.dp * grid.cp * grid.tp
        eps = request.values("ep", [n for n in divisors(X or 1) if ranks % n == 0])
        for cut, engine, ep in ((c, e, n) for c in cuts for e in engines for n in eps):
            layout = replace(
                grid, sequence_parallel=cut, cp_engine=engine, ep=ep, **_fixed_experts(request)
            )
            for size in request.values("micro_batch_size", divisors(sequences)):
                if sequences % size:
                    continue
                for recompute in request.values("recompute", choices_of("model.recompute")):
                    yield layout, _workload(request, size, sequences // size, recompute)


def grids(request: Request) -> Iterator[Layout]:
    """The sizes of the axes."""
    for tp in request.values("tp", (n for n in divisors(request.gpus) if n <= request.max_tp)):
        for cp in request.values("cp", divisors(request.gpus // tp)):
            for pp in request.values("pp", divisors(request.gpus // (tp * cp) or 1)):
                dp = request.gpus // (tp * cp * pp)
                fits = dp in request.values("dp", [dp]) and tp * cp * pp * dp == request.gpus
                has_layers = pp <= request.model_config.num_hidden_layers
                if fits and has_layers and request.global_batch % dp == 0:
                    yield Layout(tp=tp, cp=cp, pp=pp, dp=dp)


def shardings(request: Request, layout: Layout) -> list[str]:
    """The kinds of sharding that make sense for a layout."""
    kinds = choices_of("distributed.sharding") if layout.dp * layout.cp > 1 else ["none"]
    if request.optimizer != "muon":
        # Whole matrices are as fast as rows and pad more: only Muon needs them.
        kinds = [kind for kind in kinds if kind != "layerwise"]
    return request.values("sharding", kinds)


def schedules(request: Request, pp: int) -> dict[str, list[int]]:
    """Engines, each with the numbers of chunks that a rank can have."""
    if pp == 1:  # without a pipeline all others only need more memory
        return {request.fixed.get("pp_engine", "1f1b"): [request.fixed.get("pp_chunks", 1)]}
    most, numbers = request.model_config.num_hidden_layers // pp, {}
    for engine in request.values("pp_engine", SCHEDULES):
        own = SCHEDULES[engine].chunks
        if own > 1 and not SCHEDULES[engine].fixed_chunks:
            numbers[engine] = request.values("pp_chunks", range(own, most + 1))
        elif own <= most:  # else there are more stages than layers
            numbers[engine] = request.values("pp_chunks", [own])
    return numbers


def rule_problems(request: Request, layout: Layout) -> list[str]:
    """Why config files could not have this layout, as messages."""
    names = set(Distributed.model_fields)
    given = {name if name in names else f"{name}_size": v for name, v in vars(layout).items()}
    config = Config.model_construct(
        distributed=Distributed.model_construct(**given),
        model=Model.model_construct(name=request.model_name),
        training=Training.model_construct(
            seq_length=request.seq_length, optimizer=request.optimizer
        ),
    )
    problems = list(layout_problems(config))
    return problems or list(model_problems(config, request.model_config))


def choices_of(key: str) -> list[str]:
    """The values that a key of config.json can have."""
    return KEYS[key]["enum"]


@lru_cache
def divisors(number: int) -> tuple[int, ...]:
    low = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return tuple(sorted({*low, *(number // n for n in low)}))


def _workload(request: Request, size: int, num_micro_batches: int, recompute: str) -> Workload:
    return Workload(
        request.seq_length,
        size,
        num_micro_batches,
        dtype=request.dtype,
        recompute=recompute,
        optimizer=request.optimizer,
        compile=request.compile,
    )


def _fixed_experts(request: Request) -> dict[str, object]:
    return {name: request.fixed[name] for name in ("etp", "ep_engine") if name in request.fixed}
