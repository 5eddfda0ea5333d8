"""A step counted: operations that it launches on a GPU, and bytes that they read and write.

    python benchmarks/counted.py SmolLM-1.7B [--layout '{"tp_size": 2}']

No GPU is needed: a dry run counts them, the same in each run. Beside ours are transformers' model,
trained as by its Trainer, or with a layout our one process; and the least of one process: a product
reads its operands and writes its result once, so does all between two, and weights, gradients and
moments pass once. In bfloat16, nothing compiled; messages are no launches.
"""

import json
import math
import re
import sys
from argparse import ArgumentParser
from collections import Counter
from pathlib import Path
from traceback import walk_stack
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))  # measure this copy, installed or not

from benchmarks.common import transformers_model
from picotron_min.dry_run.device import GPU, as_on_a_gpu, attention
from picotron_min.dry_run.recorder import Recorder
from picotron_min.dry_run.run import dry_run
from picotron_min.runtime.config import Config
from picotron_min.runtime.config_checks import resolve_model
from picotron_min.runtime.config_file import parse_config

MODELS = "SmolLM-135M", "SmolLM-1.7B", "Llama-3.2-1B", "Qwen3-0.6B"
SEQ_LENGTH, SEQUENCES, TOKENS, MICRO_BATCHES = 2048, 4, 8192, 4  # of a micro-batch, of a step
# The part of a step that an operation belongs to, by the class and function that call it.
PARTS = {
    r"\.scale$|measure_gradient|clip_grad": "clip",
    r"GradientBuckets|Sharded": "gradients",
    r"RMSNorm|DecoderLayer": "norms",  # with the sums of the residual stream
    r"[Aa]ttention|[Rr]ota": "attention",
    r"MLP": "MLP",
    r"Embedding": "embedding",
    r"Head|head_loss|ForCausalLM": "loss",
    r"Adam|weights_changed": "optimizer",
}


def main() -> None:
    parser = ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--layout", type=json.loads, default={}, metavar="JSON")
    model, layout = vars(parser.parse_args()).values()
    config, ours = config_of(model), dry_run(config_of(model, layout), 0, part)
    other = dry_run(config, 0, part) if layout else trained_by_transformers(config)
    of_all = ours.launches, other.launches, ours.moved, other.moved, least(config)
    for counts in of_all:
        counts["gradients"] += counts.pop("backward of leaves", 0)
        counts["all"] = sum(counts.values())
    print(f"{model:22}{'launches':>8}{'other':>8}{'GB':>9}{'other':>9}{'least':>9}")
    for name in sorted(set().union(*of_all), key=of_all[3].get):
        a, b, *sizes = (counts[name] for counts in of_all)
        print(f"{name:22}{a:8}{b:8}" + "".join(f"{size / 1e9:9.1f}" for size in sizes))
    print(f"{'waits':22}" + "".join(f"{sum(run.waits.values()):8}" for run in (ours, other)))


def config_of(model: str, layout: dict | None = None) -> Config:
    work = {"micro_batch_size": SEQUENCES, "gradient_accumulation_steps": MICRO_BATCHES}
    work, kind = work | {"seq_length": SEQ_LENGTH}, {"name": model, "dtype": "bfloat16"}
    return parse_config({"model": kind, "training": work, "distributed": layout or {}})


def part() -> str:
    for frame, _ in walk_stack(sys._getframe()):
        name = f"{type(frame.f_locals.get('self')).__name__}.{frame.f_code.co_name}"
        for pattern, part in PARTS.items():
            if re.search(pattern, name):
                return part
    return "other"


def trained_by_transformers(config: Config) -> Recorder:
    """Its model, autocast, loss and clipping as in its Trainer, without what that reports."""
    cast = {}  # fake tensors know no autocast, which casts a weight once a micro-batch

    def linear(module: nn.Linear, x: Tensor) -> Tensor:
        if module not in cast:
            cast[module] = module.weight.bfloat16()
        return F.linear(x.bfloat16(), cast[module])

    def flash(*tensors: Tensor, is_causal: bool, **_) -> Tensor:
        return attention(*(x.bfloat16() for x in tensors), is_causal)

    def loss(logits: Tensor, targets: Tensor, **_) -> Tensor:  # fake tensors cannot do torch's
        return -F.log_softmax(logits, -1).gather(1, targets[:, None]).sum()

    with (
        as_on_a_gpu() as mode,
        mock.patch.object(nn.Linear, "forward", linear),
        mock.patch.object(F, "scaled_dot_product_attention", flash),
        mock.patch.object(F, "cross_entropy", loss),
        Recorder("cuda", mode, part) as recorder,
        torch.device(GPU),
    ):
        model = transformers_model(resolve_model(config))
        parameters = list(model.parameters())
        optimizer = torch.optim.AdamW(parameters, fused=True)
        sum(parameter.sum() for parameter in parameters).backward()
        optimizer.step()  # makes its state
        optimizer.zero_grad()
        ids = torch.zeros(SEQUENCES, SEQ_LENGTH, dtype=torch.int64)
        targets = {"labels": ids, "shift_labels": ids, "num_items_in_batch": ids.sum()}
        recorder.begin()
        for _ in range(MICRO_BATCHES):
            model(ids, use_cache=False, **targets).loss.backward()
            cast.clear()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
    return recorder


def least(config: Config) -> Counter[str]:
    """Bytes by part; activations are bfloat16, the residual stream and sums float32."""
    shape = resolve_model(config)
    E, M, V = shape.hidden_size, shape.intermediate_size, shape.vocab_size
    Q, K = (n * shape.head_dim for n in (shape.num_attention_heads, shape.num_key_value_heads))
    counts, layers = Counter(), shape.num_hidden_layers
    attention, mlp = [(E, Q), (E, K), (E, K), (Q, E)], [(E, M), (E, M), (M, E)]
    matrices = {"attention": attention * layers, "MLP": mlp * layers, "loss": [(E, V)]}
    for name, sizes in matrices.items():
        for inputs, outputs in sizes * MICRO_BATCHES:
            weight, passed = inputs * outputs, 2 * TOKENS * (inputs + outputs)
            counts[name] += passed + 2 * weight
            counts[f"backward of {name}"] += 2 * passed + (2 + 8) * weight  # dx, dW
    for name, times, forward, backward in (  # bytes a token, beside the products
        ("attention", layers, 4 * (Q + K) + 4 * (Q + K), 4 * (Q + K) + 8 * (Q + K)),  # and rotary
        ("MLP", layers, 2 * 3 * M, 2 * 5 * M),
        ("norms", 2 * layers + 1, 4 * 2 * E + 2 * 2 * E, 4 * 3 * E + 2 * 2 * E),
        ("norms", layers * shape.qk_norm, 4 * (Q + K), 6 * (Q + K)),
        ("loss", 1, 2 * 2 * V, 0),
        ("embedding", 1, 4 * 2 * E, 4 * 3 * E),
    ):
        counts[name] += MICRO_BATCHES * times * TOKENS * forward
        counts[f"backward of {name}"] += MICRO_BATCHES * times * TOKENS * backward
    parameters = sum(map(math.prod, shape.parameter_shapes().values()))
    counts["clip"], counts["optimizer"] = 4 * parameters, (28 + 2) * parameters
    return counts


if __name__ == "__main__":
    main()
