"""Taps: what a model computes is noted from outside, by hooks, in any layout.

    tokens -> embed_tokens -> [input -> input_layernorm -> q k v -> q k v rotated -> core_attention
    -> o_proj's input -> self_attn -> post_attention_layernorm -> gate up -> down_proj's input
    -> mlp -> the layer] -> norm -> targets -> loss

A module that is called runs its hooks, also where a parallelism has replaced its `forward`. Two
methods are called by name, `project` and `loss`: they are wrapped on the instance, after the build.
"""

import ast
import contextlib
import inspect
import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from picotron_min.model import MLP, Llama, SelfAttention

ROOT = Path(__file__).parent.parent
# In the order in which a run computes them.
PHASES = ("built", "initial", "forward", "backward", "summed gradient", "loss", "gradient norm")
PHASES += ("measure", "scaled gradient", "optimizer state", "biases of routers", "weights")
LAYER = r"model\.layers\.\d+"
PARTS = "input_layernorm|self_attn|post_attention_layernorm|mlp"
OUTPUTS = re.compile(rf"model\.(embed_tokens|norm)|{LAYER}(\.({PARTS}))?")
# A stage receives its input into a buffer that it uses again; the gradient of the loss is 1.
NO_GRADIENT = re.compile(rf"{LAYER}\.input|loss")
RAN = "ran"  # a phase without tensors: the names are functions that one process runs, too
BIAS = "e_score_correction_bias"
NUMBERS = "numbers"  # a phase of whole numbers that layers keep, which are compared apart
BUFFERS = "buffers"  # a phase of tensors that modules keep, of yours; step -1: before the first
INSIDE = "inside"  # a phase of tensors of your own functions: see inside.py
# Folders and files of extensions/; others are yours.
OURS = "build documents experts kernels memory multi_token optimizers overlap precision qk_norm "
OURS += "schedules settings sharding"
ROUTER = "extensions/experts/router:"  # its functions are watched as yours are
MOST_NUMBERS = 100_000  # of a tensor that is noted
RESULT = "the result"
Tap = Callable[[Sequence[str], Tensor], None]


class Key(NamedTuple):
    step: int  # counted from 0
    phase: str
    name: str
    micro_batch: int = 0
    dp: int = 0  # of activations and their gradients; 0 for all that dp ranks have alike


class Record(NamedTuple):
    key: Key
    tensor: Tensor
    ran: list[str]  # functions of the project since the record before, the last call first
    running: list[str]  # those that have not returned, the innermost first


class Notes:
    """What a run computes, noted under the step and micro-batch that it is at."""

    at, again = Key(0, "", ""), False  # again: a forward is computed in backward, once more

    def write(self, key: Key, tensor: Tensor, ran: tuple) -> None:
        raise NotImplementedError

    def ran(self) -> tuple:
        """What ran since the note before: see Profile."""
        return ()

    def note(self, phase: str, tensors: dict[str, Tensor], at: Key | None = None) -> None:
        ran = self.ran()
        for name, tensor in tensors.items():
            self.write((at or self.at)._replace(phase=phase, name=name), tensor.detach(), ran)

    def tap(self, names: Sequence[str], out: Tensor) -> None:
        """Several names are those of equal parts."""

        def note(phase: str, tensor: Tensor) -> None:
            parts = tensor.chunk(len(names)) if len(names) > 1 else [tensor]
            self.note(phase, dict(zip(names, parts, strict=True)), at)

        at = self.at
        note("forward", out)
        if out.requires_grad and not self.again and not NO_GRADIENT.fullmatch(names[0]):
            out.register_hook(partial(note, "backward"))

    def note_gradients(self, phase: str, parameters: dict[str, nn.Parameter]) -> None:
        self.note(phase, {name: p.grad for name, p in parameters.items()})

    def note_measures(self, measures: dict[str, object]) -> None:
        """Those that are numbers, or lists of them."""
        for name, value in measures.items():
            with contextlib.suppress(TypeError, ValueError, RuntimeError):
                self.note("measure", {name: torch.tensor(value, dtype=torch.float64)})

    def note_kept(self, models: Sequence[nn.Module]) -> None:
        """What layers keep before the first step."""
        for model in models:
            self.note(NUMBERS, numbers_of(model))
        self.note(BUFFERS, buffers_of_yours(models), Key(-1, "", ""))

    def note_update(
        self,
        parameters: dict[str, nn.Parameter],
        of: torch.optim.Optimizer,
        models: Iterable[nn.Module],
    ) -> None:
        states = {name: of.state.get(p, {}) for name, p in parameters.items()}
        for moment in ("exp_avg", "exp_avg_sq", "momentum_buffer"):
            kept = {f"{moment} of {n}": s[moment] for n, s in states.items() if moment in s}
            self.note("optimizer state", kept)
        buffers = {name: b for model in models for name, b in model.named_buffers()}
        biases = {n: b for n, b in buffers.items() if n.endswith(BIAS)}
        self.note("biases of routers", biases)
        self.note(BUFFERS, buffers_of_yours(models))
        self.note("weights", parameters)


