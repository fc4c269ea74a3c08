"""What was asked is what runs, or one line says why not: over modes, devices, numbers of processes and sources."""

import json
import re
from argparse import Namespace
from dataclasses import dataclass, field

import pytest
import torch
import yaml
from accelerate import Accelerator
from conftest import BIN, ROOT, assert_refused, launch_command, recipe_arguments, run, specs_script
from running import Run, set_world, settings_shown

import common.parallel.connect
import common.parallel.process_checks
from common.parallel.connect import make_accelerator
from common.parallel.launch import Launch, parse_launch
from common.parallel.launch_checks import check_launch
from common.parallel.process_checks import find_unseen_gpu
from common.report.settings import list_settings
from common.training.recipe_traits import Traits


@dataclass
class Case:
    """One launch. `config` is a shipped one's name, changed by `changes`; None is a launch without a file."""

    config: str | None = None
    options: tuple = ()
    flags: tuple = ()  # of the recipe
    changes: dict = field(default_factory=dict)
    environment: dict = field(default_factory=dict)
    launcher: tuple = ("accelerate", "launch")
    runs: tuple | None = None  # mode, processes and precision that were asked for
    refused: str | None = None  # or what the line says


FLOAT32, BF16 = "float32", "bf16 matmuls"
FP16_ON_CPU = "fp16, which does not train on a CPU"
INLINE_ZERO = {"deepspeed_config": {"zero_stage": 2, "gradient_accumulation_steps": 1, "zero3_init_flag": False}}

