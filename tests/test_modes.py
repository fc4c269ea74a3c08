"""Every config runs, as what its name says, and makes the update of one process."""

import json
import re
import shutil
from pathlib import Path

import pytest
from conftest import BIN, ROOT, launch, read_metrics, run
from conftest import equivalence_flags as flags
from safetensors.torch import load_file

CONFIGS = sorted(path.stem for path in (ROOT / "accelerate_configs").glob("*.yaml"))
PROCESSES = {"cpu": 1, "single_gpu": 1, "hsdp": 4}  # else two
MODES = {
    "multi_node_zero": "DeepSpeed",
    "zero": "DeepSpeed",
    "fsdp": "FSDP",
    "hsdp": "FSDP",
    "multi": "DDP",
    "cpu": "plain",
    "single": "plain",
}
# What a rank holds of the weights and of the optimizer state, as a share of the whole.
HELD = {
    "multi_cpu": (1, 1),
    "zero1": (1, 1 / 2),
    "zero2": (1, 1 / 2),
    "zero3": (1 / 2, 1 / 2),
    "fsdp2": (1 / 2, 1 / 2),
    "hsdp": (1 / 2, 1 / 2),
    "multi_node": (1, 1),
    "multi_node_zero3": (1 / 2, 1 / 2),
}


pytestmark = pytest.mark.usefixtures("extensions")


def options(config, tmp_path):
    """What is not the config's own: the precision, and a directory for files in the place of NVMe's."""
    given = ["--mixed_precision", "no", "--num_processes", PROCESSES.get(config, 2)]
    if config.startswith("multi_node"):  # here all on one machine; tests/test_multi_node.py runs them on two hosts
        given += ["--num_machines", 1, "--main_process_port", 0]
    if config == "zero3_offload_nvme":
        (tmp_path / "nvme").mkdir()
        text = (ROOT / f"ds_configs/{config}.json").read_text().replace("/local_nvme", str(tmp_path / "nvme"))
        (tmp_path / "nvme.json").write_text(text)
        given += ["--deepspeed_config_file", tmp_path / "nvme.json"]
    return given


