"""Every mistake in a config.json is reported with its numbers and its remedy."""

import contextlib
import json
from pathlib import Path

import pytest

from picotron_min.runtime.architectures import to_hf
from picotron_min.runtime.config import ConfigError
from picotron_min.runtime.config_checks import resolve_model
from picotron_min.runtime.config_file import load_config, parse_config
from picotron_min.runtime.public_models import PRESETS

PICOTRON_TEMPLATE = """{"distributed": {"tp_size": 1, "cp_size": 1, "pp_size": 1, "dp_size": 1,
    "pp_engine": "1f1b", "backend": "nccl", "use_cpu": false}, "model":
    {"name": "HuggingFaceTB/SmolLM-360M-Instruct", "num_hidden_layers": 16, "dtype": "bfloat16",
    "num_attention_heads": 16, "num_key_value_heads": 4, "use_flash_attention": true,
    "use_fused_adam": true}, "training": {"seed": 42, "learning_rate": 1, "total_train_steps": 200,
    "seq_length": 1024, "micro_batch_size": 32, "gradient_accumulation_steps": 1,
    "num_samples": 400000, "max_tokens": null}, "dataset": {"name": "roneneldan/TinyStories",
    "subset_name": null, "num_workers": 0, "num_proc": 4}, "checkpoint": {"save_dir": "~/ckpt",
    "save_frequency": 300, "load_path": ""}, "logging": {"use_wandb": false, "run_name": null,
    "project_name": "picotron"}, "environment": {"OMP_NUM_THREADS": "1", "HF_TOKEN": null,
    "TOKENIZERS_PARALLELISM": "false", "FLASH_ATTEN": "1"}}"""

SHORT = {"d": "distributed", "m": "model", "t": "training", "o": "dataset", "l": "logging"}
SHORT |= {"e": "environment", "c": "checkpoint"}
EIGHT = "m.num_local_experts=8 m.moe_intermediate_size=96"


def raw_of(text: str) -> dict:
    """A config from words like t.seed=1, of a section's letter and a value in JSON or as it is."""
    raw = {}
    for word in text.replace("EIGHT", EIGHT).split():
        (where, _, value), kept = word.partition("="), {}
        with contextlib.suppress(ValueError):
            kept["value"] = json.loads(value)
        raw.setdefault(SHORT[where[0]], {})[where[2:]] = kept.get("value", value)
    return raw


def problems(raw: dict) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse_config(raw)
    return caught.value.problems


# A config with one mistake, and some words of the sentence about it.
BAD = """
t.seq_length="256"                      | training.seq_length="256": must be a valid integer
t.learning_rate=NaN                     | learning_rate=NaN: must be a finite number
d.dp_size=1000000000000                 | must be less than or equal to 99999999
m.num_hidden_layers=1000000000          | must be less than or equal to 99999999
m.num_local_experts=10000 m.num_hidden_layers=1000 | are more than 100,000 in all: use at most 100
e.HF_TOKEN=hf_secret                    | HF_TOKEN must be null: delete it, and run  export HF_T
t.learning_rat=1                        | learning_rat is not known: did you mean learning_rate?
t.cpu=1                                 | cpu is not known: did you mean distributed.use_cpu?
l.zzz=1                                 | logging.zzz is not known: use log_num_zeros_in_grad, use_
t.warmup_steps=200                      | must be below total_train_steps=200
t.min_learning_rate=0.1                 | is above learning_rate=0.0003: use at most 0.0003
t.moe_pad_expert_input_to_capacity=true | needs moe_expert_capacity_factor: set it
t.moe_expert_rank_capacity_factor=0.5   | must be greater than or equal to 1
t.seq_length=4096                       | is above max_position_embeddings=2048 of model.name=tiny
o.packing=bfd                           | set document_mask to true, or packing to "wrapped"
o.name=stdlb                            | /stdlb: use stdlib, a path or a hub id
m.name=SmolLM-136M                      | SmolLM-136M: use SmolLM-360M, SmolLM-135M
m.offload=4                                             | the smallest has 4: use at most 3
d.pp_chunks=2 d.pp_engine=interleaved                   | needs more than pp_size=1: use more ranks
d.pp_chunks=2 d.pp_size=2                               | 1f1b has 1 chunk a rank, not 2: use 1
d.pp_size=2 d.pp_layers=[2,1]                           | 2 numbers with the sum num_hidden_layers=4
d.tp_size=5 m.name=Llama-3.2-1B         | use 1, 2, 4 or 8
d.pp_size=5                                             | exceed num_hidden_layers=4: use at most 4
d.cp_size=4 t.seq_length=252 d.sequence_parallel=true   | into 8 equal pieces, which cp_size=4
d.cp_size=4 d.tp_size=2 d.cp_engine=ulysses             | use 1 or 2, or cp_engine="ring"
d.ep_size=4 d.etp_size=2 d.dp_size=3 d.tp_size=2 EIGHT  | 6: use a product of 1, 2, 3 or 6
d.ep_size=16 d.dp_size=16 EIGHT                         | num_local_experts=8: use 1, 2, 4 or 8
d.etp_size=5 d.dp_size=5 EIGHT                          | moe_intermediate_size=96: use 1
d.ep_size=2 d.dp_size=2                                 | no experts, but ep_size=2: set num_local
m.n_shared_experts=2 m.scoring_func=sigmoid             | but n_shared_experts=2, scoring_func="si
d.tp_size=2 d.cp_size=2 t.seq_length=250 d.cp_engine=ulysses EIGHT | seq_length=250 / cp_size=2 =
d.tp_size=2 m.mlp_only_layers=[0] m.intermediate_size=383 EIGHT    | intermediate_size=383: use 1
m.num_experts_per_tok=9 EIGHT                           | num_local_experts=8: use at most 8
m.num_experts_per_tok=1 EIGHT                           | the router learns nothing: use 2, or false
m.mlp_only_layers=[4] EIGHT                             | must name some, not all, of the layers
m.n_group=3 m.scoring_func=sigmoid EIGHT                | use one of [1, 2, 4]
m.n_group=4 m.num_experts_per_tok=3 m.scoring_func=sigmoid EIGHT   | groups of 2: use 2 to 4
m.n_shared_experts=1 EIGHT                              | true exactly if n_shared_experts=1
m.mlp_only_layers=[0,2] m.scoring_func=sigmoid EIGHT    | of 2 dense layers the first ones
m.num_nextn_predict_layers=1 t.mtp_loss_scaling_factor=0 | =1 untrained: raise it, or num_ne
l.trace_file=checkpoints/metrics.jsonl                  | name another file
"""
quick = pytest.mark.quick


