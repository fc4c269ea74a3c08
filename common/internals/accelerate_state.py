"""State of Accelerate that is overwritten. Tested with 1.15."""

from typing import Any

from common.internals.library import private


def forget_state() -> None:
    """Lets this process create a second Accelerator with different settings.

    Needs `AcceleratorState._reset_state` and `GradientState._reset_state`, in all versions; raises UserError without.
    """
    from accelerate.state import AcceleratorState, GradientState

    private(AcceleratorState, "_reset_state")(True)
    private(GradientState, "_reset_state")()


def shard_without_gpu() -> None:
    """Lets Accelerate run FSDP on a CPU over gloo; the state that it creates by default does not support this.

    Overwrites `PartialState.distributed_type`. Accelerate checks for FSDP only if the type is one of multiple GPUs.
    """
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    PartialState().distributed_type = DistributedType.MULTI_GPU


def shard_over(accelerator: Any, mesh: Any, size: int) -> None:
    """Lets FSDP2 shard over the ranks of a device mesh, `size` ranks; by default it shards over all ranks.

    Overwrites `device_mesh` and `parallelism_config` of the state, which its `prepare` reads.
    """
    from accelerate.parallelism_config import ParallelismConfig

    accelerator.state.device_mesh = mesh
    accelerator.state.parallelism_config = ParallelismConfig(dp_shard_size=size)
