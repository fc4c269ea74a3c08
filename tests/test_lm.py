"""The language-model recipe, run as a user runs it: `accelerate launch` with the shipped configs."""

import json
import platform
import shutil

import numpy as np
import pytest
import torch
from conftest import (
    ROOT,
    assert_mistake,
    assert_same_losses,
    assert_same_update,
    example_flags,
    launch,
    make_model_dir,
    need,
    read_metrics,
    relative_difference,
    run_in_float64,
    run_recipe_alone,
    run_specs,
)
from safetensors.torch import load_file
from test_checkpoint import change_manifest
from transformers import AutoModelForCausalLM, AutoTokenizer

from common.data.standard_library import write_files
from common.training.optimizers import OPTIMIZERS

SMALL = ["--sequence_length", 64, "--num_updates", 4, "--global_batch_size", 8, "--micro_batch_tokens", 128]


def flags(functions_file, output_dir, *more, model_dir=None):
    base = [*SMALL, "--train_file", functions_file, "--output_dir", output_dir]
    return [str(part) for part in [*base, *(["--model_name_or_path", model_dir] if model_dir else []), *more]]


# Processes, and how a global batch of 16 samples is cut: samples or tokens at once.
CUTS = {
    1: [("size", 16), ("size", 8), ("size", 4), ("size", 1), ("tokens", 128), ("tokens", 64)],
    2: [("size", 8), ("size", 4), ("size", 2), ("size", 1), ("tokens", 96)],
    4: [("size", 4), ("size", 2), ("size", 1), ("tokens", 200)],
}


def test_the_update_is_the_same_however_the_global_batch_is_cut(functions_file, model_dir, tmp_path):
    """Law 1, and law 3: nor does it depend on sorting within the global batch.

    Control: the mean of the micro-batches' means, the usual loop's loss, is another update.
    """
    base = ["--num_updates", 3, "--global_batch_size", 16, "--learning_rate", 1e-3, "--warmup_updates", 0]
    cuts = {
        f"{processes}-{kind}-{number}": (
            processes,
            example_flags(functions_file, model_dir, tmp_path, *base, f"--micro_batch_{kind}", number),
            {},
        )
        for processes, kinds in CUTS.items()
        for kind, number in kinds
    }
    first, *others = cuts
    _, given, _ = cuts["1-size-4"]
    cuts |= {"means": (1, given, {"mean_of_means": 1}), "unsorted": (1, given, {"unsorted": 1})}
    runs = run_in_float64("lm", cuts, tmp_path)
    assert_same_update(runs, first, *others, "unsorted", rel=1e-12)
    assert relative_difference(runs["means"][0], runs[first][0]) > 0.01


@pytest.fixture(scope="module")
def one_process(functions_file, model_dir, tmp_path_factory):
    out = tmp_path_factory.mktemp("one") / "run"
    more = ["--shape", "examples", "--num_updates", 10, "--learning_rate", 1e-3]
    return out, more, launch(*flags(functions_file, out, *more, model_dir=model_dir))


def test_a_run_leaves_what_the_interface_promises(one_process):
    out, _, result = one_process
    metrics = read_metrics(out)
    assert [line["update"] for line in metrics] == list(range(10))
    fields = "update loss grad_norm learning_rate target_tokens tokens_per_second peak_memory_bytes sample_digest"
    assert set(fields.split()) <= set(metrics[0])
    assert metrics[-1]["loss"] < metrics[0]["loss"]
    settings = json.loads((out / "run.json").read_text())
    assert settings["arguments"]["global_batch_size"] == 8 and settings["versions"]["torch"] and settings["results"]
    model = AutoModelForCausalLM.from_pretrained(out / "model")
    tokenizer = AutoTokenizer.from_pretrained(out / "model")
    loss = model(**tokenizer("def f(x):\n    return x\n", return_tensors="pt", return_token_type_ids=False)).logits
    assert torch.isfinite(loss).all()
    assert "parameters" in result.stdout and "padding" in result.stdout and str(out / "model") in result.stdout


