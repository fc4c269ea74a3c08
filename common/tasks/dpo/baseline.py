"""KTO's baseline: the KL divergence from the reference, estimated once per global batch (arXiv:2402.01306).

The estimate is the mean log-probability ratio of model and reference over mismatched samples, at least 0. A mismatched
sample has the prompt of a row and the answer of the row before it in the global batch. It has no gradient, and the loss
of every row depends on it. Therefore all mismatched samples of the global batch are computed first, without a graph.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from common.tasks.dpo.reference import sum_mismatched
from common.training.batching import GlobalBatch
from common.training.process_grid import current_grid

Predict = Callable[[nn.Module, dict[str, Tensor]], tuple[Tensor, Tensor]]


def with_baseline(run: Any, model: nn.Module, batch: GlobalBatch) -> Iterator[tuple[dict[str, Tensor], bool]]:
    """Returns this rank's micro-batches as `run.micro_batches`; those of KTO have `target_baseline`, a scalar."""
    if run.args.loss != "kto":
        return run.micro_batches(batch)
    baseline = _estimate(run, model, [batch])
    return ((m | {"target_baseline": baseline}, is_last) for m, is_last in run.micro_batches(batch))


def predict_held_out(run: Any, model: nn.Module, predict: Predict) -> Predict:
    """Returns `predict`; for KTO, with the baseline of the whole held-out set in each micro-batch."""
    if run.args.loss != "kto":
        return predict
    model.eval()
    baseline = _estimate(run, model, run.held_out)
    return lambda model, micro_batch: predict(model, micro_batch | {"target_baseline": baseline})


@torch.no_grad()
def _estimate(run: Any, model: nn.Module, batches: Iterable[GlobalBatch]) -> Tensor:
    """Returns the baseline of all rows of these batches, a scalar, the same on all ranks, which call this together."""
    ratios, num_rows = [], 0
    for batch in batches:
        num_rows += batch.num_samples
        for micro_batch, _ in run.micro_batches(batch):
            ratios.append(sum_mismatched(model, micro_batch) - micro_batch["target_reference"][:, 1])
    total = run.accelerator.reduce(torch.cat(ratios).sum(), reduction="sum")
    return (total / (num_rows * current_grid().tensor)).clamp(min=0)  # a tensor group has equal ratios
