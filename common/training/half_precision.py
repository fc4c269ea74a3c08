"""Adds to bf16 and fp16 support of autocast, DeepSpeed and FSDP2: expert matmuls, inputs and batch norms."""

from types import MethodType
from typing import Any

import torch
from transformers import PreTrainedModel

from common.internals.torch import replace_parameters
from common.training.precision import BATCH_NORMS

# Operators of transformers' MoE experts, which autocast does not support; the second is the fallback for the first.
GROUPED_MATMULS = (("aten", "_grouped_mm"), ("transformers", "grouped_mm_fallback"))


def _register_autocast_rules() -> list[torch.library.Library]:
    """Registers autocast rules for the matmuls of experts; the returned libraries must stay alive."""
    libraries = []
    for namespace, name in GROUPED_MATMULS:
        libraries.append(torch.library.Library(namespace, "IMPL"))
        for device_type in ("cpu", "cuda"):

            def matmul(*args: Any, namespace=namespace, name=name, device_type=device_type, **kwargs: Any) -> Any:
                dtype = torch.get_autocast_dtype(device_type)
                cast = [x.to(dtype) if torch.is_tensor(x) and x.dtype == torch.float32 else x for x in args]
                with torch.autocast(device_type, enabled=False):
                    return getattr(getattr(torch.ops, namespace), name)(*cast, **kwargs)

            libraries[-1].impl(name, matmul, f"Autocast{device_type.upper()}")
    return libraries


_LIBRARIES = _register_autocast_rules()


def follow_precision(model: PreTrainedModel) -> None:
    """Adapts a bare model's inputs and batch norms to bf16 or fp16 weights, which DeepSpeed and FSDP2 use."""
    model.register_forward_pre_hook(_narrow_inputs, with_kwargs=True)
    for module in model.modules():
        if isinstance(module, BATCH_NORMS) and module.affine and module.track_running_stats:
            module.forward = MethodType(_normalize, module)  # type: ignore[method-assign]  # on purpose


def _narrow_inputs(model: PreTrainedModel, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Casts floating-point inputs (images) to the dtype of the weights, if that is narrower."""

    def narrow(value: Any) -> Any:
        is_wider = torch.is_tensor(value) and value.is_floating_point() and value.itemsize > model.dtype.itemsize
        return value.to(model.dtype) if is_wider else value

    return tuple(map(narrow, args)), {name: narrow(value) for name, value in kwargs.items()}


def _normalize(norm: Any, images: torch.Tensor) -> torch.Tensor:
    """Applies batch norm with weights in float32, the dtype of its running statistics: torch supports no others."""
    if norm.weight.dtype == norm.running_mean.dtype:
        return type(norm).forward(norm, images)
    wide = {name: p.to(norm.running_mean.dtype) for name, p in norm.named_parameters(recurse=False)}
    with replace_parameters(norm, wide):
        return type(norm).forward(norm, images)
