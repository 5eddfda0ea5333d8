"""Weights: initial values, resumed runs that equal unbroken ones, background saves, export."""

import functools
import math
import pickle
import re
import time
import warnings
from collections import defaultdict
from datetime import timedelta
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from picotron_min.checkpoint import parts_of_whole, training_tensors
from picotron_min.collectives import Axis
from picotron_min.extensions.settings import Layout
from picotron_min.mesh import Axes, build_axes
from picotron_min.placement import placements
from picotron_min.runtime import hugging_face, saver
from picotron_min.runtime.config import Config
from picotron_min.runtime.config_checks import resolve_model
from picotron_min.runtime.folders import find_start
from picotron_min.runtime.metadata import read_to_resume
from picotron_min.runtime.token_file import TokenFile
from picotron_min.runtime.tokenizer import BytesTokenizer
from tests.assembled import Parts, assemble, on_one_rank, parts_of
from tests.training import SHAPE, StepResult, Training, config_of, open_data

CPU = torch.device("cpu")


def make_config(tp=1, tied=False, fused=True, model=(), **more) -> Config:
    keys = {
        "tp": tp,
        "sequence_parallel": tp > 1,
        "use_cpu": True,
        "tie_word_embeddings": tied,
        "fused": fused,
        "learning_rate": 0.01,
        "schedule": "cosine",
        "warmup_steps": 2,
        "total_train_steps": 6,
        "seq_length": 16,
        "micro_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "eval_batches": 1,
    }
    return config_of(**SHAPE | keys | dict(model) | more)


# Layer 0 has an MLP, layer 1 has experts.
EXPERTS = {
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "scoring_func": "sigmoid",
    "mlp_only_layers": [0],
}
# What names of runs consist of, beside sizes of axes.
WORDS = {
    "one": {},
    "tied": {"tied": True},
    "experts": {"model": EXPERTS},
    "unfused": {"fused": False},
    "bfloat16": {"dtype": "bfloat16"},
    "float64": {"dtype": "float64"},
    "sgd": {"optimizer": "sgd"},
    "wsd": {"schedule": "wsd"},
    "plain": {"sequence_parallel": False},
    "afab": {"pp_engine": "afab"},
    "interleaved": {"pp_engine": "interleaved", "pp_chunks": 2},
    "zb_v": {"pp_engine": "zb_v", "pp_chunks": 2},
    "ulysses": {"cp_engine": "ulysses"},
}
WORDS |= {kind: {"sharding": kind} for kind in get_args(Layout.__annotations__["sharding"])}


def options_of(name: str) -> dict:
    """What "dp2-pp2-afab" stands for."""
    options = {}
    for word in name.split("-"):
        options |= WORDS[word] if word in WORDS else {word[:-1]: int(word[-1])}
    return options


def make_training(config: Config, weights: dict[str, Path] | None = None) -> Training:
    axes = build_axes(CPU, config.layout)
    tokens = np.random.default_rng(0).integers(256, size=2000).astype(np.uint16)
    data = open_data(config, TokenFile(tokens, len(tokens), 1), axes.dp.rank, axes.cp.rank)
    return Training(config, resolve_model(config), axes, CPU, data, weights)


def initial_weights(config: Config) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in make_training(config).parameters.items()}


def test_initial_weights_are_a_function_of_seed_and_name(pool):
    weights, second_rank = pool.run(2, initial_weights, make_config(dp=2))
    (other_seed,) = pool.run(1, initial_weights, make_config(seed=43))
    (float64,) = pool.run(1, initial_weights, make_config(dtype="float64"))
    for name, weight in weights.items():
        assert torch.equal(weight, second_rank[name])
        assert float64[name].dtype == torch.float64 and torch.equal(float64[name].float(), weight)
        if weight.ndim == 1:
            assert torch.equal(weight, torch.ones(32))
            continue
        assert not torch.equal(weight, other_seed[name])
        into_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
        std = 0.02 / math.sqrt(2 * 2) if into_residual else 0.02
        # Four standard errors of a mean, and of a standard deviation.
        assert abs(weight.mean()) < 4 * std / weight.numel() ** 0.5
        assert abs(weight.std() / std - 1) < 4 / (2 * weight.numel()) ** 0.5
    projection = "model.layers.{}.self_attn.q_proj.weight"
    assert not torch.equal(weights[projection.format(0)], weights[projection.format(1)])


