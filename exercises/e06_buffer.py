"""06 buffer: one buffer, many views

target: data_parallel:Bucket.__init__
train: distributed.dp_size=2 distributed.tp_size=1

Keep the names of the parameters in `self.names`. Make one flat tensor of zeros, `self.gradients`,
with room for the gradients of all of them, in their order, of their dtype and on their device. Let
`grad` of each parameter be a view of its part, in the shape of the parameter.
Read: data_parallel.py.

? One tensor has the memory; each parameter.grad is a view of a part.
? parameter.numel(), new_zeros, split, view_as.
? The sizes in a list. One tensor of zeros, as long as their sum, by new_zeros of any of the
  parameters. split(sizes) gives flat views; each becomes a parameter's grad, in the parameter's
  shape.
! 4 bytes a parameter in float32, once: no gradient exists twice. In production: DDP's
  `gradient_as_bucket_view`.
"""

import math

import torch

from exercises.compare import SumOf
from exercises.exercise import Case, Dice, draw
from exercises.memory import storage_bytes


def cases(dice: Dice) -> list[Case]:
    shapes = [tuple(dice.randint(2, 4) for _ in range(dice.randint(1, 2))) for _ in range(3)]
    # Shapes of one and of two dims: an offset that counts rows is too small.
    sizes = (1, [(2, 3), (4,)]), (2, shapes), (3, [*shapes, (1, 5)])
    return [Case(ranks, shapes=of_parameters) for ranks, of_parameters in sizes]


def name(i: int) -> str:
    return f"p{9 - i}"  # in no alphabetical order


def gradient(case: Case, rank: int, i: int):
    return draw(case, "gradient", rank, i, shape=case.shapes[i])


def on_rank(rank, case: Case) -> dict:
    weights = [torch.nn.Parameter(draw(case, i, shape=s)) for i, s in enumerate(case.shapes)]
    parameters = {name(i): weight for i, weight in enumerate(weights)}
    bucket = rank.course.data_parallel.Bucket(parameters)
    # On no device, so that a device that is written down is seen.
    elsewhere = {"p": torch.nn.Parameter(torch.empty(2, device="meta"))}
    device = rank.course.data_parallel.Bucket(elsewhere).gradients.device
    terms = [(weight * gradient(case, rank.number, i)).sum() for i, weight in enumerate(weights)]
    sum(terms).backward()  # adds to the gradients that are there
    rank.course.collectives.all_reduce(bucket.gradients, rank.axis("dp"))
    gradients = {f"{of}.grad": p.grad for of, p in parameters.items()}
    found = {"self.names": [*bucket.names], "self.gradients": bucket.gradients}
    found["device of the gradients of parameters on `meta`"] = str(device)
    return {**gradients, **found, "bytes": storage_bytes([bucket.gradients, *gradients.values()])}


def expected(case: Case) -> list[dict]:
    parts = [[gradient(case, r, i) for r in range(case.ranks)] for i in range(len(case.shapes))]
    right = {f"{name(i)}.grad": SumOf(part) for i, part in enumerate(parts)}
    right["self.names"] = [name(i) for i in range(len(case.shapes))]
    right["self.gradients"] = torch.cat([torch.stack(part).sum(0).flatten() for part in parts])
    right["device of the gradients of parameters on `meta`"] = "meta"
    return [right] * case.ranks


def memory(case: Case, rank: int, record) -> str | None:
    needed = 8 * sum(math.prod(shape) for shape in case.shapes)
    if (found := record.values["bytes"]) != needed:
        return f"buffer and gradients take {found} bytes; in one memory, {needed} are enough"


MISTAKES = """
copies: grad is a copy of its part of the buffer: gradients are there twice, and the sum over the
    ranks, which is in the buffer, never reaches them.
    view.view_as(parameter) => view.view_as(parameter).clone()
overlap: All parts begin at the start of the buffer: gradients of all parameters are added up there.
    views = self.gradients.split(sizes) => views = [self.gradients[:size] for size in sizes]
other_device: The buffer is on the CPU, and not on the device of the parameters.
    new_zeros(sum(sizes)) => new_zeros(sum(sizes), device="cpu")
ones: The buffer does not begin at zero: backward adds to what is there.
    new_zeros => new_ones
float32_buffer: The buffer is in float32, and what each parameter gets is a copy of its part in
    another dtype: the sum over the ranks never reaches it.
    new_zeros(sum(sizes)) => new_zeros(sum(sizes), dtype=torch.float32)
    view.view_as(parameter) => view.view_as(parameter).to(parameter.dtype)
"""
