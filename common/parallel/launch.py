"""The requested launch: the command line and config file of the `accelerate launch` that started this process."""

import argparse
import difflib
import os
from contextlib import redirect_stderr
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
import yaml
from accelerate.commands.config.config_args import default_config_file
from accelerate.utils import parse_flag_from_env

from common.internals.accelerate import read_launch
from common.launcher import find_launch_words
from common.process import ELASTIC_ID
from common.training.process_grid import ProcessGrid

# Variables from which Accelerate reads the world size on a CPU if WORLD_SIZE is not set, with prefixes of related ones.
MPI = {"PMI_SIZE": ("PMI_", "MPI_LOCAL"), "OMPI_COMM_WORLD_SIZE": ("OMPI_",), "MV2_COMM_WORLD_SIZE": ("MV2_COMM_",)}
# Sizes of Accelerate's `parallelism_config`, and the config file's key for the number of stages.
SIZES = ("dp_replicate", "dp_shard", "sp", "tp", "pp", "cp")
STAGES = "parallelism_config_pp_size"


@dataclass
class Launch:
    """The requested `accelerate launch`, or the environment's values if a different launcher started this process."""

    source: str = "the environment"  # origin of the settings, for error messages
    config_file: str | None = None
    command: list[str] = field(default_factory=list)  # `accelerate launch` as typed, up to the script
    num_processes: int = field(default_factory=lambda: int(os.environ.get("WORLD_SIZE", 1)))
    mode: str = "plain"  # plain, DDP, FSDP, DeepSpeed
    mixed_precision: str = field(default_factory=lambda: os.environ.get("ACCELERATE_MIXED_PRECISION", "no"))
    use_cpu: bool = field(
        default_factory=lambda: bool(os.environ.get("ACCELERATE_USE_CPU")) and parse_flag_from_env("ACCELERATE_USE_CPU")
    )
    gradient_accumulation_steps: str = field(
        default_factory=lambda: os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1")
    )
    deepspeed_config: str | dict = field(default_factory=dict)  # for DeepSpeed: file name, or settings of the launcher
    settings: dict[str, Any] = field(default_factory=dict)  # settings of the launcher, by flag name
    given: set[str] = field(default_factory=set)  # settings passed as flags
    file_settings: dict[str, Any] = field(default_factory=dict)  # settings in the config file
    file_problems: list[str] = field(default_factory=list)  # mistakes in the config file, or in its use
    environment: dict[str, str] = field(default_factory=lambda: dict(os.environ))  # before the launcher's changes
    num_machines: int = 1
    machine_rank: int = 0

    @property
    def sizes(self) -> dict[str, int]:
        """Returns the sizes of `parallelism_config`, from the launcher or, without a launcher, from the environment."""
        if self.settings.get("use_parallelism_config"):
            settings = self.settings | {STAGES: self.file_settings.get(STAGES)}
            sizes = {name: settings.get(f"parallelism_config_{name}_size") for name in SIZES}
            # Others than integers are None, or in `file_problems`.
            return {name: size if isinstance(size, int) else 1 for name, size in sizes.items()}
        if self.settings or os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "false").lower() != "true":
            return dict.fromkeys(SIZES, 1)
        return {name: int(os.environ.get(f"PARALLELISM_CONFIG_{name.upper()}_SIZE", 1)) for name in SIZES}

    @property
    def grid(self) -> ProcessGrid:
        """Returns the process grid; `check_launch` checks that the sizes fit the number of processes."""
        sizes = self.sizes
        return ProcessGrid(self.num_processes, *(max(1, sizes[name]) for name in ("sp", "tp", "pp")))


def started_world_size() -> int:
    """Returns the number of processes that the launcher started; known before any of them is connected."""
    return int(os.environ.get("WORLD_SIZE", 1))


def find_launch() -> Launch:
    """Returns the requested launch, from the command line of this process's nearest `accelerate launch` ancestor.

    The environment contains only the number of started processes, not the requested number; these may differ.
    Accelerate's own parser parses the command line, so flags override the config file exactly as in the launcher.
    """
    for process in psutil.Process().parents():
        try:
            command = process.cmdline()
        except psutil.Error:  # it has ended, or belongs to a different user
            continue
        if (words := find_launch_words(command)) is not None:
            launch = parse_launch(words, process.environ())
            if ELASTIC_ID in os.environ:
                from common.elastic_launch import use_started_hosts

                use_started_hosts(launch)
            return launch
    return Launch(mode="DDP" if started_world_size() > 1 else "plain")


