"""The language-model recipe, run as a user runs it: `accelerate launch` with the shipped configs."""

import json

import pytest
import torch
from conftest import ROOT, launch, launch_command, make_model_dir, need, read_metrics, relative_difference, run
from transformers import AutoModelForCausalLM, AutoTokenizer

SMALL = ["--sequence_length", 64, "--num_updates", 4, "--global_batch_size", 8, "--micro_batch_tokens", 128]


def flags(functions_file, output_dir, *more, model_dir=None):
    base = [*SMALL, "--train_file", functions_file, "--output_dir", output_dir]
    return [str(part) for part in [*base, *(["--model_name_or_path", model_dir] if model_dir else []), *more]]


# Micro-batches, accumulation steps and processes of one global batch of 16 samples.
COMBINATIONS = {
    1: [("size", 16), ("size", 8), ("size", 4), ("size", 1), ("tokens", 128), ("tokens", 64)],
    2: [("size", 8), ("size", 4), ("size", 2), ("size", 1), ("tokens", 96)],
    4: [("size", 4), ("size", 2), ("size", 1), ("tokens", 200)],
}


@pytest.fixture(scope="module")
def float64_runs(functions_file, model_dir, tmp_path_factory):
    """The real recipe in float64 on variable-length data, once for each combination; a launch for each world size."""
    out = tmp_path_factory.mktemp("float64")
    runs = {}
    for processes, cuts in COMBINATIONS.items():
        spec = []
        for kind, number in cuts:
            name = f"{processes}-{kind}-{number}"
            spec.append(float64_spec(out, name, functions_file, model_dir, [f"--micro_batch_{kind}", number]))
        if processes == 1:
            name = "mean-of-means"
            spec.append(float64_spec(out, name, functions_file, model_dir, ["--micro_batch_size", 4], mean_of_means=1))
            spec.append(float64_spec(out, "unsorted", functions_file, model_dir, ["--micro_batch_size", 4], unsorted=1))
        path = out / f"{processes}.json"
        path.write_text(json.dumps(spec))
        config = "cpu" if processes == 1 else "multi_cpu"
        launch(path, config=config, script="tests/run_recipe.py", processes=processes, TQDM_DISABLE=1)
        for name in (one["name"] for one in spec):
            runs[name] = (torch.load(out / f"{name}.pt"), read_metrics(out / name))
    return runs


def float64_spec(out, name, functions_file, model_dir, cut, **changes):
    arguments = ["--train_file", functions_file, "--model_name_or_path", model_dir, "--shape", "examples"]
    arguments += ["--sequence_length", 64, "--num_updates", 3, "--global_batch_size", 16, "--learning_rate", 1e-3]
    arguments += ["--warmup_updates", 0, "--output_dir", out / name, *cut]
    changes |= {"float64": 1, "save_gradients": str(out / f"{name}.pt")}
    return {"name": name, "flags": [str(part) for part in arguments], "changes": changes}


def test_the_update_is_the_same_however_the_global_batch_is_cut(float64_runs):
    """Law 1: gradients agree to 1e-12, losses and samples too, over micro-batch, accumulation and 1, 2, 4 processes."""
    reference, metrics = float64_runs["1-size-16"]
    names = [name for name in float64_runs if name[0].isdigit()]
    assert len(names) >= 12
    for name in names:
        gradients, other = float64_runs[name]
        assert gradients[0].dtype == torch.float64
        assert relative_difference(gradients, reference) < 1e-12, name
        for line, expected in zip(other, metrics, strict=True):
            assert line["sample_digest"] == expected["sample_digest"]
            assert line["loss"] == pytest.approx(expected["loss"], rel=1e-12), name


def test_the_mean_of_micro_batch_means_is_another_update(float64_runs):
    """Control of law 1: the usual loop's loss, on the same data, differs by more than one per cent."""
    gradients, _ = float64_runs["mean-of-means"]
    assert relative_difference(gradients, float64_runs["1-size-16"][0]) > 0.01


def test_sorting_inside_a_global_batch_does_not_change_the_update(float64_runs):
    """Law 3, and less is computed for it."""
    gradients, metrics = float64_runs["unsorted"]
    assert relative_difference(gradients, float64_runs["1-size-4"][0]) < 1e-12
    assert [line["loss"] for line in metrics] == pytest.approx(
        [line["loss"] for line in float64_runs["1-size-4"][1]], rel=1e-12
    )


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


def test_dry_run_writes_nothing(functions_file, model_dir, tmp_path):
    result = launch(*flags(functions_file, tmp_path / "run", "--dry_run", model_dir=model_dir), cwd=ROOT)
    assert "dry run" in result.stdout and "parameters" in result.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("optimizer", ["adamw8bit", "adafactor", "sgd"])
def test_every_optimizer_trains(optimizer, functions_file, model_dir, tmp_path):
    more = ["--optimizer", optimizer, "--learning_rate", 0.1 if optimizer == "sgd" else 1e-3, "--num_updates", 6]
    launch(*flags(functions_file, tmp_path / "run", *more, model_dir=model_dir))
    metrics = read_metrics(tmp_path / "run")
    assert metrics[-1]["loss"] < metrics[0]["loss"]


