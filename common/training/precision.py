"""The precision of a run's matmuls, and autocast."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from accelerate.state import AcceleratorState, is_initialized
from accelerate.utils import DistributedType
from torch import nn

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Returns autocast's dtype for matmuls on the device; None if autocast is off or not available."""
    if torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    return None


def is_deepspeed() -> bool:
    """Returns whether DeepSpeed runs: it casts the full model, and keeps float32 copies of the trained weights."""
    return is_initialized() and AcceleratorState().distributed_type == DistributedType.DEEPSPEED


def is_fsdp() -> bool:
    """Returns whether FSDP2 runs: it casts each layer's parameters and inputs; autocast leaves norms in float32."""
    return is_initialized() and AcceleratorState().distributed_type == DistributedType.FSDP


def without_autocast(device: torch.device) -> AbstractContextManager:
    """Returns a context without autocast, for code that selects its own dtypes."""
    is_available = torch.amp.is_autocast_available(device.type)
    return torch.autocast(device.type, enabled=False) if is_available else nullcontext()


@contextmanager
def weights_cast_once(keeps_copies: bool) -> Iterator[None]:
    """Makes autocast keep its 16-bit copies of the weights between forwards, if `keeps_copies`.

    With activation recomputation they are not kept, because it is used if memory is short.
    """
    if not keeps_copies:
        yield
        return
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
