"""Suspects: the functions that a wrong tensor probably comes from.

Of activations and their gradients: those that ran since the tensor before, the last call first, and
later those that send no message and also run in one process, and those that ran before right
tensors; behind them the functions that have made their objects. Sums of gradients, norms and
updates pass through queues and buckets, so time tells nothing there: a table names who computes
what.
"""

import re
from itertools import dropwhile, takewhile

from difference.compare import Compared, Comparison
from difference.taps import LAYER, RAN, Key, is_yours, name_of, outer, place_of
from difference.tiny import Trial
from picotron_min import placement
from picotron_min.costs import layers_of_stages

MOST = 3  # reasons, names and functions that are printed

# A phase, a kind of tensor, or words of an explanation -> who computes it; see from_table.
TABLE = {
    "built": "mesh:build_axes mesh:rows_of layout:Layout.coordinates",
    "initial": "initialise:initialise placement:part {place}",
    "tokens": "{steps} data:Batches._places data:Batches._read pipeline_parallel:Pipeline._forward",
    "depth": "extensions/multi_token/targets:look_ahead {reads} data:Batches._places",
    "borders": "{reads} data:Batches._places",  # of documents
    "positions": "{positions} data:Batches._read data:Batches._places",
    "rotated as": "{stage} {reads} model:rotary_table {positions}",
    "not at all": "model:SelfAttention.forward {stage} {forward} {reads}",
    "values are rotated": "model:SelfAttention.forward {forward}",
    "summed gradient": "{place} {sums}",
    "the step before": "{buckets}.begin {sums}",
    "micro-batch ": "{buckets}.arrived {sums} {place}",
    "(1/": "{buckets}.wait {sums}",
    ") times": "{builds} {place} {sums}",
    "over pp": "{place} pipeline_schedule:ends_share_rank {builds}",
    "missing": "{place} {builds} {sums}",
    "missing, though its row has it": "{builds} {begins} layout:Layout.grids mesh:rows_of {sums}",
    "loss": "train:train_step parallelize:ParallelModel.counted_once {forward}",
    "gradient norm": "optimizer:measure_gradient {place} parallelize:ParallelModel.counted_once",
    "square": "{place} optimizer:measure_gradient parallelize:ParallelModel.counted_once",
    "measure": "parallelize:ParallelModel.counts",
    "targets": "parallelize:ParallelModel.counted_once optimizer:measure_gradient train:train_step",
    "scaled gradient": "train:train_step {buckets}.scale optimizer:measure_gradient",
    "biases of routers": "{experts}/router:RoutingCounts.update_biases "
    "{experts}/extension:Experts.updated {experts}/router:RoutingCounts.count",
    "optimizer state": "{muon} optimizer:build_optimizer train:train_step",
    "weights": "{muon} optimizer:parameter_groups train:train_step optimizer:learning_rate_at",
}
# Phases -> words of an explanation that have a row of their own.
RELATIONS = {
    "forward": ("not at all", "rotated as", "values are rotated"),
    "gradient norm": ("square", "targets"),
    "summed gradient": ("the step before", "micro-batch ", "over pp", "(1/", ") times", "missing"),
}
BUCKETS, UNIT = "data_parallel:GradientBuckets", "extensions/sharding/units:ShardedUnit"
# Words of an explanation -> of the functions that ran, those that it points at.
POINTS = {
    "are merged": ("merge_blocks", "_RingAttention.forward", "Shift.__init__"),
    "see the keys": ("_RingAttention.forward", ":ring", "visible_blocks"),
    "the key heads": ("UlyssesAttention.forward",),
    "sum over cp": ("_RingAttention.backward",),
    "the part of cp": ("_RingAttention.backward",),
    "micro-batch": ("Pipeline.", ".arrived"),
    "are those of": ("collectives:all_gather",),
    "tokens": ("Dispatch.__call__",),
}
# Words of an explanation -> a function that ran long before.
ELSEWHERE = {"it is model.norm of": "pipeline_parallel:keep_stage"}
ELSEWHERE["log-sum-exp"] = "attention:merge_blocks"
ELSEWHERE["it is model."] = "pipeline_parallel:my_stages"
ELSEWHERE["weights of the step before"] = "extensions/sharding/extension:Sharding.weights_changed"
# They run between any two tensors, or meanwhile, for gradients of parameters: named last.
HELPERS = "Linear.operand Linear.product Linear.gradient Linear.add_ WeightGradients. Ledger "
HELPERS += "loss:wide data_parallel: ShardedUnit. Axes Axis. layout: model_config: "
HELPERS += "collectives:start collectives:all_ collectives:_parts Conjugate"
# Of gradients that never arrive: who runs what waits in a queue.
QUEUE = ["extensions/overlap/linear:WeightGradients.run"]
QUEUE += ["extensions/overlap/boundary:_Enter.backward"]


