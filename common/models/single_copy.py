"""Determines which processes build the weights: all, or with FSDP2 only the main process."""

from accelerate import PartialState
from accelerate.state import AcceleratorState

from common.process import this_process
from common.training.precision import is_fsdp


def main_builds_weights() -> bool:
    """Returns whether only the main process builds the weights: FSDP2 with `fsdp_cpu_ram_efficient_loading`."""
    return is_fsdp() and AcceleratorState().fsdp_plugin.cpu_ram_efficient_loading


def holds_weights() -> bool:
    """Returns whether a model that this process builds has weights; otherwise it is on the `meta` device."""
    return not this_process().has_fake_weights and (not main_builds_weights() or PartialState().is_main_process)
