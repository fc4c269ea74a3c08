"""Plots of results, as PNG files."""

import logging
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np

logger = logging.getLogger(__name__)


def save_confusion_matrix(matrix: np.ndarray, labels: Sequence[str], path: Path) -> None:
    """Draws how often each class (row) was taken for each class (column).

    matrix: counts, (classes, classes). labels: the classes' names.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # here because it takes seconds; not pyplot: no display
    from matplotlib.figure import Figure

    side = min(3 + 0.35 * len(labels), 20)
    figure = Figure(figsize=(side, side), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(xlabel="predicted", ylabel="true")
    axes.imshow(matrix / np.maximum(matrix.sum(1, keepdims=True), 1), cmap="Blues", vmin=0, vmax=1)
    if len(labels) <= 60:
        axes.set_xticks(range(len(labels)), labels, rotation=90)
        axes.set_yticks(range(len(labels)), labels)
    if len(labels) <= 30:  # else the numbers would not be readable
        for (row, column), count in np.ndenumerate(matrix):
            if count:
                colour = "white" if count > matrix[row].sum() / 2 else "black"
                axes.text(column, row, str(count), ha="center", va="center", color=colour, fontsize=8)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Glyph .* missing")  # else several lines for each such character
        try:
            figure.savefig(path, dpi=120)
        except UserWarning:
            warnings.filterwarnings("ignore", "Glyph .* missing")
            figure.savefig(path, dpi=120)
            logger.warning("%s: boxes stand for characters of the labels that matplotlib's font does not have", path)