@quick
@pytest.mark.parametrize("row", BAD.strip().splitlines())
def test_a_mistake_is_reported_with_its_numbers_and_the_remedy(row):
    text, _, words = row.partition(" | ")
    found = problems(raw_of(text))
    assert all("hf_secret" not in problem for problem in found)
    assert any(words in problem for problem in found), found
    assert len(found) == 1 or "d.tp_size" in text  # which may not divide several numbers


# What is in a file, and a part of the sentence about it.
FILES = [
    ('{\n"training": {\n\t"seed": 1\n\t"betas": 2}}', "delimiter: line 4 column 2"),
    ("[1, 2]", "must hold one object, { ... }, not [1, 2]"),
    ('{"trainng": {}}', "trainng is not known: did you mean training?"),
    ('{"model": {"name": "a", "name": "b"}}', "an object repeats name: keep one"),
]


@pytest.mark.parametrize("text,message", FILES, ids=range(len(FILES)))
def test_a_mistake_in_the_file_is_located(tmp_path, text, message):
    (path := tmp_path / "config.json").write_text(text, encoding="latin1")
    with pytest.raises(ValueError) as caught:
        load_config(path)
    assert message in str(caught.value)


def test_all_that_does_not_fit_is_reported_at_once():
    found = problems(raw_of("d.tp_size=3 t.warmup_steps=900 t.min_learning_rate=1 o.name=no.txt"))
    assert len(found) == 5 and sum("tp_size=3" in problem for problem in found) == 2


def test_the_template_of_picotron_loads(monkeypatch):
    monkeypatch.setenv("HOME", "/nowhere")
    raw = json.loads(PICOTRON_TEMPLATE)
    config = parse_config(raw)
    assert (config.checkpoint.load_path, config.checkpoint.save_dir) == (None, "/nowhere/ckpt")
    assert config.environment.OMP_NUM_THREADS == 1
    assert config.environment.TOKENIZERS_PARALLELISM is False
    model = resolve_model(config)
    assert (model.num_hidden_layers, model.head_dim, model.hidden_size) == (16, 60, 960)
    off = {"environment": {"FLASH_ATTEN": "0"}}
    assert [parse_config(raw | c).workload.flash_attention for c in ({}, off)] == [True, False]


def test_a_local_folder_gives_the_model_and_its_tokenizer_before_a_hub_id(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = Path("owner/llama/config.json")
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(to_hf(PRESETS["HuggingFaceTB/SmolLM-360M"])))
    raw = raw_of("m.name=owner/llama m.num_hidden_layers=2")
    model = resolve_model(config := parse_config(raw))
    assert (model.hidden_size, model.num_hidden_layers) == (960, 2)
    assert config.tokenizer == "owner/llama"
    path.write_text('{"model_type": "gpt2"}')
    assert "model_type='gpt2' is not supported" in problems(raw)[0]


def test_more_processes_than_a_machine_starts_need_a_launcher(tmp_path):
    path = tmp_path / "my.json"
    path.write_text('{"distributed": {"dp_size": 100000}}')
    with pytest.raises(ConfigError, match=r"needs 100,000 processes .*, and one machine starts at"):
        load_config(path)
    assert load_config(path, 10**5).world_size == 10**5
