"""Ranks that share a GPU: over gloo, whose messages go through the host."""

import functools
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from picotron_min import collectives
from picotron_min.extensions.settings import ModelConfig
from picotron_min.runtime.config import Config
from tests.assembled import Run, make_config, make_training, train_briefly, whole_run
from tests.fake_cuda import GPU, as_on_a_gpu, waits_of_a_step
from tests.test_gpu import SIZES

RING = {"tp": 2, "sequence_parallel": True, "tp_overlap": True}


def train_with_copies(config: Config, model: str, steps: int) -> Run:
    copied = mock.Mock(side_effect=lambda tensor, axis: tensor.clone())
    with mock.patch.object(collectives, "as_message", copied):
        run = train_briefly(config, model, steps)
    assert copied.called
    return run


@pytest.mark.parametrize(
    "sizes",
    [{"pp": 2, "cp": 2, "micro_batches": 2}, RING, {"pp": 2, "engine": "zb_v", "chunks": 2}],
    ids=str,
)
def test_messages_that_are_copies_train_the_same(pool, sizes):
    config = make_config(**sizes)
    ours, plain = (
        whole_run(pool, config, "untied", 2, train, atol=1e-10)
        for train in (train_with_copies, train_briefly)
    )
    assert ours[:3] == plain[:3]
    assert all((ours.weights[name] == plain.weights[name]).all() for name in plain.weights)


def test_only_gloo_takes_messages_of_a_gpu_from_the_host(monkeypatch):
    axis = SimpleNamespace(group=None)
    with as_on_a_gpu():
        for backend, device in (("gloo", "cpu"), ("nccl", "cuda")):
            monkeypatch.setattr(dist, "get_backend", lambda group, backend=backend: backend)
            message = collectives.as_message(torch.ones(2, device=GPU), axis)
            assert message.device.type == device
            assert collectives.as_message(message.cpu(), axis).device.type == "cpu"


@pytest.mark.parametrize("sizes", [{"pp": 2, "cp": 2, "micro_batches": 2}, RING], ids=str)
def test_what_arrives_on_the_host_is_brought_to_the_gpu(monkeypatch, sizes):
    monkeypatch.setattr(dist, "get_backend", lambda group: "gloo")
    config = make_config(**SIZES | sizes)
    waits = waits_of_a_step(config, rank=config.world_size - 1)
    assert any("collectives.py" in line for line in waits)  # one GPU and gloo: slow, and right


# From here on a GPU is needed: N ranks on one train what one rank does.

EXPERTS = {"num_local_experts": 4, "moe_intermediate_size": 128}
MODEL = ModelConfig(500, 128, 256, 4, 4, 2)
LAYOUTS = {
    "dp": {"dp": 2},
    "zero 1": {"dp": 2, "sharding": "optimizer"},
    "zero 3": {"dp": 2, "sharding": "parameters"},
    "tp": {"tp": 2},
    "sequence": {"tp": 2, "sequence_parallel": True},
    "ring of products": RING,
    "1f1b": {"pp": 2},
    "interleaved": {"pp": 2, "chunks": 2, "engine": "interleaved"},
    "zb_h1": {"pp": 2, "engine": "zb_h1"},
    "ring": {"cp": 2},
    "ulysses": {"cp": 2, "cp_engine": "ulysses"},
    "ep": {"dp": 2, "ep": 2},
}
DENSE = [name for name in LAYOUTS if name != "ep"]
KINDS = {  # what is on, in which layouts, and how far losses and norms may be apart
    "float64": ({"dtype": "float64"}, DENSE, 1e-9, 1e-9),
    "bfloat16": ({"dtype": "bfloat16"}, DENSE, 1e-2, 3e-2),
    "float32": ({"dtype": "float32"}, ["dp", "tp", "1f1b", "ring", "ulysses"], 1e-4, 1e-3),
    "fp8": ({"dtype": "bfloat16", "fp8": True}, ["sequence", "zero 3", "zb_h1"], 1e-2, 5e-2),
    "documents": (
        {"dtype": "bfloat16", "document_mask": True},
        ["dp", "ring", "ulysses"],
        1e-2,
        3e-2,
    ),
    "offload": (
        {"dtype": "bfloat16", "recompute": "full", "offload": 1},
        ["sequence", "1f1b"],
        1e-2,
        3e-2,
    ),
    "experts, float64": (EXPERTS | {"dtype": "float64"}, ["dp", "ep", "sequence"], 1e-9, 1e-9),
    "experts, bfloat16": (EXPERTS | {"dtype": "bfloat16"}, ["dp", "ep", "sequence"], 1e-2, 5e-2),
}


def losses_and_norms(config: Config, model: ModelConfig, device: str) -> list[tuple]:
    training = make_training(config, model, device=device)
    return [training.step(step)[:2] for step in range(3)]


@functools.cache
def trained(pool, kind: str, layout: str, device: str = "cuda:0") -> torch.Tensor:
    """[step, loss or norm]; all ranks have the same."""
    sizes = {"seq_length": 64, "micro_batches": 4, "layers": 4} | KINDS[kind][0]
    config = make_config(**sizes | LAYOUTS.get(layout, {}))
    model = MODEL.override(**EXPERTS) if EXPERTS.items() <= sizes.items() else MODEL
    ranks = pool.run(config.world_size, losses_and_norms, config, model, device, timeout=120)
    assert all(rank == ranks[0] for rank in ranks)
    return torch.tensor(ranks[0], dtype=torch.float64)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "kind,layout", [(kind, name) for kind, (_, names, *_) in KINDS.items() for name in names]
)
def test_two_ranks_on_one_gpu_train_what_one_rank_does(pool, kind, layout):
    assert_same(trained(pool, kind, layout), trained(pool, kind, "one rank"), KINDS[kind][2:])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["float64", "experts, float64"])
def test_a_gpu_trains_what_a_cpu_does(pool, kind):
    on_cpu = trained(pool, kind, "one rank", "cpu")
    assert_same(trained(pool, kind, "one rank"), on_cpu, KINDS[kind][2:])


def assert_same(ours: torch.Tensor, reference: torch.Tensor, limits: tuple[float, float]) -> None:
    apart = ((ours - reference) / reference).abs().amax(0)
    assert (apart < torch.tensor(limits)).all(), (ours, reference)
