"""03 start: initial weights depend on the seed and the name alone

target: initialise:initialise
train: distributed.tp_size=2 distributed.dp_size=1

Fill parameters with their initial weights, in place. For each: draw the whole matrix, whatever the
layout is, and copy this rank's part. `initial_weight` draws a matrix from (name, shape, seed,
std); `part` gives the slices of a rank, from the cuts in the placement table. The cuts are
`placements[name].owned`; axes.ranks has this rank's place on each axis, axes.sizes their sizes.
Read: initialise.py, mesh.py, `part` in placement.py.

? Draw all of the matrix on every rank, then take a part: drawing the part alone would give all
  ranks the same numbers.
? model_config.parameter_shapes(), initial_std(name, model_config.num_hidden_layers),
  initial_weight, part(shape, cuts, rank, size), parameter.data.copy_.
? For each name: its whole shape, its std, the whole weight. Then the slices that `part` gives for
  this shape, the parameter's cuts, axes.ranks and axes.sizes; copy whole[slices].
! With equal parts on 2 tp ranks, a matrix has half of its rank, for ever: both get the same
  gradients. In production: `torch.distributed.tensor` draws so, from an offset.
"""

import torch

from exercises.exercise import Case, Dice
from picotron_min.extensions.settings import ModelConfig
from picotron_min.initialise import initial_std, initial_weight

DIMS = dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), 0)
DIMS |= {"embed_tokens": 0, "lm_head": 0, "o_proj": 1, "down_proj": 1}


def cases(dice: Dice) -> list[Case]:
    vocab = dice.randrange(21, 40, 4)  # 21 / 4: 6, 6, 6, 3, as torch.chunk, not 6, 5, 5, 5
    seeds = {"weights_seed": dice.randint(1, 99)}
    sizes = (1, 1), (2, 1), (4, 1), (1, 2), (2, 2)
    return [Case(tp * dp, tp=tp, dp=dp, vocab=vocab, **seeds) for tp, dp in sizes]


def shape_of(case: Case):
    return ModelConfig(case.vocab, 16, 24, 2, 4, 4)


def names_of(case: Case) -> list[str]:
    """All but the embedding, as on a later stage of a pipeline."""
    return list(shape_of(case).parameter_shapes())[1:]


def part_of(name: str, whole, case: Case, tp: int, dp: int):
    """What a rank owns: of matrices its part over tp, and of that its rows over dp."""
    if (dim := DIMS.get(name.split(".")[-2])) is None:
        return whole
    return whole.chunk(case.tp, dim)[tp].chunk(case.dp)[dp]


def on_rank(rank, case: Case) -> dict:
    layout, config = rank.course.settings.Layout(dp=case.dp, tp=case.tp), shape_of(case)
    shapes, axes, placement = config.parameter_shapes(), rank.axes(layout), rank.course.placement
    table = placement.placements(shapes, layout, tied=False)
    for name, row in table.items():
        if row.cuts:  # the optimizer has less
            table[name] = row._replace(further=(placement.Cut("dp", 0),))
    # Zeros: what is not filled is seen.
    parameters = {}
    for name in names_of(case):
        mine = part_of(name, torch.empty(shapes[name]), case, axes.tp.rank, axes.dp.rank)
        parameters[name] = torch.nn.Parameter(torch.zeros(mine.shape))
    # Parameters are filled in place: their memory stays where it is.
    before = {name: parameter.data_ptr() for name, parameter in parameters.items()}
    rank.course.initialise.initialise(parameters, config, case.weights_seed, table, axes)
    moved = [name for name, parameter in parameters.items() if parameter.data_ptr() != before[name]]
    return {"in new memory": moved} | {name: p.detach() for name, p in parameters.items()}


def expected(case: Case) -> list[dict]:
    shapes, names, seed = shape_of(case).parameter_shapes(), names_of(case), case.weights_seed
    whole = {n: initial_weight(n, shapes[n], seed, initial_std(n, 2)) for n in names}
    ranks = [divmod(rank, case.tp) for rank in range(case.ranks)]
    parts = [{n: part_of(n, whole[n], case, tp, dp) for n in names} for dp, tp in ranks]
    return [{"in new memory": []} | mine for mine in parts]


MISTAKES = """
same_part_drawn: Each rank draws its own part, all with the same seed: they draw the same numbers,
    and will stay equal for ever.
    shapes[name], seed => tuple(parameter.shape), seed
    whole[mine] => whole
first_part_taken: Every rank takes the part of rank 0.
    axes.ranks, axes.sizes => dict.fromkeys(axes.ranks, 0), axes.sizes
seed_plus_rank: The seed depends on the tp rank: parts are not of one matrix, and layouts differ.
    shapes[name], seed => shapes[name], seed + axes.tp.rank
seed_plus_index: The seed depends on the place among this rank's parameters: a pipeline stage counts
    others before a parameter, and starts with other weights. The name is enough.
    shapes[name], seed, std) => shapes[name], seed + list(parameters).index(name), std)
new_memory: Parameters get new tensors, and are not filled in place: whatever holds the old ones,
    such as a buffer or an optimizer, keeps what was there.
    parameter.data.copy_(whole[mine]) => parameter.data = whole[mine].clone()
"""