def depths_in(model: Llama) -> dict[str, range]:
    """The depths, one behind the other, that a tensor holds: in the first stage 0 alone."""
    D = model.config.num_nextn_predict_layers
    last = 0 if isinstance(model.lm_head, nn.Identity) else D
    looked_up = range(0 if "0" in model.model.layers else 1, last + 1)
    return {"tokens": looked_up, "model.embed_tokens": looked_up, "targets": range(D + 1)}


def attach(model: Llama, tap: Tap) -> None:
    """Call `tap` with everything that a model, or a stage of one, computes from here on."""
    depths = depths_in(model)

    def see(names: Iterable[str], found: Tensor | tuple) -> None:
        tensors = found if isinstance(found, tuple) else (found,)
        for name, tensor in zip(names, tensors, strict=False):
            tap([f"depth {j} of {name}" if j else name for j in depths.get(name, [0])], tensor)

    def before(module: nn.Module, *names: str) -> None:
        module.register_forward_pre_hook(lambda _, args: see(names, args))

    def after(module: nn.Module, *names: str) -> None:
        module.register_forward_hook(lambda _, args, out: see(names, out))

    def call(module: nn.Module, method: str, outs: list[str], more: Sequence[str] = ()) -> None:
        run = getattr(module, method)

        def tapped(x: Tensor, *args: Tensor) -> Tensor | tuple[Tensor, ...]:
            see(more, tuple(targets.flatten(0, -2) for targets in args))
            see(outs, out := run(x, *args))
            return out

        setattr(module, method, tapped)

    for name, module in model.named_modules():
        if isinstance(module, nn.Identity) or ".mlp.experts" in name:
            continue  # of another stage; experts have rows in an order of their own
        if name == "model.embed_tokens":
            before(module, "tokens")
        if re.fullmatch(LAYER, name):
            before(module, f"{name}.input")
        if isinstance(module, SelfAttention):  # an extension's own: its output alone
            core = f"{name}.core_attention"
            call(module, "project", [f"{name}.{x}_proj" for x in "qkv"])
            before(module.core_attention, *(f"{core}.{x}" for x in "qkv"))
            after(module.core_attention, core)
            before(module.o_proj, f"{name}.o_proj.input")
        elif isinstance(module, MLP):
            call(module, "project", [f"{name}.gate_proj", f"{name}.up_proj"])
            before(module.down_proj, f"{name}.down_proj.input")
        elif name.endswith(".mlp.gate"):
            after(module, f"{name}.weights", f"{name}.experts")
        if OUTPUTS.fullmatch(name):
            after(module, name)
    if not isinstance(model.lm_head, nn.Identity):
        call(model.lm_head, "loss", ["loss"], ["targets"])


def is_yours(name: str) -> bool:
    top, folder, *_ = re.split("[/:]", name)
    return top == "extensions" and folder not in OURS.split()


def outer(name: str) -> str:
    """A function's name; of one that is defined inside another, the outer one's."""
    return name.partition(".<")[0]


