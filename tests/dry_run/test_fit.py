"""Messages of ranks fit together, and those of broken plans do not."""

import pytest

from picotron_min.dry_run.fit import kinds_of_ranks, misfit
from picotron_min.dry_run.run import dry_run
from picotron_min.extensions.settings import Layout
from tests.rows import lines, row

LAYOUTS = """
core: pp=3 m=3 model=tied
core: dp=2 cp=2 tp=2 sp
experts: dp=4 tp=2 ep=2 etp=2 model=softmax
schedules: pp=2 engine=zb_v m=2 model=tied
sharding: dp=3 sharding=layerwise muon
"""


@pytest.mark.parametrize("text", lines(LAYOUTS), ids=str)
def test_all_kinds_of_ranks_fit_together(text):
    config, _ = row(text)
    runs = {rank: dry_run(config, rank).messages for rank in kinds_of_ranks(config.layout)}
    assert misfit(runs) is None


@pytest.fixture(scope="module")
def pipeline() -> dict:
    config, _ = row("core: pp=2 m=3 tp=2")
    return {rank: dry_run(config, rank).messages for rank in range(4)}


def broken(messages: list, how: str, i: int) -> list:
    one, later = messages[i], next(j for j in range(i + 1, 99) if messages[j].peer is not None)
    before, after = messages[:i], messages[i + 1 :]
    if how == "shape":
        shape = tuple(((1, 2), dtype) for _, dtype in one.tensors)
        return [*before, one._replace(tensors=shape), *after]
    if how == "missing":
        return before + after
    return [*before, messages[later], *messages[i + 1 : later], one, *messages[later + 1 :]]


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("how", ["shape", "missing", "swapped"])
def test_a_broken_plan_is_named_by_rank_and_action(pipeline, how, rank):
    messages = pipeline[rank]
    i = [i for i, message in enumerate(messages) if message.peer is not None][2]
    why = misfit(pipeline | {rank: broken(messages, how, i)})
    assert f"rank {rank} is at" in why and f"{messages[i].action}".split()[1] in why


def test_a_collective_needs_all_ranks_alike(pipeline):
    messages = list(pipeline[1])
    i = next(i for i, message in enumerate(messages) if message.kind == "allreduce")
    wide = tuple((shape, "float64") for shape, _ in messages[i].tensors)
    messages[i] = messages[i]._replace(tensors=wide)
    assert "ranks [0, 1]" in misfit(pipeline | {1: messages})


def test_kinds_are_all_stages_and_the_ends_of_each_axis():
    layout = Layout(pp=3, dp=4, cp=1, tp=2)
    assert kinds_of_ranks(layout) == [0, 1, 6, 7, 8, 16, 17, 22, 23]
