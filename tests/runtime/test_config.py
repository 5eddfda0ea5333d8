"""Every mistake in a config.json is reported at once, with its numbers and its remedy."""

import contextlib
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from picotron_min.runtime.architectures import to_hf
from picotron_min.runtime.config import SECTIONS, Config, ConfigError
from picotron_min.runtime.config_checks import model_problems, resolve_model
from picotron_min.runtime.config_file import load_config, parse_config
from picotron_min.runtime.public_models import PRESETS

ROOT = Path(__file__).parents[2]

PICOTRON_TEMPLATE = """{
    "distributed": {"tp_size": 1, "cp_size": 1, "pp_size": 1, "dp_size": 1, "pp_engine": "1f1b",
                    "backend": "nccl", "use_cpu": false},
    "model": {"name": "HuggingFaceTB/SmolLM-360M-Instruct", "num_hidden_layers": 16,
              "num_attention_heads": 16, "num_key_value_heads": 4, "dtype": "bfloat16",
              "use_flash_attention": true, "use_fused_adam": true},
    "training": {"seed": 42, "learning_rate": 1, "total_train_steps": 200, "seq_length": 1024,
                 "micro_batch_size": 32, "gradient_accumulation_steps": 1, "num_samples": 400000,
                 "max_tokens": null},
    "dataset": {"name": "roneneldan/TinyStories", "subset_name": null, "num_workers": 0,
                "num_proc": 4},
    "checkpoint": {"save_dir": "ckpt", "save_frequency": 300, "load_path": ""},
    "logging": {"use_wandb": false, "project_name": "picotron", "run_name": null},
    "environment": {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "FLASH_ATTEN": "1",
                    "HF_TOKEN": null}
}"""


def problems(raw: dict) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse_config(raw)
    return caught.value.problems


