"""What a classifier predicts for held-out samples: measured on all ranks, and drawn."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import accelerate.utils
import numpy as np
import torch
from torch import nn

from common.report.plots import save_confusion_matrix
from common.training.accumulation import sum_over_ranks


@torch.no_grad()
def measure(
    run: Any, model: nn.Module, predict: Callable[[nn.Module, dict], tuple[torch.Tensor, torch.Tensor]]
) -> tuple[float, np.ndarray, np.ndarray]:
    """Mean loss, predictions (N,) and targets (N,) of all held-out samples, each counted once, alike on all ranks.

    run: a `common.run.Run`. predict: of a micro-batch the sum of its losses, and its predictions (N,).
    """
    model.eval()
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):  # the main process's statistics, which are saved
            for statistics in (module.running_mean, module.running_var):
                accelerate.utils.broadcast(statistics)
    loss_sums, answers = [], []
    for batch in run.held_out:
        for micro_batch, _ in run.micro_batches(batch):
            loss_sum, predicted = predict(model, micro_batch)
            loss_sums.append(loss_sum)
            targets = micro_batch["targets"]
            answers.append(torch.stack([predicted.float(), targets.float(), torch.ones_like(targets).float()], 1))
    model.train()
    (loss_sum,) = sum_over_ranks(run.accelerator, torch.stack(loss_sums).sum())
    rows = run.accelerator.gather(run.accelerator.pad_across_processes(torch.cat(answers)))
    rows = rows[rows[:, 2] == 1].cpu()  # the ranks had unequal shares: without what made them equal
    assert len(rows) == len(run.held_out.dataset.samples), "each held-out sample is to be counted once"
    predictions, targets = rows[:, :2].to(targets.dtype).numpy().T
    return loss_sum / len(rows), predictions, targets


def loss_and_accuracy(loss: float, predictions: np.ndarray, targets: np.ndarray) -> dict[str, float]:
    """The figures of what `measure` returns."""
    return {"validation_loss": loss, "accuracy": (predictions == targets).mean().item()}


def draw_confusion(predictions: np.ndarray, targets: np.ndarray, names: Sequence[str], output_dir: Path) -> str:
    """Writes confusion.png, how often each class was taken for each; returns the line that tells where it is."""
    counts = np.zeros((len(names), len(names)), np.int64)
    np.add.at(counts, (targets, predictions), 1)
    save_confusion_matrix(counts, names, output_dir / "confusion.png")
    return f"confusion  {output_dir / 'confusion.png'}"
