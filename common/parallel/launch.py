"""Checks that the run matches the requested launch configuration.

In some cases `accelerate launch` silently starts a different run: one process instead of two, two unconnected runs of
one process each, float32 instead of fp16. So the recipe compares its config file and flags with this process.
"""

import argparse
import difflib
import os
from collections.abc import Callable, Iterator
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
from common.parallel import deepspeed_files, deepspeed_flags, parallelism_config, sharding
from common.training.process_grid import Degrees
from common.training.recipe_traits import Arguments, Traits

# Accelerate's numbers of processes on a CPU where WORLD_SIZE is not set; with each, how names of its kind begin.
MPI = {"PMI_SIZE": ("PMI_", "MPI_LOCAL"), "OMPI_COMM_WORLD_SIZE": ("OMPI_",), "MV2_COMM_WORLD_SIZE": ("MV2_COMM_",)}
ALONE = "TRAINING_ALONE"  # in the environment of a process that computes alone, below a launch that is not its own


@dataclass
class Launch:
    """What `accelerate launch` was told, or what the environment says where another launcher started this process."""

    source: str = "the environment"  # what to name in an error
    config_file: str | None = None
    command: list[str] = field(default_factory=list)  # `accelerate launch` as it was typed, up to the script
    num_processes: int = field(default_factory=lambda: int(os.environ.get("WORLD_SIZE", 1)))
    mode: str = "plain"  # plain, DDP, FSDP, DeepSpeed
    mixed_precision: str = field(default_factory=lambda: os.environ.get("ACCELERATE_MIXED_PRECISION", "no"))
    use_cpu: bool = field(
        default_factory=lambda: bool(os.environ.get("ACCELERATE_USE_CPU")) and parse_flag_from_env("ACCELERATE_USE_CPU")
    )
    gradient_accumulation_steps: str = field(
        default_factory=lambda: os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1")
    )
    deepspeed_config: str | dict = field(default_factory=dict)  # DeepSpeed: the file's name, or what the launcher says
    settings: dict[str, Any] = field(default_factory=dict)  # of the launcher, by the names of its flags
    given: set[str] = field(default_factory=set)  # those that were given as flags
    file_settings: dict[str, Any] = field(default_factory=dict)  # those that the config file names
    file_problems: list[str] = field(default_factory=list)  # keys in its sections that the launcher does not take
    environment: dict[str, str] = field(default_factory=lambda: dict(os.environ))  # before the launcher added its own
    num_machines: int = 1
    machine_rank: int = 0

    @property
    def sizes(self) -> dict[str, int]:
        """Those of `parallelism_config`: of the launcher, and the one that it does not know, of the file."""
        asked = self.file_settings.get(parallelism_config.STAGES)
        stages = (
            {parallelism_config.STAGES: asked} if isinstance(asked, int) else {}
        )  # of another kind: in `file_problems`
        return parallelism_config.asked_sizes(self.settings | stages)

    @property
    def degrees(self) -> Degrees:
        """How the processes share an update; `check_launch` says whether they can."""
        sizes = self.sizes
        return Degrees(self.num_processes, *(max(1, sizes[name]) for name in ("sp", "tp", "pp")))


def check_layer_classes(launch: Launch, make_empty: Callable[[], torch.nn.Module]) -> Iterator[str]:
    """A line for each layer class that the launch names and the model does not have."""
    return sharding.check_layer_classes(launch.source, launch.settings, launch.mode, make_empty)


def started_world_size() -> int:
    """Number of processes that the launcher started; known before any of them is connected."""
    return int(os.environ.get("WORLD_SIZE", 1))


def find_launch() -> Launch:
    """What was asked, from the command line of the `accelerate launch` that is an ancestor of this process.

    Nothing in the environment tells how many processes were asked for, only how many were started; the two differ.
    The launcher's own parser reads its command line, so flags, config file and their precedence are the launcher's.
    """
    if ALONE in os.environ:
        return Launch(use_cpu=True)
    for process in psutil.Process().parents():
        try:
            command = process.cmdline()
        except psutil.Error:  # ended, or another user's
            continue
        if (words := find_launch_words(command)) is not None:
            return parse_launch(words, process.environ())
    return Launch(mode="DDP" if started_world_size() > 1 else "plain")


