"""Completes autocast, DeepSpeed and FSDP2 in bf16 and fp16: matmuls of experts, inputs, batch norms."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MethodType
from typing import Any

import torch
from accelerate.state import AcceleratorState, is_initialized
from accelerate.utils import DistributedType
from torch import nn
from transformers import PreTrainedModel

from common.internals.torch import replace_parameters

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
# Transformers' MoE experts use these; the second, if torch's own cannot run. Autocast supports neither.
GROUPED_PRODUCTS = (("aten", "_grouped_mm"), ("transformers", "grouped_mm_fallback"))


def _teach_autocast() -> list[torch.library.Library]:
    """Registers autocast rules for the matmuls of experts; the returned libraries must stay alive."""
    libraries = []
    for namespace, name in GROUPED_PRODUCTS:
        libraries.append(torch.library.Library(namespace, "IMPL"))
        for device_type in ("cpu", "cuda"):

            def product(*args: Any, namespace=namespace, name=name, device_type=device_type, **kwargs: Any) -> Any:
                dtype = torch.get_autocast_dtype(device_type)
                args = [x.to(dtype) if torch.is_tensor(x) and x.dtype == torch.float32 else x for x in args]
                with torch.autocast(device_type, enabled=False):
                    return getattr(getattr(torch.ops, namespace), name)(*args, **kwargs)

            libraries[-1].impl(name, product, f"Autocast{device_type.upper()}")
    return libraries


_LIBRARIES = _teach_autocast()


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


def narrow_dtype() -> torch.dtype | None:
    """Returns the 16-bit dtype of autocast or FSDP2; None without, and under DeepSpeed, which casts the full model."""
    if not is_initialized() or is_deepspeed():
        return None
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(AcceleratorState().mixed_precision)


def without_autocast(device: torch.device) -> AbstractContextManager:
    """Returns a context without autocast, for code that selects its own dtypes."""
    is_there = torch.amp.is_autocast_available(device.type)
    return torch.autocast(device.type, enabled=False) if is_there else nullcontext()


@contextmanager
def weights_cast_once(keeps_copies: bool) -> Iterator[None]:
    """Makes autocast keep its casts of the weights between forwards with the same weights, in the block.

    Without this, or without `keeps_copies`, autocast drops the casts at the end of each forward. Recomputation of
    activations frees them even earlier, and is used if memory is short.
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


def follow_precision(model: PreTrainedModel) -> None:
    """Adapts a bare model's inputs and batch norms to weights in bf16 or fp16, as under DeepSpeed and FSDP2."""
    model.register_forward_pre_hook(_narrow_inputs, with_kwargs=True)
    for module in model.modules():
        if isinstance(module, BATCH_NORMS) and module.affine and module.track_running_stats:
            module.forward = MethodType(_normalize, module)


def _narrow_inputs(model: PreTrainedModel, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Casts floating-point inputs (images) to the dtype of the weights, if that is narrower."""

    def narrow(value: Any) -> Any:
        is_wider = torch.is_tensor(value) and value.is_floating_point() and value.itemsize > model.dtype.itemsize
        return value.to(model.dtype) if is_wider else value

    return tuple(map(narrow, args)), {name: narrow(value) for name, value in kwargs.items()}


def _normalize(norm: nn.Module, images: torch.Tensor) -> torch.Tensor:
    """Applies batch norm with weights in float32, the dtype of its running statistics: torch supports no others."""
    if norm.weight.dtype == norm.running_mean.dtype:
        return type(norm).forward(norm, images)
    wide = {name: p.to(norm.running_mean.dtype) for name, p in norm.named_parameters(recurse=False)}
    with replace_parameters(norm, wide):
        return type(norm).forward(norm, images)
