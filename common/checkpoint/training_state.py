"""The training state: the position of a run and its counters, as stored in a checkpoint's manifest."""

import argparse
import math
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class TrainingState:
    """Position of a run and its counters; the same on all ranks."""

    update: int = 0  # number of completed updates, and index of the next update
    samples: int = 0  # samples in these updates
    skipped_updates: int = 0
    skipped_in_a_row: int = 0
    best_validation_loss: float | None = None
    validation_loss: float | None = None  # set if the last update ended with an evaluation
    evaluations_since_best: int = 0
    validation_since: int = 0  # update since which the losses are on the current held-out set
    tracker_runs: dict[str, str] = field(default_factory=dict)  # IDs with which trackers resume their runs
    # Totals over all starts (`report.totals`), saved separately from the position because they depend on the clock.
    training: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, manifest: dict[str, Any]) -> "TrainingState":
        """Returns the state in a manifest. Checkpoints of older versions have no totals."""
        return cls(**manifest["position"], training=manifest.get("training", {}))

    def to_record(self) -> dict[str, dict[str, Any]]:
        """Returns the manifest entries from which `of` restores the state."""
        position = asdict(self)
        training = position.pop("training")
        return {"position": position, "training": training}

    @property
    def is_best(self) -> bool:
        """Returns whether the last update ended with an evaluation with the lowest loss so far."""
        return self.validation_loss is not None and self.evaluations_since_best == 0

    def record_loss(self, validation_loss: float) -> None:
        """Records the validation loss after the last update. A non-finite loss is never the best."""
        self.validation_loss, best = validation_loss, self.best_validation_loss
        if math.isfinite(validation_loss) and (best is None or validation_loss < best):
            self.best_validation_loss, self.evaluations_since_best = validation_loss, 0
        else:
            self.evaluations_since_best += 1

    def end(self, args: argparse.Namespace) -> int:
        """Returns the total number of updates as far as known: --num_updates, or fewer if --patience is exhausted."""
        is_over = args.patience is not None and self.evaluations_since_best >= args.patience
        return self.update if is_over else args.num_updates
