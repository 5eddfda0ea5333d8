"""How far off a prediction may be: its 90% interval, and layouts that are too close to be ranked.

    sigma^2     0.04^2 + the sum over a step's parts of (share of the step x the part's error)^2
    interval    the prediction, divided and multiplied by exp(2.4 sigma)

2.4 is about the 0.9 (n + 1)-th of n published runs by |log error| / sigma, as in conformal
prediction: 2.3 with constants that were fitted without the run's shape, 2.5 without its source,
and 2.1 with the committed ones (docs/planner.md).
"""

import math

from picotron_min.planner.step_time import Prediction
from picotron_min.planner.system import Setting

ERRORS = {"matmuls": 0.05, "recomputed": 0.06, "passes": 0.20, "attention": 0.12, "head": 0.15}
ERRORS |= {"bubble": 0.10, "tp": 0.25, "ep": 0.30, "cp": 0.40, "optimizer": 0.30, "dp": 0.50}
OF_A_RUN, OF_A_MIXTURE = 0.04, 0.06
WIDTH = 2.4  # sigma on both sides, for 90%
EXPERT_SIZES = {768, 1536, 2880}  # of the mixtures among the runs


def interval(speed: float, prediction: Prediction, setting: Setting) -> tuple[float, float]:
    """The 90% interval of a speed, twice as wide where no run is similar."""
    is_mixture = bool(setting.model_config.num_local_experts)
    shares = {name: seconds / prediction.step for name, seconds in prediction.parts.items()}
    parts = sum((share * ERRORS[name]) ** 2 for name, share in shares.items())
    sigma = math.sqrt(OF_A_RUN**2 + parts + is_mixture * OF_A_MIXTURE**2)
    factor = math.exp((2 if unlike(setting) else 1) * WIDTH * sigma)
    return speed / factor, speed * factor


def unlike(setting: Setting) -> str:
    """Why no published run is similar to this one; empty if some are."""
    gpu, c = setting.gpu, setting.model_config
    dtype = "float8" if setting.system.precision != "bf16" else setting.workload.dtype
    if dtype not in gpu.validated and not gpu.is_calibrated:
        return f"no run was on {gpu.name} in {dtype}, which has the shares of a similar GPU"
    if c.num_local_experts and c.moe_intermediate_size not in EXPERT_SIZES:
        return f"a mixture: not validated for experts of size {c.moe_intermediate_size}"
    return ""


def is_toss_up(one: Prediction, other: Prediction) -> bool:
    """Whether the difference of two layouts is within its 90% interval.

    What both have in common cancels: only differences in the shares of parts count, and the error
    of a run. (Without it, 45% of the pairs of a published sweep were as predicted, with it 79%.)
    """
    squares = OF_A_RUN**2
    for name, error in ERRORS.items():
        a, b = (p.parts.get(name, 0.0) / p.step for p in (one, other))
        squares += (error * (a - b)) ** 2
    return abs(math.log(one.step / other.step)) <= WIDTH * math.sqrt(squares)
