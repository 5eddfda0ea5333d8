"""Taps: what a model computes is noted from outside, by hooks, in any layout.

    positions -> tokens -> embed_tokens -> [input -> input_layernorm -> q k v -> q k v rotated
    -> core_attention -> o_proj's input -> self_attn -> post_attention_layernorm -> gate up
    -> down_proj's input -> mlp -> the layer] -> norm -> targets -> loss

A module that is called runs its hooks, also where a parallelism has replaced its `forward`. Two
methods are called by name, `project` and `loss`: they are wrapped on the instance, after the build.
"""

import pickle
import re
import traceback
from functools import cache
from pathlib import Path
from types import CodeType
from typing import BinaryIO, NamedTuple

import numpy as np
from torch import Tensor, nn

from picotron_min.model import MLP, Llama, SelfAttention

ROOT = Path(__file__).parent.parent
# In the order in which a run computes them.
PHASES = ("initial weight", "forward", "gradient", "summed gradient", "loss", "gradient norm")
PHASES += ("scaled gradient", "weight")
LAYER = r"model\.layers\.\d+"
PARTS = r"(\.((input|post_attention)_layernorm|self_attn|mlp))?"
OUTPUTS = re.compile(rf"model\.(embed_tokens|norm)|{LAYER}{PARTS}")
OF_ALL_DEPTHS = "tokens", "model.embed_tokens", "targets"  # stages have other depths of them
# A stage receives its input into a buffer that it uses again; the gradient of the loss is 1.
NO_GRADIENT = re.compile(rf"{LAYER}\.input|loss")


class Key(NamedTuple):
    step: int  # counted from 0
    phase: str
    name: str
    micro_batch: int = 0
    dp: int = 0  # of activations and their gradients; 0 for all that dp ranks have alike


class Record(NamedTuple):
    key: Key
    tensor: np.ndarray
    ran: list[str]  # functions called since the record before, the last first; one that still runs


class Notes:
    """What a run computes, noted under the step and micro-batch that it is at."""

    def __init__(self, stream: BinaryIO) -> None:
        self.at, self.stream = Key(0, "", ""), stream
        self.again = False  # a forward is computed in backward, once more
        self.called: dict[str, None] = {}  # functions since the last record, the last call last

    def profile(self, frame, event: str, _: object) -> None:
        """For sys.setprofile."""
        if event == "call" and (place := place_of(frame.f_code)):
            self.called.pop(place, None)
            self.called[place] = None

    def note(self, phase: str, tensors: dict[str, Tensor], at: Key | None = None) -> None:
        running = (place_of(frame.f_code) for frame, _ in traceback.walk_stack(None))
        ran = [*reversed(self.called), next(filter(None, running), "")]
        self.called = {}
        for name, tensor in tensors.items():
            key = (at or self.at)._replace(phase=phase, name=name)
            # At once: a rank that dies leaves its records.
            pickle.dump(Record(key, tensor.detach().numpy(), ran), self.stream)

    def tap(self, name: str, tensor: Tensor) -> None:
        """A tensor that is computed now, and later its gradient."""
        self.note("forward", {name: tensor})
        if tensor.requires_grad and not self.again and not NO_GRADIENT.fullmatch(name):
            at = self.at
            tensor.register_hook(lambda gradient: self.note("gradient", {name: gradient}, at))

    def note_gradients(self, phase: str, parameters: dict[str, nn.Parameter]) -> None:
        self.note(phase, {name: p.grad for name, p in parameters.items()})

    def note_weights(self, parameters: dict[str, nn.Parameter], models: list[Llama]) -> None:
        for model in models:  # the biases of routers
            self.note("weight", dict(model.named_buffers()))
        self.note("weight", parameters)


@cache
def place_of(code: CodeType) -> str:
    """A function of the project as "picotron_min/mesh.py:57 build_axes"; "" for all others.

    What is defined inside a function has its name.
    """
    file = code.co_filename.removeprefix(f"{ROOT}/")
    name = getattr(code, "co_qualname", code.co_name).partition(".<")[0]
    is_ours = file.startswith(("picotron_min/", "exercises/", "train.py")) and "<" not in name
    return f"{file}:{code.co_firstlineno} {name}" if is_ours else ""


def attach(model: Llama, notes: Notes) -> None:
    """Note everything that a model, or a stage of one, computes from here on."""

    def see(names, found):
        tensors = found if isinstance(found, tuple) else (found,)
        for name, tensor in zip(names, tensors, strict=False):
            if not (model.config.num_nextn_predict_layers and name in OF_ALL_DEPTHS):
                notes.tap(name, tensor)

    def before(module, *names):
        module.register_forward_pre_hook(lambda _, args: see(names, args))

    def after(module, *names):
        module.register_forward_hook(lambda _, args, out: see(names, out))

    def call(module, method, *outs):
        run = getattr(module, method)

        def tapped(x, *targets):
            see(["targets"], targets)  # of `loss` alone
            see(outs, out := run(x, *targets))
            return out

        setattr(module, method, tapped)

    model.register_forward_pre_hook(lambda _, args: see(["positions"], args[1]))
    for name, module in model.named_modules():
        if isinstance(module, nn.Identity) or ".mlp.experts" in name:
            continue  # of another stage; experts have rows in an order of their own
        if name == "model.embed_tokens":
            before(module, "tokens")
        if re.fullmatch(LAYER, name):
            before(module, f"{name}.input")
        if isinstance(module, SelfAttention):  # an extension's own: its output alone
            core = f"{name}.core_attention"
            call(module, "project", *(f"{name}.{x}_proj" for x in "qkv"))
            before(module.core_attention, *(f"{core}.{x}" for x in "qkv"))
            after(module.core_attention, core)
            before(module.o_proj, f"{name}.o_proj.input")
        elif isinstance(module, MLP):
            call(module, "project", f"{name}.gate_proj", f"{name}.up_proj")
            before(module.down_proj, f"{name}.down_proj.input")
        elif name.endswith(".mlp.gate"):
            after(module, f"{name}.weights", f"{name}.experts")
        if OUTPUTS.fullmatch(name):
            after(module, name)
    if not isinstance(model.lm_head, nn.Identity):
        call(model.lm_head, "loss", "loss")
