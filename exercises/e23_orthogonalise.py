"""23 orthogonalise: all directions of an update get about the same length

target: extensions.optimizers.muon:orthogonalise
train: training.optimizer="muon"

Change the singular values of a matrix, and nothing else: divide it by its norm (Frobenius, at least
1e-7), so that none is above 1, and then apply s <- a s + b s^3 + c s^5 to them five times, with
a = 3.4445, b = -4.7750, c = 2.0315. No decomposition is needed: where x has s, (x x^T) x has s^3.
Take the smaller of both products, x x^T of a wide matrix, so that it costs at most
5 (4 k^2 l + 2 k^3) FLOPs for a matrix of k x l, k <= l; and keep shape and dtype.
Read: extensions/optimizers/muon.py.

? Transpose a tall matrix; normalise; apply the polynomial five times; undo the transpose.
? Tensor.T, Tensor.norm, Tensor.clamp(min=1e-7), @, torch.addmm(x, m, y, beta=, alpha=).
? Transpose a tall matrix first, and its result at the end. Divide by the norm. Five times: with g =
  x x^T, b (x x^T) x + c (x x^T)^2 x is (b g + c g g) x, two products beside g's; add a x.
! 15 products of matrices bring singular values from 0.002 .. 1 to 0.7 .. 1.2. In production:
  `torch.optim.Muon`.
"""

import torch
from torch.utils.flop_counter import FlopCounterMode

from exercises.exercise import Case, Dice, draw
from exercises.pictures import bars

A, B, C = 3.4445, -4.7750, 2.0315


def cases(dice: Dice) -> list[Case]:
    k = dice.randint(2, 4)
    shapes = [(k, k + dice.randint(2, 4)), (k + dice.randint(2, 4), k), (5, 5)]
    some = [Case(1, shape=shape, scale=scale) for shape in shapes for scale in (1, 1e-3)]
    some += [Case(1, shape=(8, 12), scale=100), Case(1, shape=(3, 4), scale=0)]
    some.append(Case(1, shape=(3, 4), scale=1e-9))  # a norm below 1e-7, but not 0
    rounded = [Case(1, shape=shape, scale=1, dtype="bfloat16") for shape in ((3, 4), (4, 3))]
    return [*some, *rounded]


def update_of(case: Case):
    """Some directions matter much more than others, as in a gradient."""
    u, _, v = torch.linalg.svd(draw(case, "update", shape=case.shape), full_matrices=False)
    sizes = 4.0 ** -torch.arange(u.shape[1], dtype=torch.float64)
    return case.scale * (u * sizes) @ v


def on_rank(rank, case: Case) -> dict:
    orthogonalise, update = rank.course.muon.orthogonalise, update_of(case)
    if hasattr(case, "dtype"):
        return {"dtype": str(orthogonalise(update.bfloat16()).dtype)}
    given = update.clone()
    with FlopCounterMode(display=False) as counter:
        direction = orthogonalise(given)
    short, long = sorted(case.shape)  # k and l
    formula = 5 * (4 * short * short * long + 2 * short**3)
    results = {"direction": direction, "the update afterwards": given}
    results["FLOPs above 5 (4 k^2 l + 2 k^3)"] = max(0, counter.get_total_flops() - formula)
    return results


def expected(case: Case) -> list[dict]:
    if hasattr(case, "dtype"):
        return [{"dtype": "torch.bfloat16"}]
    update = update_of(case)
    u, sizes, v = torch.linalg.svd(update, full_matrices=False)
    sizes /= max(float(sizes.norm()), 1e-7)
    for _ in range(5):
        sizes = A * sizes + B * sizes**3 + C * sizes**5
    results = {"direction": (u * sizes) @ v, "the update afterwards": update}
    return [results | {"FLOPs above 5 (4 k^2 l + 2 k^3)": 0}]


