"""Models in Hugging Face's form: what transformers writes we train, and the other way round."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from picotron_min.collectives import all_reduce
from picotron_min.runtime import export
from picotron_min.runtime.architectures import to_hf
from picotron_min.runtime.config_checks import resolve_model
from picotron_min.runtime.hugging_face import find_weights
from tests.core.test_checkpoint import make_config, make_training, train_and_save

ROOT = Path(__file__).parents[2]
SHAPE = {"num_key_value_heads": 4}


def write_theirs(folder: Path, tied: bool = False, dtype="float32", shards: str = "5GB") -> None:
    """A random Llama as transformers saves it."""
    from transformers import LlamaConfig as TheirConfig
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    model_config = resolve_model(make_config(tied=tied, model=SHAPE))
    model = LlamaForCausalLM(TheirConfig(**to_hf(model_config))).to(getattr(torch, dtype))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.normal_(mean=1, std=0.1)
    model.save_pretrained(folder, max_shard_size=shards)


def their_loss(folder: Path, tokens: Tensor, targets: Tensor) -> float:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    logits = model(tokens).logits
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), reduction="sum"
    ).item()


def first_loss(folder: Path, config) -> tuple[float, Tensor, Tensor]:
    """The summed loss of the first global batch before any step, and the batch."""
    model_config = resolve_model(config)
    training = make_training(
        config, find_weights(str(folder), model_config, set(config.model.overrides))
    )
    with torch.no_grad():
        model = training.model
        totals = model.pipeline.run(model.eval_plan, lambda i: training.data.batch(0, i))
        loss, _ = all_reduce(model.counted_once(totals), model.axes.world).tolist()
    batches = [training.data.batch(0, i) for i in range(training.data.num_micro_batches)]
    return loss, torch.cat([b.tokens for b in batches]), torch.cat([b.targets for b in batches])


@pytest.mark.parametrize(
    "dtype,shards,tied",
    [("float32", "5GB", False), ("bfloat16", "20KB", True), ("float16", "5GB", True)],
)
def test_their_weights_give_their_loss(pool, tmp_path, dtype, shards, tied):
    write_theirs(tmp_path, tied, dtype, shards)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) is (shards == "20KB")
    for layout in ({}, {"pp": 2, "tp": 2}):
        config = make_config(tied=tied, model=SHAPE, **layout)
        results = pool.run(config.world_size, first_loss, tmp_path, config)
        if not layout:
            expected = their_loss(tmp_path, *results[0][1:])
        for loss, *_ in results:
            assert loss == pytest.approx(expected, rel=1e-6)


@pytest.fixture
def tensors(tmp_path):
    """Change the tensors of a folder that transformers has written."""

    def change(changes, tied=False):
        write_theirs(tmp_path, tied)
        path = tmp_path / "model.safetensors"
        kept = {key: t for key, t in load_file(path).items() if changes.get(key, t) is not None}
        save_file(kept | {key: t for key, t in changes.items() if t is not None}, path)

    return change


def refusal(folder: Path, tied=False, given=(), **changes) -> str:
    model_config = resolve_model(make_config(tied=tied, model=SHAPE)).override(**changes)
    with pytest.raises(ValueError) as error:
        find_weights(str(folder), model_config, {*given})
    return str(error.value)


def test_the_first_mistakes_in_weights_are_reported_at_once(tmp_path, tensors):
    q, up = (f"model.layers.0.{n}.weight" for n in ("self_attn.q_proj", "mlp.up_proj"))
    changes = {q: torch.zeros(5, 32), up: None, "model.layers.7.mlp.up_proj.weight": torch.zeros(2)}
    changes["model.norm.weight"] = torch.zeros(32, dtype=torch.int32)
    changes["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)  # of old versions
    tensors(changes)
    hf = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(hf | {"rms_norm_eps": 0.1}))
    first, *lines = refusal(tmp_path).splitlines()
    assert "Does model.name fit it?" in first
    assert lines == [
        "rms_norm_eps is 0.1 there, and 1e-05 here",
        f"{q} is (5, 32) there, and (32, 32) here",
        f"{up} is absent there, and (48, 32) here",
        "model.norm.weight is of dtype I32 (readable: F64, F32, BF16, F16) there, and (32,) here",
        "model.layers.7.mlp.up_proj.weight is (2,) there, and absent here",
    ]
    assert "rms_norm_eps" not in refusal(tmp_path, given=["rms_norm_eps"])
    assert re.search(r"\nand \d+ more$", refusal(tmp_path, num_hidden_layers=6))


def test_a_tied_model_takes_a_head_that_equals_its_embedding_and_no_other(tmp_path, tensors):
    tied = resolve_model(make_config(tied=True, model=SHAPE))
    write_theirs(tmp_path, tied=True)
    embedding = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    tensors({"lm_head.weight": embedding}, tied=True)
    assert find_weights(str(tmp_path), tied, set())
    tensors({"lm_head.weight": embedding + 1}, tied=True)
    assert "model.tie_word_embeddings to false" in refusal(tmp_path, tied=True)
    tensors({}, tied=True)
    untied = refusal(tmp_path, given=["tie_word_embeddings"])
    assert "lm_head.weight is absent there" in untied
    assert "without lm_head set model.tie_word_embeddings to true" in untied


@pytest.mark.parametrize(
    "content,expected",
    [
        ("[1]", "must hold one object"),
        ('{"a": ', "Expecting value: line 1"),
        ('{"model_type": "gpt2"}', "model_type='gpt2' is not supported"),
    ],
)
def test_an_unusable_config_beside_weights_is_refused_with_its_path(tmp_path, content, expected):
    write_theirs(tmp_path)
    (path := tmp_path / "config.json").write_text(content)
    message = refusal(tmp_path)
    assert message.startswith(f"model.weights: {path}: ") and expected in message


def test_folders_without_weights_and_damaged_files_are_refused(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04")
    assert "is no folder with .safetensors files" in refusal(tmp_path)
    for content in (b"", b"garbage" * 100):
        (path := tmp_path / "model.safetensors").write_bytes(content)
        assert refusal(tmp_path).startswith(f"cannot read {path}: ")
    assert "model.safetensors is no folder with" in refusal(path)
    (tmp_path / "state.json").touch()
    command = f"python -m picotron_min.runtime.export {tmp_path} FOLDER"
    assert f"is a checkpoint: export it first, with  {command}" in refusal(tmp_path)


@pytest.mark.parametrize("tied,dtype", [(False, "float32"), (True, "bfloat16")])
def test_any_checkpoint_becomes_a_model_in_one_process(pool, tmp_path, capsys, tied, dtype):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    config = make_config(pp=2, tp=2, tied=tied, model=SHAPE, dtype=dtype)
    weights = {}
    for part in pool.run(4, trained_weights, tmp_path / "run", config):
        weights |= part
    arguments = [str(tmp_path / "run/step-00000002"), str(tmp_path / "hf")]
    export.main(arguments)
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(report.values()), report
    loaded = dict(model.named_parameters())
    assert weights.keys() == loaded.keys()
    for name, weight in weights.items():
        assert loaded[name].dtype == getattr(torch, dtype)
        assert torch.equal(loaded[name], weight.to(loaded[name].dtype)), name
    assert AutoTokenizer.from_pretrained(tmp_path / "hf").eos_token_id == 256
    card = (tmp_path / "hf" / "README.md").read_text()
    assert "| tokenizer | bytes |" in card and "| layout | pp 2 x dp 1 x cp 1 x tp 2 |" in card
    with pytest.raises(SystemExit, match="2"):
        export.main(arguments)
    assert "exists: name another folder" in capsys.readouterr().err


def test_an_export_is_a_command_that_reports_a_mistake():
    command = [sys.executable, "-m", "picotron_min.runtime.export", "nowhere", "other"]
    done = subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 2 and "cannot use the checkpoint nowhere: " in done.stderr


def trained_weights(folder: Path, config) -> dict[str, Tensor]:
    """What was saved, put together."""
    training = train_and_save(folder, config)
    parts = training.parts_of_whole({n: p.detach() for n, p in training.parameters.items()})
    return {name: part.full_tensor() for name, part in parts.items()}
