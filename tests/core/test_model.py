import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from picotron_min.extensions.settings import ModelConfig
from picotron_min.loss import IGNORE_INDEX
from picotron_min.model import Llama
from picotron_min.model_config import RopeScaling
from picotron_min.runtime.architectures import their_name, to_hf

BASE = ModelConfig(97, 32, 56, 3, 4, 4)
SHAPES = {
    "grouped-query": BASE.override(num_key_value_heads=2),
    "tied": BASE.override(tie_word_embeddings=True, num_key_value_heads=2),
    "wide-heads": BASE.override(head_dim=24),
    "scaled-rope": BASE.override(
        rope_theta=10_000.0,
        rope_scaling=RopeScaling(8.0, original_max_position_embeddings=64),
        max_position_embeddings=512,
    ),
}


def random_llama(config: ModelConfig, dtype: torch.dtype) -> Llama:
    torch.manual_seed(0)
    model = Llama(config).to(dtype)
    for parameter in model.parameters():  # norm weights too, or a missing one would not show
        torch.nn.init.normal_(parameter, mean=0.1, std=0.2)
    return model


def batch(config: ModelConfig, B: int = 2, S: int = 48) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(config.vocab_size, (B, S), generator=generator)
    targets = torch.randint(config.vocab_size, (B, S), generator=generator)
    targets[0, :5] = IGNORE_INDEX
    return tokens, torch.arange(S), targets


def norm_in_own_dtype(self, x):
    """transformers' RMSNorm without its cast of float64 to float32, which costs nine digits."""
    return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)


def assert_computes_the_same(ours: Llama, theirs: torch.nn.Module, tolerance: float) -> None:
    """Logits and gradients, with the weights of ours: errors are relative to the largest number."""
    named = {their_name(name, ours.config): p for name, p in ours.named_parameters()}
    missing, unexpected = theirs.load_state_dict(named, strict=False)
    assert not unexpected and missing in ([], ["lm_head.weight"])
    theirs.tie_weights()
    tokens, positions, targets = batch(ours.config)
    logits = theirs(tokens).logits
    pairs = {"logits": (ours(tokens, positions), logits)}
    ours(tokens, positions, targets).backward()
    torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), reduction="sum"
    ).backward()
    references = dict(theirs.named_parameters())
    pairs |= {name: (p.grad, references[name].grad) for name, p in named.items()}
    for name, (mine, reference) in pairs.items():
        atol = tolerance * reference.abs().max().item()
        torch.testing.assert_close(mine, reference, rtol=0, atol=atol, msg=name)


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_and_gradients_equal_transformers(shape, monkeypatch):
    monkeypatch.setattr(LlamaRMSNorm, "forward", norm_in_own_dtype)
    config = SHAPES[shape]
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**to_hf(config))).double()
    assert_computes_the_same(random_llama(config, torch.float64), theirs, 1e-10)
