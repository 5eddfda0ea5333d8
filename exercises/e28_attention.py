"""28 attention: heads are read off the tensors

target: model:SelfAttention.forward

Write attention around its core. x is [B, S, E]; with sequence parallelism a rank has only a part of
the positions. self.project(x) gives q [B, S, Q D], k and v [B, S, K D] of all S. View them as heads
of self.head_dim numbers, rotate queries and keys by `rotate`, which takes [B, S, heads, D] and cos,
sin (`rotary` begins with these; what follows, if anything, is for the core after q, k and v), and
call self.core_attention with q [B, Q, S, D], k and v [B, K, S, D] in their own dtype: it shares key
heads among query heads, so do not repeat them. Put its result [B, Q, S, D] back to [B, S, Q D], and
return self.o_proj of it.
How many heads there are must be read off the tensors: with tensor parallelism a rank has fewer than
the config has.
Read: model.py.

? Project, view as heads, rotate two of three, attend, flatten the heads, project.
? self.project, view(B, S, -1, self.head_dim), rotate(x, cos, sin), transpose(1, 2), reshape,
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
NAMES, EXTRA = ("q_proj", "k_proj", "v_proj", "o_proj"), ["documents", "windows"]
GOT = [f"{what} of core_attention" for what in "qkv"]
GOT.append("what core_attention gets after q, k and v")
OF_CORE = "gradient of what core_attention returns"
DTYPES = "dtypes of q, k and v in each call", "dtype of out in each call"


def cases(dice: Dice) -> list[Case]:
    sizes = {"head_dim": 4, "config_heads": 4}
    heads = [(4, 4), (4, 2), (4, 1), (2, 1)]  # the last is what a rank of two has
    some = [
        Case(1, query=q, key=k, length=dice.randint(5, 7), extra=n % 3, calls=1 + n % 2, **sizes)
        for n, (q, k) in enumerate(heads)
    ]
    sizes |= {"extra": 1, "calls": 1}
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
    softmax, results, zeros = course.attention.SoftmaxAttention(), {}, []
    dtypes = {name: [] for name in DTYPES}

    def fill(dtype):
        for name in NAMES:  # as tensor parallelism narrows them
            getattr(module, name).weight = torch.nn.Parameter(tensors[name].to(dtype))
        results["calls of project"] = 0

    def core(q, k, v, *extra):
        given = (*(x.detach().double() for x in (q, k, v)), list(extra))
        results.update(zip(GOT, given, strict=True))
        out = softmax(q, k, v)
        dtypes[DTYPES[0]].append([str(x.dtype) for x in (q, k, v)])
        zeros.append(torch.zeros_like(out, requires_grad=True))  # gets the gradient of the sum
        return out + zeros[-1]

    module._modules.pop("core_attention")
    module.core_attention = core
    cos, sin = angles(case).cos(), angles(case).sin()
    rotary = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
    own_project, whole, parts = module.project, tensors["x"], getattr(case, "parts", 1)

    def project(x):
        results["calls of project"] += 1
        return own_project(whole if parts > 1 else x)

    module.project = project
    if case.calls > 1:  # before: other positions, and zeros, which nothing rounds
        fill(torch.bfloat16)
        out = module(0 * whole[:, 1:].bfloat16(), (*(x[1:] for x in rotary), "others"))
        dtypes[DTYPES[1]].append(str(out.dtype))
    fill(torch.float64)
    out = module(whole.chunk(parts, 1)[0], (*rotary, *EXTRA[: case.extra]))
    dtypes[DTYPES[1]].append(str(out.dtype))
    out.square().sum().backward()
    gradients = {f"gradient of {n}": p.grad for n, p in module.named_parameters()}
    gradients[OF_CORE] = zeros[-1].grad if zeros else None
    return results | dtypes | {"out": out.detach()} | gradients


def expected(case: Case) -> list[dict]:
    tensors, D, S = inputs(case), case.head_dim, case.length
    q_proj, k_proj, v_proj, o_proj = weights = [tensors[name].requires_grad_() for name in NAMES]
    turn = torch.polar(torch.ones_like(angles(case)), angles(case))  # a pair as a complex number

    def turned(x):
        pairs = torch.complex(x[..., : D // 2], x[..., D // 2 :]) * turn
        return torch.cat((pairs.real, pairs.imag), -1)

    x, future = tensors["x"], torch.ones(S, S, dtype=torch.bool).triu(1)
    q, k, v = ([x @ rows.T for rows in weight.split(D)] for weight in (q_proj, k_proj, v_proj))
    q, k = ([turned(head) for head in heads] for heads in (q, k))
    out, of_heads = 0, []
    for h, rows in enumerate(o_proj.split(D, 1)):  # a head by itself
        of = h * case.key // case.query
        p = (q[h] @ k[of].mT / D**0.5).masked_fill(future, -torch.inf).softmax(-1)
        of_heads.append(p @ v[of])
        of_heads[-1].retain_grad()
        out = out + of_heads[-1] @ rows.T
    out.square().sum().backward()
    given = [torch.stack(heads, 1).detach() for heads in (q, k, v)]
    results = dict(zip(GOT, (*given, EXTRA[: case.extra]), strict=True)) | {"calls of project": 1}
    gradients = {f"gradient of {n}.weight": w.grad for n, w in zip(NAMES, weights, strict=True)}
    gradients[OF_CORE] = torch.stack([head.grad for head in of_heads], 1)
    each = ["torch.bfloat16", "torch.float64"][-case.calls :]
    dtypes = dict(zip(DTYPES, ([[dtype] * 3 for dtype in each], each), strict=True))
    return [results | dtypes | {"out": out.detach()} | gradients]


def picture(runs):
    rows = {}
    for case, records in runs[:4]:
        k, v = (records[0].values[name] for name in GOT[1:3])
        size = (k.shape[1] + v.shape[1]) * k.shape[3] * 2
        rows[f"{case.query} query heads, {case.key} of keys"] = size
    return ["bytes of keys and values per token, in bfloat16", bars(rows, "{:3.0f}")]


VERSIONS = """
values_rotated: Values are rotated, too. Positions belong in scores, so only in queries and keys.
    v = v.view(B, S, -1, self.head_dim) => v = rotate(v.view(B, S, -1, self.head_dim), cos, sin)