CASES = {
    # One process
    "no file, no flag": Case(runs=("plain", 1, FLOAT32)),
    "no file, --cpu": Case(options=("--cpu",), runs=("plain", 1, FLOAT32)),
    "without a launcher": Case(launcher=("python",), runs=("plain", 1, FLOAT32)),
    "cpu, bf16": Case("cpu", ("--mixed_precision", "bf16"), runs=("plain", 1, BF16)),
    "cpu, fp16": Case("cpu", ("--mixed_precision", "fp16"), refused=FP16_ON_CPU),
    "cpu, bf16 in the environment": Case(
        "cpu", environment={"ACCELERATE_MIXED_PRECISION": "bf16"}, runs=("plain", 1, FLOAT32)
    ),
    "cpu, FSDP in the environment": Case(
        "cpu", environment={"ACCELERATE_USE_FSDP": "true"}, runs=("plain", 1, FLOAT32)
    ),
    "single_gpu": Case("single_gpu", runs=("plain", 1, BF16)),
    "MULTI_CPU, one process": Case(
        "multi_cpu", changes={"distributed_type": "MULTI_CPU", "num_processes": 1}, runs=("plain", 1, FLOAT32)
    ),
    # Several processes where Accelerate starts one, and says nothing
    "no file, --cpu, two": Case(options=("--cpu", "--num_processes", 2), refused="asks for 2 processes, but 1 started"),
    "single_gpu, two": Case("single_gpu", ("--num_processes", 2), refused="asks for 2 processes, but 1 started"),
    "MULTI_CPU, two": Case(
        "multi_cpu", changes={"distributed_type": "MULTI_CPU"}, refused="asks for 2 processes, but 1 started"
    ),
    "--cpu over DDP": Case("multi_gpu", ("--cpu",), refused="--cpu makes the launcher drop DDP"),
    "--cpu over FSDP": Case("fsdp2", ("--cpu",), refused="--cpu makes the launcher drop FSDP"),
    "--cpu over ZeRO": Case(
        "zero2", ("--cpu", "--num_processes", 1), refused="--cpu makes the launcher drop DeepSpeed"
    ),
    # DDP (as the shipped files say it: tests/test_resume.py, in every mode)
    "no file, --multi_gpu": Case(options=("--multi_gpu", "--num_processes", 2), runs=("DDP", 2, FLOAT32)),
    "torchrun": Case(launcher=("torchrun", "--nproc_per_node", 2), runs=("DDP", 2, FLOAT32)),
    "multi_cpu, one": Case("multi_cpu", ("--num_processes", 1), runs=("DDP", 1, FLOAT32)),
    "multi_cpu, bf16": Case("multi_cpu", ("--mixed_precision", "bf16"), runs=("DDP", 2, BF16)),
    "multi_gpu, three": Case("multi_gpu", ("--num_processes", 3), runs=("DDP", 3, BF16)),
    "multi_gpu, fp16": Case("multi_gpu", ("--mixed_precision", "fp16"), refused=FP16_ON_CPU),
    # FSDP
    "fsdp2, one": Case("fsdp2", ("--num_processes", 1), runs=("FSDP", 1, BF16)),
    "fsdp2 with use_cpu": Case("fsdp2", changes={"use_cpu": True}, runs=("FSDP", 2, BF16)),
    "FSDP of version 1": Case(
        "fsdp2", changes={"fsdp_config": {"fsdp_version": 1}}, refused="FSDP 1; set fsdp_version: 2"
    ),
    "FSDP that recomputes by itself": Case(
        "fsdp2",
        changes={"fsdp_config": {"fsdp_version": 2, "fsdp_activation_checkpointing": True}},
        refused="use --activation_checkpointing full",
    ),
    "hsdp, two": Case("hsdp", ("--num_processes", 2), refused="2 processes, but for 2 copies .* in 2 shards"),
    "tensor parallel": Case(
        "hsdp",
        changes={"parallelism_config": {"parallelism_config_tp_size": 2}},
        refused="asks for 4 processes, but for 1 shards .*, 2 processes a layer .* = 2; make the product",
    ),
    "how Accelerate would share a sequence": Case(
        "sequence_parallel",
        changes={"parallelism_config": {"parallelism_config_sp_size": 2, "parallelism_config_sp_seq_length": 64}},
        refused="parallelism_config_sp_seq_length, which has no effect",
    ),
    "a shared sequence in a flag alone": Case(
        "multi_gpu", ("--parallelism_config_sp_size", 2), refused="sp_size has no effect without a parallelism_config"
    ),
    "nobody shares a sequence": Case(
        "sequence_parallel", changes={"parallelism_config": {"parallelism_config_sp_size": 0}}, refused="at least 1"
    ),
    "three processes, pairs of which share a sequence": Case(
        "sequence_parallel", ("--num_processes", 3), refused="a multiple of 2; use --num_processes 2"
    ),
    # DeepSpeed
    "zero1, one": Case("zero1", ("--num_processes", 1), runs=("DeepSpeed", 1, FLOAT32)),
    "zero3, fp16": Case("zero3", ("--mixed_precision", "fp16"), refused=FP16_ON_CPU),
    "zero2 with use_cpu": Case("zero2", changes={"use_cpu": True}, runs=("DeepSpeed", 2, FLOAT32)),
    "ZeRO without a file of its own": Case("zero2", changes=INLINE_ZERO, runs=("DeepSpeed", 2, FLOAT32)),
    "a flag that the DeepSpeed file makes void": Case(
        "zero3", ("--zero_stage", 1), refused="--zero_stage 1 next to ds_configs/zero3.json"
    ),
    "clipping in a flag of the launcher": Case(
        "zero1", ("--gradient_clipping", 0.05), refused="--gradient_clipping 0.05 next to ds_configs/zero1.json"
    ),
    # What a mode cannot take of the recipe's flags, or of the machine
    "Adafactor on FSDP's shards": Case(
        "fsdp2", flags=("--optimizer", "adafactor"), refused="adafactor does not work on the shards of FSDP2; use adamw"
    ),
    "8 bits on a tensor group's parts": Case(
        "tensor_parallel",
        flags=("--optimizer", "adamw8bit"),
        refused="adamw8bit does not work on parts of layers; use adamw",
    ),
    "8 bits on ZeRO's shards": Case(
        "zero2", flags=("--optimizer", "adamw8bit"), refused="adamw8bit works on whole tensors.*use adamw"
    ),
    "Adafactor on ZeRO's shards": Case(
        "zero3", flags=("--optimizer", "adafactor"), refused="adafactor works on whole tensors.*use adamw"
    ),
    "SGD on the host": Case("zero3_offload_cpu", flags=("--optimizer", "sgd"), refused="DeepSpeed runs only adamw"),
    "8 bits on the host": Case(
        "zero3_offload_cpu", flags=("--optimizer", "adamw8bit"), refused="DeepSpeed runs only adamw"
    ),
    "files in a directory that is not there": Case(
        "zero3_offload_nvme", refused="offload_optimizer.nvme_path /local_nvme: is not a directory"
    ),
    # Mixed and mistaken settings
    "processes of another launch in the environment": Case(
        "cpu", environment={"WORLD_SIZE": 4, "RANK": 1, "LOCAL_RANK": 1}, refused="unset WORLD_SIZE RANK LOCAL_RANK"
    ),
    "the same without a launcher": Case(
        launcher=("python",), environment={"WORLD_SIZE": 2, "RANK": 1}, refused="WORLD_SIZE is set without MASTER_ADDR"
    ),
    **{
        f"left over of mpirun: {size}": Case(
            "cpu", environment={size: 4, rank: 1} | where, refused=f"{size} is set .*; unset {rank} {size}, and use"
        )
        for size, rank, where in (
            ("PMI_SIZE", "PMI_RANK", {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29533}),
            ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", {}),
            ("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK", {}),
        )
    },
    "left over of mpirun beside processes of torchrun": Case(
        "multi_cpu", environment={"PMI_RANK": 1, "PMI_SIZE": 4}, runs=("DDP", 2, FLOAT32)
    ),
    "accumulation in a flag": Case("cpu", ("--gradient_accumulation_steps", 4), refused="accumulation follows from"),
    "accumulation in the environment": Case(
        "cpu", environment={"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": 4}, refused="the environment sets .* to 4"
    ),
    "compile in a flag": Case("cpu", ("--dynamo_backend", "inductor"), refused="dynamo_backend"),
    "compile in a section": Case(
        "cpu", changes={"dynamo_config": {"dynamo_backend": "INDUCTOR"}}, refused="dynamo_backend"
    ),
    "an unknown key in a section": Case(
        "fsdp2",
        changes={"fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forwards": False}},
        refused="unknown key fsdp_reshard_after_forwards; did you mean fsdp_reshard_after_forward",
    ),
}


