"""Models in Hugging Face's form, most with experts: each architecture in, trained, and out."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.testing import assert_close

from picotron_min.runtime.architectures import from_hf
from picotron_min.runtime.config import Config
from picotron_min.runtime.config_checks import resolve_model
from picotron_min.runtime.config_file import parse_config
from picotron_min.runtime.hugging_face import find_weights
from picotron_min.runtime.json_file import read_json
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
"smollm3": {"pad_token_id": null}
}"""
# Of each, in which layout and dtype it is read and written.
MODELS = """
llama       llama     d.tp_size=2,d.sequence_parallel=true,m.dtype=float32     {}
llama-tied  llama     d.pp_size=3,d.dp_size=2,m.dtype=bfloat16    {"tie_word_embeddings": true}
qwen2-tied  qwen2     d.tp_size=2,d.dp_size=2,d.sharding=parameters,m.dtype=float32    {"tie_word_embeddings": true}
smollm3     smollm3   d.pp_size=3,m.dtype=bfloat16    {"no_rope_layers": [1, 0, 0]}
mixtral     mixtral   d.dp_size=2,d.ep_size=2,m.dtype=bfloat16    {}
glm-no-norm glm4_moe  d.pp_size=3,m.dtype=bfloat16   {"norm_topk_prob": false, "first_k_dense_replace": 2}
glm         glm4_moe  d.dp_size=2,d.tp_size=2,d.ep_size=2,d.etp_size=2,m.dtype=bfloat16   {"rope_parameters": "llama3"}
"""  # noqa: E501
LLAMA_3 = """{"rope_type": "llama3", "rope_theta": 1e5, "factor": 4.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 16}"""
MODELS = {row.split()[0]: row.split(maxsplit=3)[1:] for row in MODELS.strip().splitlines()}


def write_theirs(folder: Path, name: str):
    """A random model as transformers saves it, in several files, and the model."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, _, changes = MODELS[name]
    numbers, changes = json.loads(NUMBERS), json.loads(changes.replace('"llama3"', LLAMA_3))
    config = AutoConfig.for_model(model_type, **numbers["all"] | numbers[model_type] | changes)
    config._experts_implementation = "eager"  # grouped products take no float64
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if "e_score_correction_bias" in key:
            tensor.data = tensor.data.to(torch.float32).normal_(std=0.3)
        elif "inv_freq" not in key:
            tensor.data.normal_(mean=float("norm" in key), std=0.1)
    model.save_pretrained(folder, max_shard_size="20KB")
    return model


def config_of(folder: Path, options: str) -> Config:
    data = "o.tokenizer=bytes t.seq_length=16 t.micro_batch_size=4 t.eval_batches=1"
    words = f"m.name={folder} d.use_cpu=true {data} {options.replace(',', ' ')}"
    return parse_config(raw_of(words))


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


def our_logits(folder: Path, config: Config) -> tuple[Tensor, Tensor]:
    training = training_from(folder, config)
    tokens = training.data.batch(0, 0).tokens
    with torch.no_grad():
        return tokens, training.chunks[0].model(tokens, torch.arange(16))


def read_save_and_write(folder: Path, config: Config) -> None:
    training = training_from(folder / "in", config)
    training.save(folder, 1)
    training.export(folder / "hf", BytesTokenizer())


def tensors_of(folder: Path) -> dict[str, Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    return {key: tensor for path in files for key, tensor in load_file(path).items()}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_transformers_computes_the_same_and_goes_out_as_it_came(pool, tmp_path, name):
    model = write_theirs(source := tmp_path / "in", name).double()
    model.model.rotary_emb.float()  # angles are float32 in both
    config = config_of(source, "m.dtype=float64")
    ((tokens, logits),) = pool.run(1, our_logits, source, config)
    with InFloat64(), torch.no_grad():
        assert_close(logits, model(tokens).logits, rtol=1e-11, atol=1e-12)

    config = config_of(source, MODELS[name][1])
    pool.run(config.world_size, read_save_and_write, tmp_path, config)
    expected, dtype = tensors_of(source), getattr(torch, config.model.dtype)
    for key, tensor in expected.items():  # biases are never rounded
        is_bias = key.endswith("e_score_correction_bias")
        expected[key] = tensor.to(torch.float32 if is_bias else dtype)
    assert_close(tensors_of(out := tmp_path / "hf"), expected, rtol=0, atol=0)
    assert from_hf(read_json(out / "config.json")) == resolve_model(config)
    loaded, report = type(model).from_pretrained(out, output_loading_info=True)
    assert not any(report.values()), report
    assert loaded.generate(tokens[:, :8], max_new_tokens=4, min_new_tokens=4).shape == (4, 12)
