"""Makes the Accelerator, and checks that what was asked is what runs.

`accelerate launch` starts something else than was asked in some cases, without a word: one process where two were asked
for, two unconnected runs of one process each, float32 in the place of fp16. So before a model is built, the recipe
compares what the launcher was told (its config file and flags) with what this process finds.
"""

import argparse
import difflib
import multiprocessing
import os
import signal
import socket
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
import yaml
from accelerate import Accelerator
from accelerate.commands.config.config_args import default_config_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.state import AcceleratorState
from accelerate.utils import DeepSpeedPlugin, DistributedDataParallelKwargs, DistributedType, set_seed
from torch.distributed.fsdp import CPUOffloadPolicy

from common import deepspeed_files, liveness, sharding
from common.errors import UserError
from common.files import FULL_OR_BROKEN, disk_error_number, disk_line
from common.liveness import wait_for_all
from common.redaction import print_exception, redact
from common.stopping import keep_requests


@dataclass
class Launch:
    """What `accelerate launch` was told, or what the environment says where another launcher started this process."""

    source: str = "the environment"  # what to name in an error
    config_file: str | None = None
    num_processes: int = field(default_factory=lambda: int(os.environ.get("WORLD_SIZE", 1)))
    mode: str = "plain"  # plain, DDP, FSDP, DeepSpeed
    mixed_precision: str = field(default_factory=lambda: os.environ.get("ACCELERATE_MIXED_PRECISION", "no"))
    use_cpu: bool = field(default_factory=lambda: _is_true("ACCELERATE_USE_CPU"))
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
    main_process_ip: str | None = None
    main_process_port: int | None = None
    multinode_launcher: str = "standard"  # DeepSpeed: pdsh and others start the other machines themselves


def _is_true(name: str) -> bool:
    return os.environ.get(name, "false").lower() in ("1", "true", "yes")


def started_world_size() -> int:
    """Number of processes that the launcher started; known before any of them is connected."""
    return int(os.environ.get("WORLD_SIZE", 1))


def find_launch() -> Launch:
    """What was asked, from the command line of the `accelerate launch` that is an ancestor of this process.

    Nothing in the environment tells how many processes were asked for, only how many were started; the two differ.
    The launcher's own parser reads its command line, so flags, config file and their precedence are the launcher's.
    """
    for process in psutil.Process().parents():
        try:
            command = process.cmdline()
        except psutil.Error:  # ended, or another user's
            continue
        for at, part in enumerate(command):
            if part.endswith("accelerate") and command[at + 1 : at + 2] == ["launch"]:
                return parse_launch(command[at + 2 :], process.environ())
            if part.endswith("accelerate-launch") or part == "accelerate.commands.launch":
                return parse_launch(command[at + 1 :], process.environ())
    return Launch(mode="DDP" if started_world_size() > 1 else "plain")


