"""Messages of broken plans do not fit together."""

import pytest

from picotron_min.dry_run.messages import kinds_of_ranks, misfit
from picotron_min.dry_run.run import dry_run
from picotron_min.extensions.settings import Layout
from tests.rows import row


@pytest.fixture(scope="module")
def pipeline() -> dict:
    config, _ = row("core: pp=2 m=3 tp=2")
    return {rank: dry_run(config, rank).messages for rank in range(4)}


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("how", ["shape", "missing", "swapped", "collective"])
def test_a_broken_plan_is_named_by_rank_and_action(pipeline, how, rank):
    messages = list(pipeline[rank])
    is_one = [(m.peer is None) == (how == "collective") for m in messages]
    i, j = [i for i, is_one in enumerate(is_one) if is_one][2:4]
    kind, micro_batch, *_ = messages[i].action
    if how == "missing":
        del messages[i]
    elif how == "swapped":
        messages[i], messages[j] = messages[j], messages[i]
    else:
        messages[i] = messages[i]._replace(tensors=("float32[1, 2]",))
    why = misfit(pipeline | {rank: messages})
    assert f"rank {rank} is at" in why and f"{kind.value[-1]}{micro_batch}" in why


def test_kinds_are_all_stages_and_the_ends_of_each_axis():
    layout = Layout(pp=3, dp=4, cp=1, tp=2)
    assert kinds_of_ranks(layout) == [0, 1, 6, 7, 8, 16, 17, 22, 23]
