"""Predictions of a classifier or regression for the held-out set, and their confusion matrix."""

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
from common.training.process_grid import current_grid

logger = logging.getLogger(__name__)
MAX_CONFUSION = 2000  # classes of a confusion matrix: its memory grows with their square


@torch.no_grad()
def measure(
    run: Any, model: nn.Module, predict: Callable[[nn.Module, dict], tuple[torch.Tensor, torch.Tensor]]
) -> tuple[dict[str, float], np.ndarray, np.ndarray]:
    """Returns `mean_losses`, predictions (N,) and targets (N,) of all held-out samples, the same on all ranks.

    Each sample counts once. run: a `common.run.Run`.
    predict: returns the summed loss and the predictions of a micro-batch, (N,), or (N, K) with K numbers per sample.
    """
    model.eval()
    for module in model.modules():
        if isinstance(module, BATCH_NORMS):  # use the main process's statistics, because these are saved
            for statistics in (module.running_mean, module.running_var):
                accelerate.utils.broadcast(statistics)
    measured, answers = [], []
    for batch in run.held_out:
        loss_sums = []
        for micro_batch, _ in run.micro_batches(batch):
            loss_sum, predicted = predict(model, micro_batch)
            loss_sums.append(loss_sum)
            targets = micro_batch["targets"]
            columns = [*(predicted.unbind(1) if predicted.ndim > 1 else [predicted]), targets, torch.ones_like(targets)]
            answers.append(torch.stack([column.float() for column in columns], 1))
        measured.append((batch.source, batch.num_targets, loss_sums))
    model.train()
    losses = mean_losses(run.accelerator, measured)
    rows = run.accelerator.gather(run.accelerator.pad_across_processes(torch.cat(answers)))
    # The ranks of a tensor group have the same predictions; keep those of one rank.
    rows = rows.unflatten(0, (run.accelerator.num_processes, -1))[:: current_grid().tensor].flatten(0, 1)
    rows = rows[rows[:, -1] == 1].to(targets.dtype).cpu().numpy()  # remove the padding of `pad_across_processes`
    assert len(rows) == len(run.held_out.dataset.samples), "each held-out sample is to be counted once"
    return losses, rows[:, :-2] if rows.shape[1] > 3 else rows[:, 0], rows[:, -2]


def draw_confusion(predictions: np.ndarray, targets: np.ndarray, names: Sequence[str], output_dir: Path) -> str:
    """Draws confusion.png, the number of samples of each class (row) by predicted class (column).

    Returns a line with its path, or with the reason why there is none.
    """
    if len(names) > MAX_CONFUSION:
        return f"confusion  not drawn, because there are {len(names):,} classes, more than {MAX_CONFUSION:,}"
    # Imported here because it takes seconds; not pyplot, which may need a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
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
    if len(names) <= 30:  # otherwise the numbers would not be legible
        for (row, column), count in np.ndenumerate(counts):
            if count:
                colour = "white" if count > counts[row].sum() / 2 else "black"
                axes.text(column, row, str(count), ha="center", va="center", color=colour, fontsize=8)
    with warnings.catch_warnings():
        # Otherwise matplotlib prints several lines per missing character.
        warnings.filterwarnings("error", "Glyph .* missing")
        try:
            figure.savefig(path, dpi=120)
        except UserWarning:
            warnings.filterwarnings("ignore", "Glyph .* missing")
            figure.savefig(path, dpi=120)
            logger.warning("%s: boxes stand for characters of the labels that matplotlib's font does not have", path)
    return f"confusion  {path}"
