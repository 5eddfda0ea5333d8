"""The planner's memory beside the dry run's: formulas, and what a step really allocates."""

import pytest

from picotron_min.dry_run.run import dry_run
from picotron_min.planner.memory import memory_of_ranks
from picotron_min.runtime.config_checks import resolve_model
from tests.rows import lines, options_of
from tests.training import config_of

# Layers of Llama-3.1-8B, so few that a case takes seconds.
MODEL = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32}
MODEL |= {"num_key_value_heads": 8, "vocab_size": 32000, "num_hidden_layers": 2}
WORK = {"dtype": "bfloat16", "seq_length": 4096, "max_position_embeddings": 4096}
WORK |= {"micro_batch_size": 2, "gradient_accumulation_steps": 2}
EXPERTS = "num_local_experts=8 moe_intermediate_size=14336"

# A rank, and its layout.
ROWS = f"""
0 dtype=float32
1 tp=4 sp
1 cp=4 ulysses recompute=selective
0 pp=2 gradient_accumulation_steps=4 num_hidden_layers=4 recompute=selective
3 pp=4 gradient_accumulation_steps=4 num_hidden_layers=4
0 pp=2 gradient_accumulation_steps=4 num_hidden_layers=4 pp_engine=zb_v pp_chunks=2
0 offload=2 recompute=full num_hidden_layers=4
0 dp=8 sharding=gradients
0 dp=8 sharding=parameters recompute=full num_hidden_layers=4
0 fp8 recompute=full num_hidden_layers=4
5 tp=2 dp=4 ep=4 {EXPERTS} sharding=optimizer recompute=full
"""


@pytest.mark.parametrize("text", lines(ROWS))
def test_the_plan_has_the_bytes_that_a_rank_really_has(text):
    rank, _, words = text.partition(" ")
    config = config_of(**MODEL | WORK | options_of(words))
    planned = memory_of_ranks(resolve_model(config), config.layout, config.workload)
    place = config.layout.coordinates(int(rank))
    assert dry_run(config, int(rank)).peak == pytest.approx(planned[place.pp].total, rel=0.015)