def suspects(both: Comparison, why: str) -> list[str]:
    """The most suspicious functions first, as module:name; of an autograd.Function, the class."""
    one = both.first[0]
    kind = kind_of(one.key, why)
    if kind in TABLE:
        named = from_table(kind, one, why, both.trial)
        yours = of_yours(one, both, why, next(filter(is_yours, named), ""))
        named = with_makers([*dict.fromkeys([*filter(is_yours, named), *yours, *named])], both)
    else:
        named = that_ran(one, both, why)
    ran = {name for other in both.all for name in other.ran}
    classes = {n.removesuffix(".forward") for n in ran if n.endswith(".forward")}
    of = {f"{name}.backward": name for name in classes}
    if one.key.phase != "forward":  # what forward has saved may be what is wrong in backward
        of |= {f"{name}.forward": name for name in classes if f"{name}.backward" in ran}
    found: list[str] = []
    for name in dict.fromkeys(of.get(name, name) for name in named):
        found += [name] * (name.removesuffix(".forward") not in found)
    return found


def kind_of(key: Key, why: str) -> str:
    """The row of the table for a tensor: words of its explanation, or its phase."""
    if re.fullmatch(r"depth \d+ of (tokens|targets)", key.name):
        return "depth"
    if key.name in ("tokens", "targets"):
        return "borders" if "-100" in why else "positions" if "position" in why else "tokens"
    return next((words for words in RELATIONS.get(key.phase, ()) if words in why), key.phase)


def that_ran(one: Compared, both: Comparison, why: str) -> list[str]:
    """Of an activation or its gradient: what ran since the tensor before."""
    before = [o for o in takewhile(lambda o: o is not one, both.all) if o.at == one.at]
    # By name: 0 for another phase, 1 for this one.
    ran_before = {n: other.key.phase == one.key.phase for other in before for n in other.ran}
    # Who has read a tensor computes its gradient, and a call may be missing there.
    alike = [o for o in before if o.key[0] == one.key.step and o.key[3:] == one.key[3:]]
    later = [*dropwhile(lambda o: o.key[1:3] != ("forward", one.key.name), alike)][1:]
    read = [o for o in later if o.key.name != "targets"][:1]
    elsewhere = [name for key, name in ELSEWHERE.items() if key in why]
    is_input = bool(re.fullmatch(rf"{LAYER}\.input", one.key.name))
    words = [*elsewhere, *["Pipeline._arrived"] * is_input]
    words += ["extensions/documents"] * both.trial.workload.document_mask
    words += pointed_at(why)
    is_of_head = one.key[1:3] == ("backward", "model.norm") and "missing" not in why
    words += ["loss:stripe_loss"] * is_of_head

    def is_aside(name: str) -> bool:
        return is_helper(name) and name not in words

    def order(name: str) -> tuple:
        pointed = next((i for i, word in enumerate(words) if word in name), len(words))
        # It runs in one process, too, and sends nothing: so it knows nothing of ranks.
        # Kernels compute with what one rank has, as does what one process runs.
        is_local = Key(0, RAN, name) in both.whole or name.startswith("extensions/kernels")
        sends = outer(name) in both.senders
        is_plain = is_local and not sends
        if name.startswith("exercises/") or is_yours(name):
            return 0, pointed, is_local, not is_local and not sends
        return 1 + is_aside(name), pointed, is_plain, name in one.running, ran_before.get(name, -1)

    # What was called before a function that is still running has made no part of this tensor.
    # And what has computed several tensors at once is noted with the first of them.
    phase = (other.ran for other in (one, *reversed(before)) if other.key.phase == one.key.phase)
    ran = next(filter(None, phase), [])
    began = [i for i, name in enumerate(ran) if name in one.running]
    since = ran[: began[-1]] if began else ran
    ran = [*elsewhere, *_before_it(one, later, both), *since, *(n for o in read for n in o.ran)]
    ran += [name for name in one.running if any(word in name for word in words)]
    ran = sorted(dict.fromkeys(ran), key=order)
    names = [*dict.fromkeys(outer(name) for name in ran if not is_aside(name))]
    helpers = map(outer, (*filter(is_aside, ran), *one.running))
    return [*dict.fromkeys([*with_makers(names, both), *helpers])]


