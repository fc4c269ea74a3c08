"""The mean losses of an evaluation."""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch


def mean(
    sum_over_ranks: Callable[..., list[Any]], batches: Iterable[tuple[str, int, list[torch.Tensor]]]
) -> dict[str, float]:
    """Implements `accumulation.mean_losses`. sum_over_ranks: returns the sums of its arguments over all ranks."""
    loss_sums: dict[str, list[torch.Tensor]] = {}
    num_targets: Counter[str] = Counter()
    for source, number, sums in batches:
        loss_sums.setdefault(source, []).extend(sums)
        num_targets[source] += number
    totals = sum_over_ranks(*(torch.stack(sums).sum() for sums in loss_sums.values()))
    metrics = {"validation_loss": sum(totals) / num_targets.total()}
    if "" not in loss_sums:
        for source, total in zip(loss_sums, totals, strict=True):
            metrics[f"validation_loss/{source}"] = total / num_targets[source]
    return metrics