keys_not_rotated: Keys are not rotated: scores depend on the query's position, not on the distance.
    k = rotate(k.view(B, S, -1, self.head_dim), cos, sin) => k = k.view(B, S, -1, self.head_dim)
cos_and_sin_swapped: cos and sin are swapped: `rotary` begins with cos.
    cos, sin, *extra => sin, cos, *extra
viewed_without_transpose: Heads and positions are mixed: view(B, heads, S, D) takes numbers in their
    order in memory, where the positions come first.
- out = self.core_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), *extra)
+ q, k, v = (x.reshape(B, -1, S, self.head_dim) for x in (q, k, v))
+ out = self.core_attention(q, k, v, *extra)
not_transposed_back: The result is reshaped, but not transposed back: heads and positions are mixed.
    transpose(1, 2). =>
heads_put_last: The result is put back as [B, S, D, Q]: the numbers of a head belong together.
    out.transpose(1, 2).reshape => out.permute(0, 2, 3, 1).reshape
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
scaled_twice: Queries are scaled before the core, which divides scores by sqrt(D) itself.
    out = self.core_attention(q => out = self.core_attention(self.head_dim**-0.5 * q
numbers_before_heads: The view is [B, S, D, heads]: a head gets numbers of all heads.
- q = rotate(q.view(B, S, -1, self.head_dim), cos, sin)
- k = rotate(k.view(B, S, -1, self.head_dim), cos, sin)
- v = v.view(B, S, -1, self.head_dim)
+ q, k, v = (x.view(B, S, self.head_dim, -1).mT for x in (q, k, v))
+ q, k = (rotate(x, cos, sin) for x in (q, k))
projections_called: q_proj, k_proj and v_proj are called, not self.project, which tensor parallelism
    and other extensions replace.
    self.project(x) => self.q_proj(x), self.k_proj(x), self.v_proj(x)
no_output_projection: o_proj is not applied.
    self.o_proj(out.transpose(1, 2).reshape(B, S, -1)) => out.transpose(1, 2).reshape(B, S, -1)
also_right:
def forward(self, x, rotary):
    q, k, v = (t.unflatten(-1, (-1, self.head_dim)) for t in self.project(x))
    q, k = (rotate(t, *rotary[:2]) for t in (q, k))
    out = self.core_attention(*(t.movedim(2, 1) for t in (q, k, v)), *rotary[2:])
    return self.o_proj(torch.cat(out.unbind(1), -1))
"""
