"""Checks that the run matches the requested launch configuration.

In some cases `accelerate launch` silently starts a different run: one process instead of two, two unconnected runs of
one process each, float32 instead of fp16. So the recipe compares its config file and flags with this process.
"""

import argparse
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch

from common.parallel.launch import MPI, Launch, mpi_variables, runs_on_cpu, started_world_size
from common.training.recipe_traits import Arguments, Traits


def check_layer_classes(launch: Launch, make_empty: Callable[[], torch.nn.Module]) -> Iterable[str]:
    """Returns a line for each layer class in the launch settings that the model does not contain."""
    if launch.mode not in ("FSDP", "DeepSpeed"):
        return []
    from common.parallel import sharding

    return sharding.check_layer_classes(launch.source, launch.settings, launch.mode, make_empty)


def check_machines(launch: Launch) -> Iterator[str]:
    """Yields a line for each mistake in the settings that connect several machines."""
    machines, processes, settings = launch.num_machines, launch.num_processes, launch.settings
    if machines == 1:
        return
    if processes % machines:
        yield (
            f"{launch.source} asks for {processes} processes on {machines} machines, which does not divide; "
            f"--num_processes is the total: use {max(1, processes // machines) * machines}, or another multiple"
        )
    if not 0 <= launch.machine_rank < machines:
        yield f"--machine_rank {launch.machine_rank} is not one of 0 to {machines - 1}; --num_machines is {machines}"
    if not settings["main_process_ip"]:
        yield "several machines need --main_process_ip, an address of the machine with --machine_rank 0"
    if settings["main_process_port"] == 0:
        yield "--main_process_port 0 is a free port, which the other machines cannot know; give one, such as 29500"
    launcher = settings["deepspeed_multinode_launcher"] or "pdsh"
    if launch.mode == "DeepSpeed" and launcher != "standard":
        yield (
            f"DeepSpeed would start the other machines itself, by {launcher}; use --deepspeed_multinode_launcher "
            "standard"
        )


# Launcher settings that a DeepSpeed file overrides.
DEEPSPEED_FLAGS = {f"offload_{part}_{what}" for part in ("optimizer", "param") for what in ("device", "nvme_path")}
DEEPSPEED_FLAGS |= {"zero_stage", "gradient_clipping", "zero3_save_16bit_model"}


def check_deepspeed_flags(launch: Launch) -> Iterator[str]:
    """Yields a line for each launcher setting that a DeepSpeed file overrides, or that changes its `auto`."""
    file = launch.deepspeed_config
    if not isinstance(file, str):
        return
    for name in sorted(DEEPSPEED_FLAGS):
        if name in launch.given:
            yield (
                f"--{name} {launch.settings[name]} beside {file}: what the file says runs; take the flag out, or name "
                "another file with --deepspeed_config_file"
            )
        elif name in launch.file_settings:
            yield f"{launch.config_file}: {name} beside {file}: what that file says runs; take one out"
    if "ACCELERATE_GRADIENT_CLIPPING" in launch.environment:
        yield "ACCELERATE_GRADIENT_CLIPPING in the environment has no effect; unset it, use --max_grad_norm"


def check_environment(launch: Launch) -> list[str]:
    """Returns a line if variables of a different run's processes are set, which this run would use."""
    if "WORLD_SIZE" in launch.environment and launch.settings and "TORCHELASTIC_RUN_ID" not in os.environ:
        return ["WORLD_SIZE is set in the environment, of another launch; unset WORLD_SIZE RANK LOCAL_RANK"]
    if started_world_size() > 1 and "MASTER_ADDR" not in os.environ:
        return ["WORLD_SIZE is set without MASTER_ADDR; unset WORLD_SIZE RANK LOCAL_RANK, or use accelerate launch"]
    size = next((name for name in MPI if name in os.environ), None)
    if size and os.environ[size] != "1" and "WORLD_SIZE" not in os.environ and runs_on_cpu(launch):
        names = " ".join(mpi_variables())
        return [f"{size} is set in the environment, by mpirun or srun; unset {names}, and use accelerate launch"]
    return []


