"""Private names of Accelerate, and its state that is overwritten. Tested with 1.15."""

import argparse
from typing import Any

from common.internals.library import private


def read_launch(words: list[str]) -> tuple[argparse.Namespace, Any, set[str]]:
    """Parses the arguments of `accelerate launch`; returns settings, default config file or None, and known settings.

    Needs `accelerate.commands.launch._validate_launch_command`, the code that `accelerate launch` itself runs: 150
    lines that choose between flag, config file and default. Raises UserError without. The public
    `load_config_from_file` ignores flags, and leaves 4 to 6 settings of each shipped config undefined.
    """
    from accelerate.commands.launch import launch_command_parser

    validate = private("accelerate.commands.launch", "_validate_launch_command")
    args = launch_command_parser().parse_args(words)
    known = vars(args).keys() - {"nondefault"}  # the flags that were passed, as a set
    args, defaults, _ = validate(args)
    return args, defaults, known


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
