"""Models in Hugging Face's form, most with experts: each architecture in, trained, and out."""

import json
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.overrides import TorchFunctionMode

from picotron_min.runtime import export
from picotron_min.runtime.architectures import from_hf, our_name
from picotron_min.runtime.config import Config
from picotron_min.runtime.config_checks import resolve_model
from picotron_min.runtime.config_file import parse_config
from picotron_min.runtime.hugging_face import find_weights
from picotron_min.runtime.tokenizer import BytesTokenizer
from tests.core.test_checkpoint import make_training
from tests.runtime.test_config import raw_of
from tests.training import Training

# Numbers of a random model of each type of transformers, and what is changed in its variants.
NUMBERS = """{
"all": {"vocab_size": 257, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64, "moe_intermediate_size": 16, "num_experts_per_tok": 3},
"llama": {},
"mixtral": {"num_local_experts": 4},
"glm4_moe": {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5,
    "n_shared_experts": 2, "partial_rotary_factor": 1.0, "num_nextn_predict_layers": 0},
"qwen2": {},
"smollm3": {"pad_token_id": null},
"qwen2_moe": {"shared_expert_intermediate_size": 32, "num_experts": 8, "qkv_bias": false}
}"""
# Of each, in which layout and dtype it is read and written.
MODELS = """
llama       llama     d.tp_size=2,d.sequence_parallel=true,m.dtype=float32     {}
llama-tied  llama     d.pp_size=3,d.dp_size=2,m.dtype=bfloat16    {"tie_word_embeddings": true}
qwen2       qwen2     d.tp_size=2,d.sequence_parallel=true,m.dtype=float32     {}
qwen2-tied  qwen2     d.tp_size=2,d.dp_size=2,d.sharding=parameters,m.dtype=float32    {"tie_word_embeddings": true}
smollm3     smollm3   d.pp_size=3,m.dtype=bfloat16    {"no_rope_layers": [1, 0, 0]}
smollm3-cp  smollm3   d.cp_size=2,m.dtype=float32    {"no_rope_layers": [0, 1, 1], "tie_word_embeddings": true}
mixtral     mixtral   d.dp_size=2,d.ep_size=2,m.dtype=bfloat16    {}
glm-no-norm glm4_moe  d.pp_size=3,m.dtype=bfloat16   {"norm_topk_prob": false, "first_k_dense_replace": 2}
glm         glm4_moe  d.dp_size=2,d.tp_size=2,d.ep_size=2,d.etp_size=2,m.dtype=bfloat16   {"rope_parameters": "llama3"}
qwen        qwen2_moe d.dp_size=2,d.tp_size=2,d.ep_size=4,d.sharding=parameters,m.dtype=float32  {"mlp_only_layers": [1]}
qwen-norm   qwen2_moe d.tp_size=2,d.etp_size=2,m.dtype=bfloat16   {"norm_topk_prob": true}
"""  # noqa: E501
LLAMA_3 = """{"rope_type": "llama3", "rope_theta": 1e5, "factor": 4.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 16}"""
MODELS = {row.split()[0]: row.split(maxsplit=3)[1:] for row in MODELS.strip().splitlines()}


def write_theirs(folder: Path, name: str, dtype=torch.float32, shards="5GB"):
    """A random model as transformers saves it, and the model."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, _, changes = MODELS[name]
    numbers, changes = json.loads(NUMBERS), json.loads(changes.replace('"llama3"', LLAMA_3))
    config = AutoConfig.for_model(model_type, **numbers["all"] | numbers[model_type] | changes)
    config._experts_implementation = "eager"  # grouped products take no float64
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if "e_score_correction_bias" in key:
            tensor.data = tensor.data.to(torch.float32).normal_(std=0.3)
        elif "inv_freq" not in key:
            tensor.data.normal_(mean=float("norm" in key), std=0.1)
    model.save_pretrained(folder, max_shard_size=shards)
    return model


def config_of(folder: Path, options: str) -> Config:
    raw = raw_of(
        "t.optimizer=sgd t.momentum=0.0 t.weight_decay=0.0 t.grad_clip=null t.eval_batches=1"
    )
    raw["training"] |= {"learning_rate": 0.01, "seq_length": 16, "micro_batch_size": 4}
    raw["training"] |= {"moe_seq_aux_loss_coeff": 0.0}
    given = raw_of(options.replace(",", " "))
    raw["distributed"] = {"use_cpu": True} | given.get("distributed", {})
    raw |= {"model": {"name": str(folder)} | given["model"], "dataset": {"tokenizer": "bytes"}}
    return parse_config(raw)


def training_from(folder: Path, config: Config) -> Training:
    return make_training(config, find_weights(str(folder), resolve_model(config), set()))


class InFloat64(TorchFunctionMode):
    """Undoes the casts of transformers to float32, of scores, norms and softmax."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if any(isinstance(a, Tensor) and a.dtype == torch.float64 for a in args):
            if function is Tensor.float:
                return args[0]
            args = [torch.float64 if a is torch.float32 else a for a in args]
            kwargs = {k: torch.float64 if v is torch.float32 else v for k, v in kwargs.items()}
        return function(*args, **kwargs)


