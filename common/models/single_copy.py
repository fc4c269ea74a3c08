"""Which processes build the weights: all, or with FSDP2 only the main process, which then decides for the others."""

from collections.abc import Callable
from typing import Any

from accelerate import PartialState
from accelerate.state import AcceleratorState, is_initialized
from accelerate.utils import DistributedType, broadcast_object_list

from common.parallel.liveness import wait_for_all


def has_one_copy() -> bool:
    """Whether only the main process makes the weights: FSDP2 with `fsdp_cpu_ram_efficient_loading`."""
    if not is_initialized() or AcceleratorState().distributed_type != DistributedType.FSDP:
        return False
    return AcceleratorState().fsdp_plugin.cpu_ram_efficient_loading


_are_imagined = False


def imagine_weights() -> None:
    """From here on a model that this process makes has none, whatever the mode."""
    global _are_imagined
    _are_imagined = True


def are_imagined() -> bool:
    """Whether no model of this process has weights."""
    return _are_imagined


def holds_weights() -> bool:
    """Whether a model that this process makes has weights; else it is one of the `meta` device."""
    return not _are_imagined and (not has_one_copy() or PartialState().is_main_process)


def decided_once(decide: Callable[[], Any]) -> Any:
    """What `decide` returns; where only the main process has the weights to decide by, what it returned there."""
    if not has_one_copy():
        return decide()
    decided = [decide() if holds_weights() else None]
    wait_for_all()  # however long the main process read the weights
    return broadcast_object_list(decided)[0]
