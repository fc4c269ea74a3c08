"""Configures FSDP2 and DeepSpeed, also without a GPU. `deepspeed_files` and `deepspeed_flags` resolve the settings."""

import argparse
import dataclasses
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import psutil
import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DeepSpeedPlugin
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy

from common.internals.accelerate_state import shard_over, shard_without_gpu
from common.parallel.deepspeed_files import offload_devices
from common.parallel.extensions import build_extensions
from common.parallel.launch import Launch, runs_on_cpu
from common.training.process_grid import ProcessGrid


def names_threads(launch: Launch) -> bool:
    """Returns whether the user set the threads per process. If not, the launcher sets 1 for several processes."""
    return "num_cpu_threads_per_process" in launch.given or "OMP_NUM_THREADS" in launch.environment


def share_of_cores() -> int:
    """Returns the number of cores per process on this host: usable physical cores / processes, at least 1."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else sys.maxsize  # not on macOS
    cores = min(allowed, psutil.cpu_count(logical=False) or os.cpu_count() or 1)
    limit = Path("/sys/fs/cgroup/cpu.max")  # limit of a container: CPU microseconds per period
    quota, period = limit.read_text().split() if limit.is_file() else ("max", "1")
    cores = cores if quota == "max" else min(cores, int(quota) // int(period))
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))


class ShardedLaunch:
    """A launch of FSDP2 or DeepSpeed. Its methods are called in the order of their definition.

    Attributes:
        options: arguments of `Accelerator`.
    """

    def __init__(self, launch: Launch, args: argparse.Namespace):
        self.launch, self.max_grad_norm = launch, args.max_grad_norm
        self.threads = share_of_cores()  # before Accelerate may bind each process to some cores
        self.options: dict[str, Any] = {}
        if runs_on_cpu(launch):
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
            os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"  # also if there is a GPU, and the config sets use_cpu
            # If ACCELERATE_USE_CPU is true, Accelerate drops FSDP and DeepSpeed. If it is false, and there is no GPU,
            # Accelerate selects no backend, so `connect` passes gloo.
            os.environ["ACCELERATE_USE_CPU"] = "false"
            if launch.mode == "DeepSpeed":
                build_extensions([])  # for DeepSpeed's collectives, which need it when the processes connect
        if launch.mode == "DeepSpeed":
            from common.parallel.deepspeed_flags import settle_deepspeed

            config = launch.deepspeed_config
            self.settled = settle_deepspeed(config, args, launch.mixed_precision, launch.grid)
            # Otherwise Accelerate would apply or reject launcher settings, which `check_launch` has already checked.
            os.environ.pop("ACCELERATE_CONFIG_DS_FIELDS", None)
            os.environ["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] = "1"
            self.options["deepspeed_plugin"] = DeepSpeedPlugin(hf_ds_config=self.settled.config)

    def connect(self) -> None:
        """Lets Accelerate shard on a CPU over gloo; the state that it creates by default does not support this."""
        if runs_on_cpu(self.launch):
            PartialState(backend="gloo")
            if self.launch.mode == "FSDP":
                shard_without_gpu()

    def configure(self, accelerator: Accelerator) -> None:
        """Configures FSDP2 or DeepSpeed, and prints DeepSpeed's final settings."""
        shard_over_peers(accelerator, self.launch.grid)
        configure_plugins(accelerator, self.max_grad_norm)
        if updates_on_host(accelerator) and not names_threads(self.launch):
            torch.set_num_threads(self.threads)  # also for DeepSpeed's CPU Adam, which uses torch's OpenMP
        if self.launch.mode == "DeepSpeed":
            from common.parallel.deepspeed_flags import describe_settled

            config = self.launch.deepspeed_config
            source = config if isinstance(config, str) else self.launch.source
            accelerator.print(describe_settled(source, self.settled), flush=True)
            idle = [f"no effect here: {', '.join(self.settled.idle)}"] if self.settled.idle else []
            for warning in [*idle, *self.settled.risky] if accelerator.is_main_process else []:
                warnings.warn(f"{source}: {warning}", stacklevel=3)