def parse_launch(argv: list[str], environment: dict[str, str] | None = None) -> Launch:
    """What the words after `accelerate launch` ask for; `environment` is that of the launcher."""
    parser = launch_command_parser()
    with open(os.devnull, "w") as null:  # the launcher has printed its warnings already
        stderr, sys.stderr = sys.stderr, null
        try:
            args, defaults, _ = _validate_launch_command(parser.parse_args(argv))
        finally:
            sys.stderr = stderr
    config_file = args.config_file or (default_config_file if defaults is not None else None)
    asked_cpu = bool(args.cpu or args.use_cpu)
    if args.use_deepspeed and not args.cpu:
        mode = "DeepSpeed"
    elif args.use_fsdp and not args.cpu:
        mode = "FSDP"
    elif args.use_megatron_lm or args.tpu:
        mode = "Megatron-LM" if args.use_megatron_lm else "TPU"
    else:
        mode = "DDP" if args.multi_gpu or (args.num_processes or 1) > 1 else "plain"
    launch = Launch(
        source=f"`accelerate launch` with {config_file}" if config_file else "`accelerate launch`",
        config_file=config_file,
        # Without a config, the launcher counts GPUs: zero of them is still one process.
        num_processes=max(1, args.num_processes or 1),
        mode=mode,
        mixed_precision=args.mixed_precision or "no",
        use_cpu=asked_cpu,
        gradient_accumulation_steps=str(args.gradient_accumulation_steps or 1),
        deepspeed_config=args.deepspeed_config_file or deepspeed_files.inline_deepspeed_config(vars(args)),
        settings=vars(args),
        given=getattr(args, "nondefault", set()),
        environment=dict(os.environ) if environment is None else environment,
        num_machines=args.num_machines or 1,
        machine_rank=int(args.machine_rank or 0),
        main_process_ip=args.main_process_ip,
        main_process_port=args.main_process_port,
        multinode_launcher=args.deepspeed_multinode_launcher or "pdsh",
    )
    if args.cpu and (
        dropped := {args.use_fsdp: "FSDP", args.use_deepspeed: "DeepSpeed", args.multi_gpu: "DDP"}.get(True)
    ):
        launch.file_problems.append(
            f"--cpu makes the launcher drop {dropped}, which {config_file} asks for; take the flag out: where there is "
            "no GPU, the same config runs on the CPU"
        )
    if config_file:
        _read_config_file(launch, known={action.dest for action in parser._actions})
    if (
        mode == "DeepSpeed"
        and "mixed_precision" not in launch.given
        and not launch.file_settings.get("mixed_precision")
    ):
        launch.mixed_precision = deepspeed_files.file_precision(launch.deepspeed_config) or launch.mixed_precision
    return launch


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
            if setting not in known:
                nearest = difflib.get_close_matches(setting, known, n=1)
                hint = f"did you mean {nearest[0]}? Else take it out" if nearest else "take it out"
                launch.file_problems.append(f"{launch.config_file}: {key} has the unknown key {name}; {hint}")


def check_machines(launch: Launch) -> list[str]:
    """One line for each mistake in how several machines are to find each other."""
    problems = []
    machines, processes = launch.num_machines, launch.num_processes
    if machines == 1:
        return problems
    if processes % machines:
        problems.append(
            f"{launch.source} asks for {processes} processes on {machines} machines, which does not divide; "
            f"--num_processes is the total: use {max(1, processes // machines) * machines}, or another multiple"
        )
    if not 0 <= launch.machine_rank < machines:
        problems.append(
            f"--machine_rank {launch.machine_rank} is not one of 0 to {machines - 1}; --num_machines is {machines}"
        )
    if not launch.main_process_ip:
        problems.append("several machines need --main_process_ip, an address of the machine with --machine_rank 0")
    if launch.main_process_port == 0:
        problems.append(
            "--main_process_port 0 is a free port, which the other machines cannot know; give one, such as 29500"
        )
    if launch.mode == "DeepSpeed" and launch.multinode_launcher != "standard":
        problems.append(
            f"DeepSpeed would start the other machines itself, by {launch.multinode_launcher}; use "
            "--deepspeed_multinode_launcher standard"
        )
    return problems


DEEPSPEED_FLAGS = {"zero_stage", "gradient_clipping", "offload_optimizer_device", "offload_param_device"}
DEEPSPEED_FLAGS |= {"offload_optimizer_nvme_path", "offload_param_nvme_path", "zero3_save_16bit_model"}


def check_deepspeed_flags(launch: Launch) -> list[str]:
    """One line for each flag of the launcher that a DeepSpeed file beside it makes void, or that changes its `auto`."""
    if not isinstance(launch.deepspeed_config, str):
        return []
    problems = [
        f"--{name} {launch.settings[name]} beside {launch.deepspeed_config}: what the file says runs; take the flag "
        "out, or name another file with --deepspeed_config_file"
        for name in sorted(DEEPSPEED_FLAGS & launch.given)
    ]
    problems += [
        f"{launch.config_file}: {name} beside {launch.deepspeed_config}: what that file says runs; take one out"
        for name in sorted(DEEPSPEED_FLAGS & launch.file_settings.keys() - launch.given)
    ]
    if "ACCELERATE_GRADIENT_CLIPPING" in launch.environment:
        problems.append("ACCELERATE_GRADIENT_CLIPPING in the environment has no effect; unset it, use --max_grad_norm")
    return problems