# fmt: off
# what is wrong: (section, its keys, the expected message)
BAD = {
    "a number in quotes": ("training", {"seq_length": "256"},
        'training.seq_length="256": must be a valid integer, without quotes'),
    "a number as text": ("training", {"learning_rate": "big"},
        'training.learning_rate="big": must be a valid number'),
    "true in quotes": ("distributed", {"use_cpu": "true"},
        'distributed.use_cpu="true": must be a valid boolean, without quotes'),
    "null without a meaning": ("training", {"seq_length": None},
        "training.seq_length=null: must be a valid integer"),
    "an empty name": ("model", {"name": ""}, 'model.name="": must have at least 1 character'),
    "a NUL in a name": ("model", {"name": "a\0"}, r'model.name="a\u0000": must match'),
    "a number too large for a float": ("training", {"learning_rate": 10**400},
        "...: must be a valid number"),
    "no process": ("distributed", {"dp_size": 0},
        "distributed.dp_size=0: must be greater than or equal to 1"),
    "not a number": ("training", {"learning_rate": float("nan")},
        "training.learning_rate=NaN: must be a finite number"),
    "zero for no clipping": ("training", {"grad_clip": 0},
        "training.grad_clip=0: must be greater than 0"),
    "a beta of 1": ("training", {"betas": [0.9, 1]}, "training.betas.1=1: must be less than 1"),
    "an unknown schedule": ("training", {"schedule": "cosin"},
        "training.schedule=\"cosin\": must be 'constant', 'cosine' or 'wsd'"),
    "a token in the file": ("environment", {"HF_TOKEN": "hf_secret"},
        "environment.HF_TOKEN must be null: delete it, and run  export HF_TOKEN=..."),
    "a misspelt key": ("training", {"learning_rat": 1},
        "training.learning_rat is not known: did you mean learning_rate?"),
    "a key of another section": ("model", {"seq_length": 64},
        "model.seq_length is not known: did you mean training.seq_length?"),
    "a key like no other": ("logging", {"zzz": 1},
        "logging.zzz is not known: use log_num_zeros_in_grad, use_wandb, project_name, run_name, "
        "metrics_file, trace_file, log_energy, log_bound or moe_per_layer_logging"),
    "only warm-up": ("training", {"warmup_steps": 50, "total_train_steps": 50},
        "warmup_steps=50: must be below total_train_steps=50"),
    "a floor above the ceiling": ("training", {"min_learning_rate": 0.1, "learning_rate": 0.01},
        "min_learning_rate=0.1 is above learning_rate=0.01: use at most 0.01"),
    "best fit without the mask": ("dataset", {"packing": "bfd"},
        'packing="bfd" packs whole documents, which document_mask=false does not keep apart: set '
        'document_mask to true, or packing to "wrapped"'),
    "fewer tokens than a step": ("training", {"max_tokens": 100},
        "max_tokens=100: must be at least 2048, the tokens of one step"),
    "longer than the model": ("training", {"seq_length": 4096},
        "seq_length=4096 is above max_position_embeddings=2048 of model.name=tiny: use at "
        "most 2048, or raise it"),
    "too small a vocabulary": ("model", {"vocab_size": 256},
        "vocab_size=256: use at least 257, the token ids of dataset.tokenizer=bytes"),
    "heads that do not divide": ("model", {"num_attention_heads": 3, "num_key_value_heads": 1},
        "model.name=tiny: num_attention_heads=3 does not divide hidden_size=128"),
    "chunks on one rank": ("distributed", {"pp_chunks": 2, "pp_engine": "interleaved"},
        'pp_engine="interleaved" with pp_chunks=2 needs more than pp_size=1: use more ranks, or '
        "1f1b with pp_chunks 1"),
    "a V on one rank": ("distributed", {"pp_engine": "zb_v"},  # two chunks would not do, either
        'pp_engine="zb_v" with pp_chunks=1 needs more than pp_size=1: use more ranks, or 1f1b'),
    "chunks in 1f1b": ("distributed", {"pp_chunks": 2, "pp_size": 2},
        'pp_engine="1f1b" with pp_chunks=2 does not fit: 1f1b has 1 chunk a rank, not 2: use 1, '),
    "offload of all layers": ("model", {"offload": 4},
        "offload=4: the last layer of a stage stays on the device, and the smallest has 4: use at "
        "most 3"),
    "stages that leave layers over": ("distributed", {"pp_size": 2, "pp_layers": [2, 1]},
        "pp_layers=[2, 1]: must be pp_size=2 x pp_chunks=1 = 2 numbers with the sum "
        "num_hidden_layers=4, or null"),
    "no weights": ("model", {"weights": "./nowhere"},
        "model.weights=./nowhere: there is no /"),
    "an unknown model": ("model", {"name": "SmolLM-136M"},
        "model.name=SmolLM-136M: use SmolLM-360M, SmolLM-135M, SmolLM-1.7B, a local path or a hub "
        "id owner/name"),
    "an unknown dataset": ("dataset", {"name": "stdlb"},
        "dataset.name=stdlb: use stdlib, a local path or a hub id owner/name"),
    "more steps than names": ("training", {"total_train_steps": 10**8},
        "training.total_train_steps=100000000: must be less than or equal to 99999999"),
    "a seed that torch cannot take": ("training", {"seed": 2**64},
        "training.seed=18446744073709551616: must be less than or equal to 9223372036854775807"),
    "bytes in a large vocabulary": ("model", {"name": "SmolLM-135M"},  # with the tokenizer below
        "vocab_size=49152 of model.name=SmolLM-135M is far above the 257 token ids of"
        " dataset.tokenizer=bytes: leave it out for the model's own, or set vocab_size"),
    "a name that no file system allows": ("dataset", {"tokenizer": "./" + "x" * 256},
        f"dataset.tokenizer=./{'x' * 256}: there is no /"),
}
# fmt: on
BESIDE = {"bytes in a large vocabulary": {"dataset": {"tokenizer": "bytes"}}}


@pytest.mark.parametrize("name", BAD)
def test_a_mistake_is_reported_with_its_numbers_and_the_remedy(name):
    section, keys, message = BAD[name]
    (problem,) = problems({section: keys} | BESIDE.get(name, {}))
    assert message in problem
    assert "hf_secret" not in problem


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '{\n"training": {\n\t"seed": 1\n\t"betas": 2}}',
            "Expecting ',' delimiter: line 4 column 2 (char 28)\n     \"betas\": 2}}\n     ^",
        ),
        ("", "Expecting value: line 1 column 1 (char 0)"),
        ("[1, 2]", "must hold one object, { ... }, not [1, 2]"),
        ('{"trainng": {}}', "trainng is not known: did you mean training?"),
        ('{"seed": 1}', "seed is not known: did you mean training.seed?"),
        ('{"name": "tiny"}', "name is not known: did you mean model.name?"),
        ('{"training": 5}', "training=5: must be a valid dictionary"),
        (
            '{"model": {"name": "a", "compile": true, "name": "b"}}',
            "an object repeats name: keep",
        ),
    ],
)
def test_a_mistake_in_the_file_is_located(tmp_path, text, message):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ValueError) as caught:
        load_config(path)
    assert message in str(caught.value)