def picture(runs):
    case, records = runs[6]
    yield "The singular values, the largest first"
    update, direction = update_of(case), records[0].values["direction"]
    for name, matrix in {"before": update / update.norm(), "after": direction}.items():
        rows = {f"{name} {i}": s for i, s in enumerate(torch.linalg.svdvals(matrix).tolist())}
        yield from ["", bars(rows, "{:.5f}")]


VERSIONS = """
not_normalised: The matrix is not divided by its norm: singular values above 1 grow without bound,
    and small ones stay small.
    x = x / x.norm().clamp(min=1e-7) => pass
zero_divided_by_zero: A matrix of zeros becomes NaN: its norm is 0. Divide by at least 1e-7.
    .clamp(min=1e-7) =>
added_to_the_norm: 1e-7 is added to the norm, and should be its lower bound: a small update is
    divided by too much.
    x.norm().clamp(min=1e-7) => (x.norm() + 1e-7)
lower_bound_too_small: The lower bound of the norm is below 1e-7: the smallest updates, whose
    directions mean little, become as long as all others.
    min=1e-7 => min=1e-12
largest_singular_value: It is divided by its largest singular value, not by its norm: that needs a
    decomposition.
    x.norm() => torch.linalg.matrix_norm(x.double(), 2)
divided_in_place: The division is in place: it changes the caller's update.
    x = x / x => x /= x
rows_normalised: Each row is divided by its own norm: that changes the directions.
    x.norm() => x.norm(dim=1, keepdim=True)
gram_computed_once: x x^T is computed only once, not for each new x.
    gram = x @ x.T => gram = gram if _ else x @ x.T
normalised_each_time: It is divided by its norm in every iteration, not only before the first:
    singular values near 1 cannot stay there.
    gram = x @ x.T => x = x / x.norm().clamp(min=1e-7); gram = x @ x.T
larger_product: Of a tall matrix the larger of both products is taken: right, but with more FLOPs.
    update.shape[0] > update.shape[1] => False
wide_turned: Wide matrices are transposed, and tall ones are not: right, but with more FLOPs.
    > update => < update
six_times: There are six iterations, not five.
    range(5) => range(6)
four_times: There are four iterations, not five: small singular values are still small.
    range(5) => range(4)
powers_of_x: x is multiplied by x x^T twice: right, but (x x^T)^2 needs fewer FLOPs.
- x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
+ x = a * x + gram @ (b * x + c * gram @ x)
powers_of_elements: x**3 and x**5 are powers of elements: they change the directions, too.
- gram = x @ x.T
- x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
+ x = a * x + b * x**3 + c * x**5
all_exactly_one: All singular values become 1: it computes U V^T, not the polynomial of U S V^T, and
    needs a decomposition.
- for _ in range(5):
-     gram = x @ x.T
-     x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
+ u, _, v = torch.linalg.svd(x.double(), full_matrices=False)
+ x = (u @ v).to(x.dtype)
element_by_element: gram * gram multiplies elements; s^5 needs the product of matrices, gram @ gram.
- x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
+ x = a * x + (b * gram + c * gram * gram) @ x
without_the_fifth_power: The term with s^5 is missing.
    torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a => gram, x, beta=a, alpha=b
added_to_x: x + a x + ... instead of a x + ...: the polynomial replaces x, it is no correction.
    beta=a => beta=1 + a
normalised_only_within: It is divided by its norm in every iteration, not once before the first:
    singular values near 1 cannot stay there.
    x = x / x.norm().clamp(min=1e-7) => pass
    gram = x @ x.T => x = x / x.norm().clamp(min=1e-7); gram = x @ x.T
also_right:
def orthogonalise(update):
    if update.shape[0] > update.shape[1]:
        return orthogonalise(update.T).T
    x = update / max(update.norm(), 1e-7)
    for _ in range(5):
        g = x @ x.T
        x = 3.4445 * x + (2.0315 * (g @ g) - 4.7750 * g) @ x
    return x
"""
