"""Any config trains as one rank does, or is refused with a sentence that names its key."""

import json
from math import prod

from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from picotron_min.extensions.settings import Layout, Workload
from picotron_min.runtime.config import KEYS, ConfigError
from picotron_min.runtime.config_file import parse_config
from tests.assembled import GLOBAL_BATCH, assert_trains_as_one_rank
from tests.pool import MAX_RANKS
from tests.rows import SHAPES, choices, row
from tests.test_layouts import APART

SIZES = st.sampled_from((1, 1, 2, 2, 3, 4))


@st.composite
def runs(draw: st.DrawFn):
    sizes = {axis: draw(SIZES) for axis in ("dp", "pp", "cp", "tp")}
    micro_batches = draw(st.sampled_from((1, 2, 3, 4, 6)))
    assume(1 < prod(sizes.values()) <= MAX_RANKS)
    assume(GLOBAL_BATCH % (sizes["dp"] * micro_batches) == 0)
    model = draw(st.sampled_from(sorted(SHAPES)))
    keys = sizes | {"m": micro_batches, "model": model}
    if SHAPES[model].num_local_experts:
        keys |= {axis: draw(st.sampled_from((1, 2, 4))) for axis in ("ep", "etp")}
    for kind in (Layout, Workload):
        for name, values in choices(kind).items():
            if name not in APART | {"fp8"}:  # 8 bits round a last bit up to a step
                keys[name] = draw(st.sampled_from(values))
    keys["engine"] = keys.pop("pp_engine")
    text = " ".join(f"{name}={json.dumps(value)}" for name, value in keys.items())
    try:
        return row(f"any: {text}")
    except ConfigError:
        assume(False)


# No shrinking: each try is a run of several processes.
@settings(
    derandomize=True,
    max_examples=4,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(run=runs())
def test_any_valid_config_trains_as_one_rank(pool, run):
    assert_trains_as_one_rank(pool, *run)


NUMBERS = st.integers(-2, 10**13) | st.floats(-2, 1e13)
VALUES = st.none() | st.booleans() | NUMBERS | st.text(max_size=4) | st.lists(NUMBERS, max_size=3)


@settings(derandomize=True, max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from(sorted(KEYS)), VALUES, min_size=1, max_size=3))
def test_any_value_is_taken_or_refused_by_the_name_of_its_key(values):
    raw = {}
    for key, value in values.items():
        section, name = key.split(".")
        raw.setdefault(section, {})[name] = value
    try:
        parse_config(raw)
    except ConfigError as error:
        for problem in error.problems:
            assert any(key.split(".")[1] in problem for key in values), problem
