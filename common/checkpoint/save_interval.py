"""--save_every auto: the time between two checkpoints, from the measured cost of a save and the failures so far."""

import math
import time
from pathlib import Path

from common.checkpoint.training_state import TrainingState
from common.report.earlier_starts import read_earlier
from common.report.totals import SAVING

FIRST = 60.0  # seconds until the first save, whose cost is then known
# Before a run has failed, its mean time between failures is unknown. So it begins with a tenth of a failure in a tenth
# of a day, a small weight: a run that fails once per hour is known after its second failure.
PRIOR_FAILURES, PRIOR_SECONDS = 0.1, 8640.0


class SaveInterval:
    """The clock of rank 0, which decides for all ranks when a save is due.

    With a cost of C seconds per save and M seconds between two failures, the least time is lost with a save every
    sqrt(2 C M) seconds: half an interval per failure, and C per interval (Young 1974, Daly 2006). An earlier start
    counts as a failure.
    """

    def __init__(self, output_dir: Path):
        self.num_failures = len(read_earlier(output_dir).get("commands", []))
        self.cost: float | None = None  # seconds of the last save, in which the training waited
        self.last, self.saving = time.monotonic(), -1.0

    def seconds(self, state: TrainingState) -> float:
        """Returns the interval in seconds. state: its totals contain the seconds of earlier starts too."""
        if self.cost is None:
            return FIRST
        names = ("seconds", "repeated_seconds", SAVING)
        trained = sum(state.training.get(name, 0.0) for name in names)
        mean = (trained + PRIOR_SECONDS) / (self.num_failures + PRIOR_FAILURES)
        return math.sqrt(2 * self.cost * mean)

    def is_due(self, state: TrainingState) -> bool:
        """Returns whether the interval has passed since the last save; call it once per update."""
        now, saving = time.monotonic(), state.training.get(SAVING, 0.0)
        if saving > self.saving >= 0:  # there was a save since the last call
            self.cost, self.last = saving - self.saving, now
        self.saving = saving
        return now - self.last >= self.seconds(state)
