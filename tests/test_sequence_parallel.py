"""Processes that share a sequence make the update of one process; what cannot be shared is refused."""

import json
import re
import shutil

import pytest
import yaml
from conftest import (
    ROOT,
    assert_refused,
    assert_same_update,
    equivalence_flags,
    example_flags,
    launch,
    read_metrics,
    relative_difference,
    run_in_float64,
    run_specs,
    save_models,
)
from test_modes import assert_is_the_run_of
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BloomConfig,
    Gemma3Config,
    GPT2Config,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    OPTConfig,
    Qwen3Config,
    Qwen3NextConfig,
    RobertaConfig,
)

from common.parallel.launch import SIZES as SPLIT_SIZES
from common.parallel.parallelism_config import check_sizes
from common.parallel.sequence import check_model
from common.training.process_grid import ProcessGrid

# Two processes; two groups of two; the same with all that is stored in four shards.
LAYOUTS = [("sequence_parallel", 2), ("sequence_parallel", 4), ("fsdp2_sequence_parallel", 4)]
SIZES = {"vocab_size": 384, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": 2}
SIZES |= {"bos_token_id": 0, "eos_token_id": 1}
LLAMA = SIZES | {"intermediate_size": 64, "max_position_embeddings": 64}
MODELS = {
    "llama": LlamaConfig(**LLAMA, num_key_value_heads=2, tie_word_embeddings=True),
    "one key head": LlamaConfig(**LLAMA, num_key_value_heads=1),  # fewer than there are processes
    "qwen3": Qwen3Config(**LLAMA, num_key_value_heads=2, head_dim=8),
    "window": MistralConfig(**LLAMA, num_key_value_heads=2, sliding_window=7),
    # Odd lengths are filled up, and the model has no position for that.
    "gpt2": GPT2Config(**SIZES, n_positions=63, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0),
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
        cuts[f"{name}, alone"] = (LAYOUTS[0], given, {"no_exchange": 1})
    return run_in_float64("lm", cuts, out)


@pytest.mark.parametrize("model", MODELS)
def test_a_shared_sequence_makes_the_update_of_one_process(model, runs):
    """Gradients of the first update to 1e-12, losses of all. Control: attention that sees its own part only."""
    assert_same_update(runs, f"{model}, 1", *(f"{model}, {layout}" for layout in LAYOUTS))
    assert [line["target_tokens"] for line in runs[f"{model}, 1"][1]][0] > 0
    assert relative_difference(runs[f"{model}, alone"][0], runs[f"{model}, 1"][0]) > 1e-3


LONG = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32}
LONG |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
CAUSAL = AutoModelForCausalLM
REFUSED = {
    "heads": (LlamaConfig(**LLAMA), CAUSAL, 3, "3 does not divide the model.s 4 .* heads; use one of 1, 2, 4"),
    "state": (
        MambaConfig(),
        CAUSAL,
        2,
        "mamba passes information .* outside of attention in its layers of linear_attention",
    ),
    "layers": (Qwen3NextConfig(), CAUSAL, 2, "qwen3_next passes information .* layers of linear_attention"),
    "attention": (BloomConfig(), CAUSAL, 2, "bloom does not use transformers' attention interface"),
    "positions": (RobertaConfig(is_decoder=True), CAUSAL, 2, "roberta computes positions or masks itself"),
    "rotary": (LlamaConfig(**LLAMA, rope_parameters=LONG), CAUSAL, 2, "llama has rotary positions .longrope."),
    "chance": (OPTConfig(layerdrop=0.1), CAUSAL, 2, "opt attends to later tokens, or drops layers"),
    "images": (Gemma3Config(), CAUSAL, 2, "gemma3 has inputs other than text"),
    "task": (LlamaConfig(**LLAMA), AutoModelForSequenceClassification, 2, "is for causal language models"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_share_a_sequence_is_refused(case):
    config, kind, size, pattern = REFUSED[case]
    (line,) = check_model(config, kind, ProcessGrid(2 * size, size))
    assert re.search(pattern, line)
    assert not [*check_model(config, kind, ProcessGrid(2))]


def test_a_model_that_does_not_run_sdpa_is_refused_before_anything_is_written(functions_file, models, tmp_path):
    """Its config.json may ask for another attention, which only the model itself then knows."""
    shutil.copytree(models / "llama", tmp_path / "eager")
    config = json.loads((tmp_path / "eager/config.json").read_text())
    (tmp_path / "eager/config.json").write_text(json.dumps(config | {"attn_implementation": "eager"}))
    given = example_flags(functions_file, tmp_path / "eager", tmp_path / "run", "--num_updates", 1)
    result = launch(*given, config="sequence_parallel", check=False, CUDA_VISIBLE_DEVICES="")
    assert_refused(result, "LlamaForCausalLM is not a class of transformers, or does not use SDPA")
    assert not (tmp_path / "run").exists()


def test_a_layer_with_an_attention_of_its_own_is_refused_in_the_first_forward(functions_file, model_dir, tmp_path):
    """Recomputation asks again, and does not stand for the layer."""
    given = equivalence_flags(functions_file, model_dir, tmp_path / "run", "--activation_checkpointing", "full")
    runs = [(given, {"own_attention": 1})]
    result = run_specs("lm", runs, tmp_path, "sequence_parallel", check=False)
    assert_refused(result, "LlamaForCausalLM has layers that compute attention themselves")
    assert not read_metrics(tmp_path / "run")


# Shipped configs to which the section is added, with their processes.
ADDED = {"zero2": ({"sp": 2}, 2), "zero3": ({"sp": 2}, 4), "hsdp": ({"dp_replicate": 2, "sp": 2}, 4)}


@pytest.mark.usefixtures("extensions")
@pytest.mark.parametrize("config", ADDED)
def test_the_section_works_in_other_configs(config, reference, functions_file, model_dir, tmp_path):
    sizes, processes = ADDED[config]
    settings = yaml.safe_load((ROOT / f"accelerate_configs/{config}.yaml").read_text())
    settings["parallelism_config"] = {f"parallelism_config_{name}_size": size for name, size in sizes.items()}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))
    mode = (tmp_path / "config.yaml", "--mixed_precision", "no", "--num_processes", processes)
    result = run_specs("lm", [(equivalence_flags(functions_file, model_dir, tmp_path / "run"), {})], tmp_path, *mode)
    assert "ranks  0 1" in result.stdout
    assert_is_the_run_of(reference, tmp_path / "run")


def sizes(**given):
    return dict.fromkeys(SPLIT_SIZES, 1) | given


@pytest.mark.parametrize(
    ("asked", "mode", "processes", "pattern"),
    [
        (sizes(sp=2), "DDP", 3, "sp_size their number is a multiple of 2; use --num_processes 2"),
        (sizes(sp=2), "plain", 1, "multiple of 2; use --num_processes 2"),
        (sizes(sp=2, dp_shard=2), "DDP", 4, "no effect without FSDP"),
        (sizes(sp=2, dp_shard=2), "FSDP", 2, "2 processes a sequence .* = 4; make the product"),
        (sizes(cp=2), "FSDP", 2, "cp_size to 2, which no recipe runs"),
        (sizes(sp=0), "DDP", 2, "use at least 1"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(asked, mode, processes, pattern):
    (line,) = check_sizes("the file", asked, mode, processes)
    assert re.search(pattern, line)


def test_sizes_that_fit_are_taken():
    assert not [*check_sizes("the file", sizes(sp=2), "DDP", 4), *check_sizes("the file", sizes(sp=4), "DeepSpeed", 4)]
    assert not [*check_sizes("the file", sizes(sp=2, dp_shard=2, dp_replicate=2), "FSDP", 8)]
