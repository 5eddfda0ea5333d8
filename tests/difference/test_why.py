"""Each formula gives its sentence, and with noise of 1e-6 it does not: without any process."""

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from difference import whole
from difference.__main__ import run
from difference.algebra import same
from difference.compare import Compared, Comparison
from difference.parts import head_of, parts_of, products
from difference.places import here, indices_of, take
from difference.reads import documents_of
from difference.suspects import suspects
from difference.taps import RAN, Key, is_yours
from difference.tiny import tiny_model, trial_of
from difference.whole import right_whole
from difference.why import explain
from picotron_min.extensions import build
from picotron_min.extensions.settings import Layout, ModelConfig
from picotron_min.model import rotary_table, rotate
from tests.assembled import make_config

FOLDER = Path(build.__file__).parent
Q = "model.layers.0.self_attn.q_proj.weight"
ATTENTION = "model.layers.1.self_attn"


@cache
def both() -> Comparison:
    sizes = {"micro_batches": 2, "model": {"num_key_value_heads": 4}}
    config = make_config(dp=2, cp=2, tp=2, sequence_parallel=True, **sizes)
    trial = trial_of(config, 2, own_sizes=False)
    return Comparison(trial, right_whole(trial))


def right(phase: str, name: str, step: int = 0, micro_batch: int = 0, rank: int = 0) -> Compared:
    """A rank's part of a tensor, as it should be."""
    at = here(rank, both().trial.layout)
    is_activation = phase in ("forward", "backward")
    key = Key(step, phase, name, micro_batch, at.dp) if is_activation else Key(step, phase, name)
    indices = indices_of(key, both().whole[key].shape, at, both().trial.layout)
    part = take(both().whole[key], indices)
    if name == "loss":  # of each token in the right run
        part, indices = part.sum(), []
    return Compared(key, at, part, part, indices, 0.0, [], [])


def got(*what, **of) -> Tensor:
    return right(*what, **of).got


def part(one: Compared, *label: tuple) -> Tensor:
    """The sum of those parts that have these places on axes."""
    return sum(p for of, p in parts_of(one, both()).items() if {*label} <= {*of})


def attention(queries: range, keys: list[int]) -> Tensor:
    """Rank 0's output, where its queries of one piece see these keys alone."""
    one = right("forward", f"{ATTENTION}.core_attention")
    q, k, v = (both().whole[one.key._replace(name=f"{one.key.name}.{x}")] for x in "qkv")
    k, v = (x.repeat_interleave(2, 1)[:, :4] for x in (k, v))  # of tp 0
    rows = one.indices[2].index(queries[0])
    got = one.got.clone()
    scores = q[:, :4, list(queries)] @ k[:, :, keys].mT / 2  # D is 4
    got[:, :, rows : rows + len(queries)] = scores.softmax(-1) @ v[:, :, keys]
    return got


