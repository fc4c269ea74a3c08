"""Determines which processes build the weights: all, or with FSDP2 only the main process."""

from accelerate import PartialState
from accelerate.state import AcceleratorState

from common.training.precision import is_fsdp

_are_imagined = False


def imagine_weights() -> None:
    """Makes this process build all further models without weights, on the `meta` device, in any mode."""
    global _are_imagined
    _are_imagined = True


def are_imagined() -> bool:
    """Returns whether `imagine_weights` was called, so that the models of this process have no weights."""
    return _are_imagined


def has_one_copy() -> bool:
    """Returns whether only the main process builds the weights: FSDP2 with `fsdp_cpu_ram_efficient_loading`."""
    return is_fsdp() and AcceleratorState().fsdp_plugin.cpu_ram_efficient_loading


def holds_weights() -> bool:
    """Returns whether a model that this process builds has weights; otherwise it is on the `meta` device."""
    return not _are_imagined and (not has_one_copy() or PartialState().is_main_process)
