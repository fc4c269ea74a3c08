"""Every recipe resumes bit for bit under every config, in the precision that the config is for.

All is in use at once: an evaluation that falls on the save, --keep_best, dropout, accumulation and clipping.
"""

import json
import shutil

import pytest
from conftest import ROOT, launch_command, make_model_dir, read_metrics, run, run_specs, told, write_rows
from test_checkpoint import manifest_of, outcome

pytestmark = pytest.mark.usefixtures("extensions")

# Their flags; ZeRO's files leave the precision to the launch. Those of several machines are run in test_multi_node.py,
# and with files (nvme) there are no checkpoints.
CONFIGS = {
    "cpu": ["--mixed_precision", "no"],
    "single_gpu": [],
    "multi_cpu": [],
    "multi_gpu": [],
    "fsdp2": [],
    "fsdp2_offload": [],
    "hsdp": [],
    "zero1": ["--mixed_precision", "bf16"],
    "zero2": ["--mixed_precision", "bf16"],
    "zero3": ["--mixed_precision", "bf16"],
    "zero3_offload_cpu": ["--mixed_precision", "bf16"],
}
WITHOUT = {"multi_node", "multi_node_zero3", "zero3_offload_nvme"}
# What a recipe trains: DATA and MODEL stand for what the fixtures make. Dropout is in WITH_DROPOUT.
TEXT = ["--train_file", "DATA", "--validation_file", "DATA"]
RECIPES = {
    "lm": [*TEXT, "--model_name_or_path", "MODEL", "--shape", "examples", "--sequence_length", 64],
    "classify": [*TEXT, "--model_config", "tiny", "--sequence_length", 32],
    "seq2seq": [*TEXT, "--model_config", "tiny", "--sequence_length", 32, "--target_length", 16, "--generate", 0],
    "moe": [*TEXT, "--model_config", "tiny", "--sequence_length", 64],
    "long_sequence": [*TEXT, "--hidden_size", 32, "--sequence_length", 256, "--segments", 4],
    "vision": ["--model_config", "convnet"],
}
WITH_DROPOUT = ("lm", "classify", "seq2seq", "vision")
NUM_UPDATES, SAVED = 4, 2


def test_no_config_and_no_recipe_is_left_out():
    assert {path.stem for path in (ROOT / "accelerate_configs").glob("*.yaml")} == CONFIGS.keys() | WITHOUT
    assert {path.stem for path in (ROOT / "recipes").glob("*.py")} == RECIPES.keys()


@pytest.fixture(scope="module")
def data(functions_file, tmp_path_factory):
    """One file for every recipe that reads text, and a model with dropout for lm.py."""
    directory = tmp_path_factory.mktemp("resume")
    rows = write_rows(directory / "rows.jsonl", 40)
    model = make_model_dir(directory / "model", functions_file, attention_dropout=0.1)
    return {"DATA": str(rows), "MODEL": str(model)}


