"""Gradient accumulation over a global batch: loss scaling, gradient synchronisation, and skipped updates.

The loss of a global batch is the sum of the losses of its targets, divided by the number of targets. Both include every
micro-batch on every rank. `batching` computes the number from the sample ids, so it is known before the first backward.
"""

from collections.abc import Iterable
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch.distributed.tensor import DTensor

from common.training.batching import GlobalBatch
from common.training.process_grid import current_grid


class RunAccelerator(Accelerator):
    """The Accelerator of a run, with its `token_budget.TokenBudget` of --micro_batch_tokens auto, or None."""

    token_budget: Any = None


@contextmanager
def synchronize_gradients(accelerator: RunAccelerator, model: torch.nn.Module, now: bool):
    """Context for one micro-batch's forward and backward: gradients are reduced over the ranks only if `now`.

    `accelerator.accumulate` is not used, because it divides the loss by a fixed number of steps, and ends the global
    batch early at the end of a data loader. FSDP, ZeRO-2 and ZeRO-3 reduce after each micro-batch, because otherwise
    every process would hold the full model's gradients until the last one. Under DeepSpeed the last backward also clips
    and steps: `clip_gradients` then only returns the norm, and the optimizer's `step` does nothing.

    With --micro_batch_tokens auto, `clip_gradients` reduces instead, and an out-of-memory error is caught here. Then
    only `loss_sum` in the recipe's loop references activations; therefore the loop sets it to None before each update.
    """
    accelerator.sync_gradients = now  # read by AcceleratedOptimizer.step, and passed to DeepSpeed's engine
    skips_reduction = not now and accelerator.distributed_type != DistributedType.FSDP
    with (
        accelerator.no_sync(model) if skips_reduction else nullcontext(),
        accelerator.token_budget.catch_out_of_memory() if accelerator.token_budget else nullcontext(),
    ):
        yield


def loss_scale(accelerator: Accelerator, num_targets: int) -> float:
    """Returns the factor by which a micro-batch's SUM of losses is multiplied before its backward.

    1 / num_targets turns the sum into the mean over the global batch. DDP, FSDP and ZeRO average the gradients over the
    ranks with different tokens and the same weights; multiplying by the number of these ranks turns this into a sum.
    """
    assert num_targets > 0, "a global batch without a target has no loss"
    assert accelerator.gradient_accumulation_steps == 1, "Accelerate would divide the loss once more"
    return current_grid().num_gradient_peers / num_targets


def _sum_dtype(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


def sum_over_ranks(accelerator: Accelerator, first: torch.Tensor, *others: torch.Tensor | float) -> list[Any]:
    """Returns the sum of each value over the ranks, by one collective; in float64 if supported, else in float32.

    A group of ranks that compute the same values, such as a tensor group, counts once. `first` is on the device.
    Numbers become device tensors by `torch.full`, because copying them would make the host wait, which it does once.

    Returns: a float for each scalar; for any other tensor, a tensor of its shape on the host.
    """
    device, dtype = first.device, _sum_dtype(first.device)
    values = [
        value.detach().to(device, dtype)
        if isinstance(value, torch.Tensor) and value.device == device
        # A number on the host, such as the norm of offloaded gradients.
        else torch.full((), float(value), dtype=dtype, device=device)
        for value in (first, *others)
    ]
    sums = accelerator.reduce(torch.cat([x.flatten() for x in values]), reduction="sum").cpu()
    pairs = zip((sums / current_grid().model_parallel).split([x.numel() for x in values]), values, strict=True)
    return [total.view(x.shape) if x.ndim else total.item() for total, x in pairs]


def mean_losses(accelerator: Accelerator, batches: Iterable[tuple[str, int, list[torch.Tensor]]]) -> dict[str, float]:
    """Returns the mean loss over all targets of an evaluation, and per source if sources are evaluated separately.

    batches: source, number of targets over all ranks, and this rank's loss sums of its micro-batches, for each batch.
    The sources and their order are equal on all ranks.
    """
    from common.training import held_out_losses

    return held_out_losses.mean(lambda *sums: sum_over_ranks(accelerator, *sums), batches)


def reduce_update(
    accelerator: Accelerator,
    loss_sums: list[torch.Tensor],
    grad_norm: torch.Tensor | float,
    batch: GlobalBatch,
    values: dict[str, torch.Tensor | float],
) -> tuple[float, float, dict[str, Any]]:
    """Returns the loss of the global batch (mean over its targets), its gradient norm, and the sums of `values`.

    A single collective synchronises all values of an update, and the host waits for the device only here. Each value is
    a separate element, so a non-finite loss does not affect the others.
    """
    sums = loss_sums or [torch.zeros((), device=accelerator.device)]  # empty if the first micro-batch ran out of memory
    loss_sum = torch.stack(sums).sum(dtype=_sum_dtype(accelerator.device))
    num_targets = sum(len(micro_batch["targets"]) for micro_batch in batch.micro_batches)
    if isinstance(grad_norm, DTensor):  # FSDP2: clipping has reduced it over the shards
        grad_norm = grad_norm.full_tensor()
    totals = sum_over_ranks(accelerator, loss_sum, num_targets, grad_norm, *values.values())
    total_loss, total_targets, norm_sum = totals[:3]
    assert total_targets == batch.num_targets, f"num_targets: {batch.num_targets}, but ranks have {total_targets:.0f}"
    mean_norm = norm_sum * current_grid().model_parallel / accelerator.num_processes
    return total_loss / batch.num_targets, mean_norm, dict(zip(values, totals[3:], strict=True))


def skip_step(accelerator: Accelerator, optimizer: torch.optim.Optimizer) -> None:
    """Replaces the optimizer step: drops gradients, keeps weights and optimizer state, and lowers fp16's loss scale.

    Under DeepSpeed this has no effect, because the engine has already skipped its step.
    """
    if accelerator.scaler is not None:
        accelerator.scaler.update()  # unscale_ has recorded the overflow, so the scale is halved
    optimizer.zero_grad()