class Profile:
    """The project's functions that ran since they were last asked for: see sys.setprofile."""

    def __init__(self) -> None:
        self.called: dict[str, None] = {}  # the last call last
        self.names: dict = {}  # by code object; None for code outside the project
        self.makers: dict[str, str] = {}  # classes (no dataclasses) -> what made the last object
        self.senders: set[str] = set()  # functions that called collectives.py
        self.watch: Callable | None = None  # gets the calls and returns of your functions

    def event(self, frame, event: str, result: object) -> None:
        name = self._name(frame.f_code) if event in ("call", "return") else None
        if name and self.watch and (is_yours(name) or name.startswith(ROUTER)):
            values = frame.f_locals | ({RESULT: result} if event == "return" else {})
            self.watch(event, name, values)
        if event == "call" and name:
            self.called.pop(name, None)
            self.called[name] = None
            is_init = name.endswith(".__init__")
            if is_init or name.startswith("collectives:"):
                stack = map(outer, self.names_of(f for f, _ in traceback.walk_stack(frame.f_back)))
                callers = (n for n in stack if ".__init__" not in n and "collectives:" not in n)
                caller = next(callers, None)
                if caller and is_init:
                    self.makers[name.removesuffix(".__init__")] = caller
                elif caller:
                    self.senders.add(caller)

    def _name(self, code) -> str | None:
        if code not in self.names:
            path, name = Path(code.co_filename), getattr(code, "co_qualname", code.co_name)
            file = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else "tests/"
            # No lambda of a module or class; a comprehension is a part of the function around it.
            is_function = "<locals>" in name or "<" not in name
            is_function = is_function and not name.endswith(("comp>", "<genexpr>"))
            is_ours = is_function and not file.startswith(("difference/", "tests/"))
            file = file.removeprefix("picotron_min/").removesuffix(".py")
            self.names[code] = f"{file}:{name}" if is_ours else None
        return self.names[code]

    def take(self) -> tuple[list[str], list[str]]:
        """Those since the last time, the last call first, and those that are still running."""
        ran, self.called = [*reversed(self.called)], {}
        return ran, self.names_of(frame for frame, _ in traceback.walk_stack(None))

    def names_of(self, frames: Iterable) -> list[str]:
        return [name for frame in frames if (name := self._name(frame.f_code))]


def own_of(keeper: object) -> Iterator[tuple[str, object]]:
    """What an object keeps, by name."""
    own = getattr(keeper, "__dict__", {})
    own = own | own.get("_parameters", {}) | own.get("_buffers", {})
    yield from ((name, one) for name, one in own.items() if not name.startswith("_"))


def buffers_of_yours(models: Iterable[nn.Module]) -> dict[str, Tensor]:
    """Also tensors that are plain attributes; the course has but the biases of routers."""
    modules = [named for model in models for named in model.named_modules()]
    kept = [(f"{n}.{of}", b) for n, m in modules for of, b in own_of(m) if type(b) is Tensor]
    return {n: b for n, b in kept if b.is_floating_point() and not n.endswith(BIAS)}


def numbers_of(model: nn.Module) -> dict[str, Tensor]:
    """Whole numbers that are kept in layers, by module, keeper and name."""
    modules = ((n, m) for n, m in model.named_modules() if re.match(LAYER, n))
    return {
        f"{module} {keeper} {name}": torch.tensor(number)
        for module, one in modules
        for keeper, name, number in _kept(name_of(type(one)), vars(one).items())
    }


def place_of(name: str, line: int = 0) -> str:
    """A function's file, line and name: "picotron_min/mesh.py:57 build_axes".

    `line`: one inside of it; else its first, or the first of the class of a generated method.
    """
    stem, _, function = name.partition(":")
    files = [f for f in (f"picotron_min/{stem}.py", f"{stem}.py") if (ROOT / f).exists()]
    if not files:
        return name
    node = ast.parse((ROOT / files[0]).read_text())
    for inner in function.split("."):
        found = (one for one in ast.walk(node) if getattr(one, "name", "") == inner)
        node = next(found, node)
    return f"{files[0]}:{line or getattr(node, 'lineno', 1)} {function}"


def name_of(code: type | Callable) -> str:
    file = code.__module__.removeprefix("picotron_min.").replace(".", "/")
    return f"{file}:{code.__qualname__}"


def _kept(keeper: str, own: Iterable[tuple[str, object]], depth: int = 3) -> Iterator[tuple]:
    """What is kept in an object, in what it holds of yours, and given to a function beforehand."""
    for name, one in own:
        if type(one) is int:
            yield keeper, name, one
        elif isinstance(one, nn.Module | type) or not depth:
            continue
        elif isinstance(one, partial) and inspect.isroutine(one.func):
            given = inspect.signature(one.func).bind_partial(*one.args, **one.keywords).arguments
            yield from _kept(name_of(one.func), given.items(), depth - 1)
        elif inspect.isfunction(one):
            given = inspect.getclosurevars(one).nonlocals
            yield from _kept(name_of(one), given.items(), depth - 1)
        elif is_yours(name_of(type(one))):
            yield from _kept(name_of(type(one)), own_of(one), depth - 1)
