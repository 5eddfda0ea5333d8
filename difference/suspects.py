"""Suspects: the functions that a wrong tensor probably comes from.

Of activations and their gradients: those that ran since the tensor before, the innermost first, and
last those that also ran before right tensors. Sums of gradients, norms and updates pass through
queues and buckets, so time tells nothing there: a table names who computes what.
"""

import re
from itertools import takewhile

from difference.compare import Compared, Comparison
from difference.tiny import Trial
from picotron_min import placement
from picotron_min.costs import layers_of_stages

BUCKETS, UNIT = "data_parallel:GradientBuckets", "extensions/sharding/units:ShardedUnit"
TABLE = {
    "built": "mesh:build_axes mesh:rows_of layout:Layout.coordinates",
    "initial": "initialise:initialise placement:part {place}",
    "tokens": "data:Batches._places pipeline_parallel:Pipeline._forward data:Batches._read",
    "positions": "{positions} data:Batches._read data:Batches._places",
    "rotated": "data:Batches._read model:rotary_table {positions}",
    "summed gradient": "{place} {sums}",
    "loss": "train:train_step parallelize:ParallelModel.counted_once "
    "pipeline_parallel:Pipeline._forward",
    "gradient norm": "optimizer:measure_gradient placement:_placement train:train_step",
    "scaled gradient": "train:train_step {scale} optimizer:measure_gradient",
    "optimizer state": "optimizer:build_optimizer train:train_step",
    "weights": "optimizer:parameter_groups train:train_step optimizer:learning_rate_at",
}
# Words of an explanation -> of the functions that ran, those that it points at.
POINTS = {
    "are merged": "merge_blocks _RingAttention.forward Shift.__init__",
    "see the keys": "_RingAttention.forward ring visible_blocks",
    "micro-batch": "Pipeline.",
    "sum over": "leave enter reduce sum gather Enter Leave",
}
# Folders and files of extensions/; others are yours.
OURS = "build documents experts kernels memory multi_token optimizers overlap precision qk_norm "
OURS += "schedules settings sharding"
# Of gradients that never arrive: who runs what waits in a queue.
QUEUE = ["extensions/overlap/linear:WeightGradients.run"]
QUEUE += ["extensions/overlap/boundary:_Enter.backward"]
# They compute gradients of parameters, while those of activations are computed.
HOLDERS = "data_parallel: ShardedUnit.arrived ShardedUnit._finish_reductions"
HOLDERS += " WeightGradients. Linear.add_weight_gradient Linear.add_gradient Linear.gradient"
# They run between any two tensors, and are named last.
HELPERS = "Linear.operand Linear.product Linear.gradient Ledger Axes Axis. loss:wide "
HELPERS += "loss:linear_dtype Conjugate refuse_missing layout: model_config:"


def suspects(both: Comparison, said: str) -> list[str]:
    """The most suspicious functions first, as module:name."""
    one = both.first[0]
    kind = "tokens" if one.key.name in ("tokens", "targets") else one.key.phase
    kind = "positions" if kind == "tokens" and "positions" in said else kind
    kind = "rotated" if "rotated as" in said else kind
    if kind in TABLE:
        return [*dict.fromkeys([*of_yours(one, both.all), *from_table(kind, one, both.trial)])]
    at = {id(other): i for i, other in enumerate(both.all)}
    one = min(both.first, key=lambda wrong: at[id(wrong)])
    before = [other for other in both.all[: at[id(one)]] if other.at == one.at]
    # Of what was still running when a tensor was right, the end has not been seen.
    innocent = {name for other in before for name in other.ran if name not in other.running}
    fresh = [name for name in one.ran if name not in innocent]
    returned = [name for name in (before[-1].running if before else ()) if name not in one.running]
    named = [*ranked(fresh, said), *returned, *ranked(one.ran, said)]
    if one.key.phase == "backward":  # who has read the tensor, since a call may be missing there
        of_readers = ranked(readers(one, before), said)
        named = [name for name in named if not any(holder in name for holder in HOLDERS.split())]
        named = [*of_readers, *named] if "the sum is missing" in said else [*named, *of_readers]
    named = [*dict.fromkeys([*named, *one.running])]
    return sorted(named, key=lambda name: any(helper in name for helper in HELPERS.split()))


def readers(one: Compared, before: list[Compared]) -> list[str]:
    """Functions that ran between the forward of a tensor and the next tensor."""
    place = one.key.step, one.key.micro_batch
    forward = [o for o in before if o.key.phase == "forward"]
    forward = [o for o in forward if (o.key.step, o.key.micro_batch) == place]
    names = [o.key.name for o in forward]
    return next((o.ran for o in forward[names.index(one.key.name) + 1 :]), [])


def of_yours(one: Compared, compared: list[Compared]) -> list[str]:
    """Functions of your own extensions that ran after backward, or after weights were filled."""
    phases = {one.key.phase, "loss"}
    mine = [o for o in compared if (o.at, o.key.step) == (one.at, one.key.step)]
    ran = next((o.ran for o in mine if o.key.phase in phases), [])
    since = [*takewhile(lambda name: name != "initialise:initialise", ran)]
    return [*filter(is_yours, reversed(since))]


def is_yours(name: str) -> bool:
    top, folder, *_ = re.split("[/:]", name)
    return top == "extensions" and folder not in OURS.split()


def from_table(kind: str, one: Compared, trial: Trial) -> list[str]:
    name = one.key.name
    is_sharded = trial.layout.sharding != "none" and "norm" not in name
    starts = f"{BUCKETS}._start_complete_buckets data_parallel:Bucket.__init__"
    names = {"sums": f"{UNIT}.arrived {UNIT}._finish_reductions" if is_sharded else starts}
    names["scale"] = f"{UNIT if is_sharded else BUCKETS}.scale"
    of_cp = "contiguous" if trial.layout.cp_engine == "ulysses" else "zigzag"
    names["positions"] = f"context_parallel:{of_cp}_positions"
    return TABLE[kind].format(**names, place=places_it(name, trial)).split()


def places_it(name: str, trial: Trial) -> str:
    """The function that says where a parameter lies: of the core, or an extension's rule."""
    layout, config, found = trial.layout, trial.model_config, "placement:_placement"
    shapes, tied = config.parameter_shapes(), config.tie_word_embeddings
    rows = {of: placement._placement(of, layout, tied) for of in shapes}
    table = {of: row for of, row in rows.items() if row}
    for rule in layout.rules:
        new = rule(shapes, table, layers_of_stages(config, layout, trial.workload.seq_length))
        if name in new and (name not in table or new[name].sums != table[name].sums):
            function = getattr(rule, "func", rule)
            module = function.__module__.removeprefix("picotron_min.").replace(".", "/")
            found = f"{module}:{function.__qualname__}"
        table |= new
    return found


def ranked(ran: list[str], said: str) -> list[str]:
    """Functions: a student's first, then those that the explanation points at."""
    words = [word for key, names in POINTS.items() if key in said for word in names.split()]

    def order(name: str) -> tuple:
        pointed = next((i for i, word in enumerate(words) if word in name), len(words))
        return not name.startswith("exercises/"), pointed, name.startswith("collectives:")

    return sorted(ran, key=order)
