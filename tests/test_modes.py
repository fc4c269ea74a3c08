"""Every config runs, as what its name says, and makes the update of one process."""

import json
import os
import shutil
from pathlib import Path

import pytest
from conftest import (
    BIN,
    ROOT,
    assert_refused,
    launch,
    launch_command,
    need,
    our_collectives,
    read_metrics,
    run,
    run_specs,
)
from conftest import equivalence_flags as flags
from safetensors.torch import load_file

from common.errors import UserError
from common.parallel.deepspeed_space import check_nvme_space

CONFIGS = sorted(path.stem for path in (ROOT / "accelerate_configs").glob("*.yaml"))
PROCESSES = {"cpu": 1, "cpu_bf16": 1, "single_gpu": 1, "hsdp": 4}  # else two
PROCESSES |= {"fsdp2_sequence_parallel": 4, "fsdp2_tensor_parallel": 4}
MODES = {
    "multi_node_zero": "DeepSpeed",
    "zero": "DeepSpeed",
    "fsdp": "FSDP",
    "hsdp": "FSDP",
    "multi": "DDP",
    "sequence": "DDP",
    "pipeline": "DDP",
    "tensor": "DDP",
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
    "sequence_parallel": (1, 1),
    "fsdp2_sequence_parallel": (1 / 4, 1 / 4),
    "pipeline": (1 / 2, 1 / 2),
    "tensor_parallel": (1 / 2, 1 / 2),
    "fsdp2_tensor_parallel": (1 / 4, 1 / 4),
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


def assert_is_the_run_of(reference, output_dir, rel=1e-5):
    """The same losses, gradient norms and weights, but for rounding. rel: how far a loss may be off."""
    expected, weights = reference
    assert all(line["grad_norm"] > 0.5 for line in expected[:5])  # clipped
    for line, other in zip(read_metrics(output_dir), expected, strict=True):
        assert line["sample_digest"] == other["sample_digest"]
        assert line["loss"] == pytest.approx(other["loss"], rel=rel)
        assert line["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
    exported = load_file(output_dir / "model/model.safetensors")
    assert exported.keys() == weights.keys()
    for name, weight in weights.items():
        assert (exported[name] - weight).abs().max() < 1e-5, name


@pytest.mark.parametrize("config", CONFIGS)
def test_every_config_makes_the_update_of_one_process(config, reference, functions_file, model_dir, tmp_path):
    """Losses, gradient norms and the exported weights, with accumulation and with clipping and decay that count.

    Weight decay in the wrong group, a loss scaled once more, or a norm of one shard would each show in the weights.
    """
    if "nvme" in config:
        need("libaio-dev")
    changes = {"measure_state": str(tmp_path / "held"), "count_collectives": str(tmp_path / "collectives")}
    runs = [(flags(functions_file, model_dir, tmp_path / "run"), changes)]
    recipe = "pipeline" if config == "pipeline" else "lm"
    result = run_specs(recipe, runs, tmp_path, config, *options(config, tmp_path))

    mode = next(name for start, name in MODES.items() if config.startswith(start))
    processes = PROCESSES.get(config, 2)
    settings = json.loads((tmp_path / "run/run.json").read_text())
    assert (settings["mode"], settings["world_size"]) == (mode, processes)
    once = ["accumulation.sum_over_ranks"] if mode != "plain" else []
    assert our_collectives(tmp_path / "collectives", processes) == 10 * [once]
    assert ("because no GPU is visible" in result.stdout) == ("cpu" not in config.removesuffix("_offload_cpu"))
    assert_is_the_run_of(reference, tmp_path / "run", rel=1e-6 if mode == "DDP" else 1e-5)
    if config in HELD:
        whole = sum(weight.nbytes for weight in reference[1].values())
        for rank in range(processes):
            held = json.loads((tmp_path / f"held-{rank}.json").read_text())
            assert held["weights"] / whole == pytest.approx(HELD[config][0], rel=0.1)
            assert held["optimizer"] / (2 * whole) == pytest.approx(HELD[config][1], rel=0.1)


def test_one_collective_an_update_carries_what_the_ranks_agree_on(functions_file, model_dir, tmp_path):
    """Also while a checkpoint is written, and with a loss that is not finite. Control: one more is noticed.

    A request after it counts in the next update; a write that fails on one rank ends both at the update after it.
    """
    more = {"plain": [], "control": ["--num_updates", 2], "asked": [], "late": [], "failing": []}
    more["failing"] = ["--num_updates", 9, "--save_every", 5]
    changes = {
        "plain": {"count_collectives": str(tmp_path / "plain-n")},
        "control": {"count_collectives": str(tmp_path / "control-n"), "one_more_collective": 1},
        "asked": {"signal_at": [2, 1, "SIGTERM", 1], "nan_loss": [0, 5]},  # two micro-batches an update
        "late": {"signal_at": [2, 1, "SIGTERM", 1, "late"]},
        "failing": {"failing_write": [1, 5], "slow_updates": 0.1},
    }
    runs = [
        (
            flags(functions_file, model_dir, tmp_path / name, "--num_updates", 5, "--save_every", 2, *more[name]),
            changes[name],
        )
        for name in more
    ]
    result = run_specs("lm", runs, tmp_path, "multi_cpu", check=False)
    assert_refused(result, "^error: disk: no checkpoint could be written: No space left on device")
    once, saved = ["accumulation.sum_over_ranks"], (1, 3)
    counted = our_collectives(tmp_path / "plain-n", 2)
    assert [ours for update, ours in enumerate(counted) if update not in saved] == 3 * [once]
    for update in saved:
        assert counted[update][:1] == once and {*counted[update][1:]} == {"agreement.sum"}
    assert our_collectives(tmp_path / "control-n", 2)[0] != once
    asked, late = (read_metrics(tmp_path / name) for name in ("asked", "late"))
    assert [line["loss"] is None for line in asked] == [False, False, True] and len(late) == 4
    assert len(read_metrics(tmp_path / "failing")) in (6, 7)


def test_the_comparison_of_weights_would_notice_a_decayed_norm(reference, functions_file, model_dir, tmp_path):
    """Control: with every parameter in the group that decays, one process ends with other norms, and only those."""
    run_specs("lm", [(flags(functions_file, model_dir, tmp_path / "run"), {"decay_all": 1})], tmp_path)
    _, weights = reference
    exported = load_file(tmp_path / "run/model/model.safetensors")
    differences = {name: float((exported[name] - weight).abs().max()) for name, weight in weights.items()}
    assert all(difference > 1e-3 for name, difference in differences.items() if "norm" in name), differences


def test_zero3_makes_the_same_model_from_scratch(functions_file, tmp_path):
    """In memory and in files: 1.3 M parameters, since DeepSpeed keeps what is below a megabyte in memory."""
    flags = ["--train_file", functions_file, "--num_updates", 3, "--sequence_length", 64, "--output_dir"]
    launch(*flags, tmp_path / "cpu")
    expected = [line["loss"] for line in read_metrics(tmp_path / "cpu")]
    for config in ("zero3", "zero3_offload_nvme"):
        if config == "zero3_offload_nvme":
            need("libaio-dev")
        run_specs("lm", [([*flags, tmp_path / config], {})], tmp_path, config, *options(config, tmp_path))
        assert [line["loss"] for line in read_metrics(tmp_path / config)] == pytest.approx(expected, rel=1e-5)
    weights = sum(weight.nbytes for weight in load_file(tmp_path / "cpu/model/model.safetensors").values())
    in_files = sum(path.stat().st_size for path in (tmp_path / "nvme").rglob("*") if path.is_file())
    assert in_files > 3 * weights  # float32 copies and both moments of AdamW, at least


@pytest.mark.parametrize("config", ["multi_cpu", "zero2", "zero3", "fsdp2"])
def test_all_ranks_skip_an_update_that_is_not_finite(config, functions_file, model_dir, tmp_path):
    """One micro-batch of rank 1 has a NaN loss."""
    runs = [(flags(functions_file, model_dir, tmp_path / "run"), {"nan_loss": [1, 3]})]
    run_specs("lm", runs, tmp_path, config, "--mixed_precision", "no")
    metrics = read_metrics(tmp_path / "run")
    assert [line["loss"] is None for line in metrics] == [False, True] + 8 * [False]
    assert metrics[-1]["skipped_updates"] == 1


@pytest.mark.parametrize(("text", "pattern"), [("{", "not JSON"), ("[]", "not a JSON object"), (None, "No such file")])
def test_a_deepspeed_file_that_cannot_be_read(text, pattern, tmp_path):
    """Through the launch, all mistakes together, and nothing written."""
    if text is not None:
        (tmp_path / "mine.json").write_text(text)
    command = launch_command("zero2", "--deepspeed_config_file", tmp_path / "mine.json")
    flags = ["--output_dir", tmp_path / "run", "--warmup_updates", 9, "--num_updates", 9]
    result = run([*command, "recipes/lm.py", *flags], CUDA_VISIBLE_DEVICES="")
    assert_refused(result, pattern, "--warmup_updates 9", lines=2)
    assert not (tmp_path / "run").exists()


def test_an_nvme_path_that_is_full_is_refused(functions_file, small_disk, tmp_path):
    need("libaio-dev")
    path = small_disk(tmp_path / "nvme", "2m")
    zero = json.loads((ROOT / "ds_configs/zero3_offload_nvme.json").read_text().replace("/local_nvme", str(path)))
    check_nvme_space(zero, lambda: [50_000])
    with pytest.raises(UserError, match="1,300,000 parameters take 0.026 GB of files there, and 0.002 GB are free"):
        check_nvme_space(zero, lambda: [1_000_000, 300_000])
    (tmp_path / "nvme.json").write_text(json.dumps(zero))
    command = launch_command("zero3_offload_nvme", "--deepspeed_config_file", tmp_path / "nvme.json")
    flags = ["--train_file", functions_file, "--save_every", 0, "--output_dir", tmp_path / "run"]
    assert_refused(run([*command, "recipes/lm.py", *flags], CUDA_VISIBLE_DEVICES=""), "GB are free; make room")
    assert not (tmp_path / "run").exists() and not list(path.iterdir())


def build(tmp_path, builder="ShareMemCommBuilder", package="g++", **env):
    """What a process does before it shards, in a place where nothing has been built."""
    code = "from common.parallel import extensions, shutdown\nwith shutdown.exit_on_user_error(): "
    (tmp_path / "build.py").write_text(code + f"extensions._build_extension({builder!r}, {package!r})")
    env = {"TORCH_EXTENSIONS_DIR": tmp_path, "DS_ACCELERATOR": "cpu", "PYTHONPATH": ROOT} | env
    return run([BIN / "python", tmp_path / "build.py"], **env)


def test_a_compiler_or_library_that_is_missing_is_one_line(tmp_path):
    assert_refused(build(tmp_path, CXX="no-such-compiler"), "finds no C\\+\\+ compiler; apt install g\\+\\+")
    # The check for libaio compiles a line of C, which this compiler refuses as one without the header would.
    result = build(tmp_path, "AsyncIOBuilder", "libaio-dev", CC="false")
    assert_refused(result, "async_io cannot be built on this machine; apt install libaio-dev")


# A builder, and what it builds: async_io a second extension, with a lock of its own.
BUILT = {"ShareMemCommBuilder": ["deepspeed_shm_comm"], "AsyncIOBuilder": ["async_io", "pin_memory"]}


@pytest.mark.parametrize("builder", BUILT)
def test_the_lock_of_a_killed_build_is_found_and_said(builder, tmp_path):
    """Control: without the lock nothing is said. (With it, and no remedy, torch waits for ever.)"""
    if builder == "AsyncIOBuilder":
        need("libaio-dev")
    for name in BUILT[builder]:
        shutil.copytree(Path(os.environ["TORCH_EXTENSIONS_DIR"]) / name, tmp_path / name)
    assert build(tmp_path, builder).stdout == ""
    lock = tmp_path / BUILT[builder][-1] / "lock"
    lock.touch()
    result = build(tmp_path, builder)
    assert result.returncode == 0, result.stderr
    assert f"{lock} was left by a build that was killed; removing it" in result.stdout
    assert not lock.exists()


def test_a_copied_recipe_runs_under_zero(functions_file, model_dir, tmp_path):
    """DeepSpeed's launcher adds the current directory to the path: the copy's common/ wins all the same."""
    shutil.copy(ROOT / "recipes/lm.py", tmp_path)
    shutil.copytree(ROOT / "common", tmp_path / "common")
    marker = tmp_path / "common/training/batching.py"
    marker.write_text(marker.read_text() + "\nprint('the copy of common/')\n")
    result = launch(
        *flags(functions_file, model_dir, tmp_path / "run", "--num_updates", 2),
        config="zero1",
        script=tmp_path / "lm.py",
        CUDA_VISIBLE_DEVICES="",
    )
    assert "the copy of common/" in result.stdout