def test_the_command_without_flags_of_its_own_trains_on_the_standard_library(tmp_path):
    """The README's first command, cut short: block, held-out figures beside gzip and xz, and a sample."""
    result = launch("--num_updates", 2, "--output_dir", tmp_path / "run")
    for part in ("held-out loss", "perplexity", "bits per byte", "gzip -9", "xz -9", "the model writes"):
        assert part in result.stdout, part
    # Continued under another Python, whose library is another text: a checkpoint that says so. And the control.
    checkpoint = tmp_path / "run/checkpoints/update-000002"
    identity = json.loads((checkpoint / "manifest.json").read_text())["identity"]
    assert identity["standard_library"] == platform.python_version()
    resumed = ["--num_updates", 2, "--output_dir", tmp_path / "run", "--resume", "--dry_run"]
    change_manifest(checkpoint, identity=identity | {"tokenizer": "0" * 16})
    assert_mistake(run_recipe_alone("lm.py", *resumed), "the tokenizer differs: .* differs between versions of Python")
    change_manifest(checkpoint, identity=identity | {"tokenizer": "0" * 16, "standard_library": "3.8.2"})
    assert_mistake(run_recipe_alone("lm.py", *resumed), f"{platform.python_version()}, and the run began with 3.8.2")
    change_manifest(checkpoint, identity=identity | {"dataset": "0" * 16})  # patched, under the same number
    assert_mistake(run_recipe_alone("lm.py", *resumed), "pass the same installation of Python, whose")
    # The way that the message names: the first run's text, as files.
    change_manifest(checkpoint, identity=identity | {"standard_library": "3.8.2"})
    write_files(tmp_path / "library")
    files = [f"--{part}_file={tmp_path}/library/{part}/**/*.txt" for part in ("train", "validation")]
    assert run_recipe_alone("lm.py", *resumed, *files).returncode == 0


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_trains(optimizer, functions_file, model_dir, tmp_path):
    rate = 1e-3 if OPTIMIZERS[optimizer].uses_adamw_rate else 0.1
    more = ["--optimizer", optimizer, "--learning_rate", rate, "--num_updates", 6]
    launch(*flags(functions_file, tmp_path / "run", *more, model_dir=model_dir))
    metrics = read_metrics(tmp_path / "run")
    assert metrics[-1]["loss"] < metrics[0]["loss"]


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_activation_checkpointing_does_not_change_the_update(mode, one_process, functions_file, model_dir, tmp_path):
    """Of several processes; in tests/test_moe.py of one."""
    reference, more, _ = one_process
    more = [*more, "--activation_checkpointing", mode]
    launch(*flags(functions_file, tmp_path / "run", *more, model_dir=model_dir), config="multi_cpu")
    assert_same_losses(tmp_path / "run", reference, rel=1e-6)


def test_bf16_on_a_cpu_is_bf16(one_process, functions_file, model_dir, tmp_path):
    """single_gpu.yaml without a GPU runs its own precision: losses near float32's, and not equal to them."""
    reference, more, _ = one_process
    arguments = flags(functions_file, tmp_path / "run", *more, model_dir=model_dir)
    result = launch(*arguments, config="single_gpu", CUDA_VISIBLE_DEVICES="")
    assert "bf16" in result.stdout and "on cpu" in result.stdout
    losses = np.array([line["loss"] for line in read_metrics(tmp_path / "run")])
    expected = np.array([line["loss"] for line in read_metrics(reference)])
    assert (losses != expected).all() and np.allclose(losses, expected, rtol=0.01)


def test_a_compiled_model_makes_the_same_update(one_process, functions_file, model_dir, tmp_path):
    """Also of documents that do not see each other."""
    need("g++")
    reference, more, _ = one_process
    masked = ["--shape", "packed", "--num_updates", 3]
    own = {"run": ["--compile"], "mask": masked, "both": [*masked, "--compile"]}
    names = {name: [*more, *last] for name, last in own.items()}
    runs = [(flags(functions_file, tmp_path / name, *given, model_dir=model_dir), {}) for name, given in names.items()]
    run_specs("lm", runs, tmp_path)
    assert_same_losses(tmp_path / "run", reference)
    assert_same_losses(tmp_path / "both", tmp_path / "mask")