class State(dict):
    """A copy of every tensor that training changes, by name."""

    def __init__(self, training: Training) -> None:
        buffers = training.model.buffers
        tensors = training_tensors(training.parameters, buffers, training.optimizer)
        tensors |= {
            f"step.{name}": training.optimizer.state[p]["step"]
            for name, p in training.parameters.items()
            if "step" in training.optimizer.state[p]
        }
        super().__init__({name: tensor.clone() for name, tensor in tensors.items()})

    def assert_equal(self, other: "State") -> None:
        assert self.keys() == other.keys()
        for name in self:
            assert torch.equal(self[name], other[name]), name


def run_steps(training: Training, steps: range, bad_step: int | None) -> list[StepResult]:
    """Train; in `bad_step` one gradient of the last rank is not a number."""
    last_rank = dist.get_rank() == dist.get_world_size() - 1
    weight = list(training.parameters.values())[-1]
    results = []
    for step in steps:
        hooks = []
        if step == bad_step and last_rank:
            hooks.append(weight.register_hook(lambda gradient: gradient * math.nan))
        results.append(training.step(step))
        for hook in hooks:
            hook.remove()
    return results


def resume_run(folder: Path, config: Config, bad_step: int | None) -> None:
    whole = make_training(config)
    expected = run_steps(whole, range(3), bad_step)

    first = make_training(config)
    results = run_steps(first, range(2), bad_step)
    first.save(folder, 2)
    path = find_start("latest", folder)
    assert path == folder / "step-00000002"
    results += run_steps(first, range(2, 3), bad_step)  # saving must change nothing
    State(whole).assert_equal(State(first))

    second = make_training(config)
    metadata = read_to_resume(path, second.model_config, config.training.optimizer)
    second.load(path, metadata.step, metadata.skipped_steps)
    resumed = results[:2] + run_steps(second, range(metadata.step, 3), bad_step)
    # Through text, because nan, the norm of a skipped step, is not equal to itself.
    assert repr(expected) == repr(results) == repr(resumed)
    State(whole).assert_equal(State(second))
    assert whole.skipped.total == second.skipped.total == (bad_step is not None)
    assert whole.evaluate() == second.evaluate()


@pytest.mark.parametrize(
    "name,bad_step",
    [
        ("tied-unfused", None),
        ("dp2-sgd", 1),
        ("tp2-tied-float64-wsd", None),
        ("dp2-tp2-bfloat16", 1),
        ("pp2-tied", 1),
        ("dp2-tp2-ep2-etp2-experts-bfloat16", None),
    ],
)
def test_a_resumed_run_is_bit_identical(pool, tmp_path, name, bad_step):
    config = make_config(**options_of(name))
    pool.run(config.world_size, resume_run, tmp_path, config, bad_step)


# 257 ids over 4 tp ranks are 65, 65, 65 and 62: shards of unequal size.
SHAPES = {"untied": {"num_hidden_layers": 4}, "experts": EXPERTS}
SHAPES["tied"] = SHAPES["untied"] | {"tie_word_embeddings": True}
# Saved under one layout and resumed under the other, which has the same global batch, but for dp3.
# Experts lie on a grid of their own: (ep, etp), beside (dp, tp) of everything else.
PAIRS = [
    ("cp4-ulysses", "dp2-pp2-tp2", "untied"),
    ("tp4", "pp2-cp2-tp2", "tied"),
    ("pp2-interleaved", "tp2-plain", "tied"),
    ("pp2-zb_v", "pp4-afab", "tied"),  # the first and the last stage are on one rank
    ("dp2-tp4-ep4-etp2", "one", "experts"),
    ("dp4-tp2-ep8", "dp2-pp2-ep2", "experts"),
    # Rows are cut over tp, and then over dp.
    ("dp2-tp2-ep2-parameters", "cp2-tp2-etp4", "experts"),
    ("dp4-etp2-layerwise", "dp3-tp2-ep2", "experts"),  # whose global batch has another size
]


def of_layout(name: str, model: str = "untied") -> Config:
    layout = options_of(name)
    dp, micro_batches = layout.get("dp", 1), max(2, layout.get("pp", 1))
    layout["gradient_accumulation_steps"] = micro_batches = 1 if dp > 2 else micro_batches
    shape, size = {"num_key_value_heads": 4} | SHAPES[model], 4 // dp // micro_batches
    return make_config(dtype="float64", model=shape, micro_batch_size=size, **layout)


