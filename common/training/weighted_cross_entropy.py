"""A loss that is a function of all token losses, such as DPO's."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def apply_to_token_losses(
    loss_of: Callable[[Tensor], Any], loss_sum: Callable[..., Tensor], rows: Tensor, with_gradients: bool
) -> Any:
    """Returns the result of `linear_cross_entropy` with `loss_of`: the loss, and the other values that it returns.

    Args:
        loss_sum: computes the sum of the token losses, with or without gradients, weighted per row.
        rows: (N,), buffer for the token losses.
    """
    with torch.no_grad():
        loss_sum(False, rows=rows)
    if not with_gradients:
        return loss_of(rows)
    loss, *others = loss_of(rows.requires_grad_())
    (row_weights,) = torch.autograd.grad(loss, rows)
    # Normalised to a maximum of 1, so that the logits' gradients do not underflow in fp16.
    largest = F.pad(row_weights.abs(), (0, 1), value=torch.finfo(rows.dtype).tiny).amax()
    weighted = loss_sum(True, row_weights / largest) * largest
    return loss.detach() + (weighted - weighted.detach()), *(value.detach() for value in others)
