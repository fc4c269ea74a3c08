"""Exchanges requests to stop between the ranks during an evaluation."""

import time
from collections.abc import Callable

from common.training.stop_signals import StopRequests


class StopVotes:
    """Sums the stop requests of all ranks about once per `SECONDS`, between the micro-batches of an evaluation.

    The number of micro-batches between two sums follows from values that all ranks have.
    """

    SECONDS = 1.0

    def __init__(self, requests: StopRequests, sum_over_ranks: Callable[..., list[float]], num_ranks: int):
        """sum_over_ranks: sums each of its arguments over the ranks, without waiting for a device."""
        self.requests, self.sum_over_ranks, self.num_ranks = requests, sum_over_ranks, num_ranks
        self.interval = self.left = 1  # micro-batches between two sums, and until the next sum
        self.last = time.monotonic()

    def stop_is_requested(self) -> bool:
        """Returns whether any rank has a request to stop, as of the last sum; call it before each micro-batch."""
        self.left -= 1
        if self.left > 0:
            return False
        milliseconds = int(1000 * (time.monotonic() - self.last))
        num_requests, total = self.sum_over_ranks(self.requests.is_requested, milliseconds)
        fitting = int(self.interval * self.SECONDS / max(1e-3, total / 1000 / self.num_ranks))
        self.interval = self.left = max(1, min(2 * self.interval, fitting))
        self.last = time.monotonic()
        return num_requests > 0
