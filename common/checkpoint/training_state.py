"""The training state: the position of a run and its counters, as stored in a checkpoint's manifest."""

import argparse
import math
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class TrainingState:
    """Where a run stands, and what it counts; the same on all ranks."""

    update: int = 0  # updates done: the number of the next one
    samples: int = 0  # that these updates consumed
    skipped_updates: int = 0
    skipped_in_a_row: int = 0
    best_validation_loss: float | None = None
    validation_loss: float | None = None  # where the last update ended with an evaluation
    evaluations_since_best: int = 0
    validation_since: int = 0  # the update after which the losses are of the held-out data of now
    tracker_runs: dict[str, str] = field(default_factory=dict)  # by which a tracker continues its own run
    # Totals over all starts (`report.totals`). They depend on the clock, and are saved beside the position.
    training: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, manifest: dict[str, Any]) -> "TrainingState":
        """The state that a checkpoint holds. Checkpoints of older versions have no totals."""
        return cls(**manifest["position"], training=manifest.get("training", {}))

    def facts(self) -> dict[str, dict[str, Any]]:
        """The entries of a manifest from which `of` restores the state."""
        position = asdict(self)
        training = position.pop("training")
        return {"position": position, "training": training}

    @property
    def is_best(self) -> bool:
        """Whether the last update ended with an evaluation whose loss is lower than all before."""
        return self.validation_loss is not None and self.evaluations_since_best == 0

    def measured(self, validation_loss: float) -> None:
        """The last update ended with an evaluation. A loss that is not finite is never the best one."""
        self.validation_loss, best = validation_loss, self.best_validation_loss
        if math.isfinite(validation_loss) and (best is None or validation_loss < best):
            self.best_validation_loss, self.evaluations_since_best = validation_loss, 0
        else:
            self.evaluations_since_best += 1

    def end(self, args: argparse.Namespace) -> int:
        """How many updates the run makes in all, as far as it is known: --num_updates, unless --patience is over."""
        is_over = args.patience is not None and self.evaluations_since_best >= args.patience
        return self.update if is_over else args.num_updates

    def describe_patience(self, args: argparse.Namespace) -> dict[str, str]:
        """For the first printed block of a run that goes on: how far --patience has come."""
        count = self.evaluations_since_best
        text = f"{count} of {args.patience} evaluations in a row without a lower validation loss"
        text += "; nothing is left to train" if self.end(args) < args.num_updates else ""
        return {"patience": text} if args.patience and count else {}