def check_environment(launch: Launch) -> list[str]:
    """One line if variables of another run's processes are left, which this one would take for its own."""
    if "WORLD_SIZE" in launch.environment and launch.settings and "TORCHELASTIC_RUN_ID" not in os.environ:
        return ["WORLD_SIZE is set in the environment, of another launch; unset WORLD_SIZE RANK LOCAL_RANK"]
    if started_world_size() > 1 and "MASTER_ADDR" not in os.environ:
        return ["WORLD_SIZE is set without MASTER_ADDR; unset WORLD_SIZE RANK LOCAL_RANK, or use accelerate launch"]
    return []


def check_launch(launch: Launch, args: argparse.Namespace) -> list[str]:
    """One line for each difference between what was asked and what this process finds; needs no process group.

    Also for what the mode cannot take of the recipe's flags; `arguments.check_arguments` has filled in their defaults.
    """
    machine_problems, environment_problems = check_machines(launch), check_environment(launch)
    problems = launch.file_problems + machine_problems + environment_problems
    on_cpu = runs_on_cpu(launch)
    world = started_world_size()
    if launch.mode not in ("plain", "DDP", "FSDP", "DeepSpeed"):
        problems.append(
            f"{launch.source} asks for {launch.mode}, which no recipe runs; take a file of accelerate_configs/"
        )
    if launch.mode == "FSDP":
        problems += sharding.check_fsdp(launch.source, launch.settings, launch.num_processes, args.optimizer)
    if launch.mode == "DeepSpeed":
        problems += check_deepspeed_flags(launch)
        problems += deepspeed_files.check_deepspeed(
            launch.deepspeed_config, args, launch.mixed_precision, launch.num_processes
        )
    if world != launch.num_processes and launch.num_machines > 1:
        if not machine_problems:
            problems.append(
                f"{launch.source} asks on machine {launch.machine_rank} for {launch.num_processes} processes in all, "
                f"but {world} started; give the same --num_processes, the total, on every machine"
            )
    elif world != launch.num_processes and not environment_problems:
        problems.append(
            f"{launch.source} asks for {launch.num_processes} processes, but {world} started: Accelerate starts one "
            "process on a CPU for MULTI_CPU or 'NO'; use accelerate_configs/multi_cpu.yaml (distributed_type: "
            "MULTI_GPU with use_cpu: true) or --num_processes 1"
        )
    if launch.mixed_precision not in ("no", "bf16", "fp16"):
        problems.append(f"{launch.source}: mixed_precision {launch.mixed_precision} is not one of no, bf16, fp16")
    if launch.mixed_precision == "fp16" and on_cpu:
        problems.append(
            f"{launch.source} asks for fp16, which does not train on a CPU (Accelerate would train in float32 without "
            "a word); use --mixed_precision no or bf16"
        )
    if launch.mixed_precision == "bf16" and not on_cpu and torch.cuda.is_available():
        if not torch.cuda.is_bf16_supported(including_emulation=False):
            name = torch.cuda.get_device_name()
            problems.append(f"{launch.source} asks for bf16, which {name} does not have; use --mixed_precision fp16")
    if on_cpu and not launch.use_cpu and (gpu := find_unseen_gpu()):
        problems.append(
            f"this machine has a GPU ({gpu}) that torch {torch.__version__} does not see ({_why_no_cuda()}); install a "
            "torch for its driver (`nvidia-smi` names the CUDA version that it takes) or give this job or container "
            "its GPUs; to rehearse on the CPU all the same, set CUDA_VISIBLE_DEVICES=''"
        )
    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if not on_cpu and torch.cuda.is_available() and local_world > torch.cuda.device_count():
        problems.append(
            f"{launch.source} starts {local_world} processes on this machine, which has {torch.cuda.device_count()} "
            f"GPUs; use --num_processes {torch.cuda.device_count() * launch.num_machines}"
        )
    in_environment = os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1")
    known_steps, arithmetic = deepspeed_files.accumulation_steps(args, launch.num_processes)
    for source, steps in ((launch.source, launch.gradient_accumulation_steps), ("the environment", in_environment)):
        is_known = launch.mode == "DeepSpeed" and known_steps is not None and steps == f"{known_steps:g}"
        if steps not in ("1", "auto") and not is_known:
            problems.append(
                f"{source} sets gradient_accumulation_steps to {steps}; take it out: accumulation follows from "
                f"{arithmetic}"
            )
            break
    if os.environ.get("ACCELERATE_DYNAMO_BACKEND", "NO").upper() != "NO":
        problems.append("the launch turns on torch.compile (dynamo_backend); take it out and use --compile")
    return problems