# Refused by what the launcher's command and file say: no process need be started to see it.
SEEN_IN_THE_COMMAND = [
    name
    for name, case in CASES.items()
    if case.refused and not case.environment and "dynamo" not in case.refused and case.launcher[0] == "accelerate"
]


def launch_options(case, tmp_path):
    if not case.config:
        return case.options
    settings = yaml.safe_load((ROOT / f"accelerate_configs/{case.config}.yaml").read_text()) | case.changes
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))
    return ["--config_file", tmp_path / "config.yaml", *case.options]


@pytest.mark.parametrize("name", SEEN_IN_THE_COMMAND)
def test_a_command_that_cannot_run_as_asked_is_refused(name, tmp_path, monkeypatch):
    case = CASES[name]
    launch = parse_launch([*map(str, launch_options(case, tmp_path)), "recipes/lm.py"], environment={})
    started = 1 if "1 started" in case.refused else launch.num_processes
    set_world(monkeypatch, started)
    problems = check_launch(launch, recipe_arguments(*case.flags), Traits())
    assert any(re.search(case.refused, problem) for problem in problems), problems


@pytest.mark.usefixtures("extensions")
@pytest.mark.parametrize("name", [name for name in CASES if name not in SEEN_IN_THE_COMMAND])
def test_a_launch_runs_as_what_was_asked_or_is_refused(name, functions_file, model_dir, tmp_path):
    case = CASES[name]
    command = [BIN / case.launcher[0], *case.launcher[1:], *launch_options(case, tmp_path)]
    flags = ["--train_file", functions_file, "--model_name_or_path", model_dir, "--sequence_length", 64, "--dry_run"]
    script = specs_script("lm", [(flags, {"no_prediction": 1})], tmp_path)
    result = run([*command, *script], **{"CUDA_VISIBLE_DEVICES": ""} | case.environment)
    if case.refused:
        assert_refused(result, case.refused, lines=None)
        return
    mode, processes, precision = case.runs
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.search(rf"mode  {mode}\b.*, {processes} process", result.stdout) and "offloaded" not in result.stdout
    assert re.search(rf"precision  {precision}", result.stdout)


