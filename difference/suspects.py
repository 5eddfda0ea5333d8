"""Suspects: the functions that a wrong tensor probably comes from.

Of activations and their gradients: those that ran since the tensor before, the innermost first, and
last those that also ran before right tensors. Sums of gradients, norms and updates pass through
queues and buckets, so time tells nothing there: a table names who computes what.
"""

import re
from itertools import takewhile

from difference.first import Compared, Found
from difference.runs import RankRun
from picotron_min.extensions.settings import Layout

FORWARD, OVERLAP = "pipeline_parallel:Pipeline._forward", "extensions/overlap/"
# Kind, a word of the explanation ("": any) -> functions. The first row that fits is used.
TABLE = [
    ("built", "", "mesh:build_axes mesh:rows_of layout:Layout.coordinates"),
    ("initial", "", "initialise:initialise placement:part placement:_placement"),
    ("tokens", "positions", "context_parallel:{positions} data:Batches._read data:Batches._places"),
    ("tokens", "", f"data:Batches._places {FORWARD} data:Batches._read"),
    ("head", "all of it", "loss:stripe_loss loss:_HeadLoss.backward"),
    ("forward", "rotated as", "data:Batches._read model:rotary_table context_parallel:{positions}"),
    ("summed gradient", "  (", "placement:_placement {sums}"),
    ("summed gradient", "step before", "{sums} {buckets}.begin train:train_step"),
    ("summed gradient", "", "{sums} {buckets}.wait placement:_placement"),
    ("loss", "", f"train:train_step parallelize:ParallelModel.counted_once {FORWARD}"),
    ("gradient norm", "", "optimizer:measure_gradient placement:_placement train:train_step"),
    ("scaled gradient", "", "train:train_step {buckets}.scale optimizer:measure_gradient"),
    ("optimizer state", "", "optimizer:build_optimizer train:train_step"),
    ("weights", "", "optimizer:parameter_groups train:train_step optimizer:learning_rate_at"),
    ("missing", "", f"{OVERLAP}linear:WeightGradients.run {OVERLAP}boundary:_Enter.backward"),
]
BUCKETS, UNIT = "data_parallel:GradientBuckets", "extensions/sharding/units:ShardedUnit"
BUCKET_SUMS = f"{BUCKETS}._start_complete_buckets data_parallel:Bucket.__init__"
UNIT_SUMS = f"{UNIT}.arrived {UNIT}._finish_reductions"

# Words of an explanation -> of the functions that ran, those that it points at.
POINTS = {
    "are merged": "merge_blocks _RingAttention.forward Shift.__init__",
    "see the keys": "_RingAttention.forward ring visible_blocks",
    "micro-batch": "Pipeline.",
    "sum over": "leave reduce sum gather Enter Leave",
}
EXTENSION, OURS = (
    "extensions/",
    re.compile(
        r"extensions/(\w+(\.py)?:|documents|experts|kernels|memory|multi_token|optimizers|overlap|"
        r"precision|qk_norm|schedules|sharding)\b"
    ),
)
HELPERS = "refuse_missing Linear.operand Linear.product Linear.gradient Ledger Axes Axis. "
HELPERS += "loss:wide loss:linear_dtype Conjugate layout: model_config:"


def suspects(found: Found, compared: list[Compared], said: str, layout: Layout) -> list[str]:
    """The most suspicious functions first, as module:name."""
    one = found.wrong[0]
    kind = "tokens" if one.key.name in ("tokens", "targets") else one.key.phase
    kind = "head" if (kind, one.key.name) == ("backward", "model.norm") else kind
    if names := from_table(kind, said, layout, one.key.name):
        return [*dict.fromkeys(map(short, own_after_backward(one, compared))), *names]
    at = {id(other): i for i, other in enumerate(compared)}
    one = min(found.wrong, key=lambda wrong: at[id(wrong)])
    before = [other for other in compared[: at[id(one)]] if other.at == one.at]
    returned = before[-1].running if before and one.got is not None else []
    returned = [name for name in returned if name not in one.running]
    # Of what was still running when a tensor was right, the end has not been seen.
    innocent = {name for other in before for name in other.ran if name not in other.running}
    fresh = [name for name in one.ran if name not in innocent]
    named = [*ranked(fresh, said), *returned, *ranked(one.ran, said), *one.running]
    return sorted(map(short, dict.fromkeys(named)), key=is_helper)


def own_after_backward(one: Compared, compared: list[Compared]) -> list[str]:
    """Functions of extensions that the project has not, which ran before such a tensor."""
    mine = [o for o in compared if o.at == one.at and o.key.step == one.key.step]
    phases = {"initial": ("initial",), "summed gradient": ("forward", "summed gradient")}
    phases |= dict.fromkeys(("scaled gradient", "optimizer state", "weights"), ("loss",))
    ran: list[str] = []
    for phase in phases.get(one.key.phase, ()):  # of a phase the first: it has run the hooks
        ran += next((o.ran for o in mine if o.key.phase == phase), [])
    if one.key.phase == "initial":  # not what has built the model
        ran = [*takewhile(lambda name: "initialise.py:initialise" not in name, ran)]
    return [*filter(is_yours, reversed(ran))]


def is_yours(name: str) -> bool:
    return EXTENSION in name and not OURS.search(name)


def from_table(kind: str, said: str, layout: Layout, name: str = "") -> list[str]:
    is_sharded = layout.sharding != "none" and "norm" not in name
    names = {"positions": "zigzag_positions", "buckets": BUCKETS, "sums": BUCKET_SUMS}
    names |= {"buckets": UNIT, "sums": UNIT_SUMS} if is_sharded else {}
    names |= {"positions": "contiguous_positions"} if layout.cp_engine == "ulysses" else {}
    for of_kind, word, functions in TABLE:
        if kind == of_kind and word in said:
            return functions.format(**names).split()
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
    beside = [r for r in run.ran if r.rpartition(".")[0] == inner.rpartition(".")[0]]
    has_just_begun = inner in run.ran[:1]
    names = [inner, *(beside if has_just_begun else run.ran[:2]), *outer]
    return [short(name) for name in dict.fromkeys(names) if name and not is_helper(name)]


def is_helper(name: str) -> bool:
    return any(helper in short(name) for helper in HELPERS.split())


def short(name: str) -> str:
    return name.removeprefix("picotron_min/").replace(".py:", ":")