def check_space(launch: Launch, parameter_sizes: Callable[[], list[int]]) -> None:
    """Whether what a mode keeps in files has room for them, and in its buffers, before the model is built.

    Args:
        parameter_sizes: makes the number of elements of each parameter.

    Raises:
        UserError: a line for each path with too little space, and one for buffers that the file makes too small.
    """
    if launch.mode != "DeepSpeed":
        return
    deepspeed_files.check_nvme_space(launch.deepspeed_config, parameter_sizes, launch.num_machines)
    plugin = AcceleratorState().deepspeed_plugin
    if deepspeed_files.size_nvme_buffers(plugin.deepspeed_config, parameter_sizes, launch.num_processes):
        plugin.set_deepspeed_weakref()  # what transformers makes a model by


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


def make_accelerator(launch: Launch, args: argparse.Namespace, **kwargs) -> Accelerator:
    """The Accelerator of what was asked; call `check_launch` before. `kwargs` go to `Accelerator`.

    Processes wait for each other for `args.connect_timeout` seconds. From then on, the loss of one ends all.

    Raises:
        UserError: the mode, world size or precision that runs is not the one that was asked.
    """
    liveness.start(args.connect_timeout)
    is_sharded_on_cpu = runs_on_cpu(launch) and launch.mode in ("FSDP", "DeepSpeed")
    if is_sharded_on_cpu:
        sharding.prepare_rehearsal(launch.mode)
    elif runs_on_cpu(launch):
        # Read by Accelerate when its state is made: CPU, and gloo in the place of NCCL. Without it, the processes of
        # a MULTI_GPU launch on a machine without a GPU are not connected and each is a run of its own.
        os.environ["ACCELERATE_USE_CPU"] = "true"
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed, once imported, warns that it looked for a GPU
    elif torch.cuda.is_available():
        # TF32 matrix products: float32 range, 10-bit mantissa, several times faster. Mixed precision leaves some in
        # float32 too, as those of a recurrence. NVIDIA_TF32_OVERRIDE=0 turns them off.
        torch.set_float32_matmul_precision("high")
    _name_interface()
    settled = None
    if launch.mode == "DeepSpeed":
        settled = deepspeed_files.settle_deepspeed(
            launch.deepspeed_config, args, launch.mixed_precision, launch.num_processes
        )
        # What the launcher says beside a file, Accelerate refuses, or takes for itself; `check_launch` has seen to it.
        os.environ.pop("ACCELERATE_CONFIG_DS_FIELDS", None)
        os.environ["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] = "1"
        kwargs["deepspeed_plugin"] = DeepSpeedPlugin(hf_ds_config=settled.config)
    # DDP: gradients lie in the buckets that are sent, and not beside them once more.
    kwargs["kwargs_handlers"] = [DistributedDataParallelKwargs(gradient_as_bucket_view=True)]
    threads = sharding.share_of_cores()  # before Accelerate may bind each process to some
    with liveness.connecting(args.connect_timeout):
        if is_sharded_on_cpu:
            sharding.connect_rehearsal(launch.mode)
        accelerator = Accelerator(**kwargs)
        accelerator.wait_for_everyone()  # NCCL connects at the first collective
    runs = running_mode(accelerator)
    # One process of DDP has nothing to reduce, and Accelerate may call it plain.
    if runs != launch.mode and not (launch.num_processes == 1 and {runs, launch.mode} <= {"plain", "DDP"}):
        raise UserError(f"{launch.source} asks for {launch.mode}, but {runs} would run on {accelerator.device.type}")
    if accelerator.num_processes != launch.num_processes:
        raise UserError(
            f"{launch.source} asks for {launch.num_processes} connected processes, but this one sees "
            f"{accelerator.num_processes}"
        )
    sharding.adapt(accelerator, args.max_grad_norm)
    if sharding.updates_on_host(accelerator) and not names_threads(launch):
        torch.set_num_threads(threads)  # of DeepSpeed's CPU Adam too: it takes torch's OpenMP
    if accelerator.mixed_precision != launch.mixed_precision:
        raise UserError(
            f"{launch.source} asks for mixed precision {launch.mixed_precision}, but {accelerator.mixed_precision} "
            "would run"
        )
    if settled is not None:
        is_file = isinstance(launch.deepspeed_config, str)
        where = launch.deepspeed_config if is_file else launch.source
        accelerator.print(redact(deepspeed_files.describe_settled(where, settled)), flush=True)
        if settled.idle and accelerator.is_main_process:
            warnings.warn(f"{where}: no effect here: {', '.join(settled.idle)}", stacklevel=2)
    return accelerator


def names_threads(launch: Launch) -> bool:
    """Whether the user said how many threads a process is to have; else the launcher gives each of several one."""
    return "num_cpu_threads_per_process" in launch.given or "OMP_NUM_THREADS" in launch.environment


def _name_interface() -> None:
    """Names gloo the network that leads to the main machine, where there are several machines and the user named none.

    By itself gloo takes the address that the host's name stands for, which on many systems is one of the loopback.
    """
    if int(os.environ.get("LOCAL_WORLD_SIZE", 1)) == started_world_size() or "GLOO_SOCKET_IFNAME" in os.environ:
        return
    family, kind, _, _, address = socket.getaddrinfo(os.environ["MASTER_ADDR"], 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # of UDP: sends nothing, and finds the way
        mine = probe.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        if mine in [interface.address.split("%")[0] for interface in addresses]:
            os.environ["GLOO_SOCKET_IFNAME"] = name


def running_mode(accelerator: Accelerator) -> str:
    """plain, DDP, FSDP or DeepSpeed."""
    return {
        DistributedType.NO: "plain",
        DistributedType.MULTI_CPU: "DDP",
        DistributedType.MULTI_GPU: "DDP",
        DistributedType.FSDP: "FSDP",
        DistributedType.DEEPSPEED: "DeepSpeed",
    }.get(accelerator.distributed_type, str(accelerator.distributed_type))


def describe_mode(accelerator: Accelerator) -> str:
    """The mode with its stage or shape and what is offloaded, for the first printed block."""
    mode = running_mode(accelerator)
    if mode == "DeepSpeed":
        zero = accelerator.deepspeed_plugin.deepspeed_config.get("zero_optimization", {})
        mode += f" ZeRO-{zero.get('stage')}"
        names = {"offload_param": "weights", "offload_optimizer": "optimizer"}
        for part, device in sharding.offload_devices(zero).items():
            mode += "" if device in ("none", "auto") else f", {names[part]} on {device}"
    if mode == "FSDP":
        parallel = accelerator.parallelism_config
        if parallel is not None and parallel.dp_replicate_size > 1:
            mode += f", {parallel.dp_replicate_size} copies in {parallel.dp_shard_size} shards"
        if isinstance(accelerator.state.fsdp_plugin.cpu_offload, CPUOffloadPolicy):
            mode += ", offloaded to the host"
    return mode


def is_sharded(accelerator: Accelerator) -> bool:
    """Whether a process may hold a part of the weights only."""
    return running_mode(accelerator) in ("FSDP", "DeepSpeed")


def describe_precision(accelerator: Accelerator) -> str:
    """What the numbers are, for the first printed block."""
    if accelerator.mixed_precision != "no" and running_mode(accelerator) == "DeepSpeed":
        return f"{accelerator.mixed_precision} weights and products; the optimizer updates float32 copies"
    if accelerator.mixed_precision != "no":
        return f"{accelerator.mixed_precision} matrix products, float32 weights"
    dtype = str(torch.get_default_dtype()).removeprefix("torch.")
    tf32 = accelerator.device.type == "cuda" and torch.get_float32_matmul_precision() != "highest"
    return f"{dtype}, TF32 matrix products" if tf32 else dtype


def seed_everything(seed: int, accelerator: Accelerator | None = None) -> None:
    """Seeds Python, numpy and torch: alike on all ranks without `accelerator`, unlike (for dropout) with it."""
    set_seed(seed, device_specific=accelerator is not None)


def end_run(accelerator: Accelerator, status: int = 0) -> None:
    """Ends a finished or stopped run on all ranks together; nothing after it runs where there are several.

    A rank that leaves while another still works can leave that one hanging. And once everything is written, Python's
    own end must not be able to spoil the run: gloo's threads race with it (pytorch#179291), and once in some hundred
    runs a process hung there, or was aborted.
    """
    wait_for_all()  # rank 0 writes the model
    accelerator.wait_for_everyone()
    accelerator.end_training()
    liveness.leave()
    if accelerator.num_processes > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    if status:
        sys.exit(status)


@contextmanager
def user_mistakes_end_here() -> Iterator[None]:
    """Around a whole run: it ends on all ranks together, and a user's mistake ends in lines on stderr with status 2.

    A mistake is a `UserError`. Every other exception keeps its traceback.
    """
    sys.excepthook = print_exception
    keep_requests()
    try:
        yield
    except UserError as error:
        _end_data_workers()
        exit_with_mistakes(str(error).splitlines())
    except BaseException as error:
        _end_data_workers()
        if disk_error_number(error) in FULL_OR_BROKEN:
            where = Path(getattr(error, "filename", None) or ".")
            advice = "start again; a run goes on from its last checkpoint with --resume"
            exit_with_mistakes([disk_line(error, "a file could not be read or written", where, 0, advice)])
        is_end = isinstance(error, SystemExit) and not error.code
        liveness.leave(None if is_end else redact(f"{type(error).__name__}: {error}"))
        raise
    liveness.leave()


def _end_data_workers() -> None:
    """They ignore the signal by which Python ends them (see common.stopping), and it would wait for ever.

    In a run that ends well the loader's iterator has ended them; an error's traceback holds it.
    """
    workers = multiprocessing.active_children()
    if workers:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would raise another error for each
    for worker in workers:
        worker.kill()


def exit_with_mistakes(problems: list[str]) -> None:
    """Prints each problem on a line of stderr, once on each host, and ends the process with status 2."""
    problems = [redact(problem) for problem in problems]
    # Without torch's launcher there are no others on this host, whatever variables are left in the environment.
    is_first = int(os.environ.get("LOCAL_RANK", 0)) == 0 or "TORCHELASTIC_RUN_ID" not in os.environ
    if is_first:
        print("\n".join(f"error: {problem}" for problem in problems), file=sys.stderr, flush=True)
    liveness.leave("\n".join(problems), liveness.MISTAKE_STATUS)
    if not is_first:
        # A launcher ends all ranks of its host when the first one ends: that one must have printed by then.
        time.sleep(10)
    sys.exit(liveness.MISTAKE_STATUS)
