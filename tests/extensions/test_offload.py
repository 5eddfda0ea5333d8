"""Offload: the same numbers to the last bit, the bytes of the formulas, and copies in order."""

import weakref
from contextlib import ExitStack, contextmanager
from functools import partial
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed._tools.mem_tracker import MemTracker

from picotron_min.extensions.memory import offload
from picotron_min.extensions.memory.offload import HostMemory, apply_offload
from picotron_min.extensions.memory.recompute import apply_recompute
from picotron_min.extensions.overlap.linear import apply_copies
from picotron_min.extensions.settings import LEAST_OFFLOAD, Layout, Workload
from picotron_min.model import Llama
from picotron_min.planner import memory
from picotron_min.planner.activations import saved_per_token
from tests.assembled import make_training
from tests.core.test_costs import GQA, planned
from tests.rows import lines, row

everything = mock.patch.object(offload, "LEAST_OFFLOAD", 1)  # also what is small


class Log(list):
    """(in or out, bytes) of each layer whose copies begin, and what else a test adds."""

    @contextmanager
    def recording(self):
        with ExitStack() as stack:
            for name, block in (("start_out", "on_device"), ("start_in", "on_host")):
                method = partial(self.record, name[6:], block, getattr(HostMemory, name))
                stack.enter_context(mock.patch.object(HostMemory, name, lambda *a, m=method: m(*a)))
            yield

    def record(self, way: str, block: str, method, memory: HostMemory, blocks) -> None:
        if blocks:
            self.append((way, sum(getattr(b, block).nbytes for b in blocks)))
        method(memory, blocks)

    def total(self, way: str) -> int:
        return sum(number for kind, number in self if kind == way)


# One process, without ranks.


def forward_and_backward(model: Llama, num_tokens: int = 64) -> dict[str, Tensor]:
    torch.manual_seed(0)
    tokens = torch.randint(model.config.vocab_size, (1, num_tokens))
    model(tokens, torch.arange(num_tokens), tokens).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def build(num_layers: int, recompute: str = "none", vocab_size: int = 512) -> Llama:
    torch.manual_seed(0)
    model = Llama(GQA.override(num_hidden_layers=num_layers, vocab_size=vocab_size))
    apply_recompute(model, recompute)
    return model


def test_copies_leave_after_their_layer_and_arrive_a_layer_early():
    model, log = build(4), Log()
    for i, layer in enumerate(model.model.layers.values()):
        layer.mlp.down_proj.register_forward_hook(lambda *_, i=i: log.append(f"F{i}"))
        layer.mlp.down_proj.register_full_backward_hook(lambda *_, i=i: log.append(f"B{i}"))
    with everything, log.recording():
        apply_offload(model, 3, "cpu")
        forward_and_backward(model)
    order = [event if isinstance(event, str) else event[0] for event in log]
    assert " ".join(order) == "F0 out F1 out F2 out F3 in B3 in B2 in B1 B0"


def test_what_is_small_stays():
    """Of 2048 tokens and E 128, k and v, 512 kB each in float32, and numbers a token do."""
    sizes, log = saved_per_token(GQA, "float32", "none", Layout(), 0), Log()
    model = build(2)
    with log.recording():
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


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_no_copy_of_a_weight_is_offloaded(recompute):
    """With autograd's own products, as in compiled layers, it is saved along with the input."""
    model, log = build(2), Log()
    apply_copies(model, torch.bfloat16)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    apply_recompute(model, recompute)
    with everything, log.recording(), torch.autocast("cpu", torch.bfloat16):
        apply_offload(model, 1, "cpu")
        forward_and_backward(model, 256)
    expected = 256 * saved_per_token(GQA, "bfloat16", recompute, Layout(), 0)
    assert log.total("out") == log.total("in") == pytest.approx(expected, rel=0.02)


class Elsewhere(HostMemory):
    """A host whose memory torch knows nothing of."""

    def start_out(self, blocks) -> None:
        for block in blocks:
            block.on_host = block.on_device.numpy().copy()

    def start_in(self, blocks) -> None:
        for block in blocks:
            block.on_device = torch.from_numpy(block.on_host).clone()
            block.on_host = None