def describe_sharding(accelerator: Accelerator) -> str:
    """Returns ZeRO's stage or the sizes of FSDP2, and the offloaded parts, for the run summary."""
    if accelerator.deepspeed_plugin is not None:
        zero = accelerator.deepspeed_plugin.deepspeed_config.get("zero_optimization", {})
        names = {"offload_param": "weights", "offload_optimizer": "optimizer"}
        devices = {names[part]: device for part, device in offload_devices(zero).items()}
        offloaded = [f", {name} on {device}" for name, device in devices.items() if device not in ("none", "auto")]
        return f" ZeRO-{zero.get('stage')}{''.join(offloaded)}"
    text, sizes = "", accelerator.parallelism_config
    if sizes is not None and sizes.dp_replicate_size > 1:
        text = f", {sizes.dp_replicate_size} copies in {sizes.dp_shard_size} shards"
    return text + (", offloaded to the host" if updates_on_host(accelerator) else "")


def updates_on_host(accelerator: Accelerator) -> bool:
    """Returns whether the optimizer state is offloaded, so that the CPU computes the updates."""
    if accelerator.deepspeed_plugin is not None:
        zero = accelerator.deepspeed_plugin.deepspeed_config.get("zero_optimization", {})
        return offload_devices(zero)["offload_optimizer"] != "none"
    fsdp = getattr(accelerator.state, "fsdp_plugin", None)
    return fsdp is not None and isinstance(fsdp.cpu_offload, CPUOffloadPolicy)


def shard_over_peers(accelerator: Accelerator, grid: ProcessGrid) -> None:
    """With tensor parallelism, lets FSDP2 shard over the ranks with the same part of each layer, not over all ranks."""
    if grid.tensor == 1 or getattr(accelerator.state, "fsdp_plugin", None) is None:
        return
    # This mesh has the sizes of Accelerate's own mesh, which is not used, because Accelerate's tensor parallelism would
    # partition the model again.
    sizes, names = (grid.data_parallel, grid.tensor), ("dp_shard_cp", "tp")
    mesh = init_device_mesh(accelerator.device.type, sizes, mesh_dim_names=names)
    shard_over(accelerator, mesh["dp_shard_cp"], grid.data_parallel)


def configure_plugins(accelerator: Accelerator, max_grad_norm: float) -> None:
    """Sets the recipe's values in the plugins of FSDP2 and DeepSpeed, before `accelerator.prepare`."""
    fsdp = getattr(accelerator.state, "fsdp_plugin", None)
    if accelerator.device.type == "cpu" and fsdp is not None and isinstance(fsdp.cpu_offload, CPUOffloadPolicy):
        fsdp.cpu_offload = CPUOffloadPolicy(pin_memory=False)  # pinned memory is for copies to a GPU
    if fsdp is not None and fsdp.mixed_precision_policy is not None:
        # By default, Accelerate reduces gradients in the compute dtype, and casts outputs and loss to it. No output is
        # cast to float32 instead, because the policy applies to every layer, whose hidden states stay in the compute
        # dtype; the loss is float32 without a cast.
        sums = {"reduce_dtype": torch.float32, "output_dtype": None}
        fsdp.mixed_precision_policy = dataclasses.replace(fsdp.mixed_precision_policy, **sums)
    if accelerator.deepspeed_plugin is not None:
        from common.internals.deepspeed import silence_memory_report  # imported here, because most runs do not need it

        # DeepSpeed calls collectives by names that torch 2.13 deprecates, with a warning per call.
        warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
        config = accelerator.deepspeed_plugin.deepspeed_config
        build_extensions(offload_devices(config.get("zero_optimization", {})).values())
        config["train_micro_batch_size_per_gpu"] = 1  # DeepSpeed requires a number; nothing is divided by it
        if config.get("gradient_clipping", "auto") == "auto":
            # Never 0: DeepSpeed would then not compute the norm, and would not detect a non-finite gradient.
            config["gradient_clipping"] = max_grad_norm or 1e30
        # Gradients are summed in float32 in every precision, over micro-batches and over ranks.
        config["data_types"], config["communication_data_type"] = {"grad_accum_dtype": "fp32"}, "fp32"
        # With float32 sums, ZeRO-1 in bf16 uses DeepSpeed's BF16_Optimizer. By default it keeps a second copy of each
        # gradient, in bf16, and prints eighteen lines about memory.
        config.setdefault("bf16", {})["immediate_grad_update"] = True
        silence_memory_report()