def values(merge: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Rank 0's gradient of v, with `merge` of the log-sum-exps of two ranks' keys in backward."""
    core = f"{ATTENTION}.core_attention"
    q, k = (both().whole[Key(0, "forward", f"{core}.{x}")] for x in "qk")
    scores = q @ k.repeat_interleave(2, 1).mT / 2 - torch.full((16, 16), torch.inf).triu(1)
    early, own = torch.arange(16) < 4, torch.arange(16) % 12 < 4  # rank 0 has 0-3 and 12-15
    mine, theirs = (scores[..., of].logsumexp(-1) for of in (own, ~own))
    lse = torch.where(early, mine, merge(mine, theirs))  # those before position 4 see one block
    dv = (scores - lse[..., None]).exp().mT @ both().whole[Key(0, "backward", core)]
    return take(dv.unflatten(1, (4, 2)).sum(2), right("backward", f"{core}.v").indices)


def without(a: Tensor, b: Tensor) -> Tensor:
    return torch.logaddexp(a, b) - torch.maximum(a, b)


def rotated(letter: str, shift: int = 0, order: int = 1) -> Tensor:
    one = right("forward", f"{ATTENTION}.core_attention.{letter}")
    x = right("forward", f"{ATTENTION}.{letter}_proj").got.unflatten(-1, (-1, 4))
    table = rotary_table(torch.tensor(one.indices[2]) - shift, both().trial.model_config)
    return rotate(x, *table[::order]).transpose(1, 2)


def targets_of(one: Compared) -> Tensor:
    return take(both().whole[Key(0, "forward", "targets")], one.indices[:2])


def logits(one: Compared, ids: dict[int, float]) -> Tensor:
    """With what some ids add in every fourth token that is not their target."""
    got, targets = one.got.clone(), targets_of(one)
    for i, much in ids.items():
        got[:, ::4] += ((targets != i) * much)[:, ::4, None] * head_of(both(), 0)[i]
    return got


def own_softmax(one: Compared) -> Tensor:
    x, weight = right("forward", "model.norm").got, head_of(both(), 0)
    p = [(x @ part.T).softmax(-1) @ part for part in (weight[:15], weight[15:])]
    return sum(p) - weight[targets_of(one)]


def loss(one: Compared, how: str) -> Tensor:
    """Of two slices of the vocabulary, ids 0-14 and 15-28, with a mistake."""
    x, targets = (both().whole[one.key._replace(name=of)] for of in ("model.norm", "targets"))
    places = right("forward", "targets").indices[1]
    logits, at_target = (x @ head_of(both(), 0).T)[:, places], targets[:, places, None]
    slices = logits[..., :15], logits[..., 15:]
    if how == "own maximum":
        slices = [of - of.amax(-1, keepdim=True) for of in slices]
        sums = sum(of.exp().sum(-1, keepdim=True) for of in slices)
        return (sums.log() - torch.cat(slices, -1).gather(-1, at_target)).sum()
    if how == "own sum":
        return (slices[0].logsumexp(-1, keepdim=True) - logits.gather(-1, at_target)).sum()
    whole = (logits.logsumexp(-1, keepdim=True) - logits.gather(-1, at_target)).sum()
    if how == "not shifted":
        return whole - logits.amax(-1).sum()
    if how == "lse added":
        lses = sum(of.logsumexp(-1, keepdim=True) for of in slices)
        return (lses - logits.gather(-1, at_target)).sum()
    shifted, is_early = logits - logits.amax(-1, keepdim=True), at_target < 15
    if how == "within":  # the first slice has one id more than the second
        counted = is_early * shifted.gather(-1, at_target)
        counted += (at_target < 14) * shifted.gather(-1, (at_target + 15).clamp(max=28))
        return whole + (shifted.gather(-1, at_target) - counted).sum()
    kinds = {"nearest": (15, 14), "first": (15, 0), "later": (15, None), "earlier": (None, 14)}
    for other, is_meant in zip(kinds[how], (is_early, ~is_early), strict=True):
        if other is not None:
            whole = whole - (shifted[..., other, None] * is_meant).sum()
    return whole


def other_rows(one: Compared) -> Tensor:
    """With another rank's rows of the part of tp 1."""
    other, parts = right(*OUT, rank=1), products(one.key, both(), 0)
    both().all = [one, other]
    return take(parts[("tp", 0),], one.indices) + take(parts[("tp", 1),], other.indices)


def rolled(tokens: Tensor) -> Tensor:
    """The sequences that begin one place later in the global batch."""
    return torch.cat((tokens[1:], got("forward", "tokens", rank=4)[:1]))


def ignored(targets: Tensor) -> Tensor:
    """With the border of a document in the first sequence."""
    return torch.cat((torch.full_like(targets[:1], -100), targets[1:]))


def norm(times: int, kind: str, rows: slice = slice(None)) -> Tensor:
    """With the squares of some gradients, or of some of their rows, counted several times."""
    sums = {k.name: t for k, t in both().whole.items() if k[:2] == (0, "summed gradient")}
    both().all = [right("summed gradient", n, rank=r) for r in range(8) for n in sums]
    more = sum(t[rows].square().sum() for n, t in sums.items() if re.search(kind, n))
    squares = sum(t.square().sum() for t in sums.values()) + (times - 1) * more
    return squares.sqrt() / both().num_targets(0)


SUM, OUT, CORE = ("summed gradient", Q), ("forward", ATTENTION), f"{ATTENTION}.core_attention"
ENTERS = ("backward", "model.layers.1.post_attention_layernorm")
LAST_NORM, LOSS = ("backward", "model.norm"), ("forward", "loss")
TP_1 = slice(15, None)  # of 29 ids
KEYS, LAST = "queries 12-15 see the keys 0-3, and should", ("micro-batch", 1)
# A tensor, what is made of it, and what is said then.
FORMULAS = [
    (OUT, lambda one: 4 * one.got, "it is 4 (dp x cp or dp x micro-batches) times"),
    (SUM, lambda one: part(one, ("dp", 0)), "own part of a sum over dp"),
    (SUM, lambda one: part(one, LAST), "part of micro-batch 1 alone"),
    (SUM, lambda one: one.got + part(one, LAST), "counts the part of micro-batch 1 2 (tp or "),
    (SUM, lambda one: part(one, ("dp", 0), LAST), "part of micro-batch 1, dp 0 alone"),
    (ENTERS, lambda one: part(one, ("linear", "up_proj")), "part of linear up_proj alone"),
    (
        OUT,
        lambda one: one.got + got(*OUT, micro_batch=1),
        "1 x micro-batch 0 of dp 0 + 1 x micro-batch 1 of dp 0, and",
    ),
    (OUT, lambda one: got(*OUT, micro_batch=1), "the tensor of micro-batch 1"),
    (OUT, lambda one: got(*OUT, rank=1), "are those of 12-15: they are the part of tp 1"),
    (OUT, lambda one: got("forward", "model.layers.0.mlp"), "it is model.layers.0.mlp, another"),
    (OUT, lambda one: one.got.float().double(), "rounding of float32"),
    (OUT, lambda one: one.got * (torch.arange(4) < 2)[:, None], "positions 2-3 are zero, and"),
    (OUT, lambda one: one.got * (1 + (torch.arange(4) > 1))[:, None], "positions 2-3 are wrong"),
    (
        OUT,
        lambda one: one.got + (torch.arange(4) == 3)[:, None],
        "position 3 is wrong, and the others are right: the last of a piece that this rank has",
    ),
    (("forward", CORE), lambda one: attention(range(12, 16), [0, 1, 2, 3]), KEYS),
    (("forward", f"{CORE}.q"), lambda one: rotated("q", shift=-1), "are rotated as if they were"),
    (("forward", f"{CORE}.k"), lambda one: rotated("k", order=-1), "with cos and sin swapped"),
    (
        ("forward", f"{CORE}.v"),
        lambda one: rotated("v"),
        "values are rotated, by the angles of positions ",
    ),
    (2 * ("gradient norm",), lambda one: norm(2, "norm"), "counts the weights of norms 2 (tp"),
    (2 * ("gradient norm",), lambda one: one.got * (1 + 1e-8), "perhaps rounding of float32"),
    (2 * ("gradient norm",), lambda one: norm(0, "(embed|head)", TP_1), "the embeddings of tp 1"),
    (("backward", f"{CORE}.v"), lambda one: part(one, ("cp", 0)), "own part of a sum over cp"),
    (("backward", f"{CORE}.k"), lambda one: part(one, ("cp", 1)), "is the part of cp 1 alone"),
    (("backward", f"{CORE}.v"), lambda one: values(torch.maximum), "the largest log-sum-exp of"),
    (("backward", f"{CORE}.v"), lambda one: values(torch.add), "sum of the log-sum-exps"),
    (("backward", f"{CORE}.v"), lambda one: values(without), "a log-sum-exp less the largest of"),
    (LAST_NORM, lambda one: part(one, ("tp", 1)), "is the part of tp 1 alone"),
    (LAST_NORM, own_softmax, "has a softmax over each rank's ids alone, not over all"),
    (LAST_NORM, lambda one: logits(one, {3: -1}), "is 1 too small at id 3, in 4 of 16 tokens"),
    (LAST_NORM, lambda one: logits(one, {3: 2, 5: 1}), "logits is wrong at ids 3 5, in 4 of 16"),
    (
        LAST_NORM,
        lambda one: one.got + head_of(both(), 0)[targets_of(one)],
        "1 too large at the tar",
    ),
    (LOSS, lambda one: loss(one, "own maximum"), "it subtracts each rank's own largest logit"),
    (LOSS, lambda one: loss(one, "own sum"), "sums the exponentials of this rank's logits alone"),
    (LOSS, lambda one: loss(one, "not shifted"), "from the others alone, not from the target's"),
    (LOSS, lambda one: loss(one, "nearest"), "in other slices the id that is nearest to the ta"),
    (LOSS, lambda one: loss(one, "first"), "it counts in other slices their first id"),
    (LOSS, lambda one: loss(one, "later"), "it counts in later slices their first id"),
    (LOSS, lambda one: loss(one, "earlier"), "it counts in earlier slices their last id"),
    (LOSS, lambda one: loss(one, "within"), "it takes a target for an id within each slice"),
    (LOSS, lambda one: loss(one, "lse added"), "it adds the log-sum-exps of slices, which"),
    (
        OUT,
        lambda one: one.got * torch.arange(2, 6)[:, None],
        "tokens are 2 to 5 times what they should be",
    ),
    (OUT, lambda one: other_rows(one), "adds the part of tp 1 for rank 1: these are other ranks"),
    (OUT, lambda one: one.got.flip(1, 2), "it has the right numbers in other places"),
    (("scaled gradient", Q), lambda one: 1.5 * one.got, "it is 1.5 times what it should be: the"),
    (
        ("weights", Q),
        lambda one: 0.75 * got("initial", Q) + one.got / 4,
        "it counts its update 0.25 (1/(dp",
    ),
    (
        ("weights", Q),
        lambda one: one.got + 0.01 * got("initial", Q),
        "it counts itself before the update 1.01 times",
    ),
    (("forward", "tokens"), lambda one: rolled(one.got), "sequences 0-3 are those of 1-4"),
    (
        ("forward", "targets"),
        lambda one: ignored(one.got),
        "0 is wrong, and the others are right: the first is -100, and should be ",
    ),
    (OUT, lambda one: one.got / 0, "are NaN or infinite"),
    (
        OUT,
        lambda one: one.got.repeat(1, 2, 1),
        "dim 1 is 2 (tp or cp or dp or ",
    ),
]


@pytest.mark.parametrize("what,formula,said", FORMULAS)
def test_a_formula_gives_its_sentence_and_noise_does_not(what, formula, said):
    one = right(*what)
    wrong = formula(one)
    assert said in explain(one._replace(got=wrong), both())
    if wrong.isfinite().all() and wrong.shape == one.got.shape:
        noise = 1 + torch.rand(wrong.shape, dtype=torch.float64)
        noise *= 1e-6 * one.right.abs().max()
        assert said not in explain(one._replace(got=wrong + noise), both())


def test_weights_of_a_token_that_were_not_normalised_are_told_by_their_sum():
    one = right(*OUT)
    one = one._replace(right=one.right.softmax(-1))
    halves = one.right * torch.linspace(0.5, 0.75, one.right.shape[1])[:, None]
    sentence = "each token's numbers add up to 0.5 to 0.75, and should to 1"
    assert explain(one._replace(got=halves), both()) == sentence


def test_what_overflows_is_equal_to_nothing():
    assert not same(torch.tensor([torch.inf]), torch.ones(1))


def test_rows_of_a_matrix_are_not_called_tokens():
    one = right(*SUM)
    scaled = one.got * torch.arange(2, 2 + len(one.got))[:, None]
    assert "token" not in explain(one._replace(got=scaled), both())


@pytest.mark.parametrize(("kept", "new"), [(0, 1), (0.6, 0.8), (0, 2)])
def test_other_draws_are_told_by_their_standard_deviation(kept, new):
    one = right("initial", Q)
    drawn = torch.randn(one.got.shape, dtype=torch.float64) * one.right.std()
    text = explain(one._replace(got=kept * one.right + new * drawn), both())
    assert text.startswith("it is drawn anew, with the right standard") == (new == 1)


@pytest.mark.parametrize("axes", [("tp",), ("cp",), ("dp", "cp")])
def test_parts_of_ranks_whose_sum_is_right_are_own_parts(axes, monkeypatch):
    what = ("forward", OUT[1]) if axes == ("tp",) else ("summed gradient", "model.norm.weight")
    others = {"dp", "cp", "tp"} - {*axes}
    ranks = [at for at in both().ranks if not any(getattr(at, axis) for axis in others)]
    one, *parts = right(*what).got, *(torch.rand_like(right(*what).got) for _ in ranks[1:])
    parts.append(one - sum(parts))
    ones = [right(*what)._replace(at=at, got=x) for at, x in zip(ranks, parts, strict=True)]
    monkeypatch.setattr(both(), "first", ones)
    over = f"a sum over {' and '.join(axes)}: the sum is missing"
    assert {explain(one, both()) for one in ones} == {f"it is this rank's own part of {over}"}
    ones = [one._replace(got=len(ones) * one.got) for one in ones]
    monkeypatch.setattr(both(), "first", ones)
    if axes == ("tp",):  # of a gradient, which no mean is, so many times a part
        said = f"it is this rank's own part of {over.replace('sum', 'mean')}"
        assert {explain(one, both()) for one in ones} == {said}
    else:
        times = re.compile(rf"it is {len(ones)} \(.*\) times this rank's own part of {over}")
        assert all(times.fullmatch(explain(one, both())) for one in ones)


def test_a_sum_of_what_should_not_be_summed_is_said(monkeypatch):
    rows = [right(*SUM, rank=rank) for rank in (0, 1)]
    monkeypatch.setattr(both(), "all", rows)
    said = "it is summed over tp, whose ranks have other parts of it"
    both_rows = rows[0].right + rows[1].right
    assert explain(rows[0]._replace(got=both_rows), both()) == said
    assert said not in explain(rows[0]._replace(got=both_rows + 1e-6), both())


def test_a_weight_that_your_extension_has_not_changed_after_the_update_is_said(monkeypatch):
    one = right("weights", Q)
    before, stepped = got("initial", Q), 1.1 * one.right
    monkeypatch.setitem(
        both().whole, one.key._replace(phase="stepped"), 1.1 * both().whole[one.key]
    )
    said = "it lacks what your extension changes after the update"
    assert explain(one._replace(got=stepped), both()) == said
    assert said not in explain(one._replace(got=stepped + 1e-6 * before), both())


def test_ranks_that_scale_by_other_numbers_are_said(monkeypatch):
    sums = [right("scaled gradient", Q, rank=rank) for rank in (0, 1)]
    for second, why in (
        (3, ""),
        (2 / 3, ": what divides it is this rank's own part of a mean over tp"),
    ):
        factors = zip(sums, (2, second), strict=True)
        wrong = [one._replace(got=factor * one.got) for one, factor in factors]
        monkeypatch.setattr(both(), "first", wrong)
        said = f"times what it should be, and another number of times on other ranks{why}"
        assert explain(wrong[0], both()).endswith(said)


def test_what_your_extension_adds_is_a_part_of_its_own(monkeypatch):
    ones = [right(*OUT)._replace(at=at) for at in both().ranks[:2]]
    known, adds = right(*OUT).got, [torch.rand_like(right(*OUT).got) for _ in ones]
    ones = [one._replace(right=known + sum(adds)) for one in ones]
    twice = explain(ones[0]._replace(got=2 * known + sum(adds)), both())
    assert re.fullmatch(r"it counts the part of tp 0 2 \(.*\) times, the part of tp 1 2 .*", twice)
    ones = [one._replace(got=known + x) for one, x in zip(ones, adds, strict=True)]
    monkeypatch.setattr(both(), "first", ones)
    said = "what your extension adds is this rank's own part of a sum over tp: the sum is missing"
    assert {explain(one, both()) for one in ones} == {said}


def test_a_wrong_place_in_the_mesh_is_said():
    at = here(1, both().trial.layout)
    key, place = Key(0, "built", "place in the mesh"), torch.tensor(at[1:5])
    one = Compared(key, at, place.flip(0), place, [range(4)], 1.0, [], [])
    assert "are [1, 0, 0, 0], and should be [0, 0, 0, 1]" in explain(one, both())


@pytest.mark.parametrize("yours", ["mlp.adapter_gate", "mlp.norm", "self_attn.in_norm"])
def test_a_parameter_of_yours_is_cut_as_its_row_says_whatever_its_name(yours):
    key, at = Key(0, "initial", f"model.layers.0.{yours}.weight"), here(1, both().trial.layout)
    cuts = [[4, 8], [0, 32], [0, 4]]
    assert indices_of(key, (8, 32), at, both().trial.layout, cuts) == [range(4, 8), range(32)]
    norm = key._replace(name="model.layers.0.input_layernorm.weight")
    assert indices_of(norm, (32,), at, both().trial.layout, [[0, 4], [0, 4]])[0] == range(4)


def test_stale_weights_are_seen_in_the_second_step():
    one = right(*OUT, step=1)
    x = both().whole[one.key._replace(name=f"{ATTENTION}.o_proj.input")]
    old = x @ both().weight(f"{ATTENTION}.o_proj.weight", 0).T
    said = explain(one._replace(got=take(old, one.indices)), both())
    assert said == "it is computed with the weights of the step before"


def test_the_tiny_model_has_the_heads_ratio_and_what_cp_does_not_divide():
    found = {}
    for heads, kv, cp in ((4, 2, 4), (32, 8, 2), (6, 2, 1), (8, 8, 2)):
        model = ModelConfig(61, 8 * heads, 48, 8, heads, kv)
        model = tiny_model(model, Layout(cp=cp, cp_engine="ulysses"))
        found[heads, kv, cp] = model.num_attention_heads, model.num_key_value_heads
    right = {(4, 2, 4): (4, 2), (32, 8, 2): (8, 2), (6, 2, 1): (9, 3), (8, 8, 2): (8, 8)}
    assert found == right


def test_your_functions_that_run_after_backward_are_named_first(monkeypatch):
    for path in FOLDER.glob("*/__init__.py"):
        assert not is_yours(f"extensions/{path.parent.name}/x:f"), path
    ran = ["extensions/yours/x:Yours.wait", "train:train_step"]
    one = right(*SUM)._replace(error=1.0, ran=ran)
    monkeypatch.setattr(both(), "first", [one])
    monkeypatch.setattr(both(), "all", [one])
    named = suspects(both(), "")
    assert named[0] == "extensions/yours/x:Yours.wait" and "train" not in named[1], named


ADAPTER = "extensions/yours/x:Yours"


def test_yours_that_ran_long_before_are_named_first(monkeypatch):
    def seen(phase: str, name: str, step: int, *ran: str) -> Compared:
        return right(phase, name, step)._replace(ran=[f"{ADAPTER}.{what}" for what in ran])

    def named(said: str, *all_of: Compared) -> list[str]:
        monkeypatch.setattr(both(), "all", [*all_of])
        monkeypatch.setattr(both(), "first", [all_of[-1]])
        return suspects(both(), said)

    norm, mlp = ENTERS[1], "model.layers.1.mlp"
    read = [seen("forward", norm, 0), seen("forward", f"{mlp}.up_proj", 0)]
    read += [seen("forward", mlp, 0, "total"), seen("forward", "loss", 0, "late")]
    assert named("", *read, seen("backward", norm, 0)) == [f"{ADAPTER}.total"]
    updated = seen("loss", "loss", 0, "x", "begin", "weights_changed")
    found = named("", updated, seen("forward", mlp, 1, "adapted"))
    assert found[:2] == [f"{ADAPTER}.weights_changed", f"{ADAPTER}.begin"]
    # Of an autograd.Function whose backward has run, the class, where a gradient is wrong.
    ran = seen("forward", mlp, 0, "forward"), seen("backward", mlp, 0, "backward")
    assert named("", *ran, seen("backward", norm, 0))[0] == ADAPTER
    assert named("", *ran, seen("forward", mlp, 0, "forward"))[0] == f"{ADAPTER}.forward"
    last = right(*LAST_NORM)._replace(ran=["loss:f", "loss:stripe_loss"])
    assert named("", last)[0] == "loss:stripe_loss" != named("the sum is missing", last)[0]
    missing = "it is this rank's own part of a sum over dp: the sum is missing"
    assert named(missing, right("loss", "loss"))[0] == "train:train_step"
    assert named(missing, right(*SUM))[:1] == ["data_parallel:build_buckets"]
    turned, how = right("forward", f"{CORE}.k"), "positions 1-15 are rotated as if they were 0"
    assert named(f"{how}, so not at all", turned)[0] == "model:SelfAttention.forward"
    assert named(f"{how}-14", turned)[0] == "data:Batches._read"
    square = right(*2 * ("gradient norm",))
    assert named(f"its square is {missing}", square)[:1] == ["placement:_placement"]
    assert named("its square lacks", square)[0] == "placement:_placement"
    assert "counted_once" in named("the targets, which divide it,", square)[0]


def test_equal_numbers_on_all_ranks_are_no_parts_of_a_root(monkeypatch):
    ones = [right(*2 * ("gradient norm",), rank=rank) for rank in range(8)]
    for of_dp_1, is_root in ((0.5**0.5, False), (0.6, True)):
        factors = {0: (1 - of_dp_1**2) ** 0.5, 1: of_dp_1}
        first = [one._replace(got=factors[one.at.dp] * one.got) for one in ones]
        monkeypatch.setattr(both(), "first", first)
        assert ("root of a sum of squares over dp" in explain(first[0], both())) == is_root


def test_an_extension_that_fails_in_one_process_is_said_in_one_line(monkeypatch):
    text, names = "def fail(*_): raise IndexError('no neighbour\\nat all')", {}
    exec(compile(text, str(FOLDER / "yours.py"), "exec"), names)
    monkeypatch.setattr(whole, "extensions_of", names["fail"])
    with pytest.raises(ValueError, match="an extension fails in the one process") as failure:
        run(both().trial)
    said = str(failure.value)
    assert "IndexError: no neighbour, fail (" in said and "\n" not in said


def test_every_tensor_that_is_wrong_gets_a_sentence(monkeypatch):
    keys = [key for key in both().whole if key.step == key.micro_batch == key.dp == 0]
    for key in keys:
        if key.phase not in (RAN, "sum so far"):
            one = right(*key[1:3], rank=3)
            one = one._replace(got=one.got.flip(-1) + 1 if one.got.ndim else one.got + 1)
            monkeypatch.setattr(both(), "first", [one])
            monkeypatch.setattr(both(), "all", [one])
            assert explain(one, both())
            suspects(both(), "")


def test_only_plain_attention_is_told_to_merge_blocks_wrongly():
    one = right(*OUT[:1], CORE)
    factors = torch.arange(one.right.shape[2])[:, None]
    wrong = one._replace(got=one.got * (1 + factors))
    assert "blocks are merged with wrong weights" in explain(wrong, both())
    changed = wrong._replace(right=one.right * (2 + factors))  # by an extension
    assert "blocks are merged" not in explain(changed, both())


def test_the_keys_of_a_document_are_told():
    trial = trial_of(make_config(cp=2, document_mask=True), 1, own_sizes=False)
    both, key = Comparison(trial, right_whole(trial)), Key(0, "forward", CORE)
    q, k, v = (both.whole[key._replace(name=f"{CORE}.{x}")] for x in "qkv")
    right, at, rows = both.whole[key], here(0, trial.layout), range(12, 16)
    begins = {of[-1]: b for b, of in enumerate(documents_of(key, trial)) if 2 <= of[-1] <= 8}
    first, b = begins.popitem()  # where the last document of this sequence begins
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1)[b] for x in (k, v))
    scores = q[b, :, 12:] @ k.mT / q.shape[-1] ** 0.5
    scores = scores.masked_fill(torch.arange(16) > torch.tensor(rows)[:, None], -torch.inf)
    wrong = right.clone()
    wrong[b, :, 12:] = scores.softmax(-1) @ v
    indices = indices_of(key, right.shape, at, trial.layout)
    one = Compared(key, at, take(wrong, indices), take(right, indices), indices, 1.0, [], [])
    said = f"queries 12-15 of sequence {b} see the keys 0-15, and should see {first}-15"
    assert explain(one, both) == said
