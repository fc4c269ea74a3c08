"""Detects a classifier or regression whose training loss stays at that of a constant answer."""

import math
from collections import deque
from typing import Any

import numpy as np

CHECKED_AT = 100  # updates; a shorter run is checked at its end
WINDOW = 50  # updates whose losses are averaged
FEWEST = 20  # minimum number of losses to average
MARGIN = 0.97  # of the constant answer's loss; a lower training loss shows that the inputs are used


def constant_loss(samples: Any) -> float | None:
    """Returns the mean loss of the best answer that is the same for all samples; None for samples without labels.

    For classes it is the entropy of the labels, at most ln(number of labels); for a regression, the variance of the
    targets. Mixed sources count by their weights.
    """
    parts = list(samples.parts.values()) if hasattr(samples, "parts") else [samples]
    labels = [part.labels for part in parts if getattr(part, "labels", None) is not None]
    if len(labels) < len(parts):
        return None
    mixing = getattr(samples, "mixing", None)
    sizes = [len(part) for part in labels]
    shares = mixing.weights if mixing else sizes
    weights = np.concatenate([np.full(size, share / size) for size, share in zip(sizes, shares, strict=True)])
    weights /= weights.sum()
    values: np.ndarray = np.concatenate(labels)
    if values.dtype.kind == "f":
        return float(weights @ (values - weights @ values) ** 2)
    frequencies = np.bincount(values, weights=weights)
    frequencies = frequencies[frequencies > 0]
    return float(-frequencies @ np.log(frequencies))


class ChanceCheck:
    """Checks the training losses of a run once, without waiting for the device: the losses are already on the host."""

    def __init__(self, samples: Any, num_updates: int) -> None:
        self.constant = constant_loss(samples)
        self.due = min(CHECKED_AT, num_updates)
        self.losses: deque[float] = deque(maxlen=WINDOW)

    def note(self, update: int, loss: float) -> str | None:
        """Notes the loss after `update` updates; returns a line to print if the loss stays at chance."""
        if not self.constant or not math.isfinite(loss):
            return None
        self.losses.append(loss)
        if update < self.due or len(self.losses) < FEWEST:
            return None
        constant, self.constant = self.constant, None
        mean = sum(self.losses) / len(self.losses)
        if mean < MARGIN * constant:
            return None
        return (
            f"update {update}: the training loss is still at chance: {mean:.4f} over the last {len(self.losses)} "
            f"updates, {constant:.4f} for the best constant answer; try a higher --learning_rate, or check the labels"
        )
