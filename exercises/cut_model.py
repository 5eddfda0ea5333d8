"""Made-up or real gradients of a cut model: a placement table sums them, and counts each once."""

from torch import Tensor

from exercises.ranks import Rank
from picotron_min.mesh import Axes


def add_up(rank: Rank, axes: Axes, table: dict, gradients: dict[str, Tensor]) -> None:
    """Sums each rank's part of every gradient over ranks, in place."""
    for name, gradient in gradients.items():
        for axis in table[name].sums:
            rank.course.collectives.all_reduce(gradient, axes[axis])


def put_together(
    rank: Rank, axes: Axes, table: dict, shapes: dict, parts: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Whole tensors, as the gradient norm counts them: of each part the first of its copies."""
    course, results = rank.course, {}
    for name, mine in parts.items():
        whole = mine.new_zeros(shapes[name])
        if all(axes.ranks[axis] == 0 for axis in table[name].copies):
            place = course.placement.part(shapes[name], table[name].cuts, axes.ranks, axes.sizes)
            whole[place] = mine
        results[name] = course.collectives.all_reduce(whole, axes.world)
    return results