def parse_launch(argv: list[str], environment: dict[str, str] | None = None) -> Launch:
    """What the words after `accelerate launch` ask for; `environment` is that of the launcher."""
    with open(os.devnull, "w") as null, redirect_stderr(null):  # the launcher has printed its warnings already
        args, defaults, known = read_launch(argv)
    config_file = args.config_file or (default_config_file if defaults is not None else None)
    launch = Launch(
        source=f"`accelerate launch` with {config_file}" if config_file else "`accelerate launch`",
        config_file=config_file,
        command=["accelerate", "launch", *argv[: len(argv) - len(args.training_script_args) - 1]],
        # Without a config, the launcher counts GPUs: zero of them is still one process.
        num_processes=max(1, args.num_processes or 1),
        mode=_asked_mode(args),
        mixed_precision=args.mixed_precision or "no",
        use_cpu=bool(args.cpu or args.use_cpu),
        gradient_accumulation_steps=str(args.gradient_accumulation_steps or 1),
        deepspeed_config=args.deepspeed_config_file or deepspeed_files.inline_deepspeed_config(vars(args)),
        settings=vars(args),
        given=getattr(args, "nondefault", set()),
        environment=dict(os.environ) if environment is None else environment,
        num_machines=args.num_machines or 1,
        machine_rank=int(args.machine_rank or 0),
    )
    if args.deepspeed_config_file and config_file and "deepspeed_config_file" not in launch.given:
        launch.deepspeed_config, launch.file_problems = deepspeed_files.find_deepspeed_file(
            args.deepspeed_config_file, config_file
        )
    dropped = {args.use_fsdp: "FSDP", args.use_deepspeed: "DeepSpeed", args.multi_gpu: "DDP"}.get(True)
    if args.cpu and dropped:
        launch.file_problems.append(
            f"--cpu makes the launcher drop {dropped}, which {config_file} asks for; take the flag out: where there is "
            "no GPU, the same config runs on the CPU"
        )
    if config_file:
        _read_config_file(launch, known)
    says_precision = "mixed_precision" in launch.given or launch.file_settings.get("mixed_precision")
    if launch.mode == "DeepSpeed" and not says_precision:
        launch.mixed_precision = deepspeed_files.file_precision(launch.deepspeed_config) or launch.mixed_precision
    return launch


def _asked_mode(args: argparse.Namespace) -> str:
    if args.use_deepspeed and not args.cpu:
        return "DeepSpeed"
    if args.use_fsdp and not args.cpu:
        return "FSDP"
    if args.use_megatron_lm or args.tpu:
        return "Megatron-LM" if args.use_megatron_lm else "TPU"
    return "DDP" if args.multi_gpu or (args.num_processes or 1) > 1 else "plain"


def _read_config_file(launch: Launch, known: set[str]) -> None:
    """Which settings the config file names. The launcher takes unknown keys within a section without a word."""
    for key, value in (yaml.safe_load(Path(launch.config_file).read_text()) or {}).items():
        if not isinstance(value, dict):
            launch.file_settings[key] = value
            continue
        prefix = {"fsdp_config": "fsdp_", "dynamo_config": "dynamo_", "fp8_config": "fp8_"}.get(key, "")
        for name, entry in value.items():
            setting = name if name.startswith(prefix) else prefix + name
            launch.file_settings[setting] = entry
            if setting == parallelism_config.STAGES and not isinstance(entry, int):
                launch.file_problems.append(f"{launch.config_file}: {name} is {entry}; give a whole number")
            if setting not in known and setting != parallelism_config.STAGES:
                nearest = difflib.get_close_matches(setting, known, n=1)
                hint = f"did you mean {nearest[0]}? Else take it out" if nearest else "take it out"
                launch.file_problems.append(f"{launch.config_file}: {key} has the unknown key {name}; {hint}")


def check_machines(launch: Launch) -> Iterator[str]:
    """One line for each mistake in how several machines are to find each other."""
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


# What a DeepSpeed file says in their place.
DEEPSPEED_FLAGS = {f"offload_{part}_{what}" for part in ("optimizer", "param") for what in ("device", "nvme_path")}
DEEPSPEED_FLAGS |= {"zero_stage", "gradient_clipping", "zero3_save_16bit_model"}


def check_deepspeed_flags(launch: Launch) -> Iterator[str]:
    """One line for each flag of the launcher that a DeepSpeed file beside it makes void, or that changes its `auto`."""
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
    """One line if variables of another run's processes are left, which this one would take for its own."""
    if "WORLD_SIZE" in launch.environment and launch.settings and "TORCHELASTIC_RUN_ID" not in os.environ:
        return ["WORLD_SIZE is set in the environment, of another launch; unset WORLD_SIZE RANK LOCAL_RANK"]
    if started_world_size() > 1 and "MASTER_ADDR" not in os.environ:
        return ["WORLD_SIZE is set without MASTER_ADDR; unset WORLD_SIZE RANK LOCAL_RANK, or use accelerate launch"]
    size = next((name for name in MPI if name in os.environ), None)
    if size and os.environ[size] != "1" and "WORLD_SIZE" not in os.environ and runs_on_cpu(launch):
        names = " ".join(mpi_variables())
        return [f"{size} is set in the environment, by mpirun or srun; unset {names}, and use accelerate launch"]
    return []


