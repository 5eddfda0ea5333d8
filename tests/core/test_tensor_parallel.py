"""Tensor parallelism apart from training, for which see test_layouts.py."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from picotron_min import collectives
from picotron_min.extensions.overlap.boundary import Boundary, SequenceBoundary, apply_overlap
from picotron_min.extensions.overlap.linear import Linear, apply_copies
from picotron_min.extensions.settings import Layout, ModelConfig
from picotron_min.mesh import build_axes
from picotron_min.model import Llama
from picotron_min.placement import placements
from picotron_min.tensor_parallel import apply_tensor_parallel, narrow
from tests.training import shard_dim

CONFIG = ModelConfig(50, 32, 48, 2, 4, 2)
B, S = 2, 12
CPU = torch.device("cpu")


def whole_model(config: ModelConfig = CONFIG) -> Llama:
    torch.manual_seed(0)
    model = Llama(config).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def split_model(config: ModelConfig, sequence_parallel: bool, whole: Llama, overlap: bool = True):
    axes = build_axes(CPU, Layout(tp=dist.get_world_size()))
    axis, model = axes.tp, Llama(config).double()
    layout = Layout(tp=axis.size, sequence_parallel=sequence_parallel)
    table = placements(config.parameter_shapes(), layout, config.tie_word_embeddings)
    narrow(model, table, axes)
    if overlap:
        kind = SequenceBoundary if sequence_parallel else Boundary
        apply_overlap(model, axes, kind, splits=False, compiles=False)
    else:
        apply_tensor_parallel(model, axis, sequence_parallel)
    weights = dict(whole.named_parameters())
    for name, parameter in model.named_parameters():
        parameter.data.copy_(part(name, weights[name].data, axis))
        parameter.grad = torch.zeros_like(parameter)
    return model, axis


def part(name: str, tensor: torch.Tensor, axis) -> torch.Tensor:
    dim = shard_dim(name)
    return tensor if dim is None else tensor.chunk(axis.size, dim)[axis.rank]


def batch(config: ModelConfig = CONFIG):
    generator = torch.Generator().manual_seed(1)
    tokens, targets = torch.randint(config.vocab_size, (2, B, S), generator=generator)
    tokens[0, :2] = torch.tensor([0, config.vocab_size - 1])
    targets[0, :3] = torch.tensor([0, config.vocab_size - 1, -100])
    return tokens, torch.arange(S), targets


def errors(config: ModelConfig, sequence_parallel: bool, overlap: bool) -> list[float]:
    """Relative to the whole model: of all logits, and of the loss where they are very large."""
    whole = whole_model(config)
    model, _ = split_model(config, sequence_parallel, whole, overlap)
    logits, expected = model(*batch(config)[:2]), whole(*batch(config)[:2])
    for weight in (whole.lm_head.weight, model.lm_head.weight):
        weight.data *= 1e4  # exp would overflow, and after a sum of maxima underflow
    losses = [(model(*batch(config)) / whole(*batch(config)) - 1).abs().item()]
    return [*losses, ((logits - expected).abs().max() / expected.abs().max()).item()]


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["plain", "sequence"])
@pytest.mark.parametrize("overlap", [False, True], ids=["simple", "overlap"])
def test_logits_and_the_loss_of_large_ones_equal_the_whole_model(pool, sequence_parallel, overlap):
    config = CONFIG.override(num_attention_heads=8, num_key_value_heads=4, head_dim=6)
    config = config.override(vocab_size=53) if overlap else config  # uneven
    for found in pool.run(4, errors, config, sequence_parallel, overlap):
        assert max(found) < 1e-10


def ledgers(sequence_parallel: bool) -> tuple[tuple[dict, dict], tuple[dict, dict]]:
    """Calls and bytes of the forward and of the backward."""
    model, axis = split_model(CONFIG, sequence_parallel, whole_model())
    loss = model(*batch())
    forward = dict(axis.ledger.calls), dict(axis.ledger.bytes)
    axis.ledger.take_bytes()
    loss.backward()
    return forward, (dict(axis.ledger.calls), dict(axis.ledger.bytes))


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["plain", "sequence"])
def test_calls_and_bytes_are_those_of_the_docstring(pool, sequence_parallel):
    n, L, b = 2, CONFIG.num_hidden_layers, 8 * B * S * CONFIG.hidden_size
    loss = 2 * (n - 1) / n * 8 * B * S * 3  # [N] and [2, N] float64
    # forward also gathers for lm_head, and scatters after the embedding
    kinds, pairs = ("all_gather", "reduce_scatter"), 2 * L + 1
    calls = Counter(kinds * pairs if sequence_parallel else ["all_reduce"] * pairs)
    sent = Counter({kind: 2 * pairs * (n - 1) / n * b / len(calls) for kind in calls})
    for forward, backward in pool.run(n, ledgers, sequence_parallel):
        assert forward == (calls + Counter(all_reduce=2), sent + Counter(all_reduce=loss))
        assert backward == (calls, sent)


def gradients_in_bfloat16(model: Llama) -> dict[str, torch.Tensor]:
    model.float()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    apply_copies(model, torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        model(*batch()).backward()
    return {name: parameter.grad.double() for name, parameter in model.named_parameters()}


def errors_in_bfloat16(sequence_parallel: bool) -> dict[str, tuple[float, float]]:
    """Of every gradient, from the exact one: of two ranks, and of one."""
    exact = whole_model()
    exact(*batch()).backward()
    model, axis = split_model(CONFIG, sequence_parallel, exact)
    ours, one_rank = gradients_in_bfloat16(model), gradients_in_bfloat16(whole_model())
    errors = {}
    for name, parameter in exact.named_parameters():
        if sequence_parallel and shard_dim(name) is None:
            dist.all_reduce(ours[name])
        near = [ours[name], part(name, one_rank[name], axis)]
        errors[name] = tuple((g - part(name, parameter.grad, axis)).norm().item() for g in near)
    return errors


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["plain", "sequence"])
def test_two_ranks_err_little_more_than_one_in_bfloat16(pool, sequence_parallel):
    for errors in pool.run(2, errors_in_bfloat16, sequence_parallel):
        for name, (ours, one_rank) in errors.items():
            assert 0 < ours < 2 * one_rank, name


def backward_events(sequence_parallel: bool) -> list[str]:
    """What happens in the backward of one layer, in order."""
    events = []

    def logged(name: str, function):
        def call(*args, **kwargs):
            events.append(name)
            result = function(*args, **kwargs)
            if name == "weight gradient":
                return result
            *rest, work = result if isinstance(result, tuple) else (result,)
            waited = SimpleNamespace(wait=lambda: (events.append("wait"), work.wait()))
            return (*rest, waited) if rest else waited

        return call

    config = CONFIG.override(num_hidden_layers=1)
    model, _ = split_model(config, sequence_parallel, whole_model(config))
    loss = model(*batch())
    with pytest.MonkeyPatch.context() as patch:
        for module, name, label in (
            (collectives, "start_all_reduce", "start"),
            (collectives, "start_reduce_scatter", "start"),
            (Linear, "add_weight_gradient", "weight gradient"),
        ):
            patch.setattr(module, name, logged(label, getattr(module, name)))
        loss.backward()
    return events


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["plain", "sequence"])
def test_weight_gradients_are_computed_while_the_input_gradient_travels(pool, sequence_parallel):
    head = ["start", "wait"]
    mlp = ["start", *["weight gradient"] * 3, "wait"]
    attention = ["start", *["weight gradient"] * 4, "wait"]
    for events in pool.run(2, backward_events, sequence_parallel):
        assert events == head + mlp + attention
