"""Private names and overwritten attributes of bitsandbytes. Tested with 0.50.2."""

from typing import Any

from common.internals.library import private


def use_own_manager(optimizer: Any) -> None:
    """Gives an optimizer a separate manager for overrides, such as 32-bit states for some layers.

    Overwrites `mng`, and creates a `GlobalOptimManager` without its constructor, which always raises. The documented
    manager is global and keeps every model alive. It stores overrides by position (group, index), so the optimizer of
    a second model would inherit the overrides of the first.
    """
    from bitsandbytes.optim import GlobalOptimManager

    optimizer.mng = GlobalOptimManager.__new__(GlobalOptimManager)
    private(GlobalOptimManager, "initialize")(optimizer.mng)
