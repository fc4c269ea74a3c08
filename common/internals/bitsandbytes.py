"""Private names of bitsandbytes, and its attributes that are overwritten. Tested with 0.50.2."""

from typing import Any

from common.internals.library import private


def use_own_manager(optimizer: Any) -> None:
    """Sets a separate manager in an optimizer for the layers whose states differ.

    Overwrites `mng`, and creates a `GlobalOptimManager` without its constructor, which raises. The documented manager
    is global and keeps every model alive. It stores overrides by position (group, index), so the optimizer of a second
    model inherits the overrides of the first.
    """
    from bitsandbytes.optim import GlobalOptimManager

    optimizer.mng = GlobalOptimManager.__new__(GlobalOptimManager)
    private(GlobalOptimManager, "initialize")(optimizer.mng)


def keep_packing(module: Any) -> None:
    """Keeps an evaluation on a CPU from repacking a 4-bit weight, because the new format has no gradient in 0.50.

    Overwrites `support_avx512bf16_for_cpu` of the layer; older versions lack it, and never repack.
    """
    if hasattr(module, "support_avx512bf16_for_cpu"):
        module.support_avx512bf16_for_cpu = False
