"""Models in Hugging Face's form: what transformers writes we train, and the other way round."""

import json
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
from tests.core.test_checkpoint import make_config, make_training, names, train_and_save

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


LAYOUTS = {
    "one": {},
    "tp4": {"tp": 4},
    "pp2-tp2": {"pp": 2, "tp": 2},
    "pp2-cp2-tp2": {"pp": 2, "cp": 2, "tp": 2},
}


@pytest.mark.turns(3, 5)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(
    "dtype,shards", [("float32", "5GB"), ("bfloat16", "20KB"), ("float16", "5GB")], ids=str
)
def test_their_weights_give_their_loss_on_every_layout(pool, tmp_path, dtype, shards, tied):
    write_theirs(tmp_path, tied, dtype, shards)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) is (shards == "20KB")
    for layout in LAYOUTS.values():
        config = make_config(tied=tied, model=SHAPE, **layout)
        results = pool.run(config.world_size, first_loss, tmp_path, config)
        if config.world_size == 1:
            expected = their_loss(tmp_path, *results[0][1:])
        for loss, *_ in results:
            assert loss == pytest.approx(expected, rel=1e-6)


def test_the_first_mistakes_in_weights_are_reported_at_once(tmp_path):
    model_config = resolve_model(make_config(model=SHAPE))
    write_theirs(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    q, up = (f"model.layers.0.{n}.weight" for n in ("self_attn.q_proj", "mlp.up_proj"))
    tensors[q] = tensors[q][:5].contiguous()
    del tensors[up]
    tensors["model.layers.7.mlp.up_proj.weight"] = torch.zeros(2)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int32)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)  # of old versions
    save_file(tensors, path)
    hf = json.loads((tmp_path / "config.json").read_text())
    hf["rms_norm_eps"] = 0.1
    (tmp_path / "config.json").write_text(json.dumps(hf))
    with pytest.raises(ValueError) as error:
        find_weights(str(tmp_path), model_config, set())
    for part in (
        f"{q} is (5, 32) there, and (32, 32) here",
        "model.layers.7.mlp.up_proj.weight is (2,) there, and absent here",
        "model.norm.weight is of dtype I32 (readable: F64, F32, BF16, F16) there, and (32,) here",
        f"{up} is absent there, and (48, 32) here",
        "does model.name fit it?",
        "config.json: rms_norm_eps is 0.1, and this model's is 1e-05",
    ):
        assert part in str(error.value)
    assert "inv_freq" not in str(error.value)
    assert str(error.value).count(q) == 1
    with pytest.raises(ValueError, match=r"\nand \d+ more$"):
        find_weights(str(tmp_path), model_config.override(num_hidden_layers=6), set())
    with pytest.raises(ValueError) as error:
        find_weights(str(tmp_path), model_config, {"rms_norm_eps"})
    assert "rms_norm_eps" not in str(error.value)


def test_a_tied_model_takes_a_head_that_equals_its_embedding_and_no_other(tmp_path):
    write_theirs(tmp_path, tied=True)
    tied = resolve_model(make_config(tied=True, model=SHAPE))
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, path)
    assert find_weights(str(tmp_path), tied, set())
    tensors["lm_head.weight"][3, 3] += 1
    save_file(tensors, path)
    with pytest.raises(ValueError, match=r"differs from .* set model.tie_word_embeddings to false"):
        find_weights(str(tmp_path), tied, set())


def test_tied_weights_for_an_untied_model_are_refused_with_the_remedy(tmp_path):
    write_theirs(tmp_path, tied=True)
    untied = resolve_model(make_config(model=SHAPE))
    with pytest.raises(ValueError, match=r"lm_head.weight is absent .*tie_word_embeddings true "):
        find_weights(str(tmp_path), untied, {"tie_word_embeddings"})


@pytest.mark.parametrize(
    "content,expected",
    [
        ("[1]", "must hold one object"),
        ('{"a": ', "is not JSON: Expecting value: line 1"),
        ('{"model_type": "gpt2"}', "model_type='gpt2' is not supported"),
    ],
)
def test_an_unusable_config_beside_weights_is_refused_with_its_path(tmp_path, content, expected):
    write_theirs(tmp_path)
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError) as error:
        find_weights(str(tmp_path), resolve_model(make_config(model=SHAPE)), set())
    message = str(error.value)
    assert message.count(str(tmp_path / "config.json")) == 1 and expected in message


def test_folders_without_weights_and_damaged_files_are_refused(tmp_path):
    model_config = resolve_model(make_config(model=SHAPE))
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04")
    with pytest.raises(ValueError, match=r"is no folder with .safetensors files"):
        find_weights(str(tmp_path), model_config, set())
    for content in (b"", b"garbage" * 100, b"\xff" * 100):
        (tmp_path / "model.safetensors").write_bytes(content)
        with pytest.raises(OSError, match=r"model\.safetensors is damaged"):
            find_weights(str(tmp_path), model_config, set())
    (tmp_path / "folder.safetensors").mkdir()
    with pytest.raises(OSError, match=r"cannot read .*folder\.safetensors"):
        find_weights(str(tmp_path), model_config, set())
    with pytest.raises(ValueError, match=r"model\.safetensors is no folder with"):
        find_weights(str(tmp_path / "model.safetensors"), model_config, set())
    (tmp_path / "state.json").touch()
    with pytest.raises(ValueError, match=f"is a checkpoint: export it .*export {tmp_path} FOLDER"):
        find_weights(str(tmp_path), model_config, set())


@pytest.mark.parametrize(
    "tied,dtype", [(False, "float32"), (True, "float32"), (True, "bfloat16")], ids=str
)
def test_any_checkpoint_becomes_a_model_in_one_process(pool, tmp_path, capsys, tied, dtype):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    config = make_config(pp=2, tp=2, tied=tied, model=SHAPE, dtype=dtype)
    weights = {}
    for part in pool.run(4, trained_weights, tmp_path / "run", config):
        weights |= part
    arguments = [str(tmp_path / "run/step-00000002"), str(tmp_path / "hf")]
    if tied:
        export.main(arguments)
    else:
        command = [sys.executable, "-m", "picotron_min.runtime.export", *arguments]
        subprocess.run(command, cwd=ROOT, check=True, timeout=60)
    assert "config.json" in names(tmp_path / "hf")
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(report.values()), report
    loaded = dict(model.named_parameters())
    assert weights.keys() == loaded.keys()
    for name, weight in weights.items():
        assert loaded[name].dtype == getattr(torch, dtype)
        assert torch.equal(loaded[name], weight.to(loaded[name].dtype)), name
    assert AutoTokenizer.from_pretrained(tmp_path / "hf").eos_token_id == 256
    card = (tmp_path / "hf" / "README.md").read_text()
    assert "| data | stdlib |" in card and "| tokenizer | bytes |" in card
    assert "| layout | pp 2 x dp 1 x cp 1 x tp 2 |" in card
    for wrong, expected in (
        (arguments, "exists: name another folder"),
        (["nowhere", "other"], "cannot use the checkpoint nowhere: "),
    ):
        with pytest.raises(SystemExit, match="2"):
            export.main(wrong)
        assert expected in capsys.readouterr().err


def trained_weights(folder: Path, config) -> dict[str, Tensor]:
    """What was saved, put together."""
    training = train_and_save(folder, config)
    parts = training.parts_of_whole({n: p.detach() for n, p in training.parameters.items()})
    return {name: part.full_tensor() for name, part in parts.items()}
