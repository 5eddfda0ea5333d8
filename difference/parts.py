"""Parts: the summands that a right tensor consists of, each with where it comes from.

a row-parallel product, the embedding    a part for each tp rank
the gradient of a norm's output          for each tp rank and linear
the gradient of keys and values          for the queries of each cp rank
the gradient of the residual stream      past the next sublayer, and through it
a parameter's gradient, dy^T x           for each micro-batch, dp, cp, and tp or end where it has
"""

from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from difference.first import Compared
from difference.places import (
    Here,
    Indices,
    chunk,
    here,
    of_activation,
    of_parameter,
    positions,
    take,
)
from difference.records import Key
from difference.tiny import Trial
from difference.whole import Whole
from picotron_min.loss import IGNORE_INDEX


class Part(NamedTuple):
    label: dict  # which one it is, by axis
    own: dict  # what the label would be of this rank's own part
    tensor: Tensor


class Context:
    """What explanations need beside the tensor itself."""

    def __init__(self, trial: Trial, whole: Whole) -> None:
        self.trial, self.whole = trial, whole
        self.ranks = [here(rank, trial.layout) for rank in range(trial.layout.world_size)]

    @cached_property
    def num_targets(self) -> int:
        targets = [t for k, t in self.whole.items() if k.name == "targets" and k.step == 0]
        return sum(int((t != IGNORE_INDEX).sum()) for t in targets)

    def weight(self, name: str, step: int) -> Tensor:
        """At the beginning of a step."""
        step, phase = (step - 1, "weights") if step else (0, "initial")
        tied = name == "lm_head.weight" and self.trial.model_config.tie_word_embeddings
        return self.whole[Key(step, phase, "model.embed_tokens.weight" if tied else name)]

    def indices(self, one: Compared, at: Here) -> Indices:
        """Where another rank's part of the same tensor lies."""
        shape = self.whole[one.key].shape
        if one.key.phase in ("forward", "backward"):
            return of_activation(one.key.name, shape, at, self.trial.layout)
        name, none = one.key.name.split(" of ")[-1], {"rows": None, "is_new": False}
        return of_parameter(name, shape, at, self.trial.layout, none)


def parts_of(one: Compared, context: Context) -> list[Part]:
    """The parts of a tensor, cut to this rank's place; none where they are not known."""
    of_phase = {"forward": _forward, "backward": _backward, "summed gradient": _gradient}
    if one.key.phase not in of_phase or one.got.dtype != torch.float64:
        return []
    own = {"tp": one.at.tp, "cp": one.at.cp, "dp": one.at.dp}
    try:
        found = [*of_phase[one.key.phase](one, context)]
    except KeyError:  # a tensor that this kind of model does not have
        return []
    return [Part(label, own, take(tensor, one.indices)) for label, tensor in found]


Labelled = Iterator[tuple[dict, Tensor]]


def _forward(one: Compared, context: Context) -> Labelled:
    name, tp = one.key.name, context.trial.layout.tp

    def of(name: str) -> Tensor:
        return context.whole[one.key._replace(name=name)]

    if name.endswith((".self_attn", ".mlp")):
        linear = f"{name}.{'o_proj' if name.endswith('attn') else 'down_proj'}"
        x, weight = of(f"{linear}.input"), context.weight(f"{linear}.weight", one.key.step)
        for t, columns in enumerate(_chunks(weight.shape[1], tp)):
            yield {"tp": t}, x[..., columns] @ weight[:, columns].T
    elif name == "model.embed_tokens":
        tokens, whole = of("tokens"), of(name)
        for t, ids in enumerate(_chunks(context.trial.model_config.vocab_size, tp)):
            yield {"tp": t}, whole * torch.isin(tokens, torch.tensor([*ids]))[..., None]
    elif name.split(".")[-1].isdecimal():
        for part in ("input", "self_attn", "mlp"):
            yield {"which": part}, of(f"{name}.{part}")


def _chunks(length: int, n: int) -> list[list[int]]:
    return [[*chunk(range(length), i, n)] for i in range(n)]


def _backward(one: Compared, context: Context) -> Labelled:
    name, layout, step = one.key.name, context.trial.layout, one.key.step

    def of(name: str, phase: str = "backward") -> Tensor:
        return context.whole[one.key._replace(name=name, phase=phase)]

    layer, _, last = name.rpartition(".")
    if last in ("input_layernorm", "post_attention_layernorm"):
        inner, names = ("self_attn", "qkv") if last[0] == "i" else ("mlp", ("gate", "up"))
        for linear in (f"{layer}.{inner}.{n}_proj" for n in names):
            dy, weight = of(linear), context.weight(f"{linear}.weight", step)
            for t, rows in enumerate(_chunks(weight.shape[0], layout.tp)):
                label = {"tp": t, "linear": linear.split(".")[-1]}
                yield label, dy[..., rows] @ weight[rows]
    elif name == "model.norm":
        weight = context.weight("lm_head.weight", step)
        dy = _logits_gradient(of(name, "forward"), weight, of("targets", "forward"))
        for t, rows in enumerate(_chunks(len(weight), layout.tp)):
            yield {"tp": t}, dy[..., rows] @ weight[rows]
    elif last in ("k", "v") and "core_attention" in name:
        base = name.removesuffix(last)
        qkv = [of(base + letter, "forward").requires_grad_() for letter in "qkv"]
        out = F.scaled_dot_product_attention(*qkv, is_causal=True, enable_gqa=True)
        for c in range(layout.cp):
            mask = torch.zeros_like(out)
            mask[:, :, positions(here(c * layout.tp, layout), layout, out.shape[2])] = 1
            dy = of(base.removesuffix(".")) * mask
            gradients = torch.autograd.grad(out, qkv, dy, retain_graph=True)
            yield {"queries of cp": c}, gradients["qkv".index(last)]
        [x.requires_grad_(False) for x in qkv]
    elif last == "self_attn" or last.isdecimal() or name == "model.embed_tokens":
        number = int(last) + 1 if last.isdecimal() else 0
        after = f"{layer}.mlp" if last == "self_attn" else f"model.layers.{number}.self_attn"
        past = of(after)
        yield {"which": "the gradient past the next sublayer"}, past
        yield {"which": "the gradient through the next sublayer"}, of(name) - past