def check_launch(launch: Launch, args: Arguments, traits: Traits) -> list[str]:
    """Returns a line for each difference between the requested launch and this process; needs no process group.

    It also checks the recipe's flags that the mode does not support. Their defaults are already filled in
    (`argument_checks.check_arguments`).
    """
    problems = [*_check_processes(launch), *check_asked(launch, args, traits), *_check_budget(launch, args, traits)]
    if launch.mode == "DeepSpeed":
        from common.parallel import deepspeed_flags

        how = (args, launch.mixed_precision, launch.degrees)
        problems += deepspeed_flags.check_deepspeed(launch.deepspeed_config, *how)
    return problems + _check_precision(launch) + _check_gpus(launch)


def check_asked(launch: Launch, args: Arguments, traits: Traits) -> list[str]:
    """Returns a line for each mistake in launch and flags that can be found without a device and without DeepSpeed."""
    problems, sizes = list(launch.file_problems), launch.sizes
    if launch.mode not in ("plain", "DDP", "FSDP", "DeepSpeed"):
        problems.append(
            f"{launch.source} asks for {launch.mode}, which no recipe runs; take a file of accelerate_configs/"
        )
    if launch.mode == "FSDP":
        from common.parallel import sharding

        problems += sharding.check_fsdp(launch.source, launch.settings, args.optimizer)
    if launch.mode == "DeepSpeed":
        problems += check_deepspeed_flags(launch)
    named = {*launch.given, *launch.file_settings}
    if any(size != 1 for size in sizes.values()) or any(name.startswith("parallelism_config_") for name in named):
        from common.parallel import parallelism_config

        problems += parallelism_config.check_others(launch.source, launch.settings, named)
        problems += parallelism_config.check_sizes(launch.source, sizes, launch.mode, launch.num_processes)
        problems += _check_parts(launch, traits)
        problems += parallelism_config.check_parts(launch.source, sizes, launch.mixed_precision, args.optimizer)
    problems += _check_accumulation(launch, args)
    if args.shared("quantize") and launch.mode in ("FSDP", "DeepSpeed"):
        problems.append(
            f"--quantize {args.quantize}: weights in 4 bits are for one process and for DDP, and {launch.source} asks "
            f"for {launch.mode}: take multi_gpu.yaml or single_gpu.yaml, or leave --quantize out"
        )
    if os.environ.get("ACCELERATE_DYNAMO_BACKEND", "NO").upper() != "NO":
        problems.append("the launch turns on torch.compile (dynamo_backend); take it out and use --compile")
    return problems


def check_started(launch: Launch) -> list[str]:
    """Returns a line for each difference between the requested and the started processes and their GPUs."""
    return launch.file_problems + _check_processes(launch) + _check_gpus(launch)


def _check_processes(launch: Launch) -> list[str]:
    """Returns a line if the number of started processes differs from the request, or lines with the cause."""
    if problems := [*check_machines(launch), *check_environment(launch)]:
        return problems
    world, processes = started_world_size(), launch.num_processes
    if world == processes:
        return []
    if launch.num_machines > 1:
        return [
            f"{launch.source} asks on machine {launch.machine_rank} for {processes} processes in all, but {world} "
            "started; give the same --num_processes, the total, on every machine"
        ]
    return [
        f"{launch.source} asks for {processes} processes, but {world} started: Accelerate starts one process on a CPU "
        "for MULTI_CPU or 'NO'; use accelerate_configs/multi_cpu.yaml (distributed_type: MULTI_GPU with use_cpu: true) "
        "or --num_processes 1"
    ]


def _check_parts(launch: Launch, traits: Traits) -> list[str]:
    """Returns a line if the recipe has no stages, or cannot compute the loss of a part of a sequence."""
    stages, asked = launch.degrees.pipeline, f"{launch.source} sets parallelism_config_pp_size to"
    if stages > 1 and traits.pipeline_schedule is None:
        return [f"{asked} {stages}, and this recipe has no stages; run recipes/pipeline.py, or take another config"]
    if launch.degrees.sequence > 1 and not traits.splits_sequences:
        asked = f"{launch.source} sets parallelism_config_sp_size to {launch.degrees.sequence}"
        return [f"{asked}, and this recipe's loss needs all tokens of an answer; set it to 1, or take another config"]
    return []


