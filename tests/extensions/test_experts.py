"""Mixtures of experts: N ranks train the same model as one rank, in float64 with SGD."""

import functools
import itertools
import random
from unittest import mock

import pytest
import torch

from picotron_min.extensions.experts import router
from picotron_min.extensions.settings import ModelConfig
from picotron_min.runtime.config import Config
from tests.assembled import GLOBAL_BATCH, Run, assert_same, make_config, train_briefly, whole_run
from tests.conftest import has_turn
from tests.pool import RankFailed

SHAPE = ModelConfig(
    61, 32, 48, 8, 8, 8, num_local_experts=8, num_experts_per_tok=2, moe_intermediate_size=16
)
MODELS = {
    "softmax": SHAPE,
    "gated": SHAPE.override(
        n_shared_experts=1, moe_shared_expert_gate=True, mlp_only_layers=(1,), norm_topk_prob=False
    ),
    "sigmoid": SHAPE.override(
        scoring_func="sigmoid",
        mlp_only_layers=(0,),
        n_shared_experts=2,
        n_group=4,
        topk_group=2,
        num_experts_per_tok=3,
        routed_scaling_factor=2.5,
        tie_word_embeddings=True,
    ),
}
MODELS["depths"] = MODELS["sigmoid"].override(num_nextn_predict_layers=1)
# Which losses are on, and for which one-rank run: see `reference`.
SCOPES = {
    "sequence": {"moe_seq_aux_loss_coeff": 0.3, "moe_z_loss_coeff": 0.01},
    "micro-batch": {"moe_seq_aux_loss_coeff": 0.0, "moe_aux_loss_coeff": 0.3},
    "global": {"moe_seq_aux_loss_coeff": 0.1, "moe_global_aux_loss_coeff": 0.3},
}
CAPACITIES = {
    "probs": {"moe_expert_capacity_factor": 0.7},
    "position": {"moe_expert_capacity_factor": 0.7, "moe_token_drop_policy": "position"},
}
FORCED = {"forced": {"moe_router_force_load_balancing": True}}
FORCED["biased"] = {"moe_router_force_biased": -2.0}
FORCED["both"] = FORCED["forced"] | FORCED["biased"]
CAPACITIES |= {
    f"{policy}, padded": keys | {"moe_pad_expert_input_to_capacity": True}
    for policy, keys in CAPACITIES.items()
}


def make_expert_config(
    scope: str = "sequence", ep=1, etp=1, ep_engine="alltoall", capacity=None, **layout
) -> Config:
    raw = make_config(**layout).model_dump(by_alias=True)
    raw["distributed"] |= {"ep_size": ep, "etp_size": etp, "ep_engine": ep_engine}
    raw["training"] |= SCOPES[scope] | {"moe_router_bias_update_rate": 0.01}
    raw["training"] |= (CAPACITIES | FORCED)[capacity] if capacity else {}
    return Config.model_validate(raw)  # the model is given apart: here it has no experts


@functools.cache
def reference(pool, model, scope, layers, seq_length, dp, m, capacity=None):
    """One rank's run: with all micro-batches of all dp ranks, with the micro-batches of one rank
    joined over dp, or, as a balance within sequences allows, with a single micro-batch."""
    micro_batches = {"sequence": 1, "micro-batch": dp * m, "global": m}[scope]
    sizes = {"seq_length": seq_length, "micro_batches": micro_batches, "layers": layers}
    config = make_expert_config(scope, capacity=capacity, **sizes)
    return whole_run(pool, config, MODELS[model], 2, train_watched)


