"""The softmax of `linear_cross_entropy` on a GPU: one compiled function instead of ten passes over the logits."""

from functools import cache
from typing import Any

import torch
from torch import Tensor

# Logits of a chunk: 0.5 GiB in bf16. Each chunk reads and writes the float32 gradient of the whole weight, so chunks of
# 512 rows would take longer for that than for their matmuls.
CHUNK_LOGITS = 2**28


def cross_entropy_gradient_(
    logits: Tensor, targets: Tensor, row_weights: Tensor | None, scale: float, softcap: float | None, backward: bool
) -> Tensor:
    """Returns the losses (n,), in float32 at least, of the rows of a matmul's output `logits` (n, V).

    With `backward` it overwrites `logits` with the gradient of their sum, weighted by `row_weights` (n,) if given.
    scale, softcap: as in `linear_cross_entropy`.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32)) * scale
    derivative: Tensor | float = 1.0
    if softcap is not None:
        tanh = torch.tanh(wide / softcap)
        wide, derivative = tanh * softcap, 1 - tanh * tanh
    row_max = wide.amax(1, keepdim=True)
    normalizer = row_max + (wide - row_max).exp().sum(1, keepdim=True).log()
    targets = targets.unsqueeze(1)
    losses = (normalizer - wide.gather(1, targets)).squeeze(1)
    if backward:
        is_target = torch.arange(logits.shape[1], device=logits.device) == targets
        gradient = ((wide - normalizer).exp() - is_target.to(wide.dtype)) * derivative * scale
        logits.copy_(gradient if row_weights is None else gradient * row_weights.unsqueeze(1))
    return losses


@cache
def compiled() -> Any:
    """Returns the compiled `cross_entropy_gradient_`, for any number of rows."""
    return torch.compile(cross_entropy_gradient_, dynamic=True)
