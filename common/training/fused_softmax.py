"""The softmax of `linear_cross_entropy` on a GPU: one compiled function instead of ten passes over the logits."""

import sys
from functools import cache
from typing import Any

import torch
from torch import Tensor

from common.training.compilation import can_compile

# Logits of a chunk: 0.5 GiB in bf16. Each chunk reads and writes the float32 gradient of the whole weight, so chunks of
# 512 rows would take longer for that than for their matmuls.
CHUNK_LOGITS = 2**28


def cross_entropy_gradient_(
    logits: Tensor,
    targets: Tensor,
    row_weights: Tensor | None,
    scale: float,
    softcap: float | None,
    wants_gradient: bool,
    vocabulary: None,
) -> Tensor:
    """Returns the losses (n,), in float32 at least, of the rows of a matmul's output `logits` (n, V).

    With `wants_gradient` it overwrites `logits` with the gradient of their sum, weighted by `row_weights` (n,) if any.
    scale, softcap: as in `linear_cross_entropy`; vocabulary: always None, because it is not partitioned here.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32)) * scale
    derivative: Tensor | float = 1.0
    if softcap is not None:
        tanh = torch.tanh(wide / softcap)
        wide, derivative = tanh * softcap, 1 - tanh * tanh
    row_max = wide.amax(1, keepdim=True)
    normalizer = row_max + (wide - row_max).exp().sum(1, keepdim=True).log()
    # Not a gather: torch 2.11's compiled code for CPUs runs it after `logits` is overwritten.
    is_target = torch.arange(logits.shape[1], device=logits.device) == targets.unsqueeze(1)
    losses = normalizer.squeeze(1) - torch.where(is_target, wide, 0).sum(1)
    if wants_gradient:
        gradient = ((wide - normalizer).exp() - is_target.to(wide.dtype)) * derivative * scale
        logits.copy_(gradient if row_weights is None else gradient * row_weights.unsqueeze(1))
    return losses


def choose(weight: Tensor, chunk_rows: int) -> tuple[Any, int]:
    """Returns this module if torch.compile works here, else None; and the maximum rows of a chunk."""
    if not can_compile("cuda"):
        return None, chunk_rows
    return sys.modules[__name__], max(chunk_rows, CHUNK_LOGITS // len(weight))


@cache
def compiled() -> Any:
    """Returns the compiled `cross_entropy_gradient_`, for any number of rows."""
    return torch.compile(cross_entropy_gradient_, dynamic=True)


def add_product(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """Returns `total + a @ b` in float32, added in place and without rounding the product of 16-bit matrices."""
    if total is None:
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