def peak(recompute: str, num_offloaded: int, num_tokens: int) -> int:
    model = build(4, recompute, vocab_size=256)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with everything, mock.patch.object(offload, "HostMemory", Elsewhere), MemTracker() as tracker:
        apply_offload(model, num_offloaded, "cpu")
        forward_and_backward(model, num_tokens)
    return tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_the_device_has_as_much_less_as_planned(recompute):
    """What has left is freed, then. Where a single layer stays, another one is on its way."""
    S, shape = 256, GQA.override(num_hidden_layers=4, vocab_size=64)
    plan = partial(planned, shape, seq_length=S, recompute=recompute)
    each, here = (
        S * saved_per_token(GQA, "float32", recompute, Layout(), 0, device=device)
        for device in ("cuda", "cpu")
    )
    for num_offloaded, fewer_layers in [(1, 1), (2, 2), (3, 2)]:
        with mock.patch.object(memory, "LEAST_OFFLOAD", 1):
            less = plan().activations - plan(offload=num_offloaded).activations
        assert less == fewer_layers * each
    temporary = 2 * S * 4 * GQA.hidden_size  # the fullest moment is another one
    less = peak(recompute, 0, S) - peak(recompute, 3, S)
    assert less == pytest.approx(fewer_layers * here, abs=temporary)


def test_the_plan_leaves_a_later_stage_its_input():
    shape, S, m = GQA.override(num_hidden_layers=8), 4096, 4
    layout = Layout(pp=2, pp_engine="afab", pp_layers=(4, 4))
    each = S * saved_per_token(GQA, "float32", "none", layout, 0, device="cuda")
    layer_input = S * 4 * GQA.hidden_size
    for device, moves in [("cuda", 1), ("cpu", 0)]:  # where copies save nothing
        plans = [
            memory.memory_of_ranks(shape, layout, Workload(S, 1, m, offload=offload), device)
            for offload in (0, 2)
        ]
        less = [a.activations - b.activations for a, b in zip(*plans, strict=True)]
        assert less == [moves * m * 2 * each, moves * m * (2 * each - layer_input)]
    few = Workload(S // 2 - 1, 1, m, offload=2)  # the input of a layer is below LEAST_OFFLOAD
    none = Workload(S // 2 - 1, 1, m)
    assert memory.memory_per_rank(shape, layout, few) == memory.memory_per_rank(shape, layout, none)


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

    with ExitStack() as stack:
        for where, name, fake in [
            (torch.cuda, "Stream", FakeStream),
            (torch.cuda, "stream", use),
            (torch.cuda, "current_stream", lambda: current[-1]),
            (torch, "empty_like", empty),
            (Tensor, "copy_", start_copy),
        ]:
            stack.enter_context(mock.patch.object(where, name, fake))
        yield


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_copies_beside_what_computes_are_waited_for(recompute):
    expected = forward_and_backward(build(4, recompute))
    model = build(4, recompute)
    with everything, fake_gpu():
        apply_offload(model, 3, "cuda")
        gradients = forward_and_backward(model)
    for name, gradient in gradients.items():
        assert torch.equal(gradient, expected[name]), name


# The same run with and without, on N ranks: to the last bit.

RUNS = """
memory: m=2 recompute=selective layers=4 offload=3
schedules: pp=2 m=3 engine=interleaved recompute=selective layers=8 offload=1
schedules: pp=2 m=3 engine=zb_v layers=8 offload=1
overlap: tp=2 sp layers=3 offload=2
experts: dp=2 ep=2 m=2 global_aux layers=3 model=gated offload=2
"""


def steps(text: str) -> tuple:
    training = make_training(*row(text))
    results = [training.step(step)[:2] for step in range(2)]
    tensors = {
        name: (p.grad.clone(), p.detach().clone()) for name, p in training.parameters.items()
    }
    return results, training.evaluate(), tensors


def with_and_without(text: str) -> tuple[int, int]:
    """The bytes that left and came back, after a check that no bit differs."""
    log = Log()
    *expected, tensors = steps(text.partition(" offload")[0])
    with everything, log.recording():
        *ours, our_tensors = steps(text)
    assert ours == expected
    for name, pair in tensors.items():
        assert all(map(torch.equal, our_tensors[name], pair)), name
    return log.total("out"), log.total("in")


@pytest.mark.parametrize("text", lines(RUNS))
def test_runs_train_the_same(pool, text):
    for out, back in pool.run(row(text)[0].world_size, with_and_without, text):
        assert out == back > 0


def test_no_sharded_weight_is_offloaded(pool):
    """Gathered weights have another address in each use."""
    text = "sharding: dp=2 m=2 dtype=bfloat16 layers=3 {} offload=2"
    plain, sharded = (
        pool.run(2, with_and_without, text.format(kind)) for kind in ("", "sharding=parameters")
    )
    assert sharded == plain
