"""Ranks that share a GPU: over gloo, whose messages go through the host."""

import functools
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from picotron_min import collectives
from picotron_min.dry_run.device import GPU, as_on_a_gpu
from picotron_min.dry_run.recorder import Recorder
from picotron_min.dry_run.run import dry_run
from picotron_min.extensions.settings import ModelConfig
from picotron_min.runtime.config import Config
from tests.assembled import Run, make_training, train_briefly, whole_run
from tests.rows import row


def train_with_copies(config: Config, model: ModelConfig, steps: int) -> Run:
    copied = mock.Mock(side_effect=lambda tensor, axis: tensor.clone())
    with mock.patch.object(collectives, "as_message", copied):
        run = train_briefly(config, model, steps)
    assert copied.called
    return run


@pytest.mark.parametrize("text", ["pp=2 cp=2 m=2", "tp=2 sp tp_overlap", "pp=2 engine=zb_v"])
def test_messages_that_are_copies_train_the_same(pool, text):
    ours, plain = (
        whole_run(pool, *row(f"core: {text}"), 2, train, atol=1e-10)
        for train in (train_with_copies, train_briefly)
    )
    assert ours[:3] == plain[:3]
    assert all((ours.weights[name] == plain.weights[name]).all() for name in plain.weights)


def test_only_gloo_takes_messages_of_a_gpu_from_the_host(monkeypatch):
    axis = SimpleNamespace(group=None)
    with as_on_a_gpu() as mode, Recorder("cuda", mode):
        for backend, device in (("gloo", "cpu"), ("nccl", "cuda")):
            monkeypatch.setattr(dist, "get_backend", lambda group, backend=backend: backend)
            message = collectives.as_message(torch.ones(2, device=GPU), axis)
            assert message.device.type == device
            assert collectives.as_message(message.cpu(), axis).device.type == "cpu"


@pytest.mark.parametrize("text", ["pp=2 cp=2 m=2", "tp=2 sp tp_overlap"])
def test_what_arrives_on_the_host_is_brought_to_the_gpu(monkeypatch, text):
    monkeypatch.setattr(dist, "get_backend", lambda group: "gloo")
    config, _ = row(f"core: {text}", use_cpu=False, dtype="bfloat16")
    waits = dry_run(config, config.world_size - 1).waits
    assert any("collectives.py" in line for line in waits)  # slow, and right


# From here on a GPU is needed: N ranks on one train what one rank does.

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "vocab_size": 500, "moe_intermediate_size": 128}
SIZES |= {"seq_length": 64, "micro_batches": 4, "layers": 4}
# What is on, how far losses and norms may be apart, and in which layouts.
KINDS = """
dtype=float64 | 1e-9 1e-9 | dp=2, dp=2 sharding=optimizer, dp=2 sharding=parameters, tp=2, tp=2 sp
dtype=float64 | 1e-9 1e-9 | tp=2 sp tp_overlap, pp=2, pp=2 engine=interleaved, pp=2 engine=zb_h1
dtype=float64 | 1e-9 1e-9 | cp=2, cp=2 ulysses
dtype=bfloat16 | 1e-2 3e-2 | dp=2, dp=2 sharding=optimizer, dp=2 sharding=parameters, tp=2, tp=2 sp
dtype=bfloat16 | 1e-2 3e-2 | tp=2 sp tp_overlap, pp=2, pp=2 engine=interleaved, pp=2 engine=zb_h1
dtype=bfloat16 | 1e-2 3e-2 | cp=2, cp=2 ulysses
dtype=float32 | 1e-4 1e-3 | dp=2, tp=2, pp=2, cp=2, cp=2 ulysses
dtype=bfloat16 fp8 | 1e-2 5e-2 | tp=2 sp, dp=2 sharding=parameters, pp=2 engine=zb_h1
dtype=bfloat16 mask | 1e-2 3e-2 | dp=2, cp=2, cp=2 ulysses
dtype=bfloat16 recompute=full offload=1 | 1e-2 3e-2 | tp=2 sp, pp=2
dtype=float64 num_local_experts=4 | 1e-9 1e-9 | dp=2, dp=2 ep=2, tp=2 sp
dtype=bfloat16 num_local_experts=4 | 1e-2 5e-2 | dp=2, dp=2 ep=2, tp=2 sp
"""
CASES = [
    (kind, layout, tuple(map(float, limits.split())))
    for kind, limits, layouts in (line.split(" | ") for line in KINDS.strip().splitlines())
    for layout in layouts.split(", ")
]


def losses_and_norms(config: Config, model: ModelConfig, device: str) -> list[tuple]:
    training = make_training(config, model, device=device)
    return [training.step(step)[:2] for step in range(3)]


@functools.cache
def trained(pool, text: str, device: str = "cuda:0") -> torch.Tensor:
    """[step, loss or norm]; all ranks have the same."""
    config, model = row(f"gpu: {text}", **SIZES)
    ranks = pool.run(config.world_size, losses_and_norms, config, model, device, timeout=120)
    assert all(rank == ranks[0] for rank in ranks)
    return torch.tensor(ranks[0], dtype=torch.float64)


@pytest.mark.gpu
@pytest.mark.parametrize("kind,layout,limits", CASES)
def test_two_ranks_on_one_gpu_train_what_one_rank_does(pool, kind, layout, limits):
    assert_same(trained(pool, f"{kind} {layout}"), trained(pool, kind), limits)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["dtype=float64", "dtype=float64 num_local_experts=4"])
def test_a_gpu_trains_what_a_cpu_does(pool, kind):
    assert_same(trained(pool, kind), trained(pool, kind, "cpu"), (1e-9, 1e-9))


def assert_same(ours: torch.Tensor, reference: torch.Tensor, limits: tuple[float, float]) -> None:
    apart = ((ours - reference) / reference).abs().amax(0)
    assert (apart < torch.tensor(limits)).all(), (ours, reference)
