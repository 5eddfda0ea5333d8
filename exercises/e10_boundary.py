"""10 boundary: two sums a layer forward, and two backward

target: extensions.overlap.boundary:Boundary
train: distributed.tp_size=2

Write what happens at the ends of a sublayer. It begins with x, all of which every rank has, and
with products of x and several weights: gather_multiply. It ends with the sum over all ranks of
what each of them has computed: multiply_scatter. In backward the same two methods serve the other
ends: a sublayer's gradient comes by gather_multiply, and leaves by multiply_scatter, with the
weight gradients as `meanwhile`, to be computed while the sum travels. `whole` and `maximum` return
their argument and send nothing: x is the same on all ranks, and so is its largest number.
A product need not be contiguous. SequenceBoundary inherits the last two methods: let them send only
by `whole` and `start_sum`, which it replaces.
Read: tensor_parallel.py, extensions/overlap/boundary.py, extensions/overlap/linear.py.

? All ranks have x: nothing is to be sent for it. What a rank computes is one term of a sum.
? collectives.start_all_reduce(y, axis), work.wait(), add_products(xs, products).
? start_sum begins an all-reduce of a contiguous y, and returns y and the work. gather_multiply
  returns x and the list of its products. multiply_scatter adds up its products on this rank, begins
  one sum of that, calls meanwhile, and then waits.
! 4 all-reduces of [B, S, E] a layer: each of its 2 sublayers has one forward and one backward. In
  production: `torch.distributed.tensor.parallel.parallelize_module`.
"""

from exercises.boundaries import SEQUENCE, expected, on_rank, order, traffic  # noqa: F401
from exercises.exercise import Case, Dice


def cases(dice: Dice) -> list[Case]:
    sizes = {"batch": 2, "hidden": dice.randint(3, 6), "inner": 4}
    # The last kind inherits the methods that are written here.
    some = (2, 3, "Boundary"), (3, 2, "Boundary"), (2, 4, SEQUENCE)
    return [Case(n, length=S, kind=kind, **sizes) for n, S, kind in some]


MISTAKES = """
not_summed: Products are not summed over the ranks: each continues with its own part.
    y, work = self.start_sum(add_products(xs, products)) => y = add_products(xs, products)
    work.wait() => pass
whole_summed: What all ranks have already is summed once more, forward and backward: it becomes tp
    times too large in each sublayer.
- return x
+ return collectives.all_reduce(x.clone(), self.axis)
own_messages: `start_sum` and `whole` are not called: SequenceBoundary, which replaces them, sends
    the wrong messages.
- x = self.whole(x)
    self.start_sum( => Boundary.start_sum(self,
meanwhile_first: `meanwhile` is called before the sum is started: the ranks below wait for both.
- meanwhile()
    y, work = self => meanwhile(); y, work = self
never_awaited: The result is used without a wait: the sum may not have arrived.
    work.wait() =>
"""