def pointed_at(why: str) -> list[str]:
    return [word for key, words in POINTS.items() if key in why for word in words]


def look_at(named: list[str]) -> str:
    few = map(place_of, named[: MOST + any(map(is_yours, named[:MOST]))])
    return "look at      " + (f"\n{' ' * 13}".join(few) or "no function of the project ran since")


def is_helper(name: str) -> bool:
    return any(helper in name for helper in HELPERS.split())


def with_makers(names: list[str], both: Comparison) -> list[str]:
    """Behind them, or three of yours: what made their objects, and yours that prepared them."""
    built = dict.fromkeys(n for o in both.all if o.key.phase == "initial" for n in o.ran)
    later = {name for o in both.all if o.key.phase not in ("built", "initial") for name in o.ran}
    most = 3 if any(map(is_yours, names[:3])) else len(names)
    classes = dict.fromkeys(name.rpartition(".")[0] for name in names[:most][::-1] if "." in name)
    methods = [n for n in built if n not in later and n.rpartition(".")[0] in classes]
    makers = [name for name in methods if is_yours(name) and not name.endswith(".__init__")]
    makers += [both.makers[of] for of in classes if of in both.makers]
    return [*dict.fromkeys([*names[:most], *makers, *names[most:]])]


def _before_it(one: Compared, later: list[Compared], both: Comparison) -> list[str]:
    """Functions of yours that have run long before it, and can be why.

    In a later step, where all of the steps before is right: those that ran after an update. Of a
    gradient: up to the end of the sublayer that reads the tensor, those first that read it first.
    """
    updates = [o for o in both.all if (o.at, *o.key[:2]) == (one.at, one.key.step - 1, "loss")]
    ran = [name for o in updates for name in reversed(o.ran) if not name.endswith(".measures")]
    if one.key.phase == "backward":
        ends = [i for i, o in enumerate(later) if o.key.name.endswith((".self_attn", ".mlp"))]
        for o in later[: ends[0] + 1 if ends else 1]:
            called = [*reversed(o.ran)]
            ran += sorted(called, key=lambda name: outer(name) not in both.senders)
    return [*filter(is_yours, ran)]


def of_yours(one: Compared, both: Comparison, why: str, rule: str) -> list[str]:
    """Functions of your own extensions that ran since the phase before: first those that send.

    Of the summed gradient of a parameter that your own rule places: functions of the forward.
    """
    since = dict.fromkeys(("loss", "gradient norm"), ("scaled gradient",))
    # The loss is the first that is noted after an update.
    since |= dict.fromkeys(("optimizer state", "weights"), ("loss",))
    since["measure"] = ("scaled gradient", "loss")  # what counts, what is reported
    since["summed gradient"] = ("forward",) if rule else ("summed gradient", "backward")
    phases = since.get(one.key.phase, (one.key.phase,))
    mine = [o for o in both.all if (o.at, o.key.step) == (one.at, one.key.step)]
    records = [o for phase in phases for o in reversed(mine) if o.key.phase == phase]
    ran = [name for o in records for name in o.ran]
    ran = [*takewhile(lambda name: name != "initialise:initialise", ran)]
    folder = rule.partition(":")[0].rpartition("/")[0]
    yours = [outer(n) for n in ran[:: -1 if rule else 1] if is_yours(n) and n.startswith(folder)]
    idle = (".begin",) * bool(rule) + (".counts", ".measures") * (one.key.phase == "weights")
    yours = [name for name in yours if not name.endswith(idle)]
    words = pointed_at(why)

    def order(name: str) -> tuple:
        return not any(word in name for word in words), name not in both.senders

    before = _before_it(one, [], both) if one.key.phase == "summed gradient" else []
    return [*dict.fromkeys([*map(outer, before), *sorted(yours, key=order)])]


