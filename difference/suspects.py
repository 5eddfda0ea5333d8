"""Suspects: the functions that a wrong tensor probably comes from.

Of activations and their gradients: those that ran since the tensor before, the last call first, and
later those that also ran before right tensors. Sums of gradients, norms and updates pass through
queues and buckets, so time tells nothing there: a table names who computes what.
"""

import re
from itertools import dropwhile, takewhile

from difference.compare import Compared, Comparison
from difference.taps import LAYER
from difference.tiny import Trial
from picotron_min import placement
from picotron_min.costs import layers_of_stages

TABLE = {
    "built": "mesh:build_axes mesh:rows_of layout:Layout.coordinates",
    "initial": "initialise:initialise placement:part {place}",
    "tokens": "data:Batches._places pipeline_parallel:Pipeline._forward data:Batches._read",
    "positions": "{positions} data:Batches._read data:Batches._places",
    "rotated": "data:Batches._read model:rotary_table {positions}",
    "summed gradient": "{place} {sums}",
    "loss": "train:train_step parallelize:ParallelModel.counted_once {forward}",
    "gradient norm": "optimizer:measure_gradient {place} parallelize:ParallelModel.counted_once",
    "square": "{place} optimizer:measure_gradient parallelize:ParallelModel.counted_once",
    "targets": "parallelize:ParallelModel.counted_once optimizer:measure_gradient train:train_step",
    "scaled gradient": "train:train_step {scale} optimizer:measure_gradient",
    "optimizer state": "optimizer:build_optimizer train:train_step",
    "weights": "optimizer:parameter_groups train:train_step optimizer:learning_rate_at",
}
BUCKETS, UNIT = "data_parallel:GradientBuckets", "extensions/sharding/units:ShardedUnit"
# Words of an explanation -> of the functions that ran, those that it points at.
POINTS = {
    "are merged": ("merge_blocks", "_RingAttention.forward", "Shift.__init__"),
    "see the keys": ("_RingAttention.forward", ":ring", "visible_blocks"),
    "sum over cp": ("_RingAttention.backward",),
    "micro-batch": ("Pipeline.",),
}
# They run between any two tensors, or meanwhile, for gradients of parameters: named last.
HELPERS = "Linear.operand Linear.product Linear.gradient Linear.add_ WeightGradients. Ledger "
HELPERS += "loss:wide data_parallel: ShardedUnit. Axes Axis. layout: model_config: "
HELPERS += "collectives:start collectives:all_ collectives:_parts Conjugate"
# Folders and files of extensions/; others are yours.
OURS = "build documents experts kernels memory multi_token optimizers overlap precision qk_norm "
OURS += "schedules settings sharding"
# Of gradients that never arrive: who runs what waits in a queue.
QUEUE = ["extensions/overlap/linear:WeightGradients.run"]
QUEUE += ["extensions/overlap/boundary:_Enter.backward"]


def suspects(both: Comparison, said: str) -> list[str]:
    """The most suspicious functions first, as module:name."""
    one = both.first[0]
    kind = "tokens" if one.key.name in ("tokens", "targets") else one.key.phase
    kind = "positions" if kind == "tokens" and "position" in said else kind
    kind = "rotated" if "rotated as" in said else kind
    if kind == "gradient norm":
        kind = next((k for k in ("square", "targets") if k in said), kind)
    if kind in TABLE:
        name = parameter_of(one.key.name, said, both.trial)
        return [*dict.fromkeys([*of_yours(one, both.all), *from_table(kind, name, both.trial)])]
    place = {id(other): i for i, other in enumerate(both.all)}
    one = min(both.first, key=lambda wrong: place[id(wrong)])
    before = [other for other in both.all[: place[id(one)]] if other.at == one.at]
    innocent = {name for other in before for name in other.ran}
    # Who has read a tensor computes its gradient, and a call may be missing there.
    alike = [o for o in before if o.key[0] == one.key.step and o.key[3:] == one.key[3:]]
    read = [*dropwhile(lambda o: o.key[1:3] != ("forward", one.key.name), alike)][1:2]
    words = ["Pipeline._arrived"] * bool(re.fullmatch(rf"{LAYER}\.input", one.key.name))
    words += [word for key, names in POINTS.items() if key in said for word in names]
    yours = [*filter(is_yours, _before_it(one, alike, before))]

    def order(name: str) -> tuple:
        pointed = next((i for i, word in enumerate(words) if word in name), len(words))
        is_helper = any(helper in name for helper in HELPERS.split())
        is_first = name.startswith("exercises/") or name in yours
        return not is_first, is_helper, pointed, name in innocent

    ran = [*yours, *one.ran, *(name for reader in read for name in reader.ran)]
    return [*dict.fromkeys([*sorted(ran, key=order), *one.running])]


