"""Processes that share layers make the update of one process; what cannot be cut is refused."""

import json
import re
import shutil

import pytest
import torch
import yaml
from conftest import (
    ROOT,
    assert_refused,
    assert_same_update,
    equivalence_flags,
    example_flags,
    launch,
    relative_difference,
    run_in_float64,
    run_specs,
    save_models,
)
from safetensors.torch import load_file
from test_sequence_parallel import LLAMA, SIZES
from transformers import (
    ApertusConfig,
    Gemma2Config,
    Gemma3Config,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MixtralConfig,
    Olmo2Config,
    Qwen3Config,
    Starcoder2Config,
)

from common.models.untrained import empty_model
from common.parallel.launch import SIZES as ALL_SIZES
from common.parallel.launch import parse_launch
from common.parallel.parallelism_config import check_parts, warn_across_machines
from common.parallel.tensor import check_model
from common.training.process_grid import ProcessGrid

# Two processes; two groups of two; the same with what is stored of each part in two shards.
LAYOUTS = [("tensor_parallel", 2), ("tensor_parallel", 4), ("fsdp2_tensor_parallel", 4)]
KEYS = {"num_key_value_heads": 2}
MODELS = {
    "llama": LlamaConfig(**LLAMA, **KEYS, tie_word_embeddings=True),
    "one key head": LlamaConfig(**LLAMA, num_key_value_heads=1, attention_bias=True),
    "qwen3": Qwen3Config(**LLAMA, **KEYS, head_dim=8),  # has norms of each head
    "gathered": Olmo2Config(**LLAMA, num_key_value_heads=1),  # has norms of all heads at once
    "gpt_neox": GPTNeoXConfig(**LLAMA),  # queries, keys and values in one, biases
    "starcoder2": Starcoder2Config(**LLAMA, **KEYS, residual_dropout=0, embedding_dropout=0),
    "gemma2": Gemma2Config(**LLAMA, **KEYS, head_dim=8),  # a soft cap, a scaled embedding
}


# What is taken out, the model that shows it, and what becomes another one.
CONTROLS = {
    "partial_gradients": ("llama", "gradients"),
    "sum_each_backward": ("qwen3", "gradients"),
    "count_copies": ("llama", "grad_norm"),
}


@pytest.fixture(scope="module")
def models(model_dir, tmp_path_factory):
    return save_models(tmp_path_factory.mktemp("models"), MODELS, model_dir)


@pytest.fixture(scope="module")
def runs(functions_file, models, tmp_path_factory):
    """Of each model and layout; four accumulation steps at least, clipping, and a short last batch of an epoch."""
    out, cuts = tmp_path_factory.mktemp("runs"), {}
    rows = out / "rows.jsonl"
    rows.write_text("".join(functions_file.read_text().splitlines(keepends=True)[:13]))
    more = ["--num_updates", 3, "--global_batch_size", 8, "--micro_batch_size", 1, "--learning_rate", 1e-3]
    more += ["--warmup_updates", 0, "--max_grad_norm", 0.5]
    for name in MODELS:
        given = example_flags(rows, models / name, out, *more, "--sequence_length", 63)
        for layout in [1, *LAYOUTS]:
            cuts[f"{name}, {layout}"] = (layout, given, {})
    # Controls, of which each is noticed in the first gradient.
    for control, (name, _) in CONTROLS.items():
        given = example_flags(rows, models / name, out, *more, "--sequence_length", 63)
        cuts[control] = (LAYOUTS[0], given, {control: 1})
    return run_in_float64("lm", cuts, out)


@pytest.mark.parametrize("model", MODELS)
def test_shared_layers_make_the_update_of_one_process(model, runs):
    """Gradients of the first update to 1e-12, losses and norms of all; the written model is whole."""
    assert_same_update(runs, f"{model}, 1", *(f"{model}, {layout}" for layout in LAYOUTS))
    norms = [line["grad_norm"] for line in runs[f"{model}, 1"][1]]
    expected = load_file(runs[f"{model}, 1"][2] / "model/model.safetensors")
    for layout in LAYOUTS:
        _, metrics, out = runs[f"{model}, {layout}"]
        assert [line["grad_norm"] for line in metrics] == pytest.approx(norms, rel=1e-11)
        written = load_file(out / "model/model.safetensors")
        assert written.keys() == expected.keys()
        for name, weight in expected.items():
            assert torch.allclose(written[name], weight, rtol=1e-9, atol=1e-12), name


@pytest.mark.parametrize("control", CONTROLS)
def test_what_is_left_out_is_noticed(control, runs):
    """Gradients that are not summed over the group, are summed once too often, or count as often as they are held."""
    model, shows = CONTROLS[control]
    (gradients, metrics, _), (expected, lines, _) = runs[control], runs[f"{model}, 1"]
    if shows == "gradients":
        assert relative_difference(gradients, expected) > 1e-3
    else:
        assert metrics[0]["grad_norm"] > (1 + 1e-6) * lines[0]["grad_norm"]


