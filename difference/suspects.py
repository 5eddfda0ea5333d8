"""Suspects: the functions that a wrong tensor probably comes from.

Of activations and their gradients: those that ran since the tensor before, the innermost first, and
last those that also ran before right tensors. Of sums of gradients, norms and updates time says
nothing, since queues and buckets come between: there a table knows who does what.
"""

from collections.abc import Sequence

from difference.first import Compared, Found

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


# Among the functions that ran: those that an explanation points at, and helpers.
POINTS = {
    "are merged": "merge_blocks _RingAttention.forward Shift.__init__ visible_blocks",
    "see the keys": "_RingAttention.forward visible_blocks Shift.__init__ ring",
    "the part of micro-batch": "Pipeline.",
    "x micro-batch": "Pipeline.",
    "sum over": "leave reduce sum gather Enter Leave",
}
HELPERS = "loss.py:wide loss.py:linear_dtype Ledger Axes Axis. Conjugate layout.py model_config.py"


def suspects(found: Found, compared: list[Compared], said: str) -> list[str]:
    phase = found.wrong[0].key.phase
    for of_phase, word, names in TABLE:
        if phase == of_phase and word in said:
            return [BUCKETS + n[1:] if n[0] == "B" else n for n in names.split()]
    one = min(found.wrong, key=lambda wrong: compared.index(wrong))
    innocent = set()
    for other in compared[: compared.index(one)]:
        if other.at == one.at:
            innocent |= set(other.ran)
    return ranked(one.ran, innocent, said)


def ranked(ran: list[str], innocent: set[str], said: str = "") -> list[str]:
    """Functions, the most suspicious first."""
    words = [word for key, names in POINTS.items() if key in said for word in names.split()]

    def order(name: str) -> tuple:
        is_helper = any(helper in name for helper in HELPERS.split())
        pointed = next((i for i, word in enumerate(words) if word in name), len(words))
        return is_helper, name in innocent, pointed, "collectives.py" in name

    return [short(name) for name in sorted(ran, key=order)]


def of_failure(ran: Sequence[str], stack: Sequence[str]) -> list[str]:
    """The functions that were running, others of the innermost one's class, and those before."""
    running = []
    for line in stack:  # "file:line in name"
        file, _, name = line.partition(":")
        found = [r for r in ran if r.startswith(file) and r.endswith(name.rpartition(" ")[2])]
        running += found[:1]
    if running and running[0] == ran[0]:
        beside = [r for r in ran if r.rpartition(".")[0] == running[0].rpartition(".")[0]]
        ran = [running[0], *beside, *running, *ran]
    return [
        short(name) for name in dict.fromkeys(ran) if not any(h in name for h in HELPERS.split())
    ]


def short(name: str) -> str:
    return name.removeprefix("picotron_min/").replace(".py:", ":")
