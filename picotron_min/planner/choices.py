"""All layouts that could be chosen: which values each choice has, and which fit each other.

    grids           (tp, cp, pp, dp) whose product is the number of GPUs
    groups          x sequence parallelism, cp engine, experts, recompute, micro-batch: how long the
                    compute of a step takes, and so how fast it can be at best
    variants        x schedule, chunks, sharding: the bubble, messages of dp, memory

Sizes are powers of two; dp is what is left of the GPUs. What fits is decided by the rules for
config files.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import NamedTuple

from picotron_min.extensions.schedules.registry import SCHEDULES
from picotron_min.extensions.settings import Layout, ModelConfig, Workload
from picotron_min.planner.memory import RankMemory, gb, memory_per_rank
from picotron_min.planner.step_time import Prediction, predict
from picotron_min.planner.system import Setting, our_system
from picotron_min.runtime.config import KEY, KEYS, Config, Distributed, Model, Training
from picotron_min.runtime.config_checks import layout_problems, model_problems
from picotron_min.runtime.hardware import Gpu

FILL = 0.92  # share of the memory that may be planned
LIBRARY_BYTES = 1e9  # of CUDA and NCCL, on each GPU
MOST_TP = 8  # also where more GPUs are in a node
# What is chosen, by the names of Layout and Workload: where config.json has it.
_NAMES = "tp cp pp dp ep etp sequence_parallel pp_engine pp_chunks cp_engine ep_engine sharding"
_NAMES += " recompute micro_batch_size"
_HOMES = {where.partition(".")[2]: where for where in KEYS}
CHOICES = {name: _HOMES[KEY.get(name, name)] for name in _NAMES.split()}


@dataclass(frozen=True)
class Request:
    """What a plan is asked for."""

    model_config: ModelConfig
    gpu: Gpu
    gpus: int
    work: Workload  # but its micro-batches and recompute, which are chosen
    global_batch: int  # sequences a step
    model_name: str = "tiny"
    fixed: Mapping[str, object] = field(default_factory=dict)  # some of CHOICES

    @property
    def budget(self) -> float:
        """Bytes of a GPU that a plan may use."""
        return FILL * self.gpu.memory - LIBRARY_BYTES

    @property
    def budget_text(self) -> str:
        """The budget, and how it is computed."""
        left = f"{LIBRARY_BYTES / 1e9:.0f} for libraries"
        return f"{gb(self.budget)} ({self.gpu.memory / 1e9:.0f} x {FILL:g} - {left})"

    def setting(self, layout: Layout, workload: Workload) -> Setting:
        system = our_system(self.model_config, workload)
        return Setting(self.model_config, self.gpu, layout, workload, system)

    def memory(self, layout: Layout, workload: Workload) -> RankMemory:
        return memory_per_rank(self.model_config, layout, workload)

    def candidate(self, layout: Layout, workload: Workload) -> "Candidate":
        prediction = predict(self.setting(layout, workload))
        return Candidate(layout, workload, prediction, self.memory(layout, workload))

    def values(self, name: str, layout: Layout) -> Sequence:
        """The values that make sense for a choice beside the others of a layout, in order."""
        gpus, tp, cp, pp = self.gpus, layout.tp, layout.cp, layout.pp
        if name in self.fixed:
            return [self.fixed[name]]
        match name:
            case "tp":
                return powers_in(gpus, min(MOST_TP, self.gpu.gpus_per_node))
            case "cp":
                return powers_in(gpus // (tp * pp))
            case "pp":
                return powers_in(gpus // (tp * cp), self.model_config.num_hidden_layers)
            case "ep":
                return powers_in(self.model_config.num_local_experts or 1)
            case "micro_batch_size":
                return powers_in(self.global_batch // layout.dp)
            case "sequence_parallel":
                return [False, True] if tp > 1 else [False]
            case "cp_engine":
                return ["ring", "ulysses"] if cp > 1 else ["ring"]
            case "pp_engine":
                # afab is as fast as 1f1b, and needs more memory.
                return [n for n in SCHEDULES if n != "afab"] if pp > 1 else ["1f1b"]
            case "pp_chunks":
                most = self.model_config.num_hidden_layers // pp  # else stages outnumber layers
                least = layout.schedule.chunks
                if layout.schedule.fixed_chunks:
                    most = min(most, least)
                return [n for n in POWERS if least <= n <= most]
            case "recompute":
                return KEYS["model.recompute"]["enum"]
            case "sharding":
                kinds = KEYS["distributed.sharding"]["enum"] if layout.dp * cp > 1 else ["none"]
                # Whole matrices are as fast as rows and pad more: only Muon may gain by them.
                is_muon = self.work.optimizer == "muon"
                return [kind for kind in kinds if kind != "layerwise" or is_muon]


class Candidate(NamedTuple):
    """A layout, and what is predicted for it."""

    layout: Layout
    workload: Workload
    prediction: Prediction
    memory: RankMemory

    @property
    def chosen(self) -> dict[str, object]:
        """All choices by name, and more."""
        return vars(self.layout) | vars(self.workload)


def groups(request: Request) -> Iterator[tuple[Layout, Workload]]:
    """All choices but the pipeline's schedule and sharding."""
    for grid in grids(request):
        sequences, ranks = request.global_batch // grid.dp, grid.dp * grid.cp * grid.tp
        kept = {n: request.fixed[n] for n in ("etp", "ep_engine") if n in request.fixed}
        names = ("sequence_parallel", "cp_engine", "ep", "micro_batch_size", "recompute")
        for cut, engine, ep, size, recompute in product(*(request.values(n, grid) for n in names)):
            if sequences % size == 0 and ("ep" in request.fixed or ranks % ep == 0):
                layout = replace(grid, sequence_parallel=cut, cp_engine=engine, ep=ep, **kept)
                sizes = {"micro_batch_size": size, "num_micro_batches": sequences // size}
                yield layout, replace(request.work, recompute=recompute, **sizes)


def grids(request: Request) -> Iterator[Layout]:
    """The sizes of the axes."""
    for tp in request.values("tp", Layout()):
        for cp in request.values("cp", Layout(tp=tp)):
            for pp in request.values("pp", Layout(tp=tp, cp=cp)):
                dp = request.gpus // (tp * cp * pp)
                fits = dp == request.fixed.get("dp", dp) and tp * cp * pp * dp == request.gpus
                if fits and request.global_batch % dp == 0:
                    yield Layout(tp=tp, cp=cp, pp=pp, dp=dp)


def variants(request: Request, layout: Layout) -> Iterator[Layout]:
    """A layout with each schedule and each kind of sharding."""
    for engine in request.values("pp_engine", layout):
        numbers = request.values("pp_chunks", replace(layout, pp_engine=engine))
        for chunks, kind in product(numbers, request.values("sharding", layout)):
            yield replace(layout, pp_engine=engine, pp_chunks=chunks, sharding=kind)


def rule_problems(request: Request, layout: Layout, work: Workload) -> list[str]:
    """Why config files could not have this layout, as messages."""
    given = {KEY.get(name, name): value for name, value in vars(layout).items()}
    config = Config.model_construct(
        distributed=Distributed.model_construct(**given),
        model=Model.model_construct(name=request.model_name, **vars(work)),
        training=Training.model_construct(**vars(work)),
    )
    problems = list(layout_problems(config))
    return problems or list(model_problems(config, request.model_config))


POWERS = [2**i for i in range(21)]  # above the last a search takes hours


def powers_in(number: int, most: int = POWERS[-1]) -> list[int]:
    """The powers of two that divide a number."""
    return [n for n in POWERS if number % n == 0 and n <= most]
