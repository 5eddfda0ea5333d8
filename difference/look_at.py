"""Look at: the functions that a wrong tensor probably comes from, the most suspicious first.

Of activations and their gradients: what was called since the tensor before, first what one process
does not call. Sums of gradients, norms and updates pass through queues and buckets, so time tells
nothing there: a table names who computes what.
"""

import re

from difference.compare import Compared, Comparison

# What is wrong, as a pattern -> who computes it; those are named that this layout calls.
TABLE = {
    "(forward|gradient) (tokens|targets|positions)": "data:Batches._places data:Batches._read "
    "context_parallel:zigzag_positions",
    r"(initial|summed|scaled).*\.experts\.": "mixture:_placement mixture:expert_rows",
    r"gradient model\.norm": "loss:stripe_loss loss:_HeadLoss.backward "
    "pipeline_parallel:Pipeline._backward",
    "initial": "initialise:initialise placement:part placement:_placement",
    "summed gradient": "units:ShardedUnit.arrived units:ShardedUnit._finish_reductions "
    "placement:_placement data_parallel:GradientBuckets._start_complete_buckets "
    "data_parallel:Bucket.__init__",
    "loss": "parallelize:ParallelModel.counted_once train:train_step "
    "pipeline_parallel:Pipeline._forward",
    "gradient norm": "optimizer:measure_gradient placement:_placement "
    "parallelize:ParallelModel.counted_once",
    "scaled gradient": "train:train_step data_parallel:GradientBuckets.scale "
    "units:ShardedUnit.scale optimizer:measure_gradient",
    "weight": "router:RoutingCounts.update_biases muon:Muon.step muon:orthogonalise_parts",
}
# They run between any two tensors, or meanwhile: named last.
HELPERS = re.compile(
    r"Ledger|kernels|mesh|layout|model_config|data_parallel|Linear\.|wide|Conjugate|refuse|dtype|"
    r"collectives.py:\d+ (start_all|all_|_parts)|Shift.wait|Exchange| RingAttention| DocumentRing|"
    r"visible_blocks|ring_plan|_Product|on_device|_Attach|Counts.add"
)


def look_at(both: Comparison) -> list[str]:
    one = both.first[0]
    mine = [o for o in both.all if o.at == one.at]
    for what, names in TABLE.items():
        if re.match(what, " ".join(one.key[1:3])):
            places = {_short(place): place for o in mine for place in o.ran}
            return [places[name] for name in names.split() if name in places]
    return _that_ran(one, mine, both.ran_plainly)


def _short(place: str) -> str:
    """picotron_min/mesh.py:57 build_axes -> mesh:build_axes"""
    return re.sub(r".*?(\w+)\.py:\d+ ", r"\1:", place)


def _that_ran(one: Compared, mine: list[Compared], ran_plainly: set[str]) -> list[str]:
    ran = [*one.ran]
    if one.key.phase == "gradient":  # who has read the tensor in forward computes its gradient
        keys = [o.key for o in mine]
        ran += mine[keys.index(one.key._replace(phase="forward")) + 1].ran
    functions: dict[str, str] = {}  # each once, not once for each lambda in it
    for place in filter(None, ran):
        functions.setdefault(_short(place), place)

    def order(place):
        return bool(HELPERS.search(place)), place in ran_plainly, "collectives" in place

    return sorted(functions.values(), key=order)
