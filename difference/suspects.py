"""Suspects: the functions that a wrong tensor probably comes from.

Of activations and their gradients: those that ran since the tensor before, the innermost first, and
last those that also ran before right tensors. Of sums of gradients, norms and updates time says
nothing, since queues and buckets come between: there a table knows who does what.
"""

from difference.first import Compared, Found
from difference.parts import Context

# phase, a word of the explanation or of the names ("" for any) -> functions. The first row is used.
BUCKETS = "data_parallel:GradientBuckets."
TABLE = [
    ("built", "", "mesh:build_axes mesh:rows_of layout:Layout.coordinates"),
    ("initial", "", "initialise:initialise placement:part placement:_placement"),
    ("summed gradient", "sum over", "placement:_placement B_start_complete_buckets Bwait"),
    ("summed gradient", "step before", "Bbegin train:train_step Bscale"),
    ("summed gradient", "", "B_start_complete_buckets Barrived placement:_placement"),
    ("loss", "", "train:train_step parallelize:ParallelModel.counted_once"),
    ("gradient norm", "", "optimizer:measure_gradient placement:_placement train:train_step"),
    ("scaled gradient", "", "train:train_step Bscale optimizer:measure_gradient"),
    ("optimizer state", "", "optimizer:build_optimizer train:train_step"),
    ("weights", "", "optimizer:parameter_groups train:train_step optimizer:learning_rate_at"),
]


def suspects(found: Found, compared: list[Compared], said: str, context: Context) -> list[str]:
    phase = found.wrong[0].key.phase
    for of_phase, word, names in TABLE:
        if phase == of_phase and word in said:
            return [BUCKETS + n[1:] if n[0] == "B" else n for n in names.split()]
    one = min(found.wrong, key=lambda wrong: compared.index(wrong))
    innocent = set()
    for other in compared:
        if other is one:
            break
        if other.at == one.at:
            innocent |= set(other.ran)
    ranked = sorted(one.ran, key=lambda name: (name in innocent, "collectives.py" in name))
    return [short(name) for name in ranked if "exercises/" not in name or ":" in name]


def short(name: str) -> str:
    return name.removeprefix("picotron_min/").replace(".py:", ":")
