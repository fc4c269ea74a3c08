"""Gradient accumulation over a global batch: loss scaling, gradient synchronisation, and skipped updates.

The loss of a global batch is (sum of the losses of its target tokens) / (number of its target tokens), over every
micro-batch on every rank. The count is known before the first backward, because the samples of a global batch are known
(see `batching`).
"""

from collections import Counter
from collections.abc import Iterable
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch.distributed.tensor import DTensor

from common.training import token_budget
from common.training.batching import GlobalBatch
from common.training.process_grid import running


@contextmanager
def synchronize_gradients(accelerator: Accelerator, model: torch.nn.Module, now: bool):
    """Around one micro-batch's forward and backward: gradients are reduced over the ranks only if `now`.

    `accelerator.accumulate` does this too, but counts the steps itself, divides the loss by a fixed number of them and
    closes the global batch early at the end of a data loader; here a global batch has any number of micro-batches.

    FSDP reduces after each micro-batch, as ZeRO-2 and 3 do: else every process would hold the whole model's gradients
    until the last one. Under DeepSpeed the backward of the last one also clips, and steps where the gradient is finite;
    `clip_gradients` then only returns the norm, and the optimizer's `step` and `zero_grad` do nothing.

    With --micro_batch_tokens auto, nothing is reduced here (`token_budget`), and an error of memory ends here. Then
    only the loop's `loss_sum` still holds activations: it begins each update with None in it.
    """
    accelerator.sync_gradients = now  # read by AcceleratedOptimizer.step, and for DeepSpeed's engine
    keeps_whole_gradients = not now and accelerator.distributed_type != DistributedType.FSDP
    budget = token_budget.adjusting()
    with (
        accelerator.no_sync(model) if keeps_whole_gradients else nullcontext(),
        budget.spared() if budget else nullcontext(),
    ):
        yield


def loss_scale(accelerator: Accelerator, num_targets: int) -> float:
    """Ranks / num_targets: the factor on a micro-batch's SUM of losses that makes gradients those of the mean.

    1 / num_targets makes the mean; the number of ranks with tokens of their own and the same weights undoes the
    averaging over them by DDP, FSDP and ZeRO.
    """
    assert num_targets > 0, "a global batch without a target has no loss"
    assert accelerator.gradient_accumulation_steps == 1, "Accelerate would divide the loss once more"
    return running().averaged / num_targets


def _widest(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


def sum_over_ranks(accelerator: Accelerator, *figures: torch.Tensor | float) -> list[Any]:
    """Each figure summed over the ranks, in float64 where the device has it, by one collective.

    Ranks that tell the same figures, as those of a tensor group, count as one: each as a part of it.

    A scalar comes back as a float, another tensor as one of its shape on the host. The first must be a tensor on the
    device. Numbers of the host are filled in there: a copy would make the host wait for the device, which it does only
    once, at the end.
    """
    device = figures[0].device
    options = {"dtype": _widest(device), "device": device}
    parts = [
        figure.detach().to(**options)
        if torch.is_tensor(figure) and figure.device == device
        # A number of the host, such as the norm of offloaded gradients.
        else torch.full((), float(figure), **options)
        for figure in figures
    ]
    sums = accelerator.reduce(torch.cat([part.flatten() for part in parts]), reduction="sum").cpu() / running().copies
    sums = [one.view(part.shape) for one, part in zip(sums.split([p.numel() for p in parts]), parts, strict=True)]
    return [one if one.ndim else one.item() for one in sums]


def mean_losses(accelerator: Accelerator, batches: Iterable[tuple[str, int, list[torch.Tensor]]]) -> dict[str, float]:
    """The mean loss over all targets of an evaluation; where each source is measured apart, also that of each.

    batches: of each its source, its number of targets over all ranks, and this rank's sums of the losses of its
    micro-batches. The sources and their order are the same on all ranks.
    """
    loss_sums: dict[str, list[torch.Tensor]] = {}
    num_targets: Counter[str] = Counter()
    for source, number, sums in batches:
        loss_sums.setdefault(source, []).extend(sums)
        num_targets[source] += number
    totals = sum_over_ranks(accelerator, *(torch.stack(sums).sum() for sums in loss_sums.values()))
    figures = {"validation_loss": sum(totals) / num_targets.total()}
    of_each = zip(loss_sums, totals, strict=True) if "" not in loss_sums else ()
    return figures | {f"validation_loss/{source}": total / num_targets[source] for source, total in of_each}


def reduce_update(
    accelerator: Accelerator,
    loss_sums: list[torch.Tensor],
    grad_norm: torch.Tensor | float,
    batch: GlobalBatch,
    news: dict[str, torch.Tensor | float],
) -> tuple[float, float, dict[str, Any]]:
    """The global batch's loss (mean over its targets on all ranks), the norm of its gradient, and `news`, summed.

    All that the ranks must agree on travels in this one collective. Besides those of its mode an update has no other (a
    save, an evaluation and `--balance exact` have theirs), and the host waits for the device here only. Each figure is
    an element of its own: a loss that is not finite spoils no other.

    Args:
        loss_sums: this rank's sums of token losses, one scalar a micro-batch.
        grad_norm: scalar, norm of the reduced gradient before clipping, equal on all ranks.
        batch: what was computed; AssertionError if the ranks saw another number of targets than it was divided by.
        news: of this rank, the same names and shapes on all. They come back summed, as `sum_over_ranks` says.
    """
    sums = loss_sums or [torch.zeros((), device=accelerator.device)]  # memory ran out at the first one
    loss_sum = torch.stack(sums).sum(dtype=_widest(accelerator.device))
    num_targets = sum(len(micro_batch["targets"]) for micro_batch in batch.micro_batches)
    if isinstance(grad_norm, DTensor):  # FSDP2; the clip has summed it over the shards
        grad_norm = grad_norm.full_tensor()
    total_loss, total_targets, norm_sum, *sums = sum_over_ranks(
        accelerator, loss_sum, num_targets, grad_norm, *news.values()
    )
    assert total_targets == batch.num_targets, f"divided by {batch.num_targets}, but ranks saw {total_targets:.0f}"
    news = dict(zip(news, sums, strict=True))
    return total_loss / batch.num_targets, norm_sum * running().copies / accelerator.num_processes, news


def skip_step(accelerator: Accelerator, optimizer: torch.optim.Optimizer) -> None:
    """In place of the step: drops the gradients, keeps weights and optimizer state, lowers fp16's loss scale.

    Under DeepSpeed it does nothing: the engine has skipped its own step already.
    """
    if accelerator.scaler is not None:
        accelerator.scaler.update()  # has seen the overflow in unscale_, and halves
    optimizer.zero_grad()
