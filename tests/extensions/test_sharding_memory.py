"""What sharding saves of a process's memory, and which gathers a step waits for."""

import ctypes
import gc
import re
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist

from picotron_min.costs import parameter_count
from picotron_min.runtime.config import Config
from picotron_min.runtime.config_checks import resolve_model
from picotron_min.runtime.launch import set_allocator
from tests.core.test_checkpoint import make_config, make_training
from tests.pool import Pool

# 10M parameters, and almost no activations.
LARGE = {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 5}
LARGE |= {"vocab_size": 2048, "num_attention_heads": 6, "num_key_value_heads": 6}
# Bytes a parameter, at least, and by the formula without buffers: a rank keeps a quarter of masters
# and moments, then of gradients, then of weights.
SAVED = {"optimizer": (4, 5), "gradients": (6, 8), "parameters": (9, 12)}


def resident_bytes(kind: str) -> int:
    """Of this process's own memory: what is mapped from files is shared with others."""
    facts = Path("/proc/self/smaps_rollup").read_text()
    return 1024 * int(re.search(rf"^{kind}:\s+(\d+) kB", facts, re.MULTILINE)[1])


def bytes_a_parameter(config: Config) -> float:
    """How much this process has grown after two steps."""
    libc, threshold = ctypes.CDLL(None), -3
    set_allocator(returns=True)  # as train.py does
    try:
        gc.collect()
        libc.malloc_trim(0)  # what runs before this one have left
        before = resident_bytes("Anonymous")
        training = make_training(config)
        for step in range(2):
            training.step(step)
        dist.barrier()
        return (resident_bytes("Anonymous") - before) / parameter_count(resolve_model(config))
    finally:
        libc.mallopt(threshold, 32 * 2**20)  # where its own adaptation ends


@pytest.fixture
def new_pool():
    """Processes that have run nothing else: what earlier tests freed would be used again."""
    pool = Pool()
    yield pool
    pool.close()


@pytest.mark.slow
def test_a_process_has_less_memory_with_sharding(new_pool):
    sizes = {"seq_length": 8, "micro_batch_size": 1, "gradient_accumulation_steps": 1}
    make = partial(make_config, dp=4, optimizer="adamw", model=LARGE, **sizes)

    def measure(sharding: str) -> float:
        return max(new_pool.run(4, bytes_a_parameter, make(sharding=sharding), timeout=180))

    measure("none")  # what only a first run allocates is there from now on
    sizes = {sharding: measure(sharding) for sharding in ("none", *SAVED)}
    for sharding, (least, most) in SAVED.items():
        assert least <= sizes["none"] - sizes[sharding] <= most + 0.5, sizes


def gathers_and_computing(config: Config) -> list[tuple[str, int]]:
    """In the forward after an update: of which unit a gather starts, ends, or a module computes."""
    training = make_training(config)
    units, events = training.units, []
    training.step(0)
    model = training.chunks[0].model
    for i, unit in enumerate(units):

        def observed(method: str, i=i, unit=unit):
            inner = getattr(unit, method)

            def call():
                before = unit.arriving
                inner()
                if unit.arriving is not before:
                    events.append((method, i))

            setattr(unit, method, call)

        observed("start")
        observed("finish")
        users = {module for of in unit.modules.values() for module in of}
        parts = [model.model.embed_tokens, *(x.self_attn for x in model.model.layers.values())]
        for part in parts:
            if users & set(part.modules()):
                part.register_forward_hook(lambda *_, i=i: events.append(("compute", i)))
    training.step(1)
    return events


# Seven ranks own the matrices of two layers in turn, which are then gathered together.
@pytest.mark.parametrize("sharding,dp,units", [("optimizer", 2, 8), ("layerwise", 7, 5)])
def test_only_the_first_gather_is_waited_for(pool, sharding, dp, units):
    sizes = {"gradient_accumulation_steps": 1, "model": {"num_hidden_layers": 6}}
    config = make_config(dp=dp, sharding=sharding, **sizes)
    for events in pool.run(dp, gathers_and_computing, config):
        assert max(i for _, i in events) == units - 1
        for i in range(1, units):
            start, compute, finish = map(
                events.index, (("start", i), ("compute", i - 1), ("finish", i))
            )
            assert start < compute < finish, "it travels while the one before computes"
