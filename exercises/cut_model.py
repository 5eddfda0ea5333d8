"""Made-up or real gradients of a cut model, put together: a placement table sums them."""

from torch import Tensor

from exercises.ranks import Rank
from picotron_min.mesh import Axes


def put_together(
    rank: Rank, axes: Axes, table: dict, shapes: dict, gradients: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Whole gradients: each part is summed over ranks, and counts once, as the table has it."""
    course, results = rank.course, {}
    for name, gradient in gradients.items():
        for axis in table[name].sums:
            course.collectives.all_reduce(gradient, axes[axis])
        whole = gradient.new_zeros(shapes[name])
        if all(axes.ranks[axis] == 0 for axis in table[name].copies):
            place = course.placement.part(shapes[name], table[name].cuts, axes.ranks, axes.sizes)
            whole[place] = gradient
        results[f"gradient of {name}"] = course.collectives.all_reduce(whole, axes.world)
    return results