def mpi_variables() -> list[str]:
    """The names of the variables that mpirun, or srun, has left in this process's environment."""
    return sorted(name for name in os.environ if name.startswith(tuple(one for kind in MPI.values() for one in kind)))


def check_launch(launch: Launch, args: Arguments, traits: Traits) -> list[str]:
    """One line for each difference between what was asked and what this process finds; needs no process group.

    Also for what the mode cannot take of the recipe's flags; `checks.check_arguments` has filled in their defaults.
    """
    problems = [*_check_processes(launch), *check_asked(launch, args, traits), *_check_budget(launch, args, traits)]
    if launch.mode == "DeepSpeed":
        how = (args, launch.mixed_precision, launch.degrees)
        problems += deepspeed_flags.check_deepspeed(launch.deepspeed_config, *how)
    return problems + _check_precision(launch) + _check_gpus(launch)


def check_asked(launch: Launch, args: Arguments, traits: Traits) -> list[str]:
    """One line for each mistake of a launch, and of the flags beside it, that needs no device and no DeepSpeed."""
    problems, sizes = list(launch.file_problems), launch.sizes
    if launch.mode not in ("plain", "DDP", "FSDP", "DeepSpeed"):
        problems.append(
            f"{launch.source} asks for {launch.mode}, which no recipe runs; take a file of accelerate_configs/"
        )
    if launch.mode == "FSDP":
        problems += sharding.check_fsdp(launch.source, launch.settings, args.optimizer)
    if launch.mode == "DeepSpeed":
        problems += check_deepspeed_flags(launch)
    problems += parallelism_config.check_others(launch.source, launch.settings, {*launch.given, *launch.file_settings})
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
    """One line for each thing that keeps the processes, or their GPUs, from being those that were asked for."""
    return launch.file_problems + _check_processes(launch) + _check_gpus(launch)


def _check_processes(launch: Launch) -> list[str]:
    """Whether as many processes started as were asked for, or what keeps them from it."""
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
    """Whether the recipe has stages, and a loss of which each process can have a part."""
    stages, asked = launch.degrees.pipeline, f"{launch.source} sets parallelism_config_pp_size to"
    if stages > 1 and traits.pipeline_schedule is None:
        return [f"{asked} {stages}, and this recipe has no stages; run recipes/pipeline.py, or take another config"]
    if launch.degrees.sequence > 1 and not traits.splits_sequences:
        asked = f"{launch.source} sets parallelism_config_sp_size to {launch.degrees.sequence}"
        return [f"{asked}, and this recipe's loss needs all tokens of an answer; set it to 1, or take another config"]
    return []


def _check_budget(launch: Launch, args: Arguments, traits: Traits) -> Iterator[str]:
    """--micro_batch_tokens auto needs ranks that compute without each other until their gradients are averaged."""
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
    """It follows from the recipe's flags; under DeepSpeed the launch may say the same number."""
    known_steps, arithmetic = deepspeed_flags.accumulation_steps(args, launch.degrees)
    allowed = ["1", "auto"]
    if launch.mode == "DeepSpeed" and known_steps is not None:
        allowed.append(f"{known_steps:g}")
    in_environment = os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1")
    for source, steps in ((launch.source, launch.gradient_accumulation_steps), ("the environment", in_environment)):
        if steps not in allowed:
            what = f"{source} sets gradient_accumulation_steps to {steps}"
            return [f"{what}; take it out: accumulation follows from {arithmetic}"]
    return []


def find_unseen_gpu(root: Path = Path("/")) -> str | None:
    """What shows that this machine has an NVIDIA GPU; None where nothing does, or where its GPUs are hidden on purpose.

    Ask where torch sees none. `root` is where `dev` and `proc` are.
    """
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        return None
    found = [path for pattern in ("dev/nvidia[0-9]*", "proc/driver/nvidia/gpus/*") for path in root.glob(pattern)]
    return str(min(found)) if found else None


def _why_no_cuda() -> str:
    """Why torch sees no CUDA device, in its own words; call it where it sees none."""
    try:
        torch.cuda.init()
    except (AssertionError, RuntimeError) as error:
        return (str(error).splitlines() or [""])[0].split(". ")[0].removesuffix(".")
    return "it gives no reason"


def runs_on_cpu(launch: Launch) -> bool:
    """Whether the CPU computes: asked for, or the only device there is."""
    return launch.use_cpu or not torch.accelerator.is_available()


def is_rehearsal(launch: Launch) -> bool:
    """Whether a config for GPUs runs on a CPU."""
    return runs_on_cpu(launch) and not launch.use_cpu and launch.config_file is not None


def names_threads(launch: Launch) -> bool:
    """Whether the user said how many threads a process is to have; else the launcher gives each of several one."""
    return "num_cpu_threads_per_process" in launch.given or "OMP_NUM_THREADS" in launch.environment