def state_with_places(training: Training) -> dict[str, Parts]:
    """All tensors that are saved, by kind, each with its place in the whole."""
    kinds, model = defaultdict(dict), training.model
    for key, tensor in training_tensors(
        training.parameters, model.buffers, training.optimizer
    ).items():
        kind, name = re.fullmatch(r"(?:optimizer\.(\w+)\.)?(.*)", key).groups()
        kinds[kind or "model"][name] = tensor
    return {kind: parts_of(training, tensors) for kind, tensors in kinds.items()}


def put_together(ranks: list[dict[str, Parts]], config: Config) -> dict[str, np.ndarray]:
    model_config, wholes = resolve_model(config), {}
    shapes = model_config.parameter_shapes() | model_config.buffer_shapes()
    for kind in set().union(*ranks):
        of_ranks = [rank.get(kind, {}) for rank in ranks]
        names = set(shapes) if kind == "model" else set().union(*of_ranks)
        parts = assemble(of_ranks, {name: shapes[name] for name in names})
        wholes |= {f"{kind} {name}": whole for name, whole in parts.items()}
    return wholes


class LargestTensor(TorchDispatchMode):
    """How many numbers the largest tensor has that is made in here."""

    numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        # Not the bytes in which ranks exchange their plans of what to read.
        is_plain = isinstance(result, Tensor) and not isinstance(result, DTensor)
        if is_plain and result.is_floating_point() and result.device.type != "meta":
            self.numbers = max(self.numbers, result.numel())
        return result


def train_and_save(folder: Path, config: Config) -> Training:
    training = make_training(config)
    run_steps(training, range(2), bad_step=None)
    training.save(folder, 2)
    return training


def saved_state(folder: Path, config: Config) -> dict[str, Parts]:
    return state_with_places(train_and_save(folder, config))


def continue_run(folder: Path | None, config: Config, steps: range):
    """The steps' results, the states before and after, and the largest tensor made by loading."""
    training = make_training(config)
    with LargestTensor() as largest:
        if folder:
            path, optimizer = find_start("latest", folder), config.training.optimizer
            training.load(path, read_to_resume(path, training.model_config, optimizer).step)
    before = state_with_places(training)
    results = run_steps(training, steps, bad_step=None)
    return [result[:3] for result in results], before, state_with_places(training), largest.numbers


def assert_resumes(pool, folder: Path, before: Config, after: Config) -> None:
    same_batch = before.global_batch == after.global_batch
    state = put_together(pool.run(before.world_size, saved_state, folder, before), before)
    steps = range(2, 3) if same_batch else range(0)
    ranks = pool.run(after.world_size, continue_run, folder, after, steps)
    loaded = put_together([rank[1] for rank in ranks], after)
    assert loaded.keys() == state.keys()
    for name, tensor in loaded.items():
        assert np.array_equal(tensor, state[name]), name
    parts = min(before.distributed.tp_size, after.distributed.tp_size)
    for *_, largest in ranks:
        assert largest <= math.ceil(257 / parts) * 32, "more than a part of the embedding was held"
    if same_batch:
        plain = on_one_rank(before).model_dump_json(by_alias=True)
        results, final = unbroken_run(pool, plain)
        for theirs, *_ in ranks:
            np.testing.assert_allclose(theirs, results[2:], rtol=0, atol=1e-10)
        for name, tensor in put_together([rank[2] for rank in ranks], after).items():
            np.testing.assert_allclose(tensor, final[name], rtol=0, atol=1e-10, err_msg=name)


@functools.cache
def unbroken_run(pool, plain: str) -> tuple[list, dict[str, np.ndarray]]:
    config = Config.model_validate_json(plain)
    ((results, first, final, _),) = pool.run(1, continue_run, None, config, range(3))
    first, final = (put_together([state], config) for state in (first, final))
    for name in first:  # the test would miss what does not change
        assert not np.array_equal(first[name], final[name]), name
    return results, final


