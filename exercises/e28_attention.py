"""28 attention: heads are read off the tensors

target: model:SelfAttention.forward

Write attention around its core. x is [B, S, E]; self.project(x) gives q [B, S, Q D], k and v [B, S,
K D]. View them as heads of self.head_dim numbers, rotate queries and keys by `rotate`, which takes
[B, S, heads, D] and cos, sin (`rotary` begins with these; what follows, if anything, is for the
core after q, k and v), and call self.core_attention with q [B, Q, S, D], k and v [B, K, S, D]: it
shares key heads among query heads, so do not repeat them. Put its result [B, Q, S, D] back to [B,
S, Q D], and return self.o_proj of it.
How many heads there are must be read off the tensors: with tensor parallelism a rank has fewer than
the config has.
Read: model.py.

? Project, view as heads, rotate two of three, attend, flatten the heads, project.
? self.project, view(B, S, -1, self.head_dim), rotate(x, *rotary), transpose(1, 2), reshape,
  self.core_attention, self.o_proj.
? A position's numbers lie head by head, so the view is [B, S, heads, D]; the transpose comes after
  rotate. -1 lets view find the number of heads. What comes back is transposed before it is reshaped
  to [B, S, Q D].
! With 1/4 as many key heads, keys and values need 1/4 of the memory, and a ring sends 1/4 of the
  bytes. In production: Hugging Face's `LlamaAttention`.
"""

import torch

from exercises.exercise import Case, Dice, draw
from exercises.pictures import bars

B = 2
NAMES = "q_proj", "k_proj", "v_proj", "o_proj"


def cases(dice: Dice) -> list[Case]:
    sizes = {"head_dim": 4, "config_heads": 4}
    heads = [(4, 4), (4, 2), (4, 1), (2, 1)]  # the last is what a rank of two has
    some = [Case(1, query=q, key=k, length=dice.randint(5, 7), **sizes) for q, k in heads]
    some.append(Case(1, query=4, key=4, length=4, **sizes))  # as many positions as heads
    # With sequence parallelism x is a part of the sequence, and `project` gathers the whole.
    return [*some, Case(1, query=4, key=2, length=6, parts=2, **sizes)]


def inputs(case: Case) -> dict:
    E, q, k = (heads * case.head_dim for heads in (case.config_heads, case.query, case.key))
    shapes = zip(NAMES, ((q, E), (k, E), (k, E), (E, q)), strict=True)
    tensors = {name: draw(case, name, shape=shape) / 4 for name, shape in shapes}
    return tensors | {"x": draw(case, "x", shape=(B, case.length, E))}