def flags(recipe, data, output_dir, processes, *more):
    own = [data.get(part, str(part)) for part in RECIPES[recipe]]
    base = ["--num_updates", NUM_UPDATES, "--global_batch_size", 8, "--micro_batch_size", 4 // processes or 1]
    base += ["--save_every", SAVED, "--eval_every", SAVED, "--keep_best", "--keep_last", 9, "--warmup_updates", 1]
    base += ["--max_grad_norm", 0.5, "--output_dir", output_dir]
    return [*own, *(str(part) for part in [*base, *more])]


def run_matrix(config, recipes, data, tmp_path, first=None, second=None):
    """Each recipe runs as a whole, then goes on from a copy of what it had saved; all in one launch.

    first, second: changes of tests/run_recipe.py for the two runs.
    """
    processes = {"cpu": 1, "single_gpu": 1, "hsdp": 4}.get(config, 2)
    specs = []
    for recipe in recipes:
        whole, again = str(tmp_path / recipe), str(tmp_path / f"{recipe}-again")
        script = f"recipes/{recipe}.py"
        specs.append({"recipe": script, "flags": flags(recipe, data, whole, processes), "changes": first or {}})
        resumed = {"copy_run": [whole, again, SAVED], **(second or {})}
        specs.append({"recipe": script, "flags": flags(recipe, data, again, processes, "--resume"), "changes": resumed})
    (tmp_path / "specs.json").write_text(json.dumps(specs))
    command = [*launch_command(config, *CONFIGS[config]), "tests/run_recipe.py", tmp_path / "specs.json"]
    result = run(command, CUDA_VISIBLE_DEVICES="", TQDM_DISABLE=1, timeout=900)
    assert result.returncode == 0, told(result)
    return result


@pytest.mark.parametrize("config", CONFIGS)
def test_every_recipe_resumes_bit_for_bit(config, data, tmp_path):
    run_matrix(config, RECIPES, data, tmp_path)
    facts = json.loads((tmp_path / "lm/run.json").read_text())
    mode = {"cpu": "plain", "single_gpu": "plain", "multi_cpu": "DDP", "multi_gpu": "DDP"}.get(config)
    assert facts["mode"] == (mode or ("DeepSpeed" if config.startswith("zero") else "FSDP"))
    assert facts["mixed_precision"] == ("no" if "cpu" in config.removesuffix("_offload_cpu") else "bf16")
    ends = [{name: outcome(tmp_path / f"{name}{end}", NUM_UPDATES) for name in RECIPES} for end in ("", "-again")]
    assert ends[0] == ends[1]
    for name in RECIPES:
        metrics = read_metrics(tmp_path / name)
        assert ["validation_loss" in line for line in metrics] == [False, True, False, True], name
        assert manifest_of(tmp_path / name, SAVED)["position"]["best_validation_loss"] is not None, name


def test_a_resume_that_forgets_the_random_states_draws_another_dropout(data, tmp_path):
    """The control of the test above: dropout is in use, and the losses show it."""
    run_matrix("cpu", WITH_DROPOUT, data, tmp_path, second={"forget": "random"})
    for name in WITH_DROPOUT:
        whole, again = (outcome(tmp_path / f"{name}{end}", NUM_UPDATES)[0] for end in ("", "-again"))
        assert whole[:SAVED] == again[:SAVED] and whole[SAVED:] != again[SAVED:], name


FP16 = {"fp16": 1}


@pytest.mark.parametrize(
    ("config", "changes"), [("fsdp2", FP16), ("multi_gpu", FP16), ("zero1", {}), ("zero3", {})], ids=str
)
def test_a_save_after_a_skipped_update_is_complete(config, changes, data, tmp_path):
    """The update before the save overflows, and the evaluation comes after it. In fp16 the scale is halved too."""
    run_matrix(config, ["lm"], data, tmp_path, changes | {"nan_loss": [0, 3]}, changes)
    assert [line["loss"] is None for line in read_metrics(tmp_path / "lm")] == [False, True, False, False]
    saved = manifest_of(tmp_path / "lm", SAVED)
    assert saved["identity"]["settings"]["mixed_precision"] == ("fp16" if changes else "bf16")
    assert (saved["position"]["skipped_updates"], saved["untrained"]) == (1, [])
    assert not changes or saved["scaler"]["scale"] == 8 * 2 / 2  # doubled after the first update, then halved
    assert outcome(tmp_path / "lm", NUM_UPDATES) == outcome(tmp_path / "lm-again", NUM_UPDATES)


def test_a_finished_run_keeps_what_its_training_took(data, tmp_path):
    """Resumed with nothing left to train; the best model is measured and written all the same."""
    given = flags("lm", data, tmp_path / "run", 1, "--learning_rate", 10)  # the first checkpoint is the best one
    run_specs("lm", [(given, {})], tmp_path)
    first = json.loads((tmp_path / "run/run.json").read_text())
    shutil.rmtree(tmp_path / "run/model")
    printed = run_specs("lm", [([*given, "--resume", "--load_best_at_end"], {})], tmp_path).stdout
    assert "nothing was left to train" in printed and "\ntrained in 0 s, 0 tokens" not in printed
    again = json.loads((tmp_path / "run/run.json").read_text())
    took = ["training_seconds", "tokens_per_second", "padding_share", "waiting_for_data", "memory_growth_bytes"]
    assert [again["results"][name] for name in took] == [first["results"][name] for name in took]
    assert again["status"] == "finished" and (tmp_path / "run/model/model.safetensors").exists()
    assert (first["results"]["best"]["is_model"], again["results"]["best"]["is_model"]) == (False, True)
    assert again["results"]["validation_loss"] < first["results"]["validation_loss"]
