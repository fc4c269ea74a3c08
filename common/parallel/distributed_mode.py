"""The distributed mode of a run, and descriptions of mode and precision for the run summary."""

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch.distributed.fsdp import CPUOffloadPolicy

from common.training.process_grid import running


def running_mode(accelerator: Accelerator) -> str:
    """Returns the distributed mode: plain, DDP, FSDP or DeepSpeed."""
    return {
        DistributedType.NO: "plain",
        DistributedType.MULTI_CPU: "DDP",
        DistributedType.MULTI_GPU: "DDP",
        DistributedType.FSDP: "FSDP",
        DistributedType.DEEPSPEED: "DeepSpeed",
    }.get(accelerator.distributed_type, str(accelerator.distributed_type))


def describe_mode(accelerator: Accelerator) -> str:
    """Returns the mode with its stage or sizes, and with offloaded parts, for the run summary."""
    mode = running_mode(accelerator)
    if mode == "DeepSpeed":
        zero = accelerator.deepspeed_plugin.deepspeed_config.get("zero_optimization", {})
        mode += f" ZeRO-{zero.get('stage')}"
        names = {"offload_param": "weights", "offload_optimizer": "optimizer"}
        from common.parallel.deepspeed_files import offload_devices

        for part, device in offload_devices(zero).items():
            mode += "" if device in ("none", "auto") else f", {names[part]} on {device}"
    if mode == "FSDP":
        parallel = accelerator.parallelism_config
        if parallel is not None and parallel.dp_replicate_size > 1:
            mode += f", {parallel.dp_replicate_size} copies in {parallel.dp_shard_size} shards"
        if isinstance(accelerator.state.fsdp_plugin.cpu_offload, CPUOffloadPolicy):
            mode += ", offloaded to the host"
    degrees = running()
    mode += f", {degrees.sequence} processes a sequence" if degrees.sequence > 1 else ""
    mode += f", {degrees.tensor} processes a layer" if degrees.tensor > 1 else ""
    return mode + (f", {degrees.pipeline} stages of a pipeline" if degrees.pipeline > 1 else "")


def is_sharded(accelerator: Accelerator) -> bool:
    """Returns whether a process may hold only a part of the weights."""
    return running_mode(accelerator) in ("FSDP", "DeepSpeed") or running().copies > 1


def describe_precision(accelerator: Accelerator) -> str:
    """Returns the precision of weights and matmuls, for the run summary."""
    if accelerator.mixed_precision != "no" and running_mode(accelerator) == "DeepSpeed":
        return f"{accelerator.mixed_precision} weights and products; the optimizer updates float32 copies"
    if accelerator.mixed_precision != "no":
        return f"{accelerator.mixed_precision} matrix products, float32 weights"
    dtype = str(torch.get_default_dtype()).removeprefix("torch.")
    tf32 = accelerator.device.type == "cuda" and torch.get_float32_matmul_precision() != "highest"
    return f"{dtype}, TF32 matrix products" if tf32 else dtype