REFUSED = {
    "heads": (LlamaConfig(**LLAMA), 3, "has 4 attention heads, which 3 does not divide .use one of 1, 2, 4."),
    "key heads": (
        LlamaConfig(**LLAMA | {"num_attention_heads": 6, "hidden_size": 48}, num_key_value_heads=3),
        2,
        "has 3 heads of keys and values, which 2 processes can neither divide nor share",
    ),
    "width": (LlamaConfig(**LLAMA | {"intermediate_size": 63}), 2, "gate_proj of 63 features, which 2 does not divide"),
    "no plan": (GPT2Config(**SIZES), 2, "gpt2 has no tensor-parallel plan in transformers"),
    "experts": (MixtralConfig(**LLAMA), 2, "mixtral has tensor-parallel styles that are not supported .moe_tp_experts"),
    "images": (Gemma3Config(), 2, "gemma3 has no tensor-parallel plan"),
    "weights beside": (ApertusConfig(**LLAMA), 2, "has weights next to model.layers.0.mlp.up_proj that its plan"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_cut_is_refused(case):
    config, size, pattern = REFUSED[case]
    (line,) = check_model(config, lambda: empty_model(config), ProcessGrid(2 * size, tensor=size))
    assert re.search(pattern, line)
    assert check_model(config, lambda: empty_model(config), ProcessGrid(2)) == []


def test_an_embedding_in_the_plan_is_accepted():
    """transformers 5.17 adds it to the plan of every model with tied weights. Control: an unknown style is rejected."""
    config = LlamaConfig(**LLAMA, tie_word_embeddings=True)
    plan = config.base_model_tp_plan
    for style, problems in (("embedding_rowwise", 0), ("unknown", 1)):
        config.base_model_tp_plan = plan | {"embed_tokens": style}
        assert len(check_model(config, lambda: empty_model(config), ProcessGrid(2, tensor=2))) == problems


def test_a_setting_that_parts_of_layers_cannot_take_is_refused(functions_file, tmp_path):
    """Before anything is written, all together."""
    given = ["--train_file", functions_file, "--optimizer", "adafactor", "--output_dir", tmp_path / "run"]
    settings = yaml.safe_load((ROOT / "accelerate_configs/tensor_parallel.yaml").read_text())
    settings["parallelism_config"]["parallelism_config_sp_size"] = 2
    (tmp_path / "both.yaml").write_text(yaml.safe_dump(settings))
    result = launch(*given, config=tmp_path / "both.yaml", check=False, CUDA_VISIBLE_DEVICES="")
    both = "sp_size 2 and parallelism_config_tp_size 2, which cannot be combined"
    assert_refused(result, both, "adafactor does not work on parts of layers", lines=2)
    assert not (tmp_path / "run").exists()
    assert [*check_parts("it", dict.fromkeys(ALL_SIZES, 1) | {"tp": 2}, "fp16", "adamw")]


def test_dropout_is_the_same_in_a_group(functions_file, model_dir, tmp_path):
    """The residual stream is held by each process of it: with other streams they would drift apart."""
    shutil.copytree(model_dir, tmp_path / "model")
    config = json.loads((tmp_path / "model/config.json").read_text())
    (tmp_path / "model/config.json").write_text(json.dumps(config | {"attention_dropout": 0.1}))
    given = equivalence_flags(functions_file, tmp_path / "model", tmp_path / "run", "--save_every", 5)
    run_specs("lm", [(given, {"save_copies": str(tmp_path / "copies")})], tmp_path, "tensor_parallel")
    ranks = [torch.load(tmp_path / f"copies-{rank}.pt") for rank in range(2)]
    assert ranks[0].keys() == ranks[1].keys() and len(ranks[0]) == 5  # the norms
    assert all(weight.equal(ranks[1][name]) for name, weight in ranks[0].items())


def test_a_group_across_machines_is_warned_of(caplog):
    warn_across_machines(ProcessGrid(8, tensor=2), 2)
    warn_across_machines(ProcessGrid(6), 2)
    assert not caplog.text
    warn_across_machines(ProcessGrid(6, tensor=2), 2)
    assert "groups of 2 processes exchange" in caplog.text


def test_a_flag_of_the_launcher_wins_over_the_file():
    given = ["--config_file", str(ROOT / "accelerate_configs/tensor_parallel.yaml"), "--num_processes", "4"]
    assert parse_launch([*given, "recipes/lm.py"], environment={}).grid == ProcessGrid(4, tensor=2)
    given += ["--parallelism_config_tp_size", "4"]
    assert parse_launch([*given, "recipes/lm.py"], environment={}).grid == ProcessGrid(4, tensor=4)


def test_what_several_layers_read_is_summed_once(functions_file, models, tmp_path):
    """Of a micro-batch: two sums a layer forward and two backward, one of the embedding, three of the head's loss."""
    runs = []
    for size in (4, 2):
        given = example_flags(functions_file, models / "llama", tmp_path / f"{size}", "--sequence_length", 32)
        given += ["--num_updates", 1, "--warmup_updates", 0, "--global_batch_size", 4, "--micro_batch_size", size]
        runs.append((given, {"count_collectives": str(tmp_path / f"n{size}")}))
    run_specs("lm", runs, tmp_path, "tensor_parallel")
    one, two = (json.loads((tmp_path / f"n{size}-0.json").read_text())[0]["others"] for size in (4, 2))
    assert two - one == 4 * SIZES["num_hidden_layers"] + 4