@pytest.mark.parametrize(("mode", "config", "allowed"), [("full", "cpu", 1e-6), ("selective", "multi_cpu", 1e-5)])
def test_activation_checkpointing_does_not_change_the_update(
    mode, config, allowed, one_process, functions_file, model_dir, tmp_path
):
    reference, more, _ = one_process
    more = [*more, "--activation_checkpointing", mode]
    launch(*flags(functions_file, tmp_path / "run", *more, model_dir=model_dir), config=config)
    expected = [line["loss"] for line in read_metrics(reference)]
    assert [line["loss"] for line in read_metrics(tmp_path / "run")] == pytest.approx(expected, rel=allowed)


def test_a_compiled_model_makes_the_same_update(one_process, functions_file, model_dir, tmp_path):
    need("g++")
    reference, more, _ = one_process
    run_flags = flags(functions_file, tmp_path / "run", *more, "--compile", model_dir=model_dir)
    launch(*run_flags, timeout=900)  # a first compilation, beside other tests
    expected = [line["loss"] for line in read_metrics(reference)]
    assert [line["loss"] for line in read_metrics(tmp_path / "run")] == pytest.approx(expected, rel=1e-5)


def test_sorted_global_batches_hardly_pad_and_load_the_ranks_alike(tmp_path):
    """128 of the standard library's functions an update, on two processes: the figures that the recipe prints."""
    more = ["--shape", "examples", "--global_batch_size", 128, "--num_updates", 2, "--output_dir", tmp_path / "run"]
    (tmp_path / "held_out.txt").write_text((ROOT / "LICENSE").read_text())
    result = launch(*more, "--validation_file", tmp_path / "held_out.txt", config="multi_cpu")
    results = json.loads((tmp_path / "run/run.json").read_text())["results"]
    assert 0 < results["padding_share"] <= 0.12
    assert results["work_difference"] <= 0.05
    assert f"padding {results['padding_share']:.1%}" in result.stdout


def run_changed(tmp_path, functions_file, model_dir, *more, config="multi_cpu", processes=2, **changes):
    spec = [{"flags": flags(functions_file, tmp_path / "run", *more, model_dir=model_dir), "changes": changes}]
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    return run([*launch_command(config, "--num_processes", processes), "tests/run_recipe.py", tmp_path / "spec.json"])


def weights_are_finite(output_dir):
    model = AutoModelForCausalLM.from_pretrained(output_dir / "model")
    return all(torch.isfinite(p).all() for p in model.parameters())


@pytest.mark.parametrize("guard", [True, False])
def test_all_ranks_skip_an_update_that_is_not_finite(guard, functions_file, model_dir, tmp_path):
    """One micro-batch of rank 1 has a NaN loss. Control: without the guard the weights are NaN."""
    changes = {"nan_loss": [1, 2]} | ({} if guard else {"no_guard": 1})
    result = run_changed(tmp_path, functions_file, model_dir, **changes)
    if not guard:
        assert not weights_are_finite(tmp_path / "run")
        return
    assert result.returncode == 0, result.stderr
    metrics = read_metrics(tmp_path / "run")
    assert [line["loss"] is None for line in metrics] == [True, False, False, False]
    assert metrics[-1]["skipped_updates"] == 1
    assert weights_are_finite(tmp_path / "run")


def test_a_run_that_is_never_finite_stops(functions_file, model_dir, tmp_path):
    more = ["--num_updates", 9, "--max_skipped_updates", 3]
    result = run_changed(tmp_path, functions_file, model_dir, *more, config="cpu", processes=1, nan_loss=[0, "all"])
    assert result.returncode != 0
    assert "not finite 3 times in a row" in result.stderr
    assert len(read_metrics(tmp_path / "run")) == 3


def test_memory_stays_flat(functions_file, model_dir, tmp_path):
    """No tensor is left behind by an update, over 100 of them. Control: one leaked scalar an update is noticed."""
    more = ["--num_updates", 105, "--micro_batch_tokens", 512]
    counts = {}
    for name, changes in {"kept": {}, "leaked": {"leak": 1}}.items():
        (tmp_path / name).mkdir()
        changes |= {"count_tensors": str(tmp_path / f"{name}.json")}
        result = run_changed(tmp_path / name, functions_file, model_dir, *more, config="cpu", processes=1, **changes)
        assert result.returncode == 0, result.stderr
        counts[name] = json.loads((tmp_path / f"{name}.json").read_text())
    assert len(counts["kept"]) == 11  # every tenth
    assert max(counts["kept"][1:]) - min(counts["kept"][1:]) <= 2
    assert counts["leaked"][-1] - counts["leaked"][1] >= 90


def test_trackers_of_accelerate_are_fed(functions_file, model_dir, tmp_path):
    launch(*flags(functions_file, tmp_path / "run", "--report_to", "tensorboard", model_dir=model_dir))
    assert list((tmp_path / "run").rglob("events.out.tfevents*"))


def test_data_workers_change_nothing(functions_file, tmp_path):
    """Two data processes give the losses of none, with dropout on: they draw nothing from the model's random stream."""
    model = make_model_dir(tmp_path / "model", functions_file, attention_dropout=0.1)
    losses = []
    for workers in (0, 2):
        out = tmp_path / f"run{workers}"
        launch(*flags(functions_file, out, "--num_workers", workers, model_dir=model))
        losses.append([line["loss"] for line in read_metrics(out)])
    assert losses[0] == losses[1]