def angles(case: Case):
    """[S, D/2]: how far each pair of numbers is turned."""
    positions = torch.arange(case.length, dtype=torch.float64) + 3
    exponents = torch.arange(case.head_dim // 2, dtype=torch.float64) / (case.head_dim // 2)
    return positions[:, None] / 100**exponents


def on_rank(rank, case: Case) -> dict:
    course, tensors = rank.course, inputs(case)
    E, heads = case.config_heads * case.head_dim, case.config_heads
    config = course.model_config.ModelConfig(7, E, 8, 1, heads, min(heads, case.key))
    module = course.model.SelfAttention(config)
    for name in NAMES:  # as tensor parallelism narrows them
        getattr(module, name).weight = torch.nn.Parameter(tensors[name])
    softmax, seen = course.attention.SoftmaxAttention(), []

    def core(q, k, v):
        seen[:] = [list(x.shape) for x in (q, k, v)]
        return softmax(q, k, v)

    module._modules.pop("core_attention")
    module.core_attention = core
    cos, sin = angles(case).cos(), angles(case).sin()
    rotary = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
    x = tensors["x"]
    if parts := getattr(case, "parts", 0):
        project, whole = module.project, x
        x, module.project = whole.chunk(parts, 1)[0], lambda x: project(whole)
    out = module(x, rotary)
    out.square().sum().backward()
    gradients = {f"gradient of {n}": p.grad for n, p in module.named_parameters()}
    return {"out": out.detach(), "shapes that core_attention gets": seen} | gradients


def expected(case: Case) -> list[dict]:
    tensors, D, S = inputs(case), case.head_dim, case.length
    q_proj, k_proj, v_proj, o_proj = weights = [tensors[name].requires_grad_() for name in NAMES]
    turn = torch.polar(torch.ones_like(angles(case)), angles(case))  # a pair as a complex number

    def turned(x):
        pairs = torch.complex(x[..., : D // 2], x[..., D // 2 :]) * turn
        return torch.cat((pairs.real, pairs.imag), -1)

    out, future = 0, torch.ones(S, S, dtype=torch.bool).triu(1)
    for h in range(case.query):  # a head by itself, with its rows of each matrix
        of, rows = h * case.key // case.query, slice(h * D, (h + 1) * D)
        q = turned(tensors["x"] @ q_proj[rows].T)
        k = turned(tensors["x"] @ k_proj[of * D : (of + 1) * D].T)
        v = tensors["x"] @ v_proj[of * D : (of + 1) * D].T
        p = (q @ k.mT / D**0.5).masked_fill(future, -torch.inf).softmax(-1)
        out = out + p @ v @ o_proj[:, rows].T
    out.square().sum().backward()
    shapes = [[B, heads, S, D] for heads in (case.query, case.key, case.key)]
    results = {"out": out.detach(), "shapes that core_attention gets": shapes}
    gradients = zip(NAMES, (weight.grad for weight in weights), strict=True)
    return [results | {f"gradient of {name}.weight": gradient for name, gradient in gradients}]


def picture(runs):
    rows = {}
    for case, records in runs[:4]:
        _, k, v = records[0].values["shapes that core_attention gets"]
        rows[f"{case.query} query heads, {case.key} of keys"] = (k[1] + v[1]) * k[3] * 2
    return ["bytes of keys and values per token, in bfloat16", bars(rows, "{:3.0f}")]


VERSIONS = """
values_rotated: Values are rotated, too. Positions belong in scores, so only in queries and keys.
    v = v.view(B, S, -1, self.head_dim) => v = rotate(v.view(B, S, -1, self.head_dim), cos, sin)
keys_not_rotated: Keys are not rotated: scores depend on the query's position, not on the distance.
    k = rotate(k.view(B, S, -1, self.head_dim), cos, sin) => k = k.view(B, S, -1, self.head_dim)
nothing_rotated: Neither queries nor keys are rotated: attention does not know positions.
    q = rotate(q.view(B, S, -1, self.head_dim), cos, sin) => q = q.view(B, S, -1, self.head_dim)
    k = rotate(k.view(B, S, -1, self.head_dim), cos, sin) => k = k.view(B, S, -1, self.head_dim)
rotated_after_transpose: Queries and keys are rotated after the transpose: heads as positions.
- q = rotate(q.view(B, S, -1, self.head_dim), cos, sin)
- k = rotate(k.view(B, S, -1, self.head_dim), cos, sin)
+ q = rotate(q.view(B, S, -1, self.head_dim).transpose(1, 2), cos, sin).transpose(1, 2)
+ k = rotate(k.view(B, S, -1, self.head_dim).transpose(1, 2), cos, sin).transpose(1, 2)
viewed_without_transpose: Heads and positions are mixed: view(B, heads, S, D) takes numbers in their
    order in memory, where the positions come first.
- out = self.core_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), *extra)
+ q, k, v = (x.reshape(B, -1, S, self.head_dim) for x in (q, k, v))
+ out = self.core_attention(q, k, v, *extra)
not_transposed_back: The result is reshaped, but not transposed back: heads and positions are mixed.
    transpose(1, 2). =>
keys_repeated: Keys and values are repeated for the query heads. The result is right, but a ring of
    ranks would send Q/K times the bytes.
- v = v.view(B, S, -1, self.head_dim)
+ v = v.view(B, S, -1, self.head_dim)
+ k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
heads_of_the_config: The number of heads is a whole layer's: with tp a rank has fewer. View by -1.
    q.view(B, S, -1, self.head_dim) => q.view(B, S, x.shape[-1] // self.head_dim, self.head_dim)
length_of_x: The number of positions is read off x: with sequence parallelism x is a part, and
    `project` gathers the whole. Read it off q.
    B, S, _ = q.shape => B, S, _ = x.shape
no_output_projection: o_proj is not applied.
    self.o_proj(out.transpose(1, 2).reshape(B, S, -1)) => out.transpose(1, 2).reshape(B, S, -1)
also_right:
def forward(self, x, rotary):
    q, k, v = (t.unflatten(-1, (-1, self.head_dim)) for t in self.project(x))
    q, k = (rotate(t, *rotary[:2]) for t in (q, k))
    out = self.core_attention(*(t.movedim(2, 1) for t in (q, k, v)), *rotary[2:])
    return self.o_proj(torch.cat(out.unbind(1), -1))
"""
