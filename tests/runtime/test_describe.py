"""What a rank runs, as runtime/describe.py prints it."""

from functools import partial

import torch

from picotron_min.extensions.build import build_model
from picotron_min.mesh import build_axes
from picotron_min.runtime.describe import lines_of_a_step
from tests.assembled import MODEL, make_config


def described(**layout) -> list[str]:
    config, device = make_config(**layout, micro_batches=2), torch.device("cpu")
    axes = build_axes(device, config.layout)
    model_config = MODEL.override(num_hidden_layers=3)
    model = build_model(model_config, config.layout, config.workload, axes, device)
    for parameter in model.parameters.values():
        torch.nn.init.ones_(parameter)
    return lines_of_a_step(model, axes, config)


def test_each_sublayer_has_what_is_replaced_and_its_messages_with_their_bytes(pool):
    b = 12 * 16 * 32 * 8  # micro-batch, sequence, hidden size, float64
    message = f"      all_reduce over tp: {b:,} bytes, of [12, 16, 32]"
    for overlap, attention in (
        (True, "project: _Enter"),
        (False, "forward: _between of SelfAttention.forward"),
    ):
        lines, _ = pool.run(2, partial(described, tp=2, overlap=overlap))
        assert lines[:2] == ["plan: F0, B0", "F0"]
        assert lines[2:4] == ["  model.embed_tokens: VocabularyParallelEmbedding", message]
        assert f"  model.layers.0.self_attn: SelfAttention, {attention}" in lines
        assert "  model.layers.2: the same" in lines
        forward, backward = (
            lines[i:j] for i, j in ((0, lines.index("B0")), (lines.index("B0"), None))
        )
        assert forward.count(message) == 1 + 2, "the embedding, and two of a layer"
        assert backward.count(message) == 1 + 2 * 3, "lm_head, and two of each layer"
        assert lines[-1] == "all of the step, of gradients and weights", "no dp: nothing is sent"
