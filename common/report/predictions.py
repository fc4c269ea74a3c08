"""What a classifier predicts for held-out samples: measured on all ranks, and drawn."""

import logging
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import accelerate.utils
import numpy as np
import torch
from torch import nn

from common.training.accumulation import mean_losses
from common.training.precision import BATCH_NORMS
from common.training.process_grid import running

logger = logging.getLogger(__name__)


@torch.no_grad()
def measure(
    run: Any, model: nn.Module, predict: Callable[[nn.Module, dict], tuple[torch.Tensor, torch.Tensor]]
) -> tuple[dict[str, float], np.ndarray, np.ndarray]:
    """`mean_losses`, predictions (N,) and targets (N,) of all held-out samples, each counted once, alike on all ranks.

    run: a `common.run.Run`. predict: of a micro-batch the sum of its losses, and its predictions (N,).
    """
    model.eval()
    for module in model.modules():
        if isinstance(module, BATCH_NORMS):  # the main process's statistics, which are saved
            for statistics in (module.running_mean, module.running_var):
                accelerate.utils.broadcast(statistics)
    measured, answers = [], []
    for batch in run.held_out:
        loss_sums = []
        for micro_batch, _ in run.micro_batches(batch):
            loss_sum, predicted = predict(model, micro_batch)
            loss_sums.append(loss_sum)
            targets = micro_batch["targets"]
            answers.append(torch.stack([predicted.float(), targets.float(), torch.ones_like(targets).float()], 1))
        measured.append((batch.source, batch.num_targets, loss_sums))
    model.train()
    losses = mean_losses(run.accelerator, measured)
    rows = run.accelerator.gather(run.accelerator.pad_across_processes(torch.cat(answers)))
    rows = rows.unflatten(0, (run.accelerator.num_processes, -1))[:: running().tensor].flatten(0, 1)  # of copies, one
    rows = rows[rows[:, 2] == 1].cpu()  # the ranks had unequal shares: without what made them equal
    assert len(rows) == len(run.held_out.dataset.samples), "each held-out sample is to be counted once"
    predictions, targets = rows[:, :2].to(targets.dtype).numpy().T
    return losses, predictions, targets


def draw_confusion(predictions: np.ndarray, targets: np.ndarray, names: Sequence[str], output_dir: Path) -> str:
    """Draws confusion.png, how often each class (row) was taken for each (column); the line that says where it is."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # here because it takes seconds; not pyplot: no display
    from matplotlib.figure import Figure

    counts, path = np.zeros((len(names), len(names)), np.int64), output_dir / "confusion.png"
    np.add.at(counts, (targets, predictions), 1)
    side = min(3 + 0.35 * len(names), 20)
    figure = Figure(figsize=(side, side), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(xlabel="predicted", ylabel="true")
    axes.imshow(counts / np.maximum(counts.sum(1, keepdims=True), 1), cmap="Blues", vmin=0, vmax=1)
    if len(names) <= 60:
        axes.set_xticks(range(len(names)), names, rotation=90)
        axes.set_yticks(range(len(names)), names)
    if len(names) <= 30:  # else the numbers would not be readable
        for (row, column), count in np.ndenumerate(counts):
            if count:
                colour = "white" if count > counts[row].sum() / 2 else "black"
                axes.text(column, row, str(count), ha="center", va="center", color=colour, fontsize=8)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Glyph .* missing")  # else several lines for each such character
        try:
            figure.savefig(path, dpi=120)
        except UserWarning:
            warnings.filterwarnings("ignore", "Glyph .* missing")
            figure.savefig(path, dpi=120)
            logger.warning("%s: boxes stand for characters of the labels that matplotlib's font does not have", path)
    return f"confusion  {path}"
