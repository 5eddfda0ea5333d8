"""Parts: the summands that a right tensor consists of, each with where it comes from.

a row-parallel product, the embedding    a part for each tp rank
the gradient of a norm's output          for each tp rank and linear
a parameter's gradient, dy^T x           for each micro-batch, dp, cp, and tp or end where it has
the step's loss                          for each micro-batch, dp and cp
the square of the gradient's norm        for matrices, norms and embeddings
"""

from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from difference.first import Compared
from difference.places import Here, Indices, chunk, here, indices_of, take
from difference.records import Key
from difference.tiny import Trial
from difference.whole import Whole
from picotron_min.loss import IGNORE_INDEX
from picotron_min.placement import NORMS


class Part(NamedTuple):
    label: dict  # which one it is, by axis
    tensor: Tensor


Parts = Iterator[tuple[dict, Tensor]]


class Context:
    """What explanations need beside the tensor itself."""

    def __init__(self, trial: Trial, whole: Whole, wrong: Sequence[Compared] = ()) -> None:
        self.trial, self.whole, self.wrong = trial, whole, wrong  # wrong: as in Found
        self.ranks = [here(rank, trial.layout) for rank in range(trial.layout.world_size)]

    def num_targets(self, step: int) -> int:
        targets = [t for k, t in self.whole.items() if k.name == "targets" and k.step == step]
        return sum(int((t != IGNORE_INDEX).sum()) for t in targets)

    def weight(self, name: str, step: int) -> Tensor:
        """At the beginning of a step."""
        step, phase = (step - 1, "weights") if step else (0, "initial")
        tied = name == "lm_head.weight" and self.trial.model_config.tie_word_embeddings
        return self.whole[Key(step, phase, "model.embed_tokens.weight" if tied else name)]

    def indices(self, key: Key, at: Here) -> Indices:
        return indices_of(key, self.whole[key].shape, at, self.trial.layout)


def parts_of(one: Compared, context: Context, weights_of_step: int | None = None) -> list[Part]:
    """The parts of a tensor, cut to this rank's place; none where they are not known."""
    parts = {"forward": _forward, "backward": _backward, "summed gradient": _gradient}
    parts |= {"loss": _loss, "gradient norm": _norm}
    if one.key.phase not in parts:
        return []
    step = one.key.step if weights_of_step is None else weights_of_step
    try:
        found = [*parts[one.key.phase](one.key, context, step)]
    except KeyError:  # a tensor that this kind of model does not have
        return []
    return [Part(label, take(tensor, one.indices)) for label, tensor in found]


def _forward(key: Key, context: Context, step: int) -> Parts:
    name, tp = key.name, context.trial.layout.tp
    if name.endswith((".self_attn", ".mlp")):
        linear = f"{name}.{'o_proj' if name.endswith('attn') else 'down_proj'}"
        x = context.whole[key._replace(name=f"{linear}.input")]
        weight = context.weight(f"{linear}.weight", step)
        for t, columns in enumerate(_chunks(weight.shape[1], tp)):
            yield {"tp": t}, x[..., columns] @ weight[:, columns].T
    elif name == "model.embed_tokens":
        tokens = context.whole[key._replace(name="tokens")]
        weight = context.weight(f"{name}.weight", step)
        for t, ids in enumerate(_chunks(len(weight), tp)):
            yield {"tp": t}, weight[tokens] * torch.isin(tokens, torch.tensor(ids))[..., None]


def _chunks(length: int, n: int) -> list[list[int]]:
    return [[*chunk(range(length), i, n)] for i in range(n)]


READERS = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}


def _backward(key: Key, context: Context, step: int) -> Parts:
    layer, _, last = key.name.rpartition(".")
    linears = [f"{layer}.{linear}" for linear in READERS.get(last, ())]
    for linear in ["lm_head"] if key.name == "model.norm" else linears:
        dy = context.whole[key._replace(phase="dy", name=linear)]
        weight = context.weight(f"{linear}.weight", step)
        for t, rows in enumerate(_chunks(len(weight), context.trial.layout.tp)):
            label = {"tp": t, "linear": linear.split(".")[-1]}
            yield label, dy[..., rows] @ weight[rows]


def _gradient(key: Key, context: Context, step: int) -> Parts:
    layout, config = context.trial.layout, context.trial.model_config
    user = key.name.removesuffix(".weight")
    ends = {"model.embed_tokens", "lm_head"} if config.tie_word_embeddings else {}
    # With sequence parallelism each tp rank has seen other positions of what enters a norm.
    is_norm = user.split(".")[-1] in NORMS
    like, tps = ("model.norm", layout.tp) if is_norm and layout.sequence_parallel else ("tokens", 1)
    places = [at for at in context.ranks if at.tp < tps and at.pp == at.dp == 0]
    for (m, d), at in product(context.trial.micro_batches, places):
        for end in sorted(ends if user in ends else {user}):
            of = key._replace(name=end, micro_batch=m, dp=d)
            x, dy = (context.whole[of._replace(phase=phase)] for phase in ("x", "dy"))
            rows = context.indices(of._replace(phase="forward", name=like), at)[1]
            label = {"micro-batch": m, "dp": d, "cp": at.cp, "tp": at.tp, "end": end}
            yield label, _multiply(x[:, rows], dy[:, rows], end, config.vocab_size)


def _multiply(x: Tensor, dy: Tensor, module: str, vocabulary: int) -> Tensor:
    if "norm" in module:
        return (x * dy).flatten(0, -2).sum(0)  # x is divided by its root mean square
    x = x if x.is_floating_point() else F.one_hot(x, vocabulary).double()
    outer = dy.flatten(0, -2).T @ x.flatten(0, -2)
    return outer.T if module == "model.embed_tokens" else outer


def _loss(key: Key, context: Context, step: int) -> Parts:
    for (m, d), at in product(context.trial.micro_batches, context.ranks):
        if at.pp == at.dp == at.tp == 0:
            of = key._replace(phase="forward", micro_batch=m, dp=d)
            losses = take(context.whole[of], context.indices(of, at))
            yield {"micro-batch": m, "dp": d, "cp": at.cp}, losses.sum()


def _norm(key: Key, context: Context, step: int) -> Parts:
    kinds = dict.fromkeys(("matrices", "the weights of norms", "the embeddings"), torch.zeros(()))
    for of, tensor in context.whole.items():
        if of[:2] == (step, "summed gradient"):
            is_end = "embed_tokens" in of.name or "lm_head" in of.name
            kind = "the embeddings" if is_end else "matrices"
            kind = "the weights of norms" if "norm" in of.name else kind
            kinds[kind] = kinds[kind] + tensor.square().sum()
    for kind, square in kinds.items():
        yield {"which": kind}, square