def parse_launch(argv: list[str], environment: dict[str, str] | None = None) -> Launch:
    """Returns the launch that the words after `accelerate launch` request."""
    with open(os.devnull, "w") as null, redirect_stderr(null):  # the launcher has printed its warnings already
        args, defaults, known = read_launch(argv)
    config_file = args.config_file or (default_config_file if defaults is not None else None)
    launch = Launch(
        source=f"`accelerate launch` with {config_file}" if config_file else "`accelerate launch`",
        config_file=config_file,
        command=["accelerate", "launch", *argv[: len(argv) - len(args.training_script_args) - 1]],
        # Without a config, the launcher counts GPUs; without GPUs, it starts one process.
        num_processes=max(1, args.num_processes or 1),
        mode=_requested_mode(args),
        mixed_precision=args.mixed_precision or "no",
        use_cpu=bool(args.cpu or args.use_cpu),
        gradient_accumulation_steps=str(args.gradient_accumulation_steps or 1),
        settings=vars(args),
        given=getattr(args, "nondefault", set()),
        environment=dict(os.environ) if environment is None else environment,
        num_machines=args.num_machines or 1,
        machine_rank=int(args.machine_rank or 0),
    )
    dropped = {args.use_fsdp: "FSDP", args.use_deepspeed: "DeepSpeed", args.multi_gpu: "DDP"}.get(True)
    if args.cpu and dropped:
        launch.file_problems.append(
            f"--cpu makes the launcher drop {dropped}, which {config_file} requests; remove the flag: without a GPU, "
            "the same config runs on the CPU"
        )
    if config_file:
        _read_config_file(launch, config_file, known)
    if launch.mode == "DeepSpeed" or args.deepspeed_config_file:
        from common.parallel.deepspeed_files import read_launched

        read_launched(launch, args)
    return launch


def _requested_mode(args: argparse.Namespace) -> str:
    if args.use_deepspeed and not args.cpu:
        return "DeepSpeed"
    if args.use_fsdp and not args.cpu:
        return "FSDP"
    if args.use_megatron_lm or args.tpu:
        return "Megatron-LM" if args.use_megatron_lm else "TPU"
    return "DDP" if args.multi_gpu or (args.num_processes or 1) > 1 else "plain"


def _read_config_file(launch: Launch, config_file: str, known: set[str]) -> None:
    """Reads the config file; notes unknown keys in its sections, because the launcher silently accepts them."""
    for key, value in (yaml.safe_load(Path(config_file).read_text()) or {}).items():
        if not isinstance(value, dict):
            launch.file_settings[key] = value
            continue
        prefix = {"fsdp_config": "fsdp_", "dynamo_config": "dynamo_", "fp8_config": "fp8_"}.get(key, "")
        for name, entry in value.items():
            setting = name if name.startswith(prefix) else prefix + name
            launch.file_settings[setting] = entry
            if setting.removeprefix("parallelism_config_").removesuffix("_size") in SIZES and type(entry) is not int:
                launch.file_problems.append(f"{config_file}: {name} is {entry}; give a whole number")
            if setting not in known and setting != STAGES:
                nearest = difflib.get_close_matches(setting, known, n=1)
                hint = f"did you mean {nearest[0]}? Otherwise remove it" if nearest else "remove it"
                launch.file_problems.append(f"{config_file}: {key} has the unknown key {name}; {hint}")


def mpi_variables() -> list[str]:
    """Returns the names of the MPI variables in this process's environment, for example of mpirun or srun."""
    return sorted(name for name in os.environ if name.startswith(tuple(one for kind in MPI.values() for one in kind)))


def runs_on_cpu(launch: Launch) -> bool:
    """Returns whether the run computes on the CPU: because use_cpu is set, or without an accelerator."""
    return launch.use_cpu or not torch.accelerator.is_available()


def lacks_gpus(launch: Launch) -> bool:
    """Returns whether a config for GPUs runs on a CPU, because no GPU is visible."""
    return runs_on_cpu(launch) and not launch.use_cpu and launch.config_file is not None
