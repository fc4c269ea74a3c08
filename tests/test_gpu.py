"""What only a GPU can show: `make test TESTS=tests/test_gpu.py` where there is one. Elsewhere they are skipped."""

import json
import math

import pytest
import torch
from conftest import launch, launch_command, read_metrics, run

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def flags(functions_file, model_dir, output_dir, *more):
    base = ["--train_file", functions_file, "--model_name_or_path", model_dir, "--shape", "examples"]
    base += ["--sequence_length", 64, "--num_updates", 10, "--global_batch_size", 8, "--micro_batch_tokens", 128]
    return [str(part) for part in [*base, "--learning_rate", 1e-3, "--output_dir", output_dir, *more]]


def train(output_dir, functions_file, model_dir, *more, precision="no", config="single_gpu", processes=1, **env):
    command = launch_command(config, "--mixed_precision", precision, "--num_processes", processes)
    result = run([*command, "recipes/lm.py", *flags(functions_file, model_dir, output_dir, *more)], **env)
    assert result.returncode == 0, result.stdout + result.stderr
    return [line["loss"] for line in read_metrics(output_dir)], result.stdout


@pytest.fixture(scope="module")
def float32_losses(functions_file, model_dir, tmp_path_factory):
    """On the CPU: what every GPU run is compared with."""
    out = tmp_path_factory.mktemp("cpu") / "run"
    launch(*flags(functions_file, model_dir, out))
    return [line["loss"] for line in read_metrics(out)]


def test_float32_on_the_gpu_makes_the_losses_of_the_cpu(float32_losses, functions_file, model_dir, tmp_path):
    losses, printed = train(tmp_path / "run", functions_file, model_dir, NVIDIA_TF32_OVERRIDE=0)
    assert losses == pytest.approx(float32_losses, rel=1e-4)
    assert "on cuda" in printed


@pytest.mark.parametrize(("precision", "words"), [("no", "TF32"), ("bf16", "bf16"), ("fp16", "fp16")])
def test_precision_of_the_config_runs(precision, words, float32_losses, functions_file, model_dir, tmp_path):
    """Near float32's losses, and not equal to them."""
    losses, printed = train(tmp_path / "run", functions_file, model_dir, precision=precision)
    assert words in printed
    assert json.loads((tmp_path / "run/run.json").read_text())["mixed_precision"] == precision
    finite = [(loss, expected) for loss, expected in zip(losses, float32_losses, strict=True) if loss is not None]
    assert len(finite) >= 8  # fp16 may skip updates while it looks for its scale
    if len(finite) == len(losses):
        assert all(math.isclose(loss, expected, rel_tol=0.02) for loss, expected in finite)
        assert losses != float32_losses


@pytest.mark.parametrize("control", [False, True])
def test_the_host_does_not_wait_within_a_window(control, functions_file, model_dir, tmp_path):
    """CUDA's own check raises on every wait between the first forward and the last backward. Control: one .item()."""
    changes = {"forbid_host_sync": 1} | ({"item_of_each_loss": 1} if control else {})
    spec = [{"flags": flags(functions_file, model_dir, tmp_path / "run"), "changes": changes}]
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    result = run([*launch_command("single_gpu"), "tests/run_recipe.py", tmp_path / "spec.json"])
    assert (result.returncode != 0) == control, result.stderr
    if control:
        assert "synchronizing" in result.stderr


@pytest.mark.parametrize("mode", ["selective", "full", "offload"])
def test_activation_checkpointing_takes_less_memory(mode, functions_file, tmp_path):
    """On a model large enough for its activations to count: the same losses to TF32's precision, a lower peak."""
    losses, peaks = {}, {}
    for name in ("none", mode):
        more = ["--model_config", "small", "--sequence_length", 512, "--micro_batch_tokens", 4096]
        more += ["--activation_checkpointing", name, "--num_updates", 3, "--output_dir", tmp_path / name]
        launch("--train_file", functions_file, *more, config="single_gpu")
        losses[name] = [line["loss"] for line in read_metrics(tmp_path / name)]
        peaks[name] = json.loads((tmp_path / name / "run.json").read_text())["results"]["memory_growth_bytes"]
    assert losses[mode] == pytest.approx(losses["none"], rel=1e-3)
    assert peaks[mode] < 0.9 * peaks["none"]


