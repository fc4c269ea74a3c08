"""Gradient clipping by the global norm, also if a rank has only a part of the weights or partial gradients."""

import math

import torch
from torch.profiler import record_function

from common.training.accumulation import RunAccelerator


@record_function("optimizer")  # name in a profiler trace
def clip_gradients(accelerator: RunAccelerator, model: torch.nn.Module, max_norm: float) -> torch.Tensor | float:
    """Scales the gradients down to norm `max_norm` (0: never), and returns the norm before, equal on all ranks.

    If ranks have a part of each layer, partial gradients are summed over them first, once per update, in float32 at
    least. With --micro_batch_tokens auto, gradients are averaged over the ranks here, not in backward.
    """
    if accelerator.token_budget:
        accelerator.token_budget.average_gradients(model)
    max_norm = max_norm or math.inf
    shares = getattr(getattr(model, "module", model), "shares", None)
    if shares is None:
        return accelerator.clip_grad_norm_(model.parameters(), max_norm)
    from common.training.shares import clip_shared_gradients

    return clip_shared_gradients(accelerator, model, max_norm, shares)