def test_a_default_config_file_of_the_users_runs_as_what_it_says(functions_file, tmp_path):
    default = tmp_path / "accelerate/default_config.yaml"
    default.parent.mkdir()
    default.write_text((ROOT / "accelerate_configs/fsdp2_offload.yaml").read_text())
    script = specs_script("lm", [(["--train_file", functions_file, "--dry_run"], {"no_prediction": 1})], tmp_path)
    result = run([BIN / "accelerate", "launch", *script], HF_HOME=tmp_path, CUDA_VISIBLE_DEVICES="")
    assert result.returncode == 0, result.stderr
    assert "mode  FSDP, offloaded to the host, 2 processes on cpu, because no GPU is visible" in result.stdout
    assert re.search(r"fsdp_offload_params +True +.*default_config.yaml", result.stdout)


def test_the_error_line_is_the_last_one_with_one_process_too(tmp_path):
    """Control: without the config's `quiet`, the launcher's own traceback follows, and shows the whole command."""
    settings = yaml.safe_load((ROOT / "accelerate_configs/cpu.yaml").read_text())
    del settings["mpirun_config"]
    (tmp_path / "loud.yaml").write_text(yaml.safe_dump(settings))
    configs = [ROOT / "accelerate_configs/cpu.yaml", tmp_path / "loud.yaml"]
    with Run(tmp_path) as started:
        for config in configs:
            started.start([BIN / "accelerate", "launch", "--config_file", config, "recipes/lm.py", "--bad"])
        assert started.wait(120) == [1, 1]
    error = "error: unrecognized argument --bad (--help lists the flags)"
    shipped, loud = (started.output(number).splitlines() for number in range(2))
    assert shipped[-1] == error and shipped.count(error) == 1 and not any("Traceback" in line for line in shipped)
    assert loud.count(error) == 1 and "CalledProcessError" in loud[-1]


@pytest.mark.parametrize("name", ["cpu", "cpu_bf16", "single_gpu"])
def test_every_config_for_one_process_is_quiet(name):
    assert parse_launch(["--config_file", str(ROOT / f"accelerate_configs/{name}.yaml"), "lm.py"]).settings["quiet"]


def test_more_processes_than_gpus_are_refused(monkeypatch):
    set_world(monkeypatch, 4)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    launch = Launch(source="`accelerate launch`", num_processes=4, mode="DDP")
    for gpus, expected in (
        (2, ["starts 4 processes on this machine, which has 2 GPUs; use --num_processes 2"]),
        (4, []),
    ):
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        problems = check_launch(launch, recipe_arguments(), Traits())
        assert len(problems) == len(expected)
        assert all(text in problem for text, problem in zip(expected, problems, strict=True))


@pytest.mark.parametrize("node", ["dev/nvidia0", "proc/driver/nvidia/gpus/0000:07:00.0"])
def test_a_gpu_that_torch_does_not_see_is_a_mistake(node, tmp_path, monkeypatch):
    """A driver that does not fit, or a CPU build of torch. Controls: asked for the CPU, hidden GPUs."""

    def problems(name, *options):
        path = ROOT / f"accelerate_configs/{name}.yaml"
        return check_launch(
            parse_launch(["--config_file", str(path), *options, "x.py"], {}), recipe_arguments(), Traits()
        )

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(common.parallel.process_checks, "find_unseen_gpu", lambda: find_unseen_gpu(tmp_path))
    (tmp_path / "dev").mkdir()
    for name in ("null", "nvidiactl"):  # of every machine; of the driver without a GPU
        (tmp_path / "dev" / name).touch()
    assert problems("single_gpu") == []
    (tmp_path / node).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / node).touch()
    (problem,) = problems("single_gpu")
    assert f"has a GPU ({tmp_path / node}) that torch {torch.__version__} does not see (" in problem
    assert "\n" not in problem
    assert problems("cpu") == []
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert problems("single_gpu") == []