def train_watched(config: Config, model: ModelConfig, steps: int) -> Run:
    """A run in which no choice of the routers is close: else rounding, which differs between
    layouts, could make a token change its experts."""
    route = router.route

    def watched(logits, config, bias=None):
        k = config.num_experts_per_tok
        weights, experts, shares = route(logits, config, bias)
        scores = logits.softmax(-1) if config.scoring_func == "softmax" else logits.sigmoid()
        ranked = scores if bias is None else scores + bias
        if config.n_group > 1:
            groups = ranked.unflatten(-1, (config.n_group, -1))
            worth = groups.sort(-1).values[..., -2:].sum(-1)
            assert smallest_gap(worth, config.topk_group) > 1e-9
            chosen = (worth >= worth.sort(-1).values[..., -config.topk_group, None])[..., None]
            ranked = groups.where(chosen, -1e9).flatten(-2)
        assert smallest_gap(ranked, k) > 1e-9
        assert smallest_gap(shares, k) > 1e-9  # of the balance losses
        return weights, experts, shares

    with mock.patch.object(router, "route", watched):
        return train_briefly(config, model, steps)


def smallest_gap(scores: torch.Tensor, k: int) -> float:
    """The least difference between the k-th score and the next one."""
    best = scores.detach().sort(-1, descending=True).values
    return (best[..., k - 1] - best[..., k]).min().item()


def assert_trains_as_one_rank(pool, config: Config, model: str, scope: str) -> None:
    d, t = config.distributed, config.training
    layers, m = config.model.num_hidden_layers, t.gradient_accumulation_steps
    theirs = reference(pool, model, scope, layers, t.seq_length, d.dp_size, m)
    assert_same(whole_run(pool, config, MODELS[model], 2), theirs)


