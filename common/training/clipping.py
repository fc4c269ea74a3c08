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
    """What this rank has of a parameter, among the ranks of its group."""

    shape: tuple[int, ...]  # of the whole
    dim: int | None = None  # along which it is cut; None: every rank has the whole
    start: int = 0  # of this rank's part, along that dimension
    sums_gradients: bool = False  # whether each rank's gradient is a part of it, and their sum the whole
    counts: bool = True  # whether this rank's part counts in a norm, which counts each element once


@dataclass
class Shares:
    """How a model's parameters are shared in a group of ranks; a model that is has them as its `shares`."""

    group: dist.ProcessGroup
    of: dict[str, Share] = field(default_factory=dict)  # by the parameters' names
    # Those of the group that have parts of gradients, where these are not all.
    partial_group: dist.ProcessGroup | None = None


@record_function("optimizer")  # its name in a trace
def clip_gradients(accelerator: Accelerator, model: torch.nn.Module, max_norm: float) -> torch.Tensor | float:
    """Scales the gradients down to `max_norm` (0: not at all), and returns the norm before; the same on all ranks.

    Where ranks have a part of each layer, it first sums what is a part of a gradient: once an update, so that nothing
    is summed twice however many micro-batches there are. In float32 at least, as gradients are.
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
        total = torch.cat([gradient.flatten() for gradient in partial]).to(accelerator.device)  # offloaded ones too
        dist.all_reduce(total, group=shares.partial_group or shares.group)
        for gradient, part in zip(partial, total.split([one.numel() for one in partial]), strict=True):
            gradient.copy_(part.view_as(gradient))
    counted = [p.grad for name, p in named.items() if shares.of[name].counts]
    norm = torch.nn.utils.get_total_norm(counted)  # of DTensors, those of FSDP2, over all that average them
    square = (norm.full_tensor() if isinstance(norm, DTensor) else norm).to(accelerator.device).square()
    dist.all_reduce(square, group=shares.group)
    norm = square.sqrt()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1)  # as torch.nn.utils.clip_grad_norm_ does
    multiply_in_place(list(local.values()), factor.to(next(iter(local.values())).device))
    return norm


def _local(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