@pytest.mark.parametrize("sees_gpu", [True, False])
@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_a_gpu_computes_what_is_left_in_float32_as_tf32(precision, sees_gpu, monkeypatch):
    """In each precision; a CPU keeps its own."""

    class Reached(Exception):
        pass

    def accelerator(**_):
        raise Reached

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: sees_gpu)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: sees_gpu)
    monkeypatch.setattr(common.parallel.connect, "RunAccelerator", accelerator)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "false")
    before = torch.get_float32_matmul_precision()
    try:
        with pytest.raises(Reached):
            make_accelerator(Launch(mixed_precision=precision), recipe_arguments())
        assert torch.get_float32_matmul_precision() == ("high" if sees_gpu else before)
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.usefixtures("extensions")
def test_a_dry_run_shows_every_setting_and_where_it_comes_from(functions_file, model_dir, tmp_path):
    flags = ["--train_file", functions_file, "--model_name_or_path", model_dir, "--sequence_length", 64, "--dry_run"]
    command = [*launch_command("zero2", "--num_processes", 1), "recipes/lm.py", *flags, "--max_grad_norm", 0.5]
    secret = {"HF_TOKEN": "hf_canary", "WANDB_API_KEY": "canary"}
    result = run(command, CUDA_VISIBLE_DEVICES="", NCCL_DEBUG="WARN", **secret)
    assert result.returncode == 0, result.stderr
    view = settings_shown(result.stdout)
    path = "zero2.yaml"
    assert view["num_processes"] == ("1", "flag --num_processes of accelerate launch")
    assert view["num_machines"][0] == "1" and view["num_machines"][1].endswith(path)
    assert view["machine_rank"] == ("0", "default of accelerate launch")
    assert view["zero_optimization.stage"] == ("2", "ds_configs/zero2.json")
    assert view["gradient_clipping"] == ("0.5", "ds_configs/zero2.json: auto, resolved")
    assert view["--max_grad_norm"] == ("0.5", "flag") and view["--weight_decay"] == ("0.1", "default")
    assert view["--compile"] == ("False", "default: auto, resolved")
    assert view["NCCL_DEBUG"] == ("WARN", "environment")
    assert "canary" not in result.stdout + result.stderr
    known = json.loads((ROOT / "ds_configs/zero2.json").read_text())
    assert {f"zero_optimization.{key}" for key in known["zero_optimization"]} <= view.keys()


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--compile"], {"compile": (True, "flag")}),
        (["--no-compile"], {"compile": (False, "flag --no-compile")}),
        (["--compile", "auto"], {"compile": (False, "flag: auto, resolved")}),
        (["--micro_batch_tokens=auto", "--seed", "3"], {"micro_batch_tokens": (512, "flag: auto, resolved")}),
        (["--save_every", "2epochs"], {"save_every": (24, "flag: 2epochs, resolved"), "seed": (0, "default")}),
        (["--num_epochs", "3"], {"num_updates": (36, "--num_epochs"), "num_epochs": (3.0, "flag")}),
    ],
)
def test_the_source_of_a_setting_says_what_was_asked(flags, expected, monkeypatch):
    """The values are those after the run has resolved them."""
    monkeypatch.setattr("sys.argv", ["recipes/lm.py", *flags])
    values = {"seed": 0, "compile": None} | {name: value for name, (value, _) in expected.items()}
    shown = {name: row for name, *row in list_settings(Namespace(**values), Launch(), Accelerator(cpu=True))}
    assert {name: tuple(shown[f"--{name}"]) for name in expected} == expected