def grids(dp: int, pp: int, cp: int, tp: int) -> list[tuple[int, int]]:
    """Two (ep, etp) of a layout: as many ranks as can be for ep, and some for etp."""
    ranks = dp * cp * tp
    pairs = [(ep, etp) for etp in (1, 2, 4) for ep in (8, 4, 2, 1) if ranks % (ep * etp) == 0]
    pairs = [pair for pair in pairs if pair != (1, 1)] or [(1, 1)]
    return list(dict.fromkeys((pairs[0], pairs[-1] if len(pairs) == 1 else pairs[len(pairs) // 2])))


LAYOUTS = [  # with two grids of experts for each; by default they take turns
    (dp, pp, cp, tp, ep, etp)
    for dp, pp, cp, tp in itertools.product((1, 2, 4, 8), (1, 2, 3, 4, 8), (1, 2, 4, 8), (1, 2, 4))
    if dp * pp * cp * tp <= 8
    for ep, etp in grids(dp, pp, cp, tp)
]
SIZES = dict.fromkeys(layout[:4] for layout in LAYOUTS)
TURNS = [
    [layout for layout in LAYOUTS if layout[:4] == sizes][i % 2 - 1]
    for i, sizes in enumerate(SIZES)
]
ENGINES, RECOMPUTE = ("1f1b", "interleaved", "afab"), ("none", "full", "selective")
MESSAGES = ("alltoall", "allgather"), ("ring", "ulysses")
KINDS = ("softmax", "gated", "depths")  # the last with all that sigmoid has
CHOICES = list(itertools.product(KINDS, SCOPES, ENGINES, RECOMPUTE, *MESSAGES))
random.Random(32293).shuffle(CHOICES)  # a seed with which every pair of choices meets


SHARDINGS = ("none", "optimizer", "parameters", "layerwise", "gradients")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.function is test_every_layout_trains_the_same_mixture:
        cases = zip(TURNS, itertools.cycle(CHOICES), itertools.cycle(SHARDINGS), strict=False)
        if metafunc.config.getoption("--all-layouts"):
            pairs = zip(LAYOUTS, itertools.cycle(CHOICES), strict=False)
            cases = [(*pair, sharding) for pair in pairs for sharding in SHARDINGS]
        metafunc.parametrize("layout,choices,sharding", list(cases), ids=str)


def test_every_pair_of_choices_meets_in_some_layout():
    used = [choices for i, choices in enumerate(CHOICES[: len(TURNS)]) if has_turn(i, 3, 7)]
    for a, b in itertools.combinations(range(len(CHOICES[0])), 2):
        assert {(c[a], c[b]) for c in used} == {(c[a], c[b]) for c in CHOICES}


@pytest.mark.turns(3, 7)
def test_every_layout_trains_the_same_mixture(pool, layout, choices, sharding):
    dp, pp, cp, tp, ep, etp = layout
    model, scope, engine, recompute, ep_engine, cp_engine = choices
    sizes = {"dp": dp, "pp": pp, "cp": cp, "tp": tp, "micro_batches": 2 if pp > 1 else 1}
    sizes["chunks"] = 2 if engine == "interleaved" and pp > 1 else 1
    sizes["sequence_parallel"] = tp > 1 and recompute != "none"
    kinds = {"cp_engine": cp_engine, "engine": engine, "recompute": recompute, "sharding": sharding}
    config = make_expert_config(scope, ep, etp, ep_engine, **sizes, **kinds)
    assert_trains_as_one_rank(pool, config, model, scope)


@pytest.mark.parametrize("cut", [False, True])
def test_the_gate_of_shared_experts_is_summed_where_ranks_see_other_tokens(pool, cut):
    config = make_expert_config(ep=2, tp=2, sequence_parallel=cut, tp_overlap=cut)
    assert_trains_as_one_rank(pool, config, "gated", "sequence")


@pytest.mark.turns(3, 7)
@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize(
    "dp,pp,ep,etp,ep_engine",
    [(2, 1, 2, 1, "alltoall"), (4, 1, 2, 2, "alltoall"), (2, 2, 2, 1, "allgather")],
    ids=str,
)
def test_layouts_drop_the_same_tokens(pool, dp, pp, ep, etp, ep_engine, capacity):
    kind = {"dp": dp, "pp": pp, "micro_batches": 24 // dp // 4, "capacity": capacity}
    config = make_expert_config("micro-batch", ep, etp, ep_engine, **kind)
    # Padded or not, and on one rank, with the micro-batches of all ranks, one after the other.
    layers, m = pp + 1, config.training.gradient_accumulation_steps
    policy = capacity.removesuffix(", padded")
    theirs = reference(pool, "softmax", "micro-batch", layers, 16, dp, m, policy)
    ours = whole_run(pool, config, MODELS["softmax"], 2)
    assert_same(ours, theirs)
    num_pairs = ours.routed[0][0, : 8 + 1].sum()
    assert num_pairs == GLOBAL_BATCH * 16 * 2 and ours.routed[0][0, 8] > 0.2 * num_pairs  # dropped


@functools.cache
def forced_run(pool, how, **layout):
    config = make_expert_config("sequence", capacity=how, layers=2, **layout)
    return whole_run(pool, config, MODELS["softmax"])


@pytest.mark.parametrize(
    "how,layout",
    [
        ("forced", {"cp": 2, "tp": 2, "ep": 4}),
        ("biased", {"dp": 2, "pp": 2, "ep": 2, "ep_engine": "allgather"}),
        ("both", {"tp": 2, "sequence_parallel": True, "recompute": "full"}),
    ],
    ids=str,
)
def test_a_forced_routing_is_the_same_in_every_layout(pool, how, layout):
    theirs = forced_run(pool, how)
    assert_same(forced_run(pool, how, **layout), theirs)
    first, second = theirs.routed[0][:, :8]
    assert (first != second).any()
    if how == "forced":
        assert all((step == theirs.routed[0]).all(1)[0] for step in theirs.routed), "in every step"
        assert first.max() < 2.5 * first.mean()
    else:
        assert first.max() > 2.5 * first.mean()


@pytest.mark.parametrize("ep_engine", ["alltoall", "allgather"])
def test_more_rows_than_a_rank_may_have_are_an_error(pool, ep_engine):
    limited = {"moe_router_force_biased": -30.0, "moe_expert_rank_capacity_factor": 1.0}
    config = make_expert_config(ep=2, dp=2, ep_engine=ep_engine, layers=2, **limited)
    with pytest.raises(RankFailed, match=r"layer 0: .* of rank \d get \d+ rows, above 1 x 384,"):
        pool.run(2, train_briefly, config, MODELS["softmax"], 1)