def _check_budget(launch: Launch, args: Arguments, traits: Traits) -> Iterator[str]:
    """Yields a line if --micro_batch_tokens auto is set but the ranks exchange data before averaging gradients."""
    is_alone = launch.mode in ("plain", "DDP") and launch.degrees.data == launch.num_processes
    if traits.lengths_vary and args.micro_batch_tokens == "auto" and not is_alone:
        yield (
            f"--micro_batch_tokens auto: in {launch.source} the processes share each forward, and if memory ran out in "
            "one, the others would wait for it for ever; give a number (--plan names the largest that fits)"
        )


def _check_precision(launch: Launch) -> list[str]:
    asked, precision = f"{launch.source} asks for", launch.mixed_precision
    if precision not in ("no", "bf16", "fp16"):
        return [f"{launch.source}: mixed_precision {precision} is not one of no, bf16, fp16"]
    if precision == "fp16" and runs_on_cpu(launch):
        return [
            f"{asked} fp16, which does not train on a CPU (Accelerate would train in float32 without a word); use "
            "--mixed_precision no or bf16"
        ]
    if precision == "bf16" and not runs_on_cpu(launch) and torch.cuda.is_available():
        if not torch.cuda.is_bf16_supported(including_emulation=False):
            return [f"{asked} bf16, which {torch.cuda.get_device_name()} does not have; use --mixed_precision fp16"]
    return []


def _check_gpus(launch: Launch) -> list[str]:
    if runs_on_cpu(launch):
        if launch.use_cpu or not (gpu := find_unseen_gpu()):
            return []
        return [
            f"this machine has a GPU ({gpu}) that torch {torch.__version__} does not see ({_why_no_cuda()}); install a "
            "torch for its driver (`nvidia-smi` names the CUDA version that it takes) or give this job or container "
            "its GPUs; to rehearse on the CPU all the same, set CUDA_VISIBLE_DEVICES=''"
        ]
    here, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), torch.cuda.device_count()
    if not torch.cuda.is_available() or here <= gpus:
        return []
    return [
        f"{launch.source} starts {here} processes on this machine, which has {gpus} GPUs; use --num_processes "
        f"{gpus * launch.num_machines}"
    ]


def _check_accumulation(launch: Launch, args: argparse.Namespace) -> list[str]:
    """Returns a line if the launch sets gradient accumulation, which follows from the recipe's flags.

    Under DeepSpeed, the launch may set the same number.
    """
    in_environment = os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1")
    allowed = ["1", "auto"]
    if {launch.gradient_accumulation_steps, in_environment} <= {*allowed}:
        return []
    from common.parallel import deepspeed_flags

    known_steps, arithmetic = deepspeed_flags.accumulation_steps(args, launch.degrees)
    if launch.mode == "DeepSpeed" and known_steps is not None:
        allowed.append(f"{known_steps:g}")
    for source, steps in ((launch.source, launch.gradient_accumulation_steps), ("the environment", in_environment)):
        if steps not in allowed:
            what = f"{source} sets gradient_accumulation_steps to {steps}"
            return [f"{what}; take it out: accumulation follows from {arithmetic}"]
    return []


def find_unseen_gpu(root: Path = Path("/")) -> str | None:
    """Returns a path that shows an NVIDIA GPU in this machine; None without a GPU, or if it is hidden on purpose.

    Call it if torch sees no GPU. `root` is the directory of `dev` and `proc`.
    """
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        return None
    found = [path for pattern in ("dev/nvidia[0-9]*", "proc/driver/nvidia/gpus/*") for path in root.glob(pattern)]
    return str(min(found)) if found else None


def _why_no_cuda() -> str:
    """Returns torch's own reason for seeing no CUDA device; call it only if it sees none."""
    try:
        torch.cuda.init()
    except (AssertionError, RuntimeError) as error:
        return (str(error).splitlines() or [""])[0].split(". ")[0].removesuffix(".")
    return "it gives no reason"
