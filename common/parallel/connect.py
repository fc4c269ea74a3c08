"""Connects the processes of the requested launch: creates the Accelerator."""

import argparse
import os
import socket
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import psutil
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DeepSpeedPlugin, set_seed
from transformers.utils.logging import disable_progress_bar

from common.errors import UserError, main_logger
from common.parallel import liveness
from common.parallel.distributed_mode import running_mode
from common.parallel.launch import Launch, asked_sizes, mpi_variables, names_threads, runs_on_cpu, started_world_size
from common.parallel.process_groups import AveragedByPeers
from common.redaction import redact
from common.training.process_grid import running, set_running

logger = main_logger(__name__)


def check_space(launch: Launch, parameter_sizes: Callable[[], list[int]]) -> None:
    """Checks that a mode's files and buffers have enough space, before the model is built.

    Args:
        parameter_sizes: returns the number of elements of each parameter.

    Raises UserError: a line per path with too little space, and a line for buffers that the file sets too small.
    """
    if launch.mode != "DeepSpeed":
        return
    from common.parallel import deepspeed_files

    deepspeed_files.check_nvme_space(launch.deepspeed_config, parameter_sizes, launch.num_machines)
    plugin = AcceleratorState().deepspeed_plugin
    if deepspeed_files.size_nvme_buffers(plugin.deepspeed_config, parameter_sizes, launch.num_processes):
        plugin.set_deepspeed_weakref()  # transformers reads this copy when it builds a model


