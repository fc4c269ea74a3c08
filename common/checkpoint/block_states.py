"""Optimizer state that does not have its parameter's shape: factored averages, and values per block of elements.

bitsandbytes keeps a scale per block of 256 consecutive elements (`absmax1`, `absmax2`), and the code book of its 8-bit
numbers (`qmap1`, `qmap2`), which is the same for each parameter.
"""

import math

import torch

from common.checkpoint.parts import Part, Piece
from common.training.adamw_8bit import BLOCK


def block_piece(name: str, value: torch.Tensor, part: Part) -> Piece:
    """Returns the piece of a state tensor `value` of this rank's part. name: "optimizer.KEY/NAME"."""
    if part.weight.shape == part.shape:
        return Piece(name, value.detach(), 0, tuple(value.shape), part.is_owner)
    if name.startswith("optimizer.absmax"):
        blocks = -(-math.prod(part.shape) // BLOCK)
        return Piece(name, value.detach(), -(-part.start // BLOCK), (blocks,), part.is_owner)
    assert name.startswith("optimizer.qmap"), f"{name} does not have the shape of its sharded parameter"
    return Piece(name, value.detach(), 0, tuple(value.shape), part.is_owner and part.start == 0)


def local_shape(key: str, shape: tuple[int, ...], part: Part) -> tuple[int, ...]:
    """Returns the shape of this rank's part of a state tensor of the full `shape`."""
    if part.weight.shape == part.shape or not key.startswith("absmax"):
        return shape
    return (-(-part.weight.numel() // BLOCK),)
