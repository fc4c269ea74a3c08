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
# Transformers computes a mixture's experts with these, the second where torch's own does not run. Autocast has neither.
GROUPED_PRODUCTS = (("aten", "_grouped_mm"), ("transformers", "grouped_mm_fallback"))


def _teach_autocast() -> list[torch.library.Library]:
    """Lets autocast choose the type of experts' products, as of all others; what is returned must stay alive."""
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
    """The type in which autocast computes matrix products on the device; None where it is off, or there is none."""
    if torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    return None


def is_deepspeed() -> bool:
    """Whether DeepSpeed runs, which casts the whole model, and keeps float32 copies of what is trained."""
    return is_initialized() and AcceleratorState().distributed_type == DistributedType.DEEPSPEED


def is_fsdp() -> bool:
    """Whether FSDP2 runs, which casts each layer's parameters and inputs where autocast leaves norms in float32."""
    return is_initialized() and AcceleratorState().distributed_type == DistributedType.FSDP


def narrow_dtype() -> torch.dtype | None:
    """The 16 bits that autocast or FSDP2 compute in; None without, and for DeepSpeed, which casts the whole model."""
    if not is_initialized() or is_deepspeed():
        return None
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(AcceleratorState().mixed_precision)


def without_autocast(device: torch.device) -> AbstractContextManager:
    """A context without autocast, for code that chooses its own dtypes."""
    is_there = torch.amp.is_autocast_available(device.type)
    return torch.autocast(device.type, enabled=False) if is_there else nullcontext()


@contextmanager
def weights_cast_once(keeps_copies: bool) -> Iterator[None]:
    """Around forwards with the same weights: autocast keeps its copies of them from one forward to the next.

    Without this, or without `keeps_copies`, it drops them at the end of each forward. Recomputation of activations
    frees them even earlier, and is asked for where memory is short.
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
    """Lets a bare model's inputs and batch norms fit weights in bf16 or fp16, as DeepSpeed and FSDP2 give them."""
    model.register_forward_pre_hook(_narrow_inputs, with_kwargs=True)
    for module in model.modules():
        if isinstance(module, BATCH_NORMS) and module.affine and module.track_running_stats:
            module.forward = MethodType(_normalize, module)


def _narrow_inputs(model: PreTrainedModel, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Casts inputs with a floating point (images) to the type of the weights, where that is narrower."""

    def narrow(value: Any) -> Any:
        is_wider = torch.is_tensor(value) and value.is_floating_point() and value.itemsize > model.dtype.itemsize
        return value.to(model.dtype) if is_wider else value

    return tuple(map(narrow, args)), {name: narrow(value) for name, value in kwargs.items()}


def _normalize(norm: nn.Module, images: torch.Tensor) -> torch.Tensor:
    """Batch norm with weights in the type of its running statistics, float32: torch takes no others."""
    if norm.weight.dtype == norm.running_mean.dtype:
        return type(norm).forward(norm, images)
    wide = {name: p.to(norm.running_mean.dtype) for name, p in norm.named_parameters(recurse=False)}
    with replace_parameters(norm, wide):
        return type(norm).forward(norm, images)
