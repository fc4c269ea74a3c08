"""Private names and overwritten functions of DeepSpeed. Tested with 0.19.8.

DeepSpeed's public `safe_get_local_fp32_param` and `safe_get_local_optimizer_state` cannot be used. They support only
ZeRO-3 (AssertionError otherwise). They raise KeyError before the first step, but a resumed run must set the optimizer
state then. They also copy to the device.
"""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from common.internals.library import private

# The attributes with the groups of parameters, and with this rank's float32 partition of each group.
ZERO_NAMES = (
    ("fp16_groups", "fp32_partitioned_groups_flat"),  # ZeRO-3
    ("bit16_groups", "single_partition_of_fp32_groups"),  # ZeRO-2, and ZeRO-1 except in bf16
    ("bf16_groups", "fp32_groups_flat_partition"),  # BF16_Optimizer: ZeRO-1 in bf16
)


def is_zero(optimizer: Any) -> bool:
    """Returns whether an optimizer is a ZeRO optimizer. Needs one of the attributes in ZERO_NAMES."""
    return any(hasattr(optimizer, groups) for groups, _ in ZERO_NAMES)


def is_zero3(zero: Any) -> bool:
    """Returns whether a ZeRO optimizer partitions each parameter (stage 3). Needs `fp16_partitioned_groups`."""
    return hasattr(zero, "fp16_partitioned_groups")


def zero_groups(zero: Any) -> Iterator[tuple[list[torch.Tensor], torch.Tensor]]:
    """Yields each group of parameters of a ZeRO optimizer, and this rank's float32 partition of it."""
    groups, partitions = next(names for names in ZERO_NAMES if hasattr(zero, names[0]))
    return zip(getattr(zero, groups), getattr(zero, partitions), strict=True)


class Fragment(NamedTuple):
    """The part of a parameter in this rank's partition."""

    offset: int  # in the partition
    numel: int
    start: int  # in the flattened parameter


def zero12_fragment(parameter: Any) -> Fragment | None:
    """Returns the part of a parameter that is in this rank's partition under ZeRO-1 and 2; None if no part is.

    Needs `parameter._hp_mapping`; fails with AttributeError without it.
    """
    mapping = parameter._hp_mapping
    if mapping is None:
        return None
    address = mapping.hp_fragment_address
    return Fragment(address.start, address.numel, mapping.lp_fragment_address.start)


def copy_master_weights(zero: Any) -> None:
    """Copies a ZeRO optimizer's float32 master weights into the weights of the forward and backward.

    Needs `update_lp_params` (ZeRO-1 and 2), or `_reassign_or_swap_out_partitioned_parameters` (ZeRO-3).
    """
    if not is_zero3(zero):
        zero.update_lp_params()
        return
    zero.empty_partition_cache()  # earlier forward passes have all-gathered the previous weights
    for index in range(len(zero.fp16_groups)):
        zero._reassign_or_swap_out_partitioned_parameters(index)
    if zero.persistent_parameters:  # small parameters that every rank keeps unsharded
        zero.persistent_parameters[0].all_gather(zero.persistent_parameters)


def replay_steps(cpu_adam: Any) -> None:
    """Restores the powers of beta in DeepSpeed's CPU Adam, which its C++ code multiplies by beta in each step.

    Needs `ds_opt_adam.adam_update` and `opt_id`. Only repeating all steps gives the same powers: if the step number
    jumps, the C++ code computes `pow(beta, step)`, which differs in the last bit (at step 10, for example). A step
    without elements takes 0.65 microseconds: 0.07 s for 100,000 updates.
    """
    group, nothing = cpu_adam.param_groups[0], [torch.zeros(0)] * 4
    settings = (group["lr"], *group["betas"], group["eps"], group["weight_decay"], group["bias_correction"])
    for step in range(1, 1 + max((state["step"] for state in cpu_adam.state.values()), default=0)):
        cpu_adam.ds_opt_adam.adam_update(cpu_adam.opt_id, step, *settings, *nothing)


def silence_memory_report() -> None:
    """Keeps the bf16 optimizer of ZeRO-1 from printing eighteen lines about memory.

    Overwrites `deepspeed.runtime.bf16_optimizer.see_memory_usage`; raises UserError if it does not exist.
    """
    private("deepspeed.runtime.bf16_optimizer", "see_memory_usage")
    import deepspeed.runtime.bf16_optimizer

    deepspeed.runtime.bf16_optimizer.see_memory_usage = lambda *_, **__: None


def measure_cpu_once() -> None:
    """Keeps the result of `cpuinfo.get_cpu_info`: it takes over a second, and DeepSpeed calls it up to three times."""
    import cpuinfo

    if not hasattr(cpuinfo.get_cpu_info, "cache_info"):
        cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)


def build_without_debug_symbols(builder: Any) -> None:
    """Removes -g from the compiler flags of an extension, because debug symbols take a third of the build time.

    Overwrites `cxx_args` of the builder.
    """
    flags = [flag for flag in builder.cxx_args() if flag != "-g"]
    builder.cxx_args = lambda: flags