def _before_it(one: Compared, alike: list[Compared], before: list[Compared]) -> list[str]:
    """What has run long before it, and can be why.

    Of a gradient: up to the end of the sublayer that reads the tensor. In a later step, where all
    of the steps before is right: what ran after an update.
    """
    if one.key.phase == "backward":
        later = [*dropwhile(lambda o: o.key[1:3] != ("forward", one.key.name), alike)][1:]
        ends = [i for i, o in enumerate(later) if o.key.name.endswith((".self_attn", ".mlp"))]
        later = later[: ends[0] + 1 if ends else 1]
        return [name for o in later for name in reversed(o.ran)]  # the first has read it
    ran = [name for o in before for name in o.ran] if one.key.step else []
    of_updates = (".weights_changed", ".updated", ".begin")
    return [name for end in of_updates for name in ran if name.endswith(end)]


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


def parameter_of(name: str, said: str, trial: Trial) -> str:
    """Of a wrong norm: a parameter whose part is wrong."""
    yours = re.search(r" your (\w+)", said)
    module = yours[1] if yours else "norm" if "of norms" in said else "q_proj"
    named = (of for of in trial.model_config.parameter_shapes() if module in of)
    return next(named, name) if name == "gradient norm" else name


def from_table(kind: str, name: str, trial: Trial) -> list[str]:
    is_sharded = trial.layout.sharding != "none" and "norm" not in name
    starts = f"{BUCKETS}._start_complete_buckets data_parallel:Bucket.__init__"
    names = {"sums": f"{UNIT}.arrived {UNIT}._finish_reductions" if is_sharded else starts}
    names["scale"] = f"{UNIT if is_sharded else BUCKETS}.scale"
    of_cp = "contiguous" if trial.layout.cp_engine == "ulysses" else "zigzag"
    names["positions"] = f"context_parallel:{of_cp}_positions"
    names["forward"] = "pipeline_parallel:Pipeline._forward"
    return TABLE[kind].format(**names, place=places_it(name, trial, kind)).split()


def places_it(name: str, trial: Trial, kind: str) -> str:
    """The function that says where a parameter lies: of the core, or an extension's rule."""
    layout, config, found = trial.layout, trial.model_config, "placement:_placement"
    shapes, tied = config.parameter_shapes(), config.tie_word_embeddings
    rows = {of: placement._placement(of, layout, tied) for of in shapes}
    table = {of: row for of, row in rows.items() if row}

    def used(row: placement.Placement | None) -> object:
        """What of a row the wrong tensor depends on: a norm on which parts a rank counts."""
        return row and (row if kind == "square" else row.sums)

    for rule in layout.rules:
        new = rule(shapes, table, layers_of_stages(config, layout, trial.workload.seq_length))
        if name in new and used(table.get(name)) != used(new[name]):
            function = getattr(rule, "func", rule)
            module = function.__module__.removeprefix("picotron_min.").replace(".", "/")
            found = f"{module}:{function.__qualname__}"
        table |= new
    return found