@pytest.mark.parametrize("config", CONFIGS)
def test_every_config_makes_the_update_of_one_process(config, reference, functions_file, model_dir, tmp_path):
    """Losses, gradient norms and the exported weights, with accumulation and with clipping and decay that count.

    Weight decay in the wrong group, a loss scaled once more, or a norm of one shard would each show in the weights.
    """
    if "nvme" in config and not Path("/usr/include/libaio.h").exists():
        pytest.skip("needs libaio-dev")
    expected, weights = reference
    command = [BIN / "accelerate", "launch", "--config_file", ROOT / f"accelerate_configs/{config}.yaml"]
    command += options(config, tmp_path)
    spec = [{"flags": [str(part) for part in flags(functions_file, model_dir, tmp_path / "run")], "changes": {}}]
    spec[0]["changes"] = {"measure_state": str(tmp_path / "held")}
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    result = run([*command, "tests/run_recipe.py", tmp_path / "spec.json"], CUDA_VISIBLE_DEVICES="", timeout=900)
    assert result.returncode == 0, result.stdout + result.stderr

    mode = next(name for start, name in MODES.items() if config.startswith(start))
    processes = PROCESSES.get(config, 2)
    settings = json.loads((tmp_path / "run/run.json").read_text())
    assert (settings["mode"], settings["world_size"]) == (mode, processes)
    assert ("rehearsal" in result.stdout) == ("cpu" not in config.removesuffix("_offload_cpu"))
    assert all(line["grad_norm"] > 0.5 for line in expected[:5])  # clipped
    for line, other in zip(read_metrics(tmp_path / "run"), expected, strict=True):
        assert line["sample_digest"] == other["sample_digest"]
        assert line["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert line["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
    exported = load_file(tmp_path / "run/model/model.safetensors")
    assert exported.keys() == weights.keys()
    for name, weight in weights.items():
        assert (exported[name] - weight).abs().max() < 1e-5, name
    if "nvme" in config:
        assert sum(path.stat().st_size for path in (tmp_path / "nvme").rglob("*") if path.is_file()) > 0
    if config in HELD:
        whole = sum(weight.numel() * weight.element_size() for weight in weights.values())
        for rank in range(processes):
            held = json.loads((tmp_path / f"held-{rank}.json").read_text())
            assert held["weights"] / whole == pytest.approx(HELD[config][0], rel=0.1)
            assert held["optimizer"] / (2 * whole) == pytest.approx(HELD[config][1], rel=0.1)


def test_zero3_makes_the_same_model_from_scratch(functions_file, tmp_path):
    """Its weights are cut while they are drawn: they must be those that one process draws."""
    losses = {}
    for config, processes in (("cpu", 1), ("zero3", 2)):
        more = ["--num_updates", 2, "--sequence_length", 64, "--output_dir", tmp_path / config]
        launch("--train_file", functions_file, *more, config=config, processes=processes, CUDA_VISIBLE_DEVICES="")
        losses[config] = [line["loss"] for line in read_metrics(tmp_path / config)]
    assert losses["zero3"] == pytest.approx(losses["cpu"], rel=1e-5)


def test_a_loss_that_is_not_finite_is_skipped_by_zero_and_fsdp_too(functions_file, model_dir, tmp_path):
    for config in ("zero2", "zero3", "fsdp2"):
        out = tmp_path / config
        spec = [{"flags": [str(f) for f in flags(functions_file, model_dir, out)], "changes": {"nan_loss": [1, 3]}}]
        (tmp_path / f"{config}.json").write_text(json.dumps(spec))
        command = [BIN / "accelerate", "launch", "--config_file", ROOT / f"accelerate_configs/{config}.yaml"]
        command += ["--mixed_precision", "no", "tests/run_recipe.py", tmp_path / f"{config}.json"]
        result = run(command, CUDA_VISIBLE_DEVICES="")
        assert result.returncode == 0, result.stderr
        metrics = read_metrics(out)
        assert [line["loss"] is None for line in metrics] == [False, True] + 8 * [False], config
        assert metrics[-1]["skipped_updates"] == 1


MISTAKES = {
    ("fsdp2", "--optimizer adafactor"): "--optimizer adafactor does not work on the shards of FSDP2; use adamw",
    ("zero2", "--optimizer adamw8bit"): "--optimizer adamw8bit works on whole tensors.*use adamw",
    ("zero3_offload_cpu", "--optimizer sgd"): "state offloaded, DeepSpeed runs only adamw",
    ("zero3_offload_nvme", ""): "nvme_path /local_nvme is no writable directory",
}


@pytest.mark.parametrize(("config", "more"), MISTAKES)
def test_what_a_mode_cannot_take_is_refused(config, more, tmp_path):
    given = ["--config_file", ROOT / f"accelerate_configs/{config}.yaml"]
    assert_refused(given, more, MISTAKES[config, more], tmp_path)


FILE_MISTAKES = {
    "gradient_clipping": (0.25, "gradient_clipping is 0.25, but --max_grad_norm is 1.0"),
    "train_batch_size": (64, "train_batch_size is 64; it follows from --global_batch_size"),
    "gradient_accumulation_steps": (4, "gradient_accumulation_steps is 4; it follows from"),
    "optimizer": ({"type": "AdamW"}, "take out its section optimizer"),
}


@pytest.mark.parametrize("key", FILE_MISTAKES)
def test_a_deepspeed_file_that_contradicts_a_flag_is_refused(key, tmp_path):
    value, pattern = FILE_MISTAKES[key]
    settings = json.loads((ROOT / "ds_configs/zero2.json").read_text()) | {key: value}
    (tmp_path / "mine.json").write_text(json.dumps(settings))
    given = ["--config_file", ROOT / "accelerate_configs/zero2.yaml", "--deepspeed_config_file", tmp_path / "mine.json"]
    assert_refused(given, "", pattern, tmp_path)


def assert_refused(given, more, pattern, tmp_path):
    command = [BIN / "accelerate", "launch", *given, "recipes/lm.py", "--output_dir", tmp_path / "run", *more.split()]
    result = run(command, CUDA_VISIBLE_DEVICES="")
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert result.returncode != 0 and errors and all(re.search(pattern, line) for line in errors), result.stderr
    assert not (tmp_path / "run").exists()


def test_a_copied_recipe_runs_under_zero(functions_file, model_dir, tmp_path):
    """DeepSpeed's launcher adds the current directory to the path: the copy's common/ wins all the same."""
    shutil.copy(ROOT / "recipes/lm.py", tmp_path)
    shutil.copytree(ROOT / "common", tmp_path / "common")
    marker = tmp_path / "common/batching.py"
    marker.write_text(marker.read_text() + "\nprint('the copy of common/')\n")
    result = launch(
        *flags(functions_file, model_dir, tmp_path / "run", "--num_updates", 2),
        config="zero1",
        script=tmp_path / "lm.py",
        CUDA_VISIBLE_DEVICES="",
    )
    assert "the copy of common/" in result.stdout
