"""A parameter that is cut along one more axis touches the placement table, and nothing else.

Sharded optimizers and experts will add such cuts. Here the table alone says so: the weights are
initialised, read, saved and loaded, and compared with pieces made by torch.chunk.
"""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from picotron_min.checkpoint import load, parts_of_whole, save
from picotron_min.extensions.settings import Layout, ModelConfig
from picotron_min.initialise import initial_std, initial_weight, initialise
from picotron_min.mesh import Axes, build_axes
from picotron_min.placement import Cut, Placement, part, placements
from picotron_min.runtime.folders import complete_or_absent

CPU = torch.device("cpu")
# 5 rows over 2 tp ranks are 3 and 2, over 4 dp ranks then 1, 1, 1, 0 and 1, 1, 0, 0.
MODEL = ModelConfig(5, 8, 12, 2, num_attention_heads=4, num_key_value_heads=2)
SHAPES = MODEL.parameter_shapes()
MOMENT = "optimizer.exp_avg."
SEED = 7

TABLES: dict[str, Callable[[tuple[Cut, ...]], tuple[Cut, ...]]] = {
    "as it is": lambda cuts: cuts,
    "same dim": lambda cuts: (*cuts, Cut("dp", cuts[0].dim)),
    "other dim": lambda cuts: (*cuts, Cut("dp", 1 - cuts[0].dim)),
    "dp before tp": lambda cuts: (Cut("dp", cuts[0].dim), *cuts),
    "owner": lambda cuts: (Cut("dp", 0, owner=1), *cuts),
}


def table_of(which: str, layout: Layout) -> dict[str, Placement]:
    """The placement table with every matrix cut once more; norms stay whole."""
    table = placements(SHAPES, layout, tied=False)
    change = TABLES[which]
    return {n: p._replace(cuts=change(p.cuts)) if p.cuts else p for n, p in table.items()}


def whole_weights() -> dict[str, Tensor]:
    std = partial(initial_std, num_hidden_layers=MODEL.num_hidden_layers)
    return {name: initial_weight(name, shape, SEED, std(name)) for name, shape in SHAPES.items()}


def whole_moments() -> dict[str, Tensor]:
    return {name: weight.cos() for name, weight in whole_weights().items()}


def allocate(table: dict[str, Placement], axes: Axes) -> dict[str, nn.Parameter]:
    """This rank's parts, all nan; a parameter that another rank owns is absent."""
    parameters = {}
    for name, placement in table.items():
        if all(cut.owner in (None, axes.ranks[cut.axis]) for cut in placement.cuts):
            slices = part(SHAPES[name], placement.cuts, axes.ranks, axes.sizes)
            mine = torch.full([s.stop - s.start for s in slices], math.nan)
            parameters[name] = nn.Parameter(mine)
    return parameters


def assert_parts_of(
    whole: dict[str, Tensor],
    parameters: dict[str, nn.Parameter],
    table: dict[str, Placement],
    axes: Axes,
) -> None:
    for name, parameter in parameters.items():
        expected = whole[name]
        for cut in table[name].cuts:
            if cut.owner is None:
                none = expected.narrow(cut.dim, 0, 0)  # torch.chunk may make fewer than asked for
                pieces = [*expected.chunk(axes.sizes[cut.axis], cut.dim), *[none] * 8]
                expected = pieces[axes.ranks[cut.axis]]
        assert torch.equal(parameter, expected), name


def build(layout: Layout, which: str):
    axes = build_axes(CPU, layout)
    table = table_of(which, layout)
    weights, moments = allocate(table, axes), allocate(table, axes)
    tensors = {name: weight.data for name, weight in weights.items()}
    tensors |= {MOMENT + name: moment.data for name, moment in moments.items()}
    declare = partial(parts_of_whole, shapes=SHAPES, placements=table, axes=axes)
    return axes, table, weights, moments, tensors, declare


def fill_and_save(folder: Path, layout: Layout, which: str) -> set[str]:
    axes, table, weights, moments, tensors, declare = build(layout, which)
    initialise(weights, MODEL, SEED, table, axes)
    assert_parts_of(whole_weights(), weights, table, axes)
    load(folder, declare({name: moment.data for name, moment in moments.items()}))
    assert_parts_of(whole_moments(), moments, table, axes)
    complete_or_absent(folder / "step-00000001", lambda partial: save(partial, declare(tensors)))
    return set(weights)


def load_and_compare(folder: Path, layout: Layout, which: str) -> None:
    axes, table, weights, moments, tensors, declare = build(layout, which)
    load(folder / "step-00000001", declare(tensors))
    assert_parts_of(whole_weights(), weights, table, axes)
    assert_parts_of(whole_moments(), moments, table, axes)


@pytest.mark.parametrize(
    "saved,loaded",
    [
        ("same dim", "other dim"),
        ("other dim", "dp before tp"),
        ("dp before tp", "owner"),
        ("owner", "same dim"),
        ("as it is", "owner"),
    ],
)
def test_a_second_cut_needs_nothing_but_a_change_of_the_table(pool, tmp_path, saved, loaded):
    save_file(whole_moments(), tmp_path / "moments.safetensors")
    keys = pool.run(8, fill_and_save, tmp_path, Layout(dp=4, tp=2), saved)
    assert set().union(*keys) == SHAPES.keys()
    if saved == "owner":  # ranks 2 and 3 are at dp 1
        norms = {name for name, shape in SHAPES.items() if len(shape) == 1}
        assert keys[2] == keys[3] == SHAPES.keys() and keys[0] == keys[7] == norms
    pool.run(1, load_and_compare, tmp_path, Layout(), "as it is")
    pool.run(6, load_and_compare, tmp_path, Layout(dp=3, tp=2), loaded)