@pytest.mark.parametrize("saved,resumed,model", PAIRS, ids=map("->".join, PAIRS))
def test_any_layout_resumes_from_any_other(pool, tmp_path, saved, resumed, model):
    assert_resumes(pool, tmp_path, of_layout(saved, model), of_layout(resumed, model))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def saves_that_fail(folder: Path) -> None:
    training = make_training(make_config())
    training.save(folder, 1)
    first = find_start("latest", folder)
    before = {path.name: path.read_bytes() for path in first.iterdir()}
    training.step(0)
    for broken in ("runtime.saver.write_json", "runtime.folders._sync", "checkpoint.dcp.save"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(f"picotron_min.{broken}", fail)
            for step in (1, 2):
                with pytest.raises(OSError, match="the disk is full"):
                    training.save(folder, step)
        assert find_start("latest", folder) == first
        assert {path.name: path.read_bytes() for path in first.iterdir()} == before

    leftover = folder / ".step-00000002.partial"
    assert leftover.exists()
    (leftover / "shard-00009-model-00001-of-00001.safetensors").write_text("of a larger world")
    training.save(folder, 2)
    second = find_start("latest", folder)
    assert second.name == "step-00000002" and names(second) == names(first)
    assert not leftover.exists()

    training.save(folder, 1)
    after = {path.name: path.read_bytes() for path in first.iterdir()}
    assert after.keys() == before.keys() and after != before


def fail(*args, **kwargs):
    raise OSError("the disk is full")


def test_a_checkpoint_is_complete_or_absent(pool, tmp_path):
    pool.run(1, saves_that_fail, tmp_path)


class WritesAFile:
    """What a stranger could put into a pickle."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def load_among_pickles_and_without_files(run: Path) -> None:
    training, folder, trace = make_training(make_config()), run / "step-00000001", run / "unpickled"
    training.step(0)
    training.save(run, 1)
    for path in folder.iterdir():
        assert path.suffix in (".safetensors", ".json")
        assert not path.read_bytes().startswith(b"\x80")  # as pickles do
    trap = pickle.dumps(WritesAFile(trace))
    for name in (".metadata", "data.pt"):
        (folder / name).write_bytes(trap)
    other = make_training(make_config())
    other.load(folder, step=1)
    State(other).assert_equal(State(training))
    assert not trace.exists()
    pickle.loads(trap)
    assert trace.exists(), "the trap does not work"
    for path in folder.glob("*.safetensors"):
        path.unlink()
    with pytest.raises(OSError, match=f"cannot load {folder}: "):
        other.load(folder, step=1)


def test_loading_runs_no_code_of_the_checkpoint_and_misses_its_files(pool, tmp_path):
    pool.run(1, load_among_pickles_and_without_files, tmp_path)


def background_saves(folder: Path) -> None:
    """What is saved is the moment of the save, and a second save waits for the first."""
    config = make_config(dp=dist.get_world_size(), **{"async": True}, keep=0)
    training = make_training(config)
    training.step(0)
    expected = State(training)
    slow, began = saver.save, time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saver, "save", lambda *a: time.sleep(1) or slow(*a))
        training.save(folder, 1)
        for step in (1, 2):
            training.step(step)
        assert find_start("latest", folder) is None
        assert time.monotonic() - began < 1, "the save was waited for"
        training.save(folder, 3)
        assert find_start("latest", folder) == folder / "step-00000001"
        assert time.monotonic() - began > 1
        training.saver.wait()
    assert find_start("latest", folder) == folder / "step-00000003"
    after = State(training)
    training.load(folder / "step-00000001", step=1)
    State(training).assert_equal(expected)
    training.load(folder / "step-00000003", step=3)
    State(training).assert_equal(after)


def test_training_continues_while_a_checkpoint_is_written(pool, tmp_path):
    pool.run(2, background_saves, tmp_path)


def background_save_that_fails(folder: Path) -> None:
    training = make_training(make_config(**{"async": True}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saver, "write_json", fail)
        training.save(folder, 1)
        while not training.saver.writing.done():
            time.sleep(0.01)
        with pytest.raises(OSError, match="the disk is full"):
            training.saver.wait(until_written=False)
    assert find_start("latest", folder) is None


def test_what_the_background_writer_raises_reaches_the_loop(pool, tmp_path):
    pool.run(1, background_save_that_fails, tmp_path)


def saves(folder: Path, keep: int, steps: int, config: Config | None = None) -> None:
    training = make_training(config or make_config(keep=keep))
    for step in range(1, steps + 1):
        training.save(folder, step)


def test_the_newest_checkpoints_are_kept(pool, tmp_path):
    (tmp_path / "step-final").mkdir()  # the user's own
    pool.run(1, saves, tmp_path, 2, 4)
    assert names(tmp_path) == ["step-00000003", "step-00000004", "step-final"]


TEXT = "Grüße, 世界 🌍!\n\tif x  !=  'y':\r\n\t"


def export(folder: Path, config: Config) -> tuple[dict[str, Tensor], Tensor | None]:
    training = make_training(config)
    training.step(0)
    model = training.chunks[0].model
    for _ in range(2):  # the second replaces the first
        training.export(folder, BytesTokenizer())
    tokens = torch.tensor([list(TEXT.encode())])
    rounds = config.model.dtype == "bfloat16"
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=rounds):
        is_whole = training.axes.pp.size == 1
        logits = model(tokens, torch.arange(tokens.shape[1])) if is_whole else None
    weights = {name: p.detach() for name, p in training.parameters.items()}
    weights = training.parts_of_whole(weights)
    return {name: part.full_tensor() for name, part in weights.items()}, logits


@pytest.mark.parametrize(
    "name", ["dp2", "tp2-tied-float64", "pp2-tied-bfloat16", "pp2-float64", "dp2-bfloat16"]
)
def test_transformers_loads_the_finished_model(pool, tmp_path, caplog, name):
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    folder, config = tmp_path / "hf", make_config(**options_of(name))
    (weights, logits), (others, _) = pool.run(2, export, folder, config)
    weights |= others
    assert names(folder) == [
        "config.json",
        "generation_config.json",
        "model-00001-of-00001.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]

    logging.enable_propagation()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        inputs = tokenizer(TEXT, return_tensors="pt")
        ids = inputs.input_ids
        continued = model.generate(**inputs, max_new_tokens=4, do_sample=False)
        assert continued.shape == (1, ids.shape[1] + 4) or continued[0, -1] == 256
        theirs = model(ids).logits
    logging.disable_propagation()
    assert not any(report.values()), report
    assert not caplog.messages

    dtype = getattr(torch, config.model.dtype)
    loaded = dict(model.named_parameters())
    in_file = load_file(folder / "model-00001-of-00001.safetensors")
    assert loaded.keys() == weights.keys() and ("lm_head.weight" in loaded) is ("tied" not in name)
    for name, weight in weights.items():
        assert in_file[name].dtype == loaded[name].dtype == dtype
        assert torch.equal(loaded[name], weight.to(dtype))
    # Ours is computed with float32 weights, theirs has only these.
    if dtype != torch.bfloat16 and logits is not None:
        torch.testing.assert_close(theirs.detach(), logits, rtol=0, atol=1e-6)

    assert ids[0].tolist() == list(TEXT.encode())
    assert tokenizer.decode(ids[0]) == TEXT
    assert model.config.eos_token_id == tokenizer.eos_token_id == 256


def part_of_a_copy() -> None:
    axes = build_axes(CPU, Layout())
    gpus = Axis("tp", dist.group.WORLD, torch.device("cuda"))  # asks for no GPU
    shapes = {"model.norm.weight": (SHAPE["hidden_size"],)}
    copies = {name: torch.ones(shape) for name, shape in shapes.items()}
    table = placements(shapes, Layout(), tied=False)
    whole = parts_of_whole(copies, shapes, table, Axes(**vars(axes) | {"tp": gpus}))
    local = whole["model.norm.weight"].to_local()
    assert local.data_ptr() == copies["model.norm.weight"].data_ptr()


def test_a_background_save_does_not_move_its_copies_back_to_the_gpu(pool):
    pool.run(1, part_of_a_copy)


def slow_export(folder: Path) -> None:
    training = make_training(make_config(dp=2))
    distributed_c10d._set_pg_timeout(timedelta(seconds=1), dist.group.WORLD)

    class SlowTokenizer(BytesTokenizer):
        def save(self, folder: Path) -> None:
            time.sleep(1.5)

    training.export(folder, SlowTokenizer())


def test_an_export_may_take_longer_than_the_timeout(pool, tmp_path):
    pool.run(2, slow_export, tmp_path / "hf")
    assert (tmp_path / "hf" / "config.json").exists()


def failing_export(folder: Path) -> None:
    training = make_training(make_config())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hugging_face, "write_json", fail)
        with pytest.raises(OSError, match="the disk is full"):
            training.export(folder, BytesTokenizer())
    assert not folder.exists()


def test_the_finished_model_is_complete_or_absent(pool, tmp_path):
    pool.run(1, failing_export, tmp_path / "hf")
