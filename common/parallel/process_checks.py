"""Compares the requested processes, machines, GPUs and precision with this process and this machine."""

import os
from collections.abc import Iterator
from pathlib import Path

import torch
from accelerate import Accelerator

from common.errors import UserError
from common.parallel.distributed_mode import current_mode
from common.parallel.launch import MPI, Launch, mpi_variables, runs_on_cpu, started_world_size
from common.process import ELASTIC_ID


def check_started(launch: Launch) -> list[str]:
    """Returns a line for each difference between the requested and the started processes and their GPUs."""
    return launch.file_problems + check_processes(launch) + check_gpus(launch)


def check_processes(launch: Launch) -> list[str]:
    """Returns lines if the number of started processes differs from the request: the known causes, or the numbers."""
    if problems := [*check_machines(launch), *check_environment(launch)]:
        return problems
    world, processes = started_world_size(), launch.num_processes
    if world == processes:
        return []
    if launch.num_machines > 1:
        return [
            f"{launch.source} asks on machine {launch.machine_rank} for {processes} processes in total, but {world} "
            "started; give the same --num_processes, the total, on every machine"
        ]
    return [
        f"{launch.source} asks for {processes} processes, but {world} started: Accelerate starts one process on a CPU "
        "for MULTI_CPU or 'NO'; use accelerate_configs/multi_cpu.yaml (distributed_type: MULTI_GPU with use_cpu: true) "
        "or --num_processes 1"
    ]


def check_machines(launch: Launch) -> Iterator[str]:
    """Yields a line for each mistake in the settings that connect several machines."""
    machines, processes, settings = launch.num_machines, launch.num_processes, launch.settings
    if machines == 1 or ELASTIC_ID in os.environ:
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


def check_environment(launch: Launch) -> list[str]:
    """Returns a line if the environment has variables of a different launch, which this run would use."""
    if "WORLD_SIZE" in launch.environment and launch.settings and "TORCHELASTIC_RUN_ID" not in os.environ:
        return ["WORLD_SIZE is set in the environment, of another launch; unset WORLD_SIZE RANK LOCAL_RANK"]
    if started_world_size() > 1 and "MASTER_ADDR" not in os.environ:
        return ["WORLD_SIZE is set without MASTER_ADDR; unset WORLD_SIZE RANK LOCAL_RANK, or use accelerate launch"]
    size = next((name for name in MPI if name in os.environ), None)
    if size and os.environ[size] != "1" and "WORLD_SIZE" not in os.environ and runs_on_cpu(launch):
        names = " ".join(mpi_variables())
        return [f"{size} is set in the environment, by mpirun or srun; unset {names}, and use accelerate launch"]
    return []


def check_accelerator(launch: Launch, accelerator: Accelerator) -> None:
    """Raises UserError if mode, world size or precision of this run differ from the request."""
    asked = f"{launch.source} asks for"
    runs = current_mode(accelerator)
    # A single process of DDP has nothing to reduce, and Accelerate may report its mode as plain.
    if runs != launch.mode and not (launch.num_processes == 1 and {runs, launch.mode} <= {"plain", "DDP"}):
        raise UserError(f"{asked} {launch.mode}, but {runs} would run on {accelerator.device.type}")
    if accelerator.num_processes != launch.num_processes:
        here = accelerator.num_processes
        raise UserError(f"{asked} {launch.num_processes} connected processes, but this one sees {here}")
    if accelerator.mixed_precision != launch.mixed_precision:
        runs = accelerator.mixed_precision
        raise UserError(f"{asked} mixed precision {launch.mixed_precision}, but {runs} would run")


def check_precision(launch: Launch) -> list[str]:
    """Returns a line if the device does not support training in the requested precision."""
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


def check_gpus(launch: Launch) -> list[str]:
    """Returns a line if torch does not see the machine's GPU, or if there are more processes than GPUs."""
    if runs_on_cpu(launch):
        if launch.use_cpu or not (gpu := find_unseen_gpu()):
            return []
        return [
            f"this machine has a GPU ({gpu}) that torch {torch.__version__} does not see ({_why_no_cuda()}); install a "
            "build of torch for its driver (`nvidia-smi` shows the CUDA version) or give this job or container its "
            "GPUs; to run on the CPU, set CUDA_VISIBLE_DEVICES=''"
        ]
    here, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), torch.cuda.device_count()
    if not torch.cuda.is_available() or here <= gpus:
        return []
    return [
        f"{launch.source} starts {here} processes on this machine, which has {gpus} GPUs; use --num_processes "
        f"{gpus * launch.num_machines}"
    ]


def find_unseen_gpu(root: Path = Path("/")) -> str | None:
    """Returns a path that shows an NVIDIA GPU in this machine; None without, or if CUDA_VISIBLE_DEVICES hides it.

    Call it if torch sees no GPU. root: directory that contains `dev` and `proc`.
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
