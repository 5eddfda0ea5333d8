"""Taps: what a model computes is noted from outside, by hooks, in any layout.

    tokens -> embed_tokens -> [input -> input_layernorm -> q k v -> q k v rotated -> core_attention
    -> o_proj's input -> self_attn -> post_attention_layernorm -> gate up -> down_proj's input
    -> mlp -> the layer] -> norm -> loss

A module that is called runs its hooks, also where a parallelism has replaced its `forward`. Two
methods are called by name, `project` and `loss`: they are wrapped on the instance, after the build.
"""

import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from picotron_min.model import MLP, Llama, SelfAttention

ROOT = Path(__file__).parent.parent
Tap = Callable[[str, Tensor, bool], None]  # name, tensor, whether its gradient is noted, too


def attach(model: Llama, tap: Tap) -> None:
    """Call `tap` with everything that a model, or a stage of one, computes from here on."""
    if not isinstance(model.model.embed_tokens, nn.Identity):
        _before(model.model.embed_tokens, lambda x: tap("tokens", x, False))
        _after(model.model.embed_tokens, "model.embed_tokens", tap)
    for i, layer in model.model.layers.items():
        name = f"model.layers.{i}"
        # No gradient: a stage receives into a buffer that it uses again.
        _before(layer, lambda x, name=name: tap(f"{name}.input", x, False))
        mlp = layer.mlp
        if isinstance(layer.self_attn, SelfAttention):  # else an extension's: its output is noted
            _attach_attention(layer.self_attn, f"{name}.self_attn", tap)
        if hasattr(mlp, "shared_experts"):
            _after_router(mlp.gate, f"{name}.mlp.gate", tap)
            mlp = mlp.shared_experts
        if isinstance(mlp, MLP):
            own = f"{name}.mlp" + ".shared_experts" * (mlp is not layer.mlp)
            _project(mlp, own, ("gate_proj", "up_proj"), tap)
            _before(mlp.down_proj, lambda x, own=own: tap(f"{own}.down_proj.input", x, True))
        for part in ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp"):
            _after(getattr(layer, part), f"{name}.{part}", tap)
        _after(layer, name, tap)
    if not isinstance(model.lm_head, nn.Identity):
        _after(model.model.norm, "model.norm", tap)
        _loss(model.lm_head, tap)


def _attach_attention(attention: nn.Module, name: str, tap: Tap) -> None:
    def rotated(_, args) -> None:
        for letter, tensor in zip("qkv", args[:3], strict=True):
            tap(f"{name}.core_attention.{letter}", tensor, True)

    _project(attention, name, ("q_proj", "k_proj", "v_proj"), tap)
    attention.core_attention.register_forward_pre_hook(rotated)
    _after(attention.core_attention, f"{name}.core_attention", tap)
    _before(attention.o_proj, lambda x: tap(f"{name}.o_proj.input", x, True))


def _before(module: nn.Module, see: Callable[[Tensor], None]) -> None:
    module.register_forward_pre_hook(lambda _, args: see(args[0]))


def _after(module: nn.Module, name: str, tap: Tap) -> None:
    module.register_forward_hook(lambda _, args, out: tap(name, out, True))


def _after_router(router: nn.Module, name: str, tap: Tap) -> None:
    router.register_forward_hook(lambda _, args, out: tap(f"{name}.experts", out[1], False))
    router.register_forward_hook(lambda _, args, out: tap(f"{name}.weights", out[0], True))


def _project(module: nn.Module, name: str, linears: tuple[str, ...], tap: Tap) -> None:
    project = module.project

    def tapped(x: Tensor) -> tuple[Tensor, ...]:
        for linear, out in zip(linears, outs := project(x), strict=True):
            tap(f"{name}.{linear}", out, True)
        return outs

    module.project = tapped


def _loss(head: nn.Module, tap: Tap) -> None:
    loss = head.loss

    def tapped(x: Tensor, targets: Tensor) -> Tensor:
        tap("targets", targets, False)
        tap("loss", out := loss(x, targets), False)
        return out

    head.loss = tapped


def update_of(
    parameters: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """What an optimizer's step has used, and what it has made of it."""
    yield "scaled gradient", {name: p.grad for name, p in parameters.items()}
    for moment in ("exp_avg", "exp_avg_sq"):
        states = {name: optimizer.state.get(p, {}).get(moment) for name, p in parameters.items()}
        of_all = {f"{moment} of {name}": t for name, t in states.items() if t is not None}
        yield "optimizer state", of_all
    yield "weights", {name: p.data for name, p in parameters.items()}


class Profile:
    """The project's functions that ran since they were last asked for: see sys.setprofile."""

    def __init__(self) -> None:
        self.called: dict[str, None] = {}  # the last call last
        self.names: dict = {}  # by code object; None for code outside the project

    def event(self, frame, event: str, _) -> None:
        if event == "call" and (name := self._name(frame.f_code)):
            self.called.pop(name, None)
            self.called[name] = None

    def _name(self, code) -> str | None:
        if code not in self.names:
            path, name = Path(code.co_filename), getattr(code, "co_qualname", code.co_name)
            file = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else "tests/"
            is_ours = not file.startswith(("difference/", "tests/")) and name[0] != "<"
            self.names[code] = f"{file}:{name.partition('.<')[0]}" if is_ours else None
        return self.names[code]

    def take(self) -> tuple[list[str], list[str]]:
        """Those since the last time, the last call first, and those that are still running."""
        ran, self.called = [*reversed(self.called)], {}
        return ran, self.names_of(frame for frame, _ in traceback.walk_stack(None))

    def names_of(self, frames: Iterable) -> list[str]:
        return [name for frame in frames if (name := self._name(frame.f_code))]
