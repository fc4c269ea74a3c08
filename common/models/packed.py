"""Frozen weights in 4 bits as plain uint8 parameters, which DDP, FSDP2 and the planner treat as any other parameter.

The bytes of a weight are one tensor: the 4-bit values, float32 scales of the scales, and 8-bit scales. FSDP2 can shard
it anywhere, because it is used only after the all-gather, and mixed precision casts no integers. bitsandbytes' own
`Params4bit` would keep its scales outside the parameter, and Accelerate excludes it from sharding.
"""

import math
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

BLOCK, BLOCK_OF_BLOCKS = 64, 256  # block sizes of bitsandbytes: weights per 8-bit scale, and scales per float32 scale
BYTES_PER_WEIGHT = 1 / 2 + 1 / BLOCK + 4 / (BLOCK * BLOCK_OF_BLOCKS)


def _sizes(num_weights: int) -> tuple[int, int, int]:
    """Returns the bytes of the 4-bit values (padded to a multiple of 4), of the float32 numbers and of the scales."""
    scales = -(-num_weights // BLOCK)
    values = -(-num_weights // 8) * 4
    return values, 4 * (1 + -(-scales // BLOCK_OF_BLOCKS)), scales


def num_bytes(shape: torch.Size) -> int:
    """Returns the bytes of a packed weight of this shape: 0.516 per element."""
    return sum(_sizes(math.prod(shape)))


def pack(values: Tensor, state: Any) -> Tensor:
    """Returns a weight that bitsandbytes has quantised, in one uint8 tensor. state: its `QuantState`."""
    padded, _, _ = _sizes(state.shape.numel())
    values = values.reshape(-1)
    padding = values.new_zeros(padded - len(values))
    numbers = torch.cat([state.offset.reshape(1), state.state2.absmax]).view(torch.uint8)
    return torch.cat([values, padding, numbers, state.absmax])


@cache
def _scale_values(device: torch.device) -> Tensor:
    """Returns the 256 values of 8-bit scales. bitsandbytes caches them on one device, and copies them to others."""
    from bitsandbytes.functional import create_dynamic_map

    return create_dynamic_map().to(device)


@torch.library.custom_op("recipes::unpack_nf4", mutates_args=())
def unpack(packed: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Returns the dequantised weight (shape), by one operator: compiled layers call it, and plans allocate its result.

    Without data if the packed bytes have none.
    """
    from bitsandbytes import functional  # here because plans never dequantise, and it takes seconds

    size = torch.Size(shape)
    values, numbers, scales = packed.split(_sizes(size.numel()))
    offset, *_ = numbers = numbers.view(torch.float32)
    options: Any = {"code": _scale_values(packed.device), "blocksize": BLOCK_OF_BLOCKS}
    absmax = functional.dequantize_blockwise(scales, absmax=numbers[1:], **options).add_(offset)
    state = functional.QuantState(absmax, size, blocksize=BLOCK, quant_type="nf4", dtype=dtype)
    return functional.dequantize_4bit(values[: -(-size.numel() // 2), None], state)


@unpack.register_fake
def _(packed: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return packed.new_empty(shape, dtype=dtype)


class PackedLinear(nn.Linear):
    """A linear layer with a frozen 4-bit weight, dequantised for each matmul and again for its backward pass.

    Args:
        dtype: dtype of the matmul; the output has the dtype of the input.
        packed: result of `pack`; None: without data, on the `meta` device.
    """

    def __init__(self, linear: nn.Linear, dtype: torch.dtype, packed: Tensor | None = None):
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.dtype = linear.in_features, linear.out_features, dtype
        if packed is None:
            packed = torch.empty(num_bytes(self.shape), dtype=torch.uint8, device="meta")
        self.packed = nn.Parameter(packed, requires_grad=False)
        self.bias = linear.bias
        self.train(linear.training)

    @property
    def shape(self) -> torch.Size:
        """The shape of the dequantised weight."""
        return torch.Size((self.out_features, self.in_features))

    @property
    def weight(self) -> Tensor:  # type: ignore[override]  # not a parameter
        """The dequantised weight, a new tensor in each access. peft reads its device, and for DoRA its values."""
        return unpack(self.packed, self.shape, self.dtype)

    def forward(self, rows: Tensor) -> Tensor:
        return _Product.apply(rows.to(self.dtype), self.packed, self.shape, self.bias).to(rows.dtype)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, packed, shape, bias):
        ctx.save_for_backward(packed)
        ctx.shape = shape
        return F.linear(rows, unpack(packed, shape, rows.dtype), None if bias is None else bias.to(rows.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        (packed,) = ctx.saved_tensors
        return gradient @ unpack(packed, ctx.shape, gradient.dtype), None, None, None


def packed_shapes(model: nn.Module) -> Iterator[torch.Size]:
    """Yields the shape of each packed weight."""
    for module in model.modules():
        if isinstance(module, PackedLinear):
            yield module.shape
        yield from vars(module).get("packed_shapes", {}).values()  # `models.packed_experts`


def count_packed(model: nn.Module) -> int:
    """Returns the number of weights in 4 bits."""
    return sum(shape.numel() for shape in packed_shapes(model))


def count_all(model: nn.Module) -> int:
    """Returns the number of elements of all parameters; a packed weight counts as dequantised, not as its bytes."""
    sizes = (getattr(p, "ds_numel", p.numel()) for p in model.parameters())
    return sum(sizes) + sum(shape.numel() - num_bytes(shape) for shape in packed_shapes(model))
