"""Overwrites or resets the state of Accelerate. Tested with 1.15."""

from typing import Any

from common.internals.library import private


def forget_state() -> None:
    """Lets this process create a second Accelerator with different settings.

    Needs `_reset_state` of `AcceleratorState` and `GradientState`, in all versions; raises UserError without it.
    """
    from accelerate.state import AcceleratorState, GradientState

    private(AcceleratorState, "_reset_state")(True)
    private(GradientState, "_reset_state")()


def shard_without_gpu() -> None:
    """Lets Accelerate run FSDP on a CPU with gloo, which its default state does not support.

    Overwrites `PartialState.distributed_type`, because Accelerate enables FSDP only for multi-GPU types.
    """
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    PartialState().distributed_type = DistributedType.MULTI_GPU


def shard_over(accelerator: Any, mesh: Any, size: int) -> None:
    """Makes FSDP2 shard over the `size` ranks of a device mesh instead of over all ranks.

    Overwrites `device_mesh` and `parallelism_config` of the state, which `accelerator.prepare` reads.
    """
    from accelerate.parallelism_config import ParallelismConfig

    accelerator.state.device_mesh = mesh
    accelerator.state.parallelism_config = ParallelismConfig(dp_shard_size=size)