def make_accelerator(launch: Launch, args: argparse.Namespace, **kwargs) -> Accelerator:
    """Returns the Accelerator of the requested launch; call `check_launch` first. `kwargs` are passed to `Accelerator`.

    Processes wait for each other for `args.connect_timeout` seconds. From then, the death of a process ends all
    processes.

    Raises UserError: mode, world size or precision of this run differ from the request.
    """
    set_running(launch.degrees)
    if not sys.stderr.isatty():  # in a log, each of transformers' bars would be one long line
        disable_progress_bar()
    for name in mpi_variables():  # no effect in this process, but in processes that it starts
        del os.environ[name]
    liveness.reset()
    if started_world_size() > 1:
        from common.parallel import rank_watch

        rank_watch.start(args.connect_timeout)
    is_sharded_on_cpu = runs_on_cpu(launch) and launch.mode in ("FSDP", "DeepSpeed")
    _name_device(launch, is_sharded_on_cpu)
    name_interface()
    settled = None
    if launch.mode == "DeepSpeed":
        from common.parallel import deepspeed_flags

        settled = deepspeed_flags.settle_deepspeed(
            launch.deepspeed_config, args, launch.mixed_precision, launch.degrees
        )
        # Next to a DeepSpeed file, Accelerate rejects or uses launcher settings, which `check_launch` has checked
        # already.
        os.environ.pop("ACCELERATE_CONFIG_DS_FIELDS", None)
        os.environ["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] = "1"
        kwargs["deepspeed_plugin"] = DeepSpeedPlugin(hf_ds_config=settled.config)
    if launch.degrees.data < launch.degrees.num_processes:
        from common.parallel import parallelism_config

        parallelism_config.hide_from_accelerate(asked_sizes(launch.settings))
    threads = share_of_cores()  # before Accelerate may bind each process to some cores
    with liveness.connecting(args.connect_timeout):
        if is_sharded_on_cpu:
            from common.parallel import sharding

            sharding.connect_rehearsal(launch.mode)
        accelerator = Accelerator(**kwargs)
        # DDP: gradients are views of the communication buckets, without memory of their own.
        accelerator.ddp_handler = AveragedByPeers(gradient_as_bucket_view=True)
        accelerator.wait_for_everyone()  # NCCL connects at the first collective
    _check_what_runs(launch, accelerator)
    if launch.mode in ("FSDP", "DeepSpeed") and _configure_sharding(launch, accelerator, args.max_grad_norm):
        torch.set_num_threads(threads)  # also for DeepSpeed's CPU Adam, which uses torch's OpenMP
    if launch.num_machines > 1:
        _warn_of_groups_across_machines(launch)
    if settled is not None:
        where = launch.deepspeed_config if isinstance(launch.deepspeed_config, str) else launch.source
        accelerator.print(redact(deepspeed_flags.describe_settled(where, settled)), flush=True)
        if settled.idle and accelerator.is_main_process:
            warnings.warn(f"{where}: no effect here: {', '.join(settled.idle)}", stacklevel=2)
    return accelerator


def _configure_sharding(launch: Launch, accelerator: Accelerator, max_grad_norm: float) -> bool:
    """Configures FSDP2 or DeepSpeed; returns whether the CPU computes the updates and the user set no thread count."""
    from common.parallel import sharding

    sharding.shard_over_peers(accelerator, launch.degrees)
    sharding.configure_plugins(accelerator, max_grad_norm)
    return sharding.updates_on_host(accelerator) and not names_threads(launch)


def _warn_of_groups_across_machines(launch: Launch) -> None:
    from common.parallel import parallelism_config

    if across := parallelism_config.across_machines(launch.degrees, launch.num_machines):
        logger.warning(across)


def _name_device(launch: Launch, is_sharded_on_cpu: bool) -> None:
    """Sets the device of Accelerate and DeepSpeed in the environment, and a GPU's precision of float32 matmuls."""
    if is_sharded_on_cpu:
        from common.parallel import sharding

        sharding.prepare_rehearsal(launch.mode)
    elif runs_on_cpu(launch):
        # Read by Accelerate when it creates its state: CPU, and gloo instead of NCCL. Without it, the processes of a
        # MULTI_GPU launch on a machine without a GPU are not connected, and each is a separate run.
        os.environ["ACCELERATE_USE_CPU"] = "true"
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # otherwise DeepSpeed warns at import that it looked for a GPU
    elif torch.cuda.is_available():
        # TF32 matmuls: float32 range, 10-bit mantissa, several times faster. Mixed precision leaves some matmuls in
        # float32 too, such as those of a recurrence. NVIDIA_TF32_OVERRIDE=0 turns TF32 off.
        torch.set_float32_matmul_precision("high")


def _check_what_runs(launch: Launch, accelerator: Accelerator) -> None:
    asked = f"{launch.source} asks for"
    runs = running_mode(accelerator)
    # A single process of DDP has nothing to reduce, and Accelerate may report its mode as plain.
    if runs != launch.mode and not (launch.num_processes == 1 and {runs, launch.mode} <= {"plain", "DDP"}):
        raise UserError(f"{asked} {launch.mode}, but {runs} would run on {accelerator.device.type}")
    if accelerator.num_processes != launch.num_processes:
        here = accelerator.num_processes
        raise UserError(f"{asked} {launch.num_processes} connected processes, but this one sees {here}")
    if accelerator.mixed_precision != launch.mixed_precision:
        runs = accelerator.mixed_precision
        raise UserError(f"{asked} mixed precision {launch.mixed_precision}, but {runs} would run")


def share_of_cores() -> int:
    """Returns the number of cores per process of this host: the usable cores, divided by the number of processes."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else sys.maxsize  # not on macOS
    cores = min(allowed, psutil.cpu_count(logical=False) or os.cpu_count() or 1)
    limit = Path("/sys/fs/cgroup/cpu.max")  # limit of a container: CPU microseconds per period
    quota, period = limit.read_text().split() if limit.is_file() else ("max", "1")
    cores = cores if quota == "max" else min(cores, int(quota) // int(period))
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))


def name_interface() -> None:
    """Sets gloo's network interface to an interface that reaches the main machine, unless the user has set it.

    It is set only with several machines. By default, gloo uses the address of the host's name, which on many systems is
    a loopback address.
    """
    if int(os.environ.get("LOCAL_WORLD_SIZE", 1)) == started_world_size() or "GLOO_SOCKET_IFNAME" in os.environ:
        return
    family, kind, _, _, address = socket.getaddrinfo(os.environ["MASTER_ADDR"], 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # UDP: sends nothing, but selects the route
        mine = probe.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        if mine in [interface.address.split("%")[0] for interface in addresses]:
            os.environ["GLOO_SOCKET_IFNAME"] = name


def seed_everything(seed: int, accelerator: Accelerator | None = None) -> None:
    """Seeds Python, numpy and torch: equal on all ranks without `accelerator`, different (for dropout) with it.

    The ranks of a tensor group compute the same values, so they get the same seed.
    """
    set_seed(seed + (0 if accelerator is None else accelerator.process_index // running().tensor))