def test_a_file_that_cannot_be_read_is_reported(tmp_path):
    path = tmp_path / "config.json"
    with pytest.raises(ValueError, match=r"cannot read .*config.json: No such file"):
        load_config(path)
    with pytest.raises(ValueError, match="Is a directory"):
        load_config(tmp_path)
    for value, message in {
        b'"\xff"': "as JSON in UTF-8: 'utf-8' codec can't decode",
        b"[" * 10**5: "as JSON in UTF-8: brackets are nested too deep",
        b"9" * 5000: "as JSON in UTF-8: Exceeds the limit",
    }.items():
        path.write_bytes(b'{"training": {"seed": ' + value + b"}}")
        with pytest.raises(ValueError, match=f"cannot read .* {message}"):
            load_config(path)


def test_all_mistakes_are_reported_at_once(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(
        '{"distributed": {"tp_size": 3, "pp_engine": "gpipe"},'
        ' "training": {"seq_length": "9999", "warmup_steps": 900, "min_learning_rate": 1},'
        ' "dataset": {"name": "nowhere.txt", "lines": 3}, "loging": {}}'
    )
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    fragments = [
        'distributed.pp_engine="gpipe"',
        'training.seq_length="9999"',
        "dataset.lines is not known",
        "loging is not known: did you mean logging?",
        "warmup_steps=900: must be below total_train_steps=200",
        "min_learning_rate=1.0 is above learning_rate=0.0003",
        f"dataset.name=nowhere.txt: there is no {Path('nowhere.txt').absolute()}: name a path that"
        " exists, or a hub id",
        "tp_size=3 does not divide num_attention_heads=4: use 1 or 2",
        "tp_size=3 does not divide num_key_value_heads=2: use 1 or 2",
    ]
    problem = caught.value.problems
    assert len(problem) == len(fragments)
    assert all(any(fragment in problem for problem in problem) for fragment in fragments)
    assert str(caught.value) == "\n".join(problem)


def test_the_default_of_a_bad_key_is_not_reported():
    (problem,) = problems({"training": {"total_train_steps": "50", "warmup_steps": 200}})
    assert "warmup_steps" not in problem  # 200 is too many for the default, but not what was meant
    (problem,) = problems({"training": 5, "model": {"max_position_embeddings": 8}})
    assert "seq_length" not in problem
    (problem,) = problems({"model": {"name": 5, "num_attention_heads": 3}})
    assert problem == "model.name=5: must be a valid string"
    both = problems({"model": {"name": 5}, "dataset": {"name": "nowhere.txt"}})
    assert len(both) == 2  # name is a key of two sections; only the model's is hidden


def test_the_default_config_loads_and_an_empty_one_is_all_defaults():
    config = load_config(ROOT / "config.json")
    assert config.world_size == 4
    t = config.training
    assert config.global_batch == 2 * t.micro_batch_size * t.gradient_accumulation_steps
    assert config.tokens_per_step == config.global_batch * t.seq_length
    assert config.metrics_file == "checkpoints/tiny/metrics.jsonl"
    assert resolve_model(config) == PRESETS["tiny"]
    assert parse_config({}) == Config()
    assert parse_config({"logging": {"metrics_file": "m.jsonl"}}).metrics_file == "m.jsonl"


def test_the_template_of_picotron_loads(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(PICOTRON_TEMPLATE)
    config = load_config(path)
    assert config.checkpoint.load_path is None
    assert config.training.learning_rate == 1.0
    assert config.environment.OMP_NUM_THREADS == 1
    assert config.environment.TOKENIZERS_PARALLELISM is False
    assert config.workload.flash_attention
    model = resolve_model(config)
    assert (model.num_hidden_layers, model.head_dim, model.hidden_size) == (16, 60, 960)


def test_either_of_picotrons_switches_turns_flash_attention_off():
    assert not parse_config({"environment": {"FLASH_ATTEN": "0"}}).workload.flash_attention
    assert not parse_config({"model": {"use_flash_attention": False}}).workload.flash_attention
    assert parse_config({}).workload.flash_attention


def test_a_tilde_is_the_home_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/nowhere")
    config = parse_config({"checkpoint": {"save_dir": "~/runs"}})
    assert config.checkpoint.save_dir == "/nowhere/runs"
    assert Path(Config().dataset.cache_dir).is_absolute()


def test_without_a_home_folder_a_tilde_is_refused(monkeypatch):
    monkeypatch.setenv("HOME", "~")  # what expanduser gives without a home folder
    (problem,) = problems({"dataset": {"cache_dir": "~/cache"}})
    assert problem.startswith("dataset.cache_dir=~/cache: ") and "set HOME" in problem


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_resolves_by_its_full_and_its_short_name(name):
    for spelling in (name, name.split("/")[-1], name + "-Instruct"):
        assert resolve_model(parse_config({"model": {"name": spelling}})) == PRESETS[name]


def test_any_number_of_the_model_can_be_overridden():
    given = {
        "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16, "rope_theta": 5e5,
        "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "max_position_embeddings": 512,
    }  # fmt: skip
    model = resolve_model(parse_config({"model": given}))
    assert {name: getattr(model, name) for name in given} == given
    assert resolve_model(parse_config({"model": {"hidden_size": 64}})).head_dim == 16


def test_a_preset_with_its_owners_name_is_checked_without_the_network():
    raw = {"model": {"name": "HuggingFaceTB/SmolLM-135M"}, "training": {"seq_length": 4096}}
    assert "seq_length=4096 is above max_position_embeddings=2048" in problems(raw)[0]


def test_a_local_folder_gives_the_model(tmp_path, monkeypatch):
    path = tmp_path / "owner" / "llama" / "config.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(to_hf(PRESETS["HuggingFaceTB/SmolLM-360M"])))
    path.with_name("tokenizer_config.json").write_text("{}")
    config = {"model": {"name": str(path.parent), "num_hidden_layers": 2}}
    model = resolve_model(parse_config(config))
    assert (model.hidden_size, model.num_hidden_layers) == (960, 2)
    monkeypatch.chdir(tmp_path)  # a folder that is there comes before a hub id
    assert resolve_model(parse_config({"model": {"name": "owner/llama"}})).hidden_size == 960
    path.write_text('{"model_type": "gpt2"}')
    assert "model_type='gpt2' is not supported" in problems(config)[0]
    path.unlink()
    assert "cannot read" in problems(config)[0]


def test_a_hub_id_is_fetched_only_to_resolve_the_model(monkeypatch, tmp_path):
    def offline(name, allow_patterns):
        raise OSError("no network\nand more")

    hub = SimpleNamespace(snapshot_download=offline)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    config = parse_config({"model": {"name": "owner/llama"}, "training": {"seq_length": 4096}})
    message = r"model.name=owner/llama: .* cannot be fetched from the hub \(no network\)"
    with pytest.raises(ConfigError, match=message):
        resolve_model(config)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(to_hf(PRESETS["meta-llama/Llama-3.2-1B"])))
    hub.snapshot_download = lambda name, allow_patterns: tmp_path
    assert resolve_model(config) == PRESETS["meta-llama/Llama-3.2-1B"]
    path.write_text(json.dumps(to_hf(PRESETS["tiny"])))
    with pytest.raises(ConfigError, match="seq_length=4096 is above max_position_embeddings=2048"):
        resolve_model(config)


def test_layouts_that_do_not_fit_the_model_name_those_that_do():
    model_config = PRESETS["meta-llama/Llama-3.2-1B"]
    config = Config.model_validate({"distributed": {"tp_size": 3, "pp_size": 9, "pp_chunks": 2}})
    assert list(model_problems(config, model_config)) == [
        "tp_size=3 does not divide num_attention_heads=32: use 1, 2, 4 or 8",
        "tp_size=3 does not divide num_key_value_heads=8: use 1, 2, 4 or 8",
        "tp_size=3 does not divide intermediate_size=8192: use 1, 2, 4 or 8",
        "pp_size=9 x pp_chunks=2 = 18 stages exceed num_hidden_layers=16: use at most 16",
    ]
    config = Config.model_validate({"distributed": {"tp_size": 8, "pp_size": 16}})
    assert list(model_problems(config, model_config)) == []


EIGHT = {"num_local_experts": 8, "moe_intermediate_size": 96}
SIGMOID = {"scoring_func": "sigmoid"}
NONE = {"num_local_experts": None, "moe_intermediate_size": None}
SOFTMAX_NEEDS = (
    'scoring_func="softmax" needs n_group=1, routed_scaling_factor=1, and moe_shared_expert_gate='
    "true exactly if n_shared_experts={} is above 0: change these, or it"
)
SIGMOID_NEEDS = (
    'scoring_func="sigmoid" needs moe_shared_expert_gate=false, and of {} dense layers the first '
    "ones: change these, or it"
)

# fmt: off
# What is wrong with experts: (layout, model, training, the expected message).
BAD_EXPERTS = {
    "a grid that does not fit the ranks":
        ({"ep_size": 4, "etp_size": 2, "dp_size": 3, "tp_size": 2}, {}, {},
        "ep_size=4 x etp_size=2 = 8 does not divide dp_size=3 x cp_size=1 x tp_size=2 = 6: use a "
        "product of 1, 2, 3 or 6"),
    "more ranks than experts": ({"ep_size": 16, "dp_size": 16}, {}, {},
        "ep_size=16 does not divide num_local_experts=8: use 1, 2, 4 or 8"),
    "a part of a row": ({"etp_size": 5, "dp_size": 5}, {}, {},
        "etp_size=5 does not divide moe_intermediate_size=96: use 1"),
    "ep without experts": ({"ep_size": 2, "dp_size": 2}, NONE | {"num_local_experts": 0}, {},
        "model.name=tiny has no experts, but ep_size=2: set num_local_experts, or leave the rest "
        "out"),
    "etp without experts": ({"etp_size": 2, "dp_size": 2}, NONE, {},
        "model.name=tiny has no experts, but etp_size=2: set num_local_experts, or leave the rest "
        "out"),
    "keys of experts without any":
        ({}, NONE | {"n_shared_experts": 2} | SIGMOID, {},
        'model.name=tiny has no experts, but n_shared_experts=2, scoring_func="sigmoid": set '
        "num_local_experts, or leave the rest out"),
    "tokens that tp does not divide":
        ({"tp_size": 2, "cp_size": 2, "cp_engine": "ulysses"}, {}, {"seq_length": 250},
        "tp_size=2 does not divide seq_length=250 / cp_size=2 = 125: use 1"),
    "shared experts that tp does not divide":
        ({"tp_size": 2}, {"n_shared_experts": 3, "moe_intermediate_size": 33} | SIGMOID, {},
        "tp_size=2 does not divide n_shared_experts=3 x moe_intermediate_size=33 = 99: use 1"),
    "dense layers that tp does not divide":
        ({"tp_size": 2}, {"mlp_only_layers": [0], "intermediate_size": 383}, {},
        "tp_size=2 does not divide intermediate_size=383: use 1"),
    "padding to no capacity": ({}, {}, {"moe_pad_expert_input_to_capacity": True},
        "moe_pad_expert_input_to_capacity=true needs moe_expert_capacity_factor: set it, for "
        "example to 1.25"),
    "less than an even share": ({}, {}, {"moe_expert_rank_capacity_factor": 0.5},
        "moe_expert_rank_capacity_factor=0.5 is below 1, the rows of a rank where all experts get "
        "as many tokens: use 1 or more, for example 1.5"),
    "a bias of each forward": ({}, {}, {"moe_router_force_biased": 0.5},
        "moe_router_force_biased=0.5 would be new in each forward, of which every layout has a "
        "number of its own: use -0.5, one bias a layer"),
    "more choices than experts": ({}, {"num_experts_per_tok": 9}, {},
        "num_experts_per_tok=9 exceeds num_local_experts=8: use at most 8"),
    "a router that learns nothing": ({}, {"num_experts_per_tok": 1}, {},
        "num_experts_per_tok=1 with norm_topk_prob=true makes every weight 1, and the router "
        "learns nothing: use 2, or false"),
    "no layer with experts": ({}, {"mlp_only_layers": [0, 1, 2, 3]}, {},
        "mlp_only_layers=[0, 1, 2, 3]: must name some, not all, of the layers 0 to 3"),
    "a layer that is not there": ({}, {"mlp_only_layers": [4]}, {},
        "mlp_only_layers=[4]: must name some, not all, of the layers 0 to 3"),
    "groups of different sizes": ({}, {"n_group": 3} | SIGMOID, {},
        "n_group=3 does not cut num_local_experts=8 into equal groups of two or more: use one of "
        "[1, 2, 4]"),
    "groups of one": ({}, {"n_group": 8} | SIGMOID, {},
        "n_group=8 does not cut num_local_experts=8 into equal groups of two or more: use one of "
        "[1, 2, 4]"),
    "more groups than there are": ({}, {"n_group": 2, "topk_group": 3} | SIGMOID, {},
        "topk_group=3 does not fit num_experts_per_tok=2 of n_group=2 groups of 4: use 1 to 2"),
    "groups with too few experts": ({}, {"n_group": 4, "num_experts_per_tok": 3} | SIGMOID, {},
        "topk_group=1 does not fit num_experts_per_tok=3 of n_group=4 groups of 2: use 2 to 4"),
    "groups with softmax": ({}, {"n_group": 2}, {}, SOFTMAX_NEEDS.format(0)),
    "a scale with softmax": ({}, {"routed_scaling_factor": 2.5}, {}, SOFTMAX_NEEDS.format(0)),
    "shared experts with softmax": ({}, {"n_shared_experts": 1}, {}, SOFTMAX_NEEDS.format(1)),
    "a gate of nothing": ({}, {"moe_shared_expert_gate": True}, {}, SOFTMAX_NEEDS.format(0)),
    "a gate with sigmoid":
        ({}, {"n_shared_experts": 1, "moe_shared_expert_gate": True} | SIGMOID, {},
        SIGMOID_NEEDS.format(0)),
    "later dense layers with sigmoid": ({}, {"mlp_only_layers": [0, 2]} | SIGMOID, {},
        SIGMOID_NEEDS.format(2)),
}
# fmt: on


@pytest.mark.parametrize("name", BAD_EXPERTS)
def test_experts_that_do_not_fit_are_reported_with_numbers_and_the_remedy(name):
    layout, model, training, message = BAD_EXPERTS[name]
    raw = {"distributed": layout, "model": EIGHT | model, "training": training}
    (problem,) = problems(raw)
    assert problem.removeprefix("model.name=tiny: ") == message


def test_layouts_that_fit_the_experts_are_accepted():
    layout = {"dp_size": 2, "tp_size": 2, "ep_size": 2, "etp_size": 2}
    # Where all layers have experts, no matrix has the size of a dense MLP.
    model = EIGHT | {"intermediate_size": 383, "n_shared_experts": 1, "scoring_func": "sigmoid"}
    assert parse_config({"distributed": layout, "model": model}).layout.ep == 2
    for sharding in ("none", "layerwise"):
        muon = {"distributed": layout | {"sharding": sharding}, "training": {"optimizer": "muon"}}
        parse_config(muon | {"model": model})


def test_how_experts_are_trained_is_harmless_without_any():
    keys = {key: value for key, value in dict(Config().training).items() if key.startswith("moe_")}
    assert len(keys) == 11
    changed = {"moe_aux_loss_coeff": 0.1, "moe_expert_capacity_factor": 1.5}
    parse_config({"training": keys | changed | {"moe_router_force_load_balancing": True}})


def test_a_sequence_that_cannot_be_cut_is_reported_with_the_lengths_that_can():
    unused = {"sequence_parallel": True}  # with tp_size=1
    ring = {"distributed": {"cp_size": 4} | unused, "training": {"seq_length": 252}}
    parse_config({"training": {"seq_length": 255}})  # uncut, any length will do
    assert problems(ring) == [
        "seq_length=252 cannot be cut into 8 equal pieces, which cp_size=4 with"
        ' cp_engine="ring" needs: use 248 or 256'
    ]
    parse_config(ring | {"distributed": {"cp_size": 4, "cp_engine": "ulysses"}})
    both = {"cp_size": 2, "tp_size": 2, "sequence_parallel": True, "cp_engine": "ulysses"}
    (problem,) = problems({"distributed": both, "training": {"seq_length": 2}})
    assert problem == (
        'seq_length=2 cannot be cut into 4 equal pieces, which cp_size=2 with cp_engine="ulysses"'
        " and tp_size=2 with sequence_parallel=true need: use 4"
    )


def test_ulysses_needs_a_head_for_every_rank():
    layout = {"cp_size": 4, "tp_size": 2, "cp_engine": "ulysses"}
    (problem,) = problems({"distributed": layout})
    assert problem == (
        "cp_size=4 does not divide num_attention_heads=4 / tp_size=2 = 2: use 1 or 2,"
        ' or cp_engine="ring"'
    )
    problems({"distributed": layout | {"tp_size": 8}})  # no head is left: tp_size is the problem


def test_a_wrong_number_of_processes_is_reported_with_the_right_command(tmp_path):
    def problems_with_3(text: str) -> list[str]:
        path.write_text(text)
        with pytest.raises(ConfigError) as caught:
            load_config(path, 3)
        return caught.value.problems

    path = tmp_path / "my.json"
    assert problems_with_3('{"distributed": {"dp_size": 4}}') == [
        "this config needs 4 processes (pp_size=1 x dp_size=4 x cp_size=1 x tp_size=1) but was"
        f" started with 3: run  torchrun --nproc_per_node 4 train.py --config {path},"
        " or set distributed.dp_size to 3"
    ]
    assert load_config(path, 4) == load_config(path)
    both = '{"distributed": {"dp_size": 4}, "training": {"seed": -1}}'
    assert len(problems_with_3(both)) == 2
    # The right number is unknown.
    assert len(problems_with_3('{"distributed": {"dp_size": "4"}}')) == 1


def test_a_config_is_checked_without_importing_torch():
    code = (
        "import sys; from picotron_min.runtime.config_file import load_config;"
        "from picotron_min.runtime.config_checks import resolve_model;"
        "resolve_model(load_config('config.json'));"
        "assert not {'torch', 'transformers', 'datasets', 'numpy'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.mark.parametrize(
    "value", [10**400, -(10**400), 1e300, -1, 0, [[]], {}, "", "\0", "x" * 10**6]
)
def test_no_value_of_any_key_ends_in_a_traceback(value):
    for section in SECTIONS:
        for key in SECTIONS[section]:
            with contextlib.suppress(ConfigError):
                parse_config({section: {key: value}})


def test_more_processes_than_a_machine_can_start_need_torchrun(tmp_path):
    path = tmp_path / "my.json"
    path.write_text('{"distributed": {"dp_size": 100000}}')
    with pytest.raises(ConfigError, match=r"needs 100,000 processes .*, and one machine starts at"):
        load_config(path)
    assert load_config(path, 10**5).world_size == 10**5


@pytest.mark.parametrize(
    "name,message",
    [
        ("runs/metrics.jsonl", "runs/metrics.jsonl or its folder"),  # of the same run
        ("runs/run.jsonl", "the run itself writes .*/runs/run.jsonl"),
        ("runs/hf/t.json", "name another file"),
        ("runs/step-00000010/state.json", "name another file"),
        ("x/../runs/.lock", "name another file"),
        ("link/hf", "name another file"),
    ],
)
def test_paths_of_a_run_differ(tmp_path, monkeypatch, name, message):
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    Path("link").symlink_to("runs")
    raw = {"checkpoint": {"save_dir": "runs"}}
    (problem,) = problems(raw | {"logging": {"trace_file": name}})
    assert problem.startswith(f"trace_file={name}") and re.search(message, problem)
    if "metrics" not in name:
        (problem,) = problems(raw | {"logging": {"metrics_file": name}})
        assert problem.startswith(f"metrics_file={name}")
    parse_config(raw | {"logging": {"trace_file": "t.json", "metrics_file": "m.jsonl"}})


def test_the_tokenizer_that_is_left_out_is_the_models_own(tmp_path):
    def tokenizer(name: str) -> str:
        config = parse_config({"model": {"name": name}})
        assert config.data_order["dataset.tokenizer"] == config.tokenizer
        return config.tokenizer

    assert tokenizer("tiny") == "bytes"
    assert tokenizer("owner/llama") == "owner/llama"
    assert tokenizer("SmolLM-135M") == "HuggingFaceTB/SmolLM-135M"
    folder = tmp_path / "llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(to_hf(PRESETS["tiny"])))
    assert tokenizer(str(folder)) == str(folder)
    given = {"model": {"name": str(folder)}, "dataset": {"tokenizer": "bytes"}}
    assert parse_config(given).tokenizer == "bytes"


def test_bytes_in_a_vocabulary_that_is_given_or_a_little_larger_are_accepted():
    dataset = {"tokenizer": "bytes"}
    parse_config({"model": {"name": "SmolLM-135M", "vocab_size": 49_152}, "dataset": dataset})
    parse_config({"model": {"name": "SmolLM-135M", "vocab_size": 257}, "dataset": dataset})
    parse_config({"model": {"vocab_size": 512}})
