"""Offload: the bytes of the formulas, and copies in order; test_pairs has runs with and without."""

import weakref
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from torch import Tensor

from picotron_min.extensions.memory import offload
from picotron_min.extensions.memory.extension import apply_recompute
from picotron_min.extensions.memory.offload import HostMemory, apply_offload
from picotron_min.extensions.overlap.linear import apply_copies
from picotron_min.extensions.settings import LEAST_OFFLOAD, Layout
from picotron_min.model import Llama
from picotron_min.planner.activations import saved_per_token
from tests.core.test_costs import GQA

everything = mock.patch.object(offload, "LEAST_OFFLOAD", 1)  # also what is small


class Noted(HostMemory):
    """Notes (out or in, bytes) of each layer whose copies begin."""

    log: list

    def start_out(self, blocks) -> None:
        self.note("out", [block.on_device for block in blocks])
        super().start_out(blocks)

    def start_in(self, blocks) -> None:
        self.note("in", [block.on_host for block in blocks])
        super().start_in(blocks)

    def note(self, way: str, tensors: list[Tensor]) -> None:
        if tensors:
            self.log.append((way, sum(tensor.nbytes for tensor in tensors)))


@contextmanager
def noting():
    Noted.log = []
    with mock.patch.object(offload, "HostMemory", Noted):
        yield Noted.log


def forward_and_backward(model: Llama, num_tokens: int = 64) -> dict[str, Tensor]:
    torch.manual_seed(0)
    tokens = torch.randint(model.config.vocab_size, (1, num_tokens))
    model(tokens, torch.arange(num_tokens), tokens).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def build(num_layers: int, vocab_size: int = 512) -> Llama:
    torch.manual_seed(0)
    return Llama(GQA.override(num_hidden_layers=num_layers, vocab_size=vocab_size))


def test_copies_leave_after_their_layer_and_arrive_a_layer_early():
    model = build(4)
    with everything, noting() as log:
        for i, layer in enumerate(model.model.layers.values()):
            layer.mlp.down_proj.register_forward_hook(lambda *_, i=i: log.append([f"F{i}"]))
            layer.mlp.down_proj.register_full_backward_hook(lambda *_, i=i: log.append([f"B{i}"]))
        apply_offload(model, 3, "cpu")
        forward_and_backward(model)
    assert " ".join(event[0] for event in log) == "F0 out F1 out F2 out F3 in B3 in B2 in B1 B0"


def test_what_is_small_stays():
    """Of 2048 tokens and E 128, k and v, 512 kB each in float32, and numbers a token do."""
    sizes = saved_per_token(GQA, "float32", "none", Layout(), 0)
    model = build(2)
    with noting() as log:
        apply_offload(model, 1, "cpu")
        forward_and_backward(model, 2048)
    k_and_v = 4 * 2 * GQA.num_key_value_heads * GQA.head_dim
    assert LEAST_OFFLOAD == 2048 * 4 * GQA.hidden_size == 4 * 2048 * 64 * 2
    assert log == [("out", 2048 * (sizes - k_and_v)), ("in", 2048 * (sizes - k_and_v))]


def test_a_graph_without_a_backward_is_freed_with_its_loss():
    """A node that kept its own output would keep itself, and all before it, for ever."""
    saved, pack = [], offload._pack

    def remember(blocks, stays, tensor):
        if tensor.grad_fn:
            saved.append(weakref.ref(tensor))
        return pack(blocks, stays, tensor)

    model, tokens = build(2), torch.zeros(1, 64, dtype=torch.long)
    with mock.patch.object(offload, "_pack", remember):
        apply_offload(model, 1, "cpu")  # of blocks so small that all stay on the device
        loss = model(tokens, torch.arange(64), tokens)
    assert saved
    del loss
    assert not any(there() is not None for there in saved)


def test_no_copy_of_a_weight_is_offloaded():
    """With autograd's own products, as in compiled layers, it is saved along with the input."""
    model = build(2)
    apply_copies(model, torch.bfloat16)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with everything, noting() as log, torch.autocast("cpu", torch.bfloat16):
        apply_offload(model, 1, "cpu")
        forward_and_backward(model, 256)
    expected = 256 * saved_per_token(GQA, "bfloat16", "none", Layout(), 0)
    (_, out), (_, back) = log
    assert out == back == pytest.approx(expected, rel=0.02)


COPY, EMPTY_LIKE = Tensor.copy_, torch.empty_like


class FakeStream:
    """A GPU's queue of copies, which are done as late as may be: when another stream waits."""

    def __init__(self) -> None:
        self.copies, self.pinned, self.has_waited = [], [], False

    def wait_stream(self, other: "FakeStream") -> None:
        for there, here in other.copies:
            assert there() is not None and here() is not None, "freed before it was copied"
            COPY(there(), here())
        other.copies.clear()
        other.pinned.clear()
        self.has_waited = True


@contextmanager
def fake_gpu():
    """What HostMemory calls: a stream that computes at once, and one beside it."""
    current = [FakeStream()]

    @contextmanager
    def use(stream: FakeStream):
        assert stream.has_waited, "it would copy what is not computed yet"
        stream.has_waited = False
        current.append(stream)
        yield
        current.pop()

    def start_copy(there: Tensor, here: Tensor, non_blocking: bool = False) -> Tensor:
        if len(current) == 1:
            return COPY(there, here)
        assert non_blocking
        current[-1].copies.append((weakref.ref(there), weakref.ref(here)))
        # torch keeps pinned memory until it is copied, and gives that of a GPU to others at once.
        current[-1].pinned += [x for x in (there, here) if hasattr(x, "pinned")]
        return there

    def empty(like: Tensor, pin_memory: bool = False, **options) -> Tensor:
        if like.dtype != torch.uint8:  # not for offload
            return EMPTY_LIKE(like, **options)
        assert options == {"device": "cpu" if pin_memory else "cuda"}
        tensor = EMPTY_LIKE(like).fill_(255)  # four such bytes are a NaN
        if pin_memory:
            tensor.pinned = True
        return tensor

    streams = {"Stream": FakeStream, "stream": use, "current_stream": lambda: current[-1]}
    of_gpu = mock.patch.multiple(torch.cuda, **streams)
    made = mock.patch.object(torch, "empty_like", empty)
    with of_gpu, made, mock.patch.object(Tensor, "copy_", start_copy):
        yield


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_copies_beside_what_computes_are_waited_for(recompute):
    expected = forward_and_backward(build(4))
    model = build(4)
    apply_recompute(model, recompute)
    with everything, fake_gpu():
        apply_offload(model, 3, "cuda")
        gradients = forward_and_backward(model)
    for name, gradient in gradients.items():
        assert torch.equal(gradient, expected[name]), name
