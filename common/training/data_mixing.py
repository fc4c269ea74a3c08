"""Assigns a source and a sample to each position of a run on mixed data.

With weights such as 7 and 3, every 10 samples of a run are 7 of the first source and 3 of the second, in an order that
repeats. A position's sample depends only on the position in this order and the number of earlier repetitions. Therefore
a run can start at any update without reading earlier samples, as in `batching`.
"""

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from heapq import heappop, heappush
from math import gcd, lcm

import numpy as np

from common.training.batching import shuffled

MAX_LENGTH = 100_000  # maximum length of an order, which is computed in a second and kept as a table


def reduce_weights(weights: list[Fraction]) -> tuple[int, ...]:
    """Returns the smallest integers with the same ratios: 0.7 and 0.3 become 7 and 3."""
    denominator = lcm(*(weight.denominator for weight in weights))
    integers = [int(weight * denominator) for weight in weights]
    return tuple(weight // gcd(*integers) for weight in integers)


def build_order(weights: tuple[int, ...]) -> np.ndarray:
    """Returns the source of each position of the order: int64, (sum of the weights,).

    The order has T positions, of which each source has `weight`. Its sample number j >= 0 is available at position
    floor(j T / weight), and has the deadline ceil((j + 1) T / weight). Each position uses the available sample with the
    first deadline; in a tie, the sample of the earlier source. Therefore, after any number of positions, each source is
    less than one sample away from its share (Tijdeman, "The chairman assignment problem", 1980).
    """
    length = sum(weights)
    samples = [
        (number * length // weight, -(-(number + 1) * length // weight), source)
        for source, weight in enumerate(weights)
        for number in range(weight)
    ]
    samples.sort(reverse=True)
    ready: list[tuple[int, int]] = []  # (deadline, source) of available samples
    order = []
    for position in range(length):
        while samples and samples[-1][0] <= position:
            _, deadline, source = samples.pop()
            heappush(ready, (deadline, source))
        order.append(heappop(ready)[1])
    return np.array(order, np.int64)


@dataclass(frozen=True)
class Mixing:
    """Sources with `sizes` samples, mixed in proportion to `weights`, which are results of `reduce_weights`.

    Sample ids number the samples of all sources, one source after the other.
    """

    weights: tuple[int, ...]
    sizes: tuple[int, ...]

    @cached_property
    def order(self) -> np.ndarray:
        return build_order(self.weights)

    @cached_property
    def _numbers(self) -> np.ndarray:
        """Returns, per position of the order, the number of earlier positions with the same source."""
        numbers = np.empty_like(self.order)
        for source, weight in enumerate(self.weights):
            numbers[self.order == source] = np.arange(weight)
        return numbers

    def counts(self, num_samples: int) -> list[int]:
        """Returns the number of samples per source among the first `num_samples` samples of a run."""
        repetitions, rest = divmod(num_samples, len(self.order))
        more = np.bincount(self.order[:rest], minlength=len(self.weights))
        return [repetitions * weight + int(number) for weight, number in zip(self.weights, more, strict=True)]

    def sample_ids_of(self, update: int, global_batch_size: int, seed: int) -> np.ndarray:
        """Returns the ids (int64) of the samples of update `update` (0-based), from their positions in the run.

        Each source has a separate permutation for each of its epochs. A short source is repeated, even within an
        update.
        """
        positions = np.arange(update * global_batch_size, (update + 1) * global_batch_size)
        repetitions, rest = np.divmod(positions, len(self.order))
        sources, ids, start = self.order[rest], np.empty_like(positions), 0
        for source, (weight, size) in enumerate(zip(self.weights, self.sizes, strict=True)):
            is_own = sources == source
            epochs, numbers = np.divmod(repetitions[is_own] * weight + self._numbers[rest[is_own]], size)
            for epoch in np.unique(epochs):
                numbers[epochs == epoch] = shuffled(numbers[epochs == epoch], size, seed, epoch, source)
            ids[is_own] = start + numbers
            start += size
        return ids
