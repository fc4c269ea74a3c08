"""The partition of a model's parameters in a group of ranks, and clipping of partial gradients."""

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.distributed.tensor import DTensor

from common.internals.torch import multiply_in_place


@dataclass(frozen=True)
class Share:
    """This rank's part of a parameter, within its group of ranks."""

    shape: tuple[int, ...]  # of the full parameter
    dim: int | None = None  # partitioned dimension; None: every rank has the full parameter
    start: int = 0  # offset of this rank's part in that dimension
    sums_gradients: bool = False  # whether the full gradient is the sum of the ranks' gradients
    counts: bool = True  # whether this rank's part is included in the norm, so that each element is counted once


@dataclass
class Shares:
    """The partition of a model's parameters in a group of ranks: attribute `shares` of a partitioned model."""

    group: dist.ProcessGroup
    of: dict[str, Share] = field(default_factory=dict)  # by parameter name
    # The ranks with partial gradients, if these are not the full group.
    partial_group: dist.ProcessGroup | None = None
    layer_group: dist.ProcessGroup | None = None  # the ranks with copies or parts of the same layers; None: all ranks


def clip_shared_gradients(
    accelerator: Accelerator, model: torch.nn.Module, max_norm: float, shares: Shares
) -> torch.Tensor:
    """Implements `clip_gradients` for a partitioned model: sums partial gradients, then clips by the global norm."""
    named = {name.removeprefix("module."): p.grad for name, p in model.named_parameters() if p.grad is not None}
    local = {name: grad.to_local() if isinstance(grad, DTensor) else grad for name, grad in named.items()}
    partial = [grad for name, grad in local.items() if shares.of[name].sums_gradients]
    if partial:
        total = torch.cat([gradient.flatten() for gradient in partial]).to(accelerator.device)  # also if offloaded
        dist.all_reduce(total, group=shares.partial_group or shares.group)
        for gradient, part in zip(partial, total.split([gradient.numel() for gradient in partial]), strict=True):
            gradient.copy_(part.view_as(gradient))
    counted = [grad for name, grad in named.items() if shares.of[name].counts]
    norm = torch.nn.utils.get_total_norm(counted)  # of DTensors (FSDP2): over all ranks of their mesh
    square = (norm.full_tensor() if isinstance(norm, DTensor) else norm).to(accelerator.device).square()
    dist.all_reduce(square, group=shares.group)
    norm = square.sqrt()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1)  # as torch.nn.utils.clip_grad_norm_ does
    multiply_in_place(list(local.values()), factor.to(next(iter(local.values())).device))
    return norm
