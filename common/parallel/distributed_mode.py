"""The distributed mode of a run, and descriptions of mode and precision for the run summary."""

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType

from common.training.process_grid import current_grid


def current_mode(accelerator: Accelerator) -> str:
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
    mode = current_mode(accelerator)
    if mode in ("FSDP", "DeepSpeed"):
        from common.parallel.sharding import describe_sharding

        mode += describe_sharding(accelerator)
    grid = current_grid()
    mode += f", {grid.sequence} processes a sequence" if grid.sequence > 1 else ""
    mode += f", {grid.tensor} processes a layer" if grid.tensor > 1 else ""
    return mode + (f", {grid.pipeline} stages of a pipeline" if grid.pipeline > 1 else "")


def is_sharded(accelerator: Accelerator) -> bool:
    """Returns whether a process may hold only a part of the weights."""
    return current_mode(accelerator) in ("FSDP", "DeepSpeed") or current_grid().model_parallel > 1


def describe_precision(accelerator: Accelerator) -> str:
    """Returns the precision of weights and matmuls, for the run summary."""
    if accelerator.mixed_precision != "no" and current_mode(accelerator) == "DeepSpeed":
        return f"{accelerator.mixed_precision} weights and matmuls; the optimizer updates float32 copies"
    if accelerator.mixed_precision != "no":
        return f"{accelerator.mixed_precision} matmuls, float32 weights"
    dtype = str(torch.get_default_dtype()).removeprefix("torch.")
    tf32 = accelerator.device.type == "cuda" and torch.get_float32_matmul_precision() != "highest"
    return f"{dtype}, TF32 matmuls" if tf32 else dtype
