"""Clips by the norm of the full gradient, also if a rank has only a part of the weights or of a gradient."""

import math
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.distributed.tensor import DTensor
from torch.profiler import record_function

from common.internals.torch import multiply_in_place
from common.training import token_budget


@dataclass(frozen=True)
class Share:
    """This rank's part of a parameter, within its group of ranks."""

    shape: tuple[int, ...]  # of the full parameter
    dim: int | None = None  # partitioned dimension; None: every rank has the full parameter
    start: int = 0  # offset of this rank's part in that dimension
    sums_gradients: bool = False  # whether the full gradient is the sum of the ranks' gradients
    counts: bool = True  # whether the norm includes this rank's part; it includes each element once


@dataclass
class Shares:
    """The partition of a model's parameters in a group of ranks: attribute `shares` of a partitioned model."""

    group: dist.ProcessGroup
    of: dict[str, Share] = field(default_factory=dict)  # by parameter name
    # The ranks with partial gradients, if these are not the full group.
    partial_group: dist.ProcessGroup | None = None


@record_function("optimizer")  # its name in a trace
def clip_gradients(accelerator: Accelerator, model: torch.nn.Module, max_norm: float) -> torch.Tensor | float:
    """Scales the gradients down to norm `max_norm` (0: never), and returns the norm before, equal on all ranks.

    If ranks have a part of each layer, partial gradients are summed first. This happens once per update, so no gradient
    is summed twice, for any number of micro-batches. The sum is in float32 at least, like the gradients.
    """
    token_budget.average_gradients(accelerator, model)
    max_norm = max_norm or math.inf
    shares = getattr(getattr(model, "module", model), "shares", None)
    if shares is None:
        return accelerator.clip_grad_norm_(model.parameters(), max_norm)
    named = {name.removeprefix("module."): p for name, p in model.named_parameters() if p.grad is not None}
    local = {name: _local(p.grad) for name, p in named.items()}
    partial = [local[name] for name in named if shares.of[name].sums_gradients]
    if partial:
        total = torch.cat([gradient.flatten() for gradient in partial]).to(accelerator.device)  # also if offloaded
        dist.all_reduce(total, group=shares.partial_group or shares.group)
        for gradient, part in zip(partial, total.split([one.numel() for one in partial]), strict=True):
            gradient.copy_(part.view_as(gradient))
    counted = [p.grad for name, p in named.items() if shares.of[name].counts]
    norm = torch.nn.utils.get_total_norm(counted)  # for DTensors (FSDP2), over all ranks that average them
    square = (norm.full_tensor() if isinstance(norm, DTensor) else norm).to(accelerator.device).square()
    dist.all_reduce(square, group=shares.group)
    norm = square.sqrt()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1)  # as torch.nn.utils.clip_grad_norm_ does
    multiply_in_place(list(local.values()), factor.to(next(iter(local.values())).device))
    return norm


def _local(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
