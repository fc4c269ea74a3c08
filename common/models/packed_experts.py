"""The stacked experts of a mixture in 4 bits: dequantised while their layer computes, and again in its backward pass.

A parameter of all experts of a layer is quantised as it is read. bitsandbytes has no layer for it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from common.models.packed import num_bytes, pack, unpack


def is_of_experts(name: str, weight: Tensor) -> bool:
    """Returns whether a parameter stacks the weights of all experts of a layer."""
    shape = getattr(weight, "ds_shape", weight.shape)  # the full shape if ZeRO-3 has partitioned the weight
    return len(shape) == 3 and ".experts." in f".{name}"


def quantize(weight: Tensor) -> Tensor:
    """Returns the packed bytes of stacked experts; blocks of 64 weights do not span two experts of usual sizes."""
    from bitsandbytes.functional import quantize_4bit

    return pack(*quantize_4bit(weight, quant_type="nf4", compress_statistics=True))


@torch.no_grad()
def round_as_quantized(model: nn.Module) -> None:
    """Replaces stacked experts with the values that they have after `quantize`, in place."""
    for name, weight in model.named_parameters():
        if is_of_experts(name, weight):
            weight.copy_(unpack(quantize(weight), weight.shape, weight.dtype))


def _note(module: Any, name: str, shape: torch.Size) -> None:
    vars(module).setdefault("packed_shapes", {})[name] = shape


@contextmanager
def quantized_on_load() -> Iterator[None]:
    """Makes `from_pretrained` with a 4-bit configuration quantise stacked experts too.

    Overwrites `get_quantize_ops` and `param_needs_quantization` of transformers' quantizer for the duration of the
    block.
    """
    from transformers.integrations.bitsandbytes import Bnb4bitQuantize
    from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer

    owner: Any = Bnb4BitHfQuantizer
    needs, make_operation = owner.param_needs_quantization, owner.get_quantize_ops

    class Quantize(Bnb4bitQuantize):
        def convert(self, input_dict: Any, model: Any = None, **kwargs: Any) -> Any:  # type: ignore[override]
            ((name, value),) = input_dict.items()
            if not is_of_experts(name, model.get_parameter(name)):
                return super().convert(input_dict, model=model, **kwargs)
            value = value[0] if isinstance(value, list) else value
            path, _, own_name = name.rpartition(".")
            _note(model.get_submodule(path), own_name, value.shape)
            return {name: nn.Parameter(quantize(value), requires_grad=False)}

    def also_experts(self: Any, model: Any, param_name: str, **kwargs: Any) -> bool:
        path, _, name = param_name.rpartition(".")
        weight = getattr(model.get_submodule(path), name, None)
        is_stacked = torch.is_tensor(weight) and is_of_experts(param_name, weight)
        return is_stacked or needs(self, model, param_name, **kwargs)

    owner.param_needs_quantization, owner.get_quantize_ops = also_experts, lambda self: Quantize(self)
    try:
        yield
    finally:
        owner.param_needs_quantization, owner.get_quantize_ops = needs, make_operation


def imagine(model: nn.Module) -> None:
    """Replaces the stacked experts of a model on the `meta` device with packed experts without data."""
    for path, module in model.named_modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            if is_of_experts(f"{path}.{name}", weight):
                _note(module, name, weight.shape)
                packed = torch.empty(num_bytes(weight.shape), dtype=torch.uint8, device="meta")
                module.register_parameter(name, nn.Parameter(packed, requires_grad=False))


def find(model: nn.Module) -> list[Any]:
    """Returns the modules with packed experts."""
    return [module for module in model.modules() if "packed_shapes" in vars(module)]


@contextmanager
def shown(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Context manager in which packed experts have the shapes of experts in `dtype`, as peft needs, without data."""
    held = [(module, name, getattr(module, name)) for module in find(model) for name in module.packed_shapes]
    for module, name, packed in held:
        empty = torch.empty((), dtype=dtype, device=packed.device).expand(module.packed_shapes[name])
        module.register_parameter(name, nn.Parameter(empty, requires_grad=False))
    try:
        yield
    finally:
        for module, name, packed in held:
            module.register_parameter(name, packed)


def dequantize_in_forward(model: nn.Module, dtype: torch.dtype) -> None:
    """Makes the packed experts of a model with an adapter available to their layers' forward passes, in `dtype`."""
    inner: set[int] = set()
    outer: Any
    for outer in model.modules():  # an adapter comes before the module that it wraps
        experts = outer.get_base_layer() if hasattr(outer, "get_base_layer") else outer
        if "packed_shapes" in vars(experts) and id(experts) not in inner:
            inner.add(id(experts))
            _wrap(outer, experts, dtype)


def _wrap(outer: Any, experts: Any, dtype: torch.dtype) -> None:
    """Wraps `outer.forward`. outer: the experts, or the outermost of the adapters around them."""
    original = outer.forward

    def compute(*args: Any, **kwargs: Any) -> Any:
        held = {name: getattr(experts, name) for name in experts.packed_shapes}
        try:
            for name, packed in held.items():
                weight = unpack(packed, experts.packed_shapes[name], dtype)
                experts.register_parameter(name, nn.Parameter(weight, requires_grad=False))
            return original(*args, **kwargs)
        finally:
            for name, packed in held.items():
                experts.register_parameter(name, packed)

    @wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return compute(*args, **kwargs)
        # Recomputed in the backward pass, because autograd would keep the dequantised experts of all layers until then.
        return checkpoint(compute, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    outer.forward = forward
