"""A frozen base model in 4 bits under an adapter: NF4 with double quantisation (QLoRA, arXiv:2305.14314; bitsandbytes).

64 weights of a linear layer share an 8-bit scale, and 256 scales share a float32 scale: 4.13 bits per weight.
"""

import logging
import re
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from common.errors import raise_errors
from common.internals.transformers_uncommon import float32_modules
from common.packages import find_missing
from common.training.precision import narrow_dtype

logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)  # it recommends a package that is not needed
BLOCK, BLOCK_OF_BLOCKS = 64, 256  # block sizes of bitsandbytes


def options(quantize: str | None) -> dict[str, Any]:
    """Returns the arguments of `from_pretrained` for a base with --quantize; {} without this flag."""
    if not quantize:
        return {}
    raise_errors(find_missing(f"--quantize {quantize}", "bitsandbytes"))
    from transformers import BitsAndBytesConfig  # here because this imports bitsandbytes

    return {
        "quantization_config": BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=quantize,
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=narrow_dtype() or torch.float32,
        )
    }


def keep_weights(model: nn.Module) -> None:
    """Keeps evaluations on a CPU from repacking the weights, because bitsandbytes has no gradient for that format."""
    for module in model.modules():
        if type(module).__module__.startswith("bitsandbytes."):
            from common.internals.bitsandbytes import keep_packing  # here because most runs do not need bitsandbytes

            keep_packing(module)


def find_kept(model: Any) -> list[str]:
    """Returns name patterns of the linear layers that stay unquantised: heads, and layers with tied weights.

    A head is every layer that a model has in addition to its base, such as a classifier's head. transformers' own list
    contains only the last parameter of a head, `classifier.bias`, so the head's weight would be quantised.
    model: on the `meta` device.
    """
    base, head = model.base_model, model.get_output_embeddings()
    inner = set() if base is model else set(base.modules())
    tied = {*model.all_tied_weights_keys, *model.all_tied_weights_keys.values()}
    return [
        f"^{re.escape(name)}$"
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and (module is head or f"{name}.weight" in tied or (inner and module not in inner))
    ]


def unquantize_new(model: nn.Module, new_weights: set[str]) -> set[str]:
    """Replaces quantised layers without pretrained weights (a new pooler) with linear layers; returns their names."""
    from bitsandbytes.nn import Linear4bit

    names = {name.rpartition(".")[0] for name in new_weights}
    names = {name for name in names if isinstance(model.get_submodule(name), Linear4bit)}
    for name in names:
        old: Any = model.get_submodule(name)
        new = nn.Linear(old.in_features, old.out_features, old.bias is not None, dtype=torch.float32)
        model.set_submodule(name, new.train(old.training))
    return names


def imagine(model: nn.Module, dtype: torch.dtype) -> None:
    """Replaces linear layers of a model on the `meta` device with layers that need as much memory as 4-bit layers.

    Their values are meaningless. dtype: dtype of their matmuls.
    """
    from transformers.quantizers.quantizers_utils import should_convert_module

    kept = [*find_kept(model), *float32_modules(model)]
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and should_convert_module(name, kept):
            model.set_submodule(name, _Imagined(module, dtype))


class _Imagined(nn.Linear):
    """A linear layer whose weight has the size of a 4-bit weight, and during a matmul the full size in `dtype`."""

    def __init__(self, linear: nn.Linear, dtype: torch.dtype):
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.dtype = linear.in_features, linear.out_features, dtype
        numbers = linear.weight.numel()
        size = numbers // 2 + numbers // BLOCK + 4 * (numbers // (BLOCK * BLOCK_OF_BLOCKS))
        self.weight = nn.Parameter(torch.empty(size, dtype=torch.uint8, device="meta"), requires_grad=False)
        self.bias = linear.bias

    def forward(self, rows: Tensor) -> Tensor:
        shape = self.out_features, self.in_features
        return _Product.apply(rows.to(self.dtype), shape, self.bias).to(rows.dtype)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, shape, bias):
        ctx.shape = shape
        return F.linear(rows, rows.new_empty(shape), None if bias is None else bias.to(rows.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        return gradient @ gradient.new_empty(ctx.shape), None, None