def test_compiled_blocks_resume_bit_for_bit_with_the_code_of_the_run_before(model_dir, tmp_path, monkeypatch):
    """In bf16. The last block of the text is shorter, and is not compiled. A second run adds no code to the cache."""
    need("g++")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    (tmp_path / "text.txt").write_text(ROOT.joinpath("LICENSE").read_text()[:2500])
    more = ["--validation_file", tmp_path / "text.txt", "--global_batch_size", 4, "--num_updates", 20, "--compile"]
    arguments = flags(tmp_path / "text.txt", tmp_path / "run", *more, "--save_every", 10, model_dir=model_dir)
    env = {"XDG_CACHE_HOME": tmp_path / "cache"}
    launch(*arguments, config="cpu_bf16", **env)
    code = {path.name for path in tmp_path.glob("cache/accelerate_recipes/compiled-*/**/*.cpp")}
    assert code
    losses = [line["loss"] for line in read_metrics(tmp_path / "run")]
    shutil.rmtree(tmp_path / "run/checkpoints/update-000020")
    launch(*arguments, "--resume", config="cpu_bf16", **env)
    assert [line["loss"] for line in read_metrics(tmp_path / "run")] == losses
    assert {path.name for path in tmp_path.glob("cache/accelerate_recipes/compiled-*/**/*.cpp")} == code


def test_sorted_global_batches_hardly_pad_and_load_the_ranks_alike(tmp_path):
    """128 of the standard library's functions an update, on two processes: the figures that the recipe prints."""
    more = ["--shape", "examples", "--global_batch_size", 128, "--num_updates", 2, "--output_dir", tmp_path / "run"]
    (tmp_path / "held_out.txt").write_text((ROOT / "LICENSE").read_text())
    result = launch(*more, "--validation_file", tmp_path / "held_out.txt", config="multi_cpu")
    results = json.loads((tmp_path / "run/run.json").read_text())["results"]
    assert 0 < results["padding_share"] <= 0.12
    assert results["work_difference"] <= 0.05
    assert f"padding {results['padding_share']:.1%}" in result.stdout


def test_without_the_guard_an_update_that_is_not_finite_spoils_the_weights(functions_file, model_dir, tmp_path):
    """The control of tests/test_modes.py, where all ranks skip it."""
    given = flags(functions_file, tmp_path / "run", model_dir=model_dir)
    run_specs("lm", [(given, {"nan_loss": [1, 2], "no_guard": 1})], tmp_path, "multi_cpu", check=False)
    weights = load_file(tmp_path / "run/model/model.safetensors")
    assert any(weight.isnan().any() for weight in weights.values())


def test_memory_stays_flat(functions_file, model_dir, tmp_path):
    """No tensor is left behind by an update, over 100 of them. Control: one leaked scalar an update is noticed."""
    more = ["--num_updates", 105, "--micro_batch_tokens", 512]
    runs = [
        (
            flags(functions_file, tmp_path / name, *more, model_dir=model_dir),
            changes | {"count_tensors": str(tmp_path / f"{name}.json")},
        )
        for name, changes in {"kept": {}, "leaked": {"leak": 1}}.items()
    ]
    run_specs("lm", runs, tmp_path)
    counts = {name: json.loads((tmp_path / f"{name}.json").read_text()) for name in ("kept", "leaked")}
    assert len(counts["kept"]) == 11  # every tenth
    assert max(counts["kept"][1:]) - min(counts["kept"][1:]) <= 2
    assert counts["leaked"][-1] - counts["leaked"][1] >= 90


def test_data_workers_change_nothing(functions_file, tmp_path):
    """Two data processes give the losses of none, with dropout on: they draw nothing from the model's random stream."""
    model = make_model_dir(tmp_path / "model", functions_file, attention_dropout=0.1)
    names = ("0", "2")
    runs = [(flags(functions_file, tmp_path / name, "--num_workers", name, model_dir=model), {}) for name in names]
    run_specs("lm", runs, tmp_path)
    losses = [[line["loss"] for line in read_metrics(tmp_path / name)] for name in names]
    assert losses[0] == losses[1]