@pytest.mark.parametrize("optimizer", ["adamw8bit", "adafactor", "sgd"])
def test_every_optimizer_trains_on_a_gpu(optimizer, functions_file, model_dir, tmp_path):
    more = ["--optimizer", optimizer, "--learning_rate", 0.1 if optimizer == "sgd" else 1e-3]
    losses, _ = train(tmp_path / "run", functions_file, model_dir, *more, precision="bf16")
    assert losses[-1] < losses[0]


@pytest.mark.usefixtures("extensions")
@pytest.mark.parametrize(("precision", "tolerance"), [("no", 1e-4), ("bf16", 3e-3)])
@pytest.mark.parametrize("config", ["fsdp2", "fsdp2_offload", "zero1", "zero2", "zero3", "zero3_offload_cpu"])
def test_sharded_modes_on_one_gpu(config, precision, tolerance, float32_losses, functions_file, model_dir, tmp_path):
    """One process: the mode's own code on the GPU, with NCCL, against float32 on the CPU."""
    more = {"NVIDIA_TF32_OVERRIDE": 0} if precision == "no" else {}
    losses, printed = train(tmp_path / "run", functions_file, model_dir, precision=precision, config=config, **more)
    assert "on cuda" in printed and "rehearsal" not in printed
    assert losses == pytest.approx(float32_losses, rel=tolerance)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_run_goes_on_from_a_checkpoint(precision, functions_file, model_dir, tmp_path):
    """With fp16's loss scale. A GPU adds in any order, so the losses after it are near, and not equal in each bit."""
    spec = [{"flags": flags(functions_file, model_dir, tmp_path / "run", "--save_every", 5)}]
    spec.append({"flags": flags(functions_file, model_dir, tmp_path / "again", "--save_every", 5, "--resume")})
    spec[1]["changes"] = {"copy_run": [str(tmp_path / "run"), str(tmp_path / "again"), 5]}
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    command = launch_command("single_gpu", "--mixed_precision", precision)
    result = run([*command, "tests/run_recipe.py", tmp_path / "spec.json"])
    assert result.returncode == 0, result.stdout + result.stderr
    lines, expected = (read_metrics(tmp_path / name) for name in ("again", "run"))
    assert [line["skipped_updates"] for line in lines] == [line["skipped_updates"] for line in expected]
    scales = [
        json.loads((tmp_path / f"{name}/checkpoints/update-000010/manifest.json").read_text())["scaler"]
        for name in ("again", "run")
    ]
    assert scales[0] == scales[1] and bool(scales[0]) == (precision == "fp16")
    for line, other in zip(lines, expected, strict=True):
        assert line["loss"] == pytest.approx(other["loss"], rel=1e-3)


OTHERS = {
    "classify": [],
    "vision": ["--model_config", "resnet"],
    "seq2seq": ["--generate", 4],
    "long_sequence": ["--sequence_length", 4096],
    "moe": [],
}


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("recipe", OTHERS)
def test_every_recipe_trains_on_a_gpu(recipe, precision, tmp_path):
    """On its own data: what it loses is near what it loses in float32 on the CPU."""
    losses = {}
    for config, asked in (("cpu", "no"), ("single_gpu", precision)):
        more = ["--num_updates", 5, "--warmup_updates", 3, "--output_dir", tmp_path / config, *OTHERS[recipe]]
        command = launch_command(config, "--mixed_precision", asked)
        result = run([*command, f"recipes/{recipe}.py", *more], timeout=600)
        assert result.returncode == 0, result.stdout + result.stderr
        losses[config] = read_metrics(tmp_path / config)[0]["loss"]  # before the first update, so in each precision
    assert losses["single_gpu"] == pytest.approx(losses["cpu"], rel=0.02)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_make_the_losses_of_one(functions_file, model_dir, tmp_path):
    one, _ = train(tmp_path / "one", functions_file, model_dir, NVIDIA_TF32_OVERRIDE=0)
    two, _ = train(tmp_path / "two", functions_file, model_dir, config="multi_gpu", processes=2, NVIDIA_TF32_OVERRIDE=0)
    assert two == pytest.approx(one, rel=1e-5)
