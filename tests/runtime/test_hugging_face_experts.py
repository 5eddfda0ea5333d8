"""Models in Hugging Face's form, most with experts: each architecture in and out."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.testing import assert_close

from picotron_min.extensions.settings import ModelConfig
from picotron_min.model_config import RopeScaling
from picotron_min.runtime.architectures import from_hf, to_hf
from picotron_min.runtime.config import Config
from picotron_min.runtime.config_checks import resolve_model
from picotron_min.runtime.hugging_face import find_weights
from picotron_min.runtime.json_file import read_json
from picotron_min.runtime.tokenizer import BytesTokenizer
from tests.core.test_checkpoint import make_training
from tests.rows import options_of
from tests.training import Training, config_of

LLAMA = ModelConfig(257, 32, 48, 3, 4, 2, rms_norm_eps=1e-6)
TIED = LLAMA.override(tie_word_embeddings=True)
EXPERTS = LLAMA.override(num_local_experts=8, moe_intermediate_size=16, num_experts_per_tok=3)
SIGMOID = EXPERTS.override(scoring_func="sigmoid", n_group=4, topk_group=2, n_shared_experts=2)
SIGMOID = SIGMOID.override(routed_scaling_factor=2.5)
STRETCHED = RopeScaling(4.0, original_max_position_embeddings=16)
# Each in the layout and dtype in which it is read and written.
MODELS = [
    (LLAMA, "tp=2 sequence_parallel dtype=float32"),
    (TIED.override(qkv_bias=True), "tp=2 dp=2 sharding=parameters dtype=float32"),
    (LLAMA.override(no_rope_layers=(1, 0, 0)), "pp=3 dtype=bfloat16"),
    (
        TIED.override(post_norm=True, num_hidden_layers=4),
        "pp=2 pp_engine=zb_v pp_chunks=2 dtype=bfloat16",
    ),
    (EXPERTS.override(intermediate_size=16), "dp=2 ep=2 dtype=bfloat16"),
    (SIGMOID.override(norm_topk_prob=False, mlp_only_layers=(0, 1)), "pp=3 dtype=bfloat16"),
    (SIGMOID.override(rope_scaling=STRETCHED), "dp=2 tp=2 ep=2 etp=2 dtype=bfloat16"),
]


def write_theirs(folder: Path, c: ModelConfig):
    """A random model as transformers saves it, in several files, and the model."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**to_hf(c) | {"pad_token_id": None})
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


def config_in(folder: Path, options: str) -> Config:
    data = {"seq_length": 16, "micro_batch_size": 4, "eval_batches": 1, "tokenizer": "bytes"}
    return config_of(name=str(folder), use_cpu=True, **data, **options_of(options))


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


def read_and_write(folder: Path, config: Config) -> None:
    training_from(folder / "in", config).export(folder / "hf", BytesTokenizer())


def tensors_of(folder: Path) -> dict[str, Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    return {key: tensor for path in files for key, tensor in load_file(path).items()}


@pytest.mark.parametrize("c,options", MODELS)
def test_a_model_of_transformers_computes_the_same_and_goes_out_as_it_came(
    pool, tmp_path, c, options
):
    model = write_theirs(source := tmp_path / "in", c).double()
    model.model.rotary_emb.float()  # angles are float32 in both
    ((tokens, logits),) = pool.run(1, our_logits, source, config_in(source, "dtype=float64"))
    with InFloat64(), torch.no_grad():
        assert_close(logits, model(tokens).logits, rtol=1e-11, atol=1e-12)

    config = config_in(source, options)
    assert resolve_model(config) == c
    pool.run(config.world_size, read_and_write, tmp_path, config)
    expected, dtype = tensors_of(source), getattr(torch, config.model.dtype)
    for key, tensor in expected.items():  # biases are never rounded
        is_bias = key.endswith("e_score_correction_bias")
        expected[key] = tensor.to(torch.float32 if is_bias else dtype)
    assert_close(tensors_of(out := tmp_path / "hf"), expected, rtol=0, atol=0)
    assert from_hf(read_json(out / "config.json")) == c
    loaded, report = type(model).from_pretrained(out, output_loading_info=True)
    assert not any(report.values()), report
    assert loaded.generate(tokens[:, :8], max_new_tokens=4, min_new_tokens=4).shape == (4, 12)
