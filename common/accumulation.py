"""The accumulation window: how its loss is scaled, when its gradients synchronise, when its update is skipped.

The loss of a window is (sum of the losses of its target tokens) / (number of its target tokens), over every micro-batch
on every rank. The count is known before the first backward, because a window's samples are (see `common.batching`).
"""

from contextlib import contextmanager, nullcontext

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch.distributed.tensor import DTensor

from common.batching import Window


@contextmanager
def synchronize_gradients(accelerator: Accelerator, model: torch.nn.Module, now: bool):
    """Around one micro-batch's forward and backward: gradients are reduced over the ranks only if `now`.

    `accelerator.accumulate` does this too, but counts the steps itself, divides the loss by a fixed number of them and
    closes the window early at the end of a data loader; here a window has as many micro-steps as it needs.

    FSDP reduces after each micro-batch, as ZeRO-2 and 3 do: between micro-batches that are not reduced, every process
    would hold the whole model's gradients.
    """
    accelerator.gradient_state._set_sync_gradients(now)  # what AcceleratedOptimizer.step and DeepSpeed's engine ask
    keeps_whole_gradients = not now and accelerator.distributed_type != DistributedType.FSDP
    with accelerator.no_sync(model) if keeps_whole_gradients else nullcontext():
        yield


def window_scale(accelerator: Accelerator, num_targets: int) -> float:
    """What a micro-batch's SUM of losses is multiplied by, so that the reduced gradient is that of the window's mean.

    1 / num_targets makes the mean; the world size undoes the averaging over ranks by DDP, FSDP and ZeRO.
    """
    assert num_targets > 0, "a window without a target has no loss"
    assert accelerator.gradient_accumulation_steps == 1, "Accelerate would divide the loss once more"
    return accelerator.num_processes / num_targets


def sum_over_ranks(accelerator: Accelerator, *scalars: torch.Tensor) -> list[float]:
    """Each scalar summed over the ranks, in float64 where the device has it. The host waits for the device here."""
    sums = torch.stack(scalars)
    return accelerator.reduce(sums if sums.device.type == "mps" else sums.double(), reduction="sum").tolist()


def reduce_window(
    accelerator: Accelerator, loss_sums: list[torch.Tensor], grad_norm: torch.Tensor | float, window: Window
) -> tuple[float, float]:
    """The window's loss (mean over its targets on all ranks) and the norm of its gradient, equal on all ranks.

    Args:
        loss_sums: this rank's sums of token losses, one scalar a micro-batch.
        grad_norm: scalar, norm of the reduced gradient before clipping, equal on all ranks.
        window: what was computed; AssertionError if the ranks saw another number of targets than it was divided by.
    """
    loss_sum = torch.stack(loss_sums)
    loss_sum = loss_sum.to(torch.float32 if loss_sum.device.type == "mps" else torch.float64).sum()
    num_targets = loss_sum.new_tensor(sum(len(micro_batch["targets"]) for micro_batch in window.micro_batches))
    # The norm is summed too, to fetch all figures in one transfer: the only wait for the device in an update.
    if isinstance(grad_norm, DTensor):  # FSDP2
        grad_norm = grad_norm.full_tensor()
    norm = torch.as_tensor(grad_norm).to(loss_sum) / accelerator.num_processes
    total_loss, total_targets, norm = sum_over_ranks(accelerator, loss_sum, num_targets, norm)
    assert total_targets == window.num_targets, f"divided by {window.num_targets}, but ranks saw {total_targets:.0f}"
    return total_loss / window.num_targets, norm


def skip_step(accelerator: Accelerator, optimizer: torch.optim.Optimizer) -> None:
    """Drops the window's gradients, leaving weights and optimizer state as they were; lowers the scale of fp16."""
    if accelerator.scaler is not None:
        accelerator.scaler.update()  # has seen the overflow in unscale_, and halves
    optimizer.zero_grad()