def parameter_of(name: str, why: str, trial: Trial) -> str:
    """Of a wrong norm: a parameter whose part is wrong."""
    yours = re.search(r" your (\w+)", why)
    words = {"of norms": "norm", "the embeddings": "embed_tokens", "routers": ".mlp.gate."}
    module = yours[1] if yours else next((words[w] for w in words if w in why), "q_proj")
    named = (of for of in trial.model_config.parameter_shapes() if module in of)
    return next(named, name) if name == "gradient norm" else name


def from_table(kind: str, one: Compared, why: str, trial: Trial) -> list[str]:
    name = parameter_of(one.key.name, why, trial)
    is_sharded = trial.layout.sharding != "none" and "norm" not in name
    starts = f"{BUCKETS}._start_complete_buckets data_parallel:Bucket.__init__"
    names = {"sums": f"{UNIT}._finish_reductions {UNIT}.arrived" if is_sharded else starts}
    names["begins"] = names["sums"].split()[0]
    names["buckets"] = UNIT if is_sharded else BUCKETS
    builds = "extensions/sharding/extension:Sharding._unit"
    names["builds"] = builds if is_sharded else "data_parallel:build_buckets"
    of_cp = "contiguous" if trial.layout.cp_engine == "ulysses" else "zigzag"
    names["positions"] = f"context_parallel:{of_cp}_positions"
    names["steps"] = "data:Batches.__post_init__" * bool(one.key.step)  # the first step is right
    documents = "extensions/documents/batches:DocumentBatches._read"
    names["reads"] = documents if trial.workload.document_mask else "data:Batches._read"
    names["experts"] = "extensions/experts"
    muon = "extensions/optimizers/muon:Muon.step extensions/optimizers/muon:orthogonalise_parts"
    names["muon"] = muon * (trial.recipe.optimizer == "muon")
    names["forward"] = "pipeline_parallel:Pipeline._forward"
    names["stage"] = names["forward"] * bool(one.at.pp)  # the first stage is right
    place = places_it(name, trial, kind, why)
    row = TABLE[kind if place else "missing, though its row has it"]
    return row.format(**names, place=place).split()


def places_it(name: str, trial: Trial, kind: str, why: str) -> str:
    """What places a parameter: the core, or an extension's rule; "" if its row is right.

    That is: if a sum of its gradient is missing whose axis the row has.
    """
    layout, config, found = trial.layout, trial.model_config, "placement:_placement"
    shapes, tied = config.parameter_shapes(), config.tie_word_embeddings
    rows = {of: placement._placement(of, layout, tied) for of in shapes}
    table = {of: row for of, row in rows.items() if row}

    def used(row: placement.Placement | None) -> object:
        """What of a row the wrong tensor depends on: a norm on which parts a rank counts."""
        return row and (row if kind == "square" else (row.cuts, row.sums))

    for rule in layout.rules:
        new = rule(shapes, table, layers_of_stages(config, layout, trial.workload.seq_length))
        if name in new:
            function = name_of(getattr(rule, "func", rule))
            if used(table.get(name)) != used(new[name]):
                found = function
            elif table[name] == new[name]:  # nothing new, where something should be
                found += f" {function}"
        table |= new
    missing = kind == "missing" and re.search(r"of a sum over (\w+): the sum is missing", why)
    has_it = missing and any(missing[1] in axis.split("_") for axis in table[name].sums)
    return "" if has_it else found
