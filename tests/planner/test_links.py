"""Which ranks communicate over an axis, as the planner lists them without a mesh."""

from typing import get_args

import pytest

from picotron_min.extensions.settings import Layout
from picotron_min.planner.links import ranks_of_axis
from picotron_min.runtime.metrics import AxisName
from tests.core.test_collectives import rows_by_hand

LAYOUTS = [Layout(2, 2, 1, 2), Layout(1, 2, 2, 2, ep=4, etp=2), Layout(4, 1, 2, 1, ep=2)]


@pytest.mark.quick
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_rows_of_ranks_are_those_of_the_mesh(layout):
    rows = rows_by_hand(layout)
    assert rows.keys() == {*get_args(AxisName)}
    for axis, of_ranks in rows.items():
        assert of_ranks == [ranks_of_axis(layout, axis, rank) for rank in range(len(of_ranks))]
