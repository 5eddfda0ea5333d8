"""Suspects: the functions that a wrong tensor probably comes from.

Of activations and their gradients: those that ran since the tensor before, the innermost first, and
last those that also ran before right tensors. Of sums of gradients, norms and updates time says
nothing, since queues and buckets come between: there a table knows who does what.
"""

from difference.first import Compared, Found
from difference.runs import RankRun
from picotron_min.extensions.settings import Layout

OVERLAP = "extensions/overlap/"
# Phase, a word of the explanation ("": any) -> functions. The first row that fits is used.
TABLE = [
    ("built", "", "mesh:build_axes mesh:rows_of layout:Layout.coordinates"),
    ("initial", "", "initialise:initialise placement:part placement:_placement"),
    ("tokens", "positions", "context_parallel:{positions} data:Batches._read data:Batches._places"),
    ("tokens", "", "data:Batches._places pipeline_parallel:Pipeline._forward data:Batches._read"),
    (
        "head",
        "all of it",
        "loss:stripe_loss loss:_HeadLoss.backward tensor_parallel:VocabularyParallelHead",
    ),
    ("forward", "rotated as", "data:Batches._read model:rotary_table context_parallel:{positions}"),
    ("summed gradient", "weights of norms)", "placement:_placement {sums}"),
    ("summed gradient", "(only the", "placement:_placement {sums}"),
    ("summed gradient", "step before", "{sums} {buckets}.begin train:train_step"),
    ("summed gradient", "", "{sums} {buckets}.wait placement:_placement"),
    ("loss", "", "train:train_step parallelize:ParallelModel.counted_once {forward}"),
    ("gradient norm", "", "optimizer:measure_gradient placement:_placement train:train_step"),
    ("scaled gradient", "", "train:train_step {buckets}.scale optimizer:measure_gradient"),
    ("optimizer state", "", "optimizer:build_optimizer train:train_step"),
    ("weights", "", "optimizer:parameter_groups train:train_step optimizer:learning_rate_at"),
    (
        "missing",
        "",
        f"{OVERLAP}linear:WeightGradients.run {OVERLAP}boundary:_Enter.backward {{sums}}",
    ),
]
BUCKETS = {
    "forward": "pipeline_parallel:Pipeline._forward",
    "buckets": "data_parallel:GradientBuckets",
    "sums": "data_parallel:GradientBuckets._start_complete_buckets data_parallel:Bucket.__init__",
}
UNIT = "extensions/sharding/units:ShardedUnit"
UNITS = BUCKETS | {"buckets": UNIT, "sums": f"{UNIT}.arrived {UNIT}._finish_reductions"}

# Of the functions that ran: those that an explanation points at, and those that only help.
POINTS = {
    "are merged": "merge_blocks _RingAttention.forward Shift.__init__",
    " times,": "ring Shift.__init__ _RingAttention.forward",
    "see the keys": "_RingAttention.forward ring visible_blocks",
    "of micro-batch": "Pipeline.",
    "x micro-batch": "Pipeline.",
    "sum over": "leave reduce sum gather Enter Leave",
}
HELPERS = "refuse_missing Linear.operand Linear.product Linear.gradient Ledger Axes Axis. "
HELPERS += "loss.py:wide loss.py:linear_dtype Conjugate layout.py model_config.py"


def suspects(found: Found, compared: list[Compared], said: str, layout: Layout) -> list[str]:
    """The most suspicious functions first, as module:name."""
    first = found.wrong[0]
    kind = "tokens" if first.key.name in ("tokens", "targets") else first.key.phase
    kind = "head" if (kind, first.key.name) == ("backward", "model.norm") else kind
    if names := from_table(kind, said, layout, first.key.name):
        return names
    one = min(found.wrong, key=lambda wrong: compared.index(wrong))
    before = [other for other in compared[: compared.index(one)] if other.at == one.at]
    returned = before[-1].running if before and one.got is not None else []
    returned = [name for name in returned if name not in one.running]
    # Of what was still running when a tensor was right, the end has not been seen.
    innocent = {name for other in before for name in other.ran if name not in other.running}
    fresh = [name for name in one.ran if name not in innocent]
    named = [*ranked(fresh, said), *returned, *ranked(one.ran, said), *one.running]
    is_helper = {n: any(helper in n for helper in HELPERS.split()) for n in named}
    return [short(n) for n in sorted(dict.fromkeys(named), key=lambda n: is_helper[n])]


def from_table(kind: str, said: str, layout: Layout, name: str = "") -> list[str]:
    is_sharded = layout.sharding != "none" and "norm" not in name
    names = UNITS if is_sharded else BUCKETS
    positions = "contiguous" if layout.cp_engine == "ulysses" else "zigzag"
    for of_kind, word, functions in TABLE:
        if kind == of_kind and word in said:
            return functions.format(**names, positions=f"{positions}_positions").split()
    return []


def ranked(ran: list[str], said: str) -> list[str]:
    """Functions: a student's first, then those that the explanation points at."""
    words = [word for key, names in POINTS.items() if key in said for word in names.split()]

    def order(name: str) -> tuple:
        pointed = next((i for i, word in enumerate(words) if word in name), len(words))
        return not name.startswith("exercises/"), pointed, "collectives.py" in name

    return sorted(ran, key=order)


def of_failure(run: RankRun, layout: Layout) -> list[str]:
    """What was running, others of the innermost one's class, and what had run before."""
    if "gradients are missing" in run.problem:
        return from_table("missing", "", layout)
    inner, *outer = [*run.running, ""]
    waits = inner in run.ran[:1]
    beside = [r for r in run.ran if r.rpartition(".")[0] == inner.rpartition(".")[0]]
    names = [inner, *beside, *outer] if waits else [inner, *run.ran[:2], *outer]
    named = [n for n in dict.fromkeys(names) if n and not any(h in n for h in HELPERS.split())]
    return [short(name) for name in named]


def short(name: str) -> str:
    return name.removeprefix("picotron_min/").replace(".py:", ":")
