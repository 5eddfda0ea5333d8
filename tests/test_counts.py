"""Golden counts: what six configurations compute, send, save and call in a step.

A change that was meant to change them renews the file, in the same commit:

    python -m tests.test_counts
"""

import json
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from picotron_min.costs import model_flops_per_token
from tests.assembled import make_training
from tests.planner.test_planner_traffic import options_of
from tests.pool import Pool

FILE = Path(__file__).with_name("counts.json")
CONFIGS = [  # as in test_planner_traffic.py
    "optimizer=adamw",
    "fp8=true dtype=bfloat16 optimizer=muon",
    "dp=2 tp=2 sp=true recompute=selective dtype=bfloat16",
    "cp=2 dp=2 sharding=parameters recompute=full model=tied",
    "pp=2 pp_engine=zb_h1 m=4",
    "dp=2 ep=2 padded m=2 model=shared",
]
OF_TORCH = "torch's"  # counts that another release of torch may change


class Calls(TorchDispatchMode):
    """Kernels called, without views; and reads of a number of a tensor by the host."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels, self.reads = 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.kernels += not function.is_view
        self.reads += function.overloadpacket is torch.ops.aten._local_scalar_dense
        return function(*args, **(kwargs or {}))


def counts_of_a_step(text: str) -> dict[str, int]:
    """Of this rank: its second step, and the reads of an evaluation after it."""
    model, config = options_of(f"{text} eval_batches=1")
    training, found, alive = make_training(config, model), Counter(), {}
    weights = {p.untyped_storage().data_ptr() for p in training.parameters.values()}
    training.step(0)
    for axis in training.axes:
        axis.ledger.take_bytes()

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            # The tensor, too: else its place could be used again.
            alive[storage.data_ptr()] = tensor, storage.nbytes()
        return tensor

    tolist = Tensor.tolist

    def counted(tensor: Tensor) -> list:
        found["reads by tolist"] += 1
        return tolist(tensor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "tolist", counted)
        saved = saved_tensors_hooks(pack, lambda tensor: tensor)
        with FlopCounterMode(display=False) as flops, Calls() as calls, saved:
            training.step(1)
        for axis in training.axes:
            ledger = axis.ledger
            found |= {f"messages: {k} over {axis.name}": n for k, n in ledger.calls.items()}
            found |= {f"bytes: {k} over {axis.name}": round(n) for k, n in ledger.bytes.items()}
        with Calls() as of_evaluation:
            training.evaluate()
    found["FLOPs of a token by the formula"] = model_flops_per_token(
        model, config.training.seq_length
    )
    found[f"FLOPs by {OF_TORCH} counter"] = flops.get_total_flops()
    found["reads of one number"] = calls.reads + of_evaluation.reads
    found[f"kernels, {OF_TORCH} operations"] = calls.kernels
    found[f"bytes saved by {OF_TORCH} autograd"] = sum(size for _, size in alive.values())
    return {name: number for name, number in sorted(found.items()) if number}


def measure(pool: Pool, text: str) -> dict[str, list[int]]:
    """Each count, of all ranks in their order."""
    _, config = options_of(text)
    ranks = pool.run(config.world_size, counts_of_a_step, text)
    return {name: [of.get(name, 0) for of in ranks] for name in sorted({*ranks[0]}.union(*ranks))}


@pytest.mark.parametrize("text", CONFIGS)
def test_counts_of_a_step_are_those_of_the_file(pool, text):
    recorded, now = json.loads(FILE.read_text()), measure(pool, text)
    expected, is_other_torch = recorded["counts"][text], recorded["torch"] != release()
    changed = [
        f"{name}: {expected.get(name)} in the file, {now.get(name)} now"
        for name in sorted(expected.keys() | now.keys())
        if expected.get(name) != now.get(name) and not (is_other_torch and OF_TORCH in name)
    ]
    assert changed == [], "if that is meant: python -m tests.test_counts"


def release() -> str:
    return torch.__version__.rpartition(".")[0]


if __name__ == "__main__":
    pool = Pool()
    recorded = {"torch": release(), "counts": {text: measure(pool, text) for text in CONFIGS}}
    text = json.dumps(recorded, indent=1)
    FILE.write_text(
        re.sub(r"\[\s+([^\]]*?)\s+\]", lambda m: f"[{' '.join(m[1].split())}]", text) + "\n"
    )
    pool.close()