def _logits_gradient(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    counts = targets != IGNORE_INDEX
    onehot = F.one_hot(targets.where(counts, 0), len(weight)).double()
    return ((x @ weight.T).softmax(-1) - onehot) * counts[..., None]


def _gradient(one: Compared, context: Context) -> Labelled:
    layout, S = context.trial.layout, context.trial.workload.seq_length
    config, name = context.trial.model_config, one.key.name
    users = [name.removesuffix(".weight")]
    if config.tie_word_embeddings and users == ["model.embed_tokens"]:
        users.append("lm_head")
    cuts_norms = layout.sequence_parallel and "norm" in name
    for m, d in context.trial.micro_batches:
        key = one.key._replace(micro_batch=m, dp=d)
        label = {"micro-batch": m, "dp": d}
        if layout.cp * len(users) == 1 and not cuts_norms:
            yield label, context.whole[key._replace(phase="part")]
            continue
        for user in users:
            x, dy = _product(user, key, context)
            for c in range(layout.cp):
                at = here(c * layout.tp, layout)
                mine = positions(at, layout, S)
                for t in range(layout.tp if cuts_norms else 1):
                    rows = [*chunk(mine, t, layout.tp)] if cuts_norms else mine
                    more = {"tp": t} if cuts_norms else {}
                    more |= {"end": user} if len(users) > 1 else {}
                    product = _multiply(x[:, rows], dy[:, rows], "norm" in user)
                    yield label | {"cp": c} | more, product


def _multiply(x: Tensor, dy: Tensor, is_norm: bool) -> Tensor:
    x, dy = x.flatten(0, -2), dy.flatten(0, -2)
    return (x * dy).sum(0) if is_norm else dy.T @ x


def _product(user: str, key: Key, context: Context) -> tuple[Tensor, Tensor]:
    """x and dy of a parameter, whose gradient is dy^T x; of a norm, the sum of dy x."""

    def of(name: str, phase: str = "forward") -> Tensor:
        return context.whole[key._replace(name=name, phase=phase)]

    layer, _, last = user.rpartition(".")
    if user == "model.embed_tokens":
        V = context.trial.model_config.vocab_size
        return of(user, "backward"), F.one_hot(of("tokens"), V).double()
    if user == "lm_head":
        weight = context.weight("lm_head.weight", key.step)
        return of("model.norm"), _logits_gradient(of("model.norm"), weight, of("targets"))
    if last in ("o_proj", "down_proj"):
        return of(f"{user}.input"), of(layer, "backward")
    if last.endswith("_proj"):
        block, _, sublayer = layer.rpartition(".")
        norm = "input_layernorm" if sublayer == "self_attn" else "post_attention_layernorm"
        return of(f"{block}.{norm}"), of(user, "backward")
    eps = context.trial.model_config.rms_norm_eps
    if user == "model.norm":
        x = of(f"model.layers.{context.trial.model_config.num_hidden_layers - 1}")
    else:
        x = of(f"{layer}.input")
        x = x + of(f"{layer}.self_attn") if last.startswith("post") else x
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt(), of(user, "backward")


def old_output(one: Compared, context: Context) -> Tensor | None:
    """What a linear or the embedding would give with the weights of the step before."""
    name, step = one.key.name, one.key.step - 1
    layer, _, last = name.rpartition(".")
    linear = {"self_attn": f"{name}.o_proj", "mlp": f"{name}.down_proj"}.get(last, name)
    try:
        weight = context.weight(f"{linear}.weight", step)
        if name == "model.embed_tokens":
            old = weight[context.whole[one.key._replace(name="tokens")]]
        elif linear != name:
            old = context.whole[one.key._replace(name=f"{linear}.input")] @ weight.T
        else:
            block, _, sublayer = layer.rpartition(".")
            norm = "input_layernorm" if sublayer == "self_attn" else "post_attention_layernorm"
            old = context.whole[one.key._replace(name=f"{block}.{norm}")] @ weight.T
    except (KeyError, RuntimeError):  # no such weight, or it is a norm's
        return None
    return take(old, one.indices)
