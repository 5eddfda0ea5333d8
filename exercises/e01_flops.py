"""01 flops: a lookup costs nothing, the head does

target: costs:model_flops_per_token

Return the FLOPs of forward and backward of a model, per token. Forward: 2 for each parameter that
a token is multiplied with, and attention's own, of which the causal half counts.
`flops_of_layers` has these for each layer, by part. The embedding is a lookup, lm_head is a
product, also where both are one matrix. Layers that predict further tokens use lm_head again;
`head_flops` has all its uses. Backward costs twice as much as forward.
Read: costs.py, model_config.py.

? Which products happen once a layer, which once a model? How many does backward add?
? sum, flops_of_layers(model_config, seq_length), head_flops(model_config).
? Add up the values of all layers' dicts. Add head_flops. Multiply the sum by 3: forward once,
  backward twice.
! To count the embedding, too, would lift the MFU of SmolLM-1.7B by 5.6%. In production: the 6 N +
  12 L Q D S of most projects (docs/planner.md).
"""

import torch
from torch.utils.flop_counter import FlopCounterMode

from exercises.exercise import Case, Dice
from picotron_min.attention import SoftmaxAttention
from picotron_min.extensions.settings import ModelConfig
from picotron_min.model import Llama


def cases(dice: Dice) -> list[Case]:
    sizes = {"vocab": dice.randint(20, 60), "hidden": 8 * dice.randint(2, 4)}
    sizes |= {"inner": dice.randint(10, 50), "layers": dice.randint(1, 3), "heads": 4}
    # A tied head costs as much as one of its own.
    kinds = (6, False), (16, False), (9, True)
    some = [Case(1, **sizes, length=n, tied=tied) for n, tied in kinds]
    # Of heads that are larger than hidden / heads.
    return [*some, Case(1, **sizes, length=6, tied=False, head_dim=sizes["hidden"] // 2)]


def model_config(case: Case):
    config = ModelConfig(case.vocab, case.hidden, case.inner, case.layers, case.heads, 2)
    head_dim = getattr(case, "head_dim", config.head_dim)
    return config.override(tie_word_embeddings=case.tied, head_dim=head_dim)


def on_rank(rank, case: Case) -> dict:
    flops = rank.course.costs.model_flops_per_token
    return {"FLOPs per token": flops(model_config(case), case.length)}


def expected(case: Case) -> list[dict]:
    model, tokens = Llama(model_config(case)), torch.zeros(1, case.length, dtype=torch.int64)
    for layer in model.model.layers.values():
        layer.core_attention = layer.self_attn.core_attention = SoftmaxAttention()
    # torch counts the products that really happen.
    with FlopCounterMode(display=False) as counter:
        model(tokens, torch.arange(case.length), tokens).backward()
    counts = counter.get_flop_counts()["Global"]
    # The only products of more than two dimensions; by the convention of MFU, half of them count.
    attention = counts[torch.ops.aten.bmm]
    return [{"FLOPs per token": (sum(counts.values()) - attention // 2) // case.length}]


MISTAKES = """
embedding_counted: The embedding is counted as if tokens were multiplied with it: it is a lookup.
- return 3 * (layers + head_flops(model_config))
+ lookup = 2 * model_config.vocab_size * model_config.hidden_size
+ return 3 * (lookup + layers + head_flops(model_config))
tied_head_forgotten: A head that shares the embedding's matrix is left out: it costs the same.
    layers + head => layers + (not model_config.tie_word_embeddings) * head
head_forgotten: The head is left out: each token is multiplied with all its V rows.
    + head_flops(model_config) =>
attention_not_halved: All pairs of attention are counted: a causal model needs half of them.
    sum(parts.values()) => sum(parts.values()) + parts["attention"]
attention_forgotten: Attention's own products are left out: scores and weighted sums have no
    parameters, but cost FLOPs.
    sum(parts.values()) => sum(parts.values()) - parts["attention"]
twice_forward: The sum is twice forward, and should be three times: backward alone has two products
    for each one of forward, the gradient of the input and the gradient of the weight.
    return 3 * => return 2 *
"""