def our_step(folder: Path, config: Config) -> tuple:
    """The first batch, and what we make of it: logits, loss and gradients."""
    training = training_from(folder, config)
    batch = training.data.batch(0, 0)
    with torch.no_grad():
        logits = training.chunks[0].model(batch.tokens, torch.arange(16))
    loss = training.step(0).loss
    gradients = {name: p.grad.clone() for name, p in training.parameters.items()}
    return batch.tokens, batch.targets, logits, loss, gradients


def their_step(model, tokens: Tensor, targets: Tensor) -> tuple:
    logits = model(tokens).logits
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return logits.detach(), loss.item(), unstacked(gradients)


def unstacked(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Their tensors in memory by our names, with the matrices of each expert apart."""
    apart = {}
    for name, tensor in tensors.items():
        base, is_stack, kind = name.partition(".experts.")
        if not is_stack:
            apart[our_name(name)] = tensor
            continue
        projections = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}[kind]
        for e, matrix in enumerate(tensor):
            for projection, part in zip(projections, matrix.chunk(len(projections)), strict=True):
                apart[f"{base}.experts.{e}.{projection}.weight"] = part
    return apart


def relative(ours: Tensor, theirs: Tensor) -> float:
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
    return ((ours - theirs).norm() / theirs.norm().clamp(min=1e-6)).item()


@pytest.mark.parametrize("name", MODELS)
def test_their_model_computes_the_same(pool, tmp_path, name):
    model = write_theirs(tmp_path, name).double()
    model.model.rotary_emb.float()  # angles are float32 in both
    ((tokens, targets, *ours),) = pool.run(
        1, our_step, tmp_path, config_of(tmp_path, "m.dtype=float64")
    )
    with InFloat64():
        theirs = their_step(model, tokens, targets)
    assert relative(ours[0], theirs[0]) < 1e-12
    assert ours[1] == pytest.approx(theirs[1], rel=1e-12)
    for key, gradient in ours[2].items():
        assert relative(gradient, theirs[2][key]) < 1e-12, key
    assert theirs[2].keys() == ours[2].keys()


def read_and_write(folder: Path, config: Config, exported: Path) -> None:
    training_from(folder, config).export(exported, BytesTokenizer())


def read_config(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def tensors_of(folder: Path) -> dict[str, Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    assert files
    return {key: tensor for path in files for key, tensor in load_file(path).items()}


@pytest.mark.parametrize("name", MODELS)
def test_what_comes_in_goes_out_the_same_and_transformers_loads_it(pool, tmp_path, name):
    from transformers import AutoModelForCausalLM

    how = (torch.float16, "20KB") if name == "llama" else ()  # in several files
    write_theirs(tmp_path / "in", name, *how)
    before = tensors_of(tmp_path / "in")
    config = config_of(tmp_path / "in", MODELS[name][1])
    pool.run(config.world_size, read_and_write, tmp_path / "in", config, tmp_path / "out")
    after, dtype = tensors_of(tmp_path / "out"), getattr(torch, config.model.dtype)
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report.values()), report
    assert before.keys() == after.keys()
    loaded = unstacked(dict([*model.named_parameters(), *model.named_buffers()]))
    for key, tensor in before.items():
        is_bias = key.endswith("e_score_correction_bias")  # is never rounded
        expected = tensor.to(torch.float32 if is_bias else dtype)
        assert expected.dtype == after[key].dtype and torch.equal(expected, after[key]), key
        if any(part in key for part in model._keep_in_fp32_modules_strict or ()):
            expected = expected.float()  # as newer releases keep weights of routers
        found = loaded[our_name(key)]
        assert expected.dtype == found.dtype and torch.equal(expected, found), key
    assert from_hf(read_config(tmp_path / "in")) == from_hf(read_config(tmp_path / "out"))
    tokens = torch.arange(8)[None]
    assert model.generate(tokens, max_new_tokens=4, min_new_tokens=4).shape == (1, 12)


@pytest.mark.parametrize("name,dtype", [("glm", "float64"), ("llama-tied", "bfloat16")])
def test_a_checkpoint_becomes_a_model_with_its_biases(pool, tmp_path, capsys, name, dtype):
    write_theirs(tmp_path / "in", name)
    config = config_of(tmp_path / "in", f"{MODELS[name][1]},m.dtype={dtype}")
    pool.run(config.world_size, train_and_save, tmp_path, config)
    arguments = [str(tmp_path / "step-00000002"), str(tmp_path / "later")]
    export.main(arguments)
    at_once, later = tensors_of(tmp_path / "hf"), tensors_of(tmp_path / "later")
    assert at_once.keys() == later.keys() == tensors_of(tmp_path / "in").keys()
    for key, tensor in at_once.items():
        assert tensor.dtype == later[key].dtype and torch.equal(tensor, later[key]), key
    assert from_hf(read_config(tmp_path / "later")) == from_hf(read_config(tmp_path / "in"))
    card = (tmp_path / "later/README.md").read_text()
    assert "| layout | pp " in card and "| tokenizer | bytes |" in card
    with pytest.raises(SystemExit, match="2"):
        export.main(arguments)
    assert "exists: name another folder" in capsys.readouterr().err


def train_and_save(folder: Path, config: Config) -> None:
    training = training_from(folder / "in", config)
    for step in range(2):
        training.step(step)
    training.save(folder, 2)
    training.export(folder / "hf", BytesTokenizer())


def test_mistakes_in_the_weights_of_experts_are_named_as_in_the_files(tmp_path):
    write_theirs(tmp_path, "mixtral")
    path, model_config = tmp_path / "model.safetensors", from_hf(read_config(tmp_path))
    tensors, prefix = load_file(path), "model.layers.1.block_sparse_moe."
    first, second, router = (
        f"{prefix}{name}.weight" for name in ("experts.0.w1", "experts.3.w2", "gate")
    )
    del tensors[first]
    save_file(tensors | {second: torch.zeros(5, 48)}, path)
    with pytest.raises(ValueError) as error:
        find_weights(str(tmp_path), model_config, set())
    assert f"{first} is absent there, and (48, 32) here" in str(error.value)
    assert f"{second} is (5, 48) there, and (32, 48) here" in str(error.value)
    # By our name, too.
    save_file({"model.layers.1.mlp.gate.weight": tensors[router]}, tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match=f"{router} of {path} is in another file, too: keep one"):
        find_weights(str(tmp_path), model_config, set())


@pytest.mark.parametrize(
    "name,key,value",
    [
        ("mixtral", "num_experts_per_tok", 2),
        ("mixtral", "scoring_func", "sigmoid"),
        ("glm", "norm_topk_prob", False),
        ("glm", "n_group", 2),
        ("glm", "topk_group", 3),
        ("glm", "routed_scaling_factor", 1.0),
        ("glm", "rope_scaling", None),
        ("smollm3", "no_rope_layers", ()),
    ],
)
def test_a_number_that_no_shape_shows_must_be_the_same(tmp_path, name, key, value):
    write_theirs(tmp_path, name)
    theirs = from_hf(read_config(tmp_path))
    ours = theirs.override(**{key: value})
    message = f"{key} is {getattr(theirs, key)} there, and {value} here"
    with pytest.raises(ValueError, match=re.escape(message)):
        find_weights(str(tmp_path), ours, set())
    if key != "scoring_func":  # without which there is no bias
        assert find_weights(str(tmp_path), ours, {key}) == tmp_path
