"""Assigns a source and a sample to each position of a run on mixed data.

It is arithmetic, as in `batching`. With weights such as 7 and 3, every 10 samples of a run are 7 of the first source
and 3 of the second, in an order that repeats. A position's sample depends only on the position in that order and the
number of earlier repetitions. Therefore a run can start at any update at once.
"""

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from heapq import heappop, heappush
from math import gcd, lcm

import numpy as np

from common.training.batching import shuffled

LONGEST = 100_000  # maximum positions of an order, which is computed in a second and kept as a table


def in_lowest_terms(weights: list[Fraction]) -> tuple[int, ...]:
    """Returns the smallest integers in the same proportion: 0.7 and 0.3 become 7 and 3."""
    common = lcm(*(weight.denominator for weight in weights))
    whole = [int(weight * common) for weight in weights]
    return tuple(weight // gcd(*whole) for weight in whole)


def order_of(weights: tuple[int, ...]) -> np.ndarray:
    """Returns the source of each position of the order: int64, (sum of the weights,).

    The order has T positions; each source has as many of them as its weight. Its sample number j (from 0) may be used
    from position floor(j T / weight), and is due before ceil((j + 1) T / weight). Each position uses the available
    sample that is due first; in a tie, that of the earlier source. Therefore, after any number of positions, each
    source is less than one sample away from its share (Tijdeman, "The chairman assignment problem", 1980).
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
    """Sources with `sizes` samples, mixed by `weights`, which are integers in lowest terms.

    Sample ids number the samples of all sources, one source after the other.
    """

    weights: tuple[int, ...]
    sizes: tuple[int, ...]

    @cached_property
    def order(self) -> np.ndarray:
        return order_of(self.weights)

    @cached_property
    def _numbers(self) -> np.ndarray:
        """Returns the number of each position's sample among its source's samples in one order, from 0."""
        numbers = np.empty_like(self.order)
        for source, weight in enumerate(self.weights):
            numbers[self.order == source] = np.arange(weight)
        return numbers

    def counts(self, num_samples: int) -> list[int]:
        """Returns the number of samples per source among the first `num_samples` samples of a run."""
        rounds, rest = divmod(num_samples, len(self.order))
        more = np.bincount(self.order[:rest], minlength=len(self.weights))
        return [rounds * weight + int(number) for weight, number in zip(self.weights, more, strict=True)]

    def sample_ids_of(self, update: int, global_batch_size: int, seed: int) -> np.ndarray:
        """Returns the ids (int64) of the samples of update `update` (0-based), from their positions in the run.

        Each source has a separate permutation for each of its epochs. A short source is repeated, even within an
        update.
        """
        positions = np.arange(update * global_batch_size, (update + 1) * global_batch_size)
        rounds, rest = np.divmod(positions, len(self.order))
        sources, ids, start = self.order[rest], np.empty_like(positions), 0
        for source, (weight, size) in enumerate(zip(self.weights, self.sizes, strict=True)):
            own = sources == source
            epochs, numbers = np.divmod(rounds[own] * weight + self._numbers[rest[own]], size)
            for epoch in np.unique(epochs):
                numbers[epochs == epoch] = shuffled(numbers[epochs == epoch], size, seed, epoch, source)
            ids[own] = start + numbers
            start += size
        return ids
