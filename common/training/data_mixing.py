"""Assigns a source and a sample to each position of a run on mixed data.

It is arithmetic, as in `batching`: with weights such as 7 and 3, every 10 samples of a run are 7 of the first source
and 3 of the second, in an order that repeats. The sample of a position depends only on its position in that order and
the number of earlier repetitions, so a run can start at any update at once.
"""

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from heapq import heappop, heappush
from math import gcd, lcm

import numpy as np

from common.training.batching import shuffled

LONGEST = 100_000  # positions of an order, which is found in a second and kept as a table


def in_lowest_terms(weights: list[Fraction]) -> tuple[int, ...]:
    """Whole numbers in the same proportion, as small as can be: 0.7 and 0.3 are 7 and 3."""
    common = lcm(*(weight.denominator for weight in weights))
    whole = [int(weight * common) for weight in weights]
    return tuple(weight // gcd(*whole) for weight in whole)


def order_of(weights: tuple[int, ...]) -> np.ndarray:
    """The source, int64 (sum of the weights,), that each position of the order takes.

    Of T positions a source takes its weight. Its sample number j (from 0) may come from position floor(j T / weight) on
    and is due before ceil((j + 1) T / weight); of those that may come, the one that is due first comes, and the earlier
    source where two are. So after any number of positions each source is less than one sample away from its share
    (Tijdeman, "The chairman assignment problem", 1980).
    """
    length = sum(weights)
    samples = [
        (number * length // weight, -(-(number + 1) * length // weight), source)
        for source, weight in enumerate(weights)
        for number in range(weight)
    ]
    samples.sort(reverse=True)
    ready, order = [], []  # when due, and of which source
    for position in range(length):
        while samples and samples[-1][0] <= position:
            heappush(ready, samples.pop()[1:])
        order.append(heappop(ready)[1])
    return np.array(order, np.int64)


@dataclass(frozen=True)
class Mixing:
    """Sources of so many samples each, `sizes`, mixed by `weights`, whole numbers in lowest terms.

    A sample's id counts the samples of all sources, one source after the other.
    """

    weights: tuple[int, ...]
    sizes: tuple[int, ...]

    @cached_property
    def order(self) -> np.ndarray:
        return order_of(self.weights)

    @cached_property
    def _numbers(self) -> np.ndarray:
        """Which of its source's samples of one order each position takes, from 0."""
        numbers = np.empty_like(self.order)
        for source, weight in enumerate(self.weights):
            numbers[self.order == source] = np.arange(weight)
        return numbers

    def counts(self, num_samples: int) -> list[int]:
        """How many of the first `num_samples` samples of a run are of each source."""
        rounds, rest = divmod(num_samples, len(self.order))
        more = np.bincount(self.order[:rest], minlength=len(self.weights))
        return [rounds * weight + int(number) for weight, number in zip(self.weights, more, strict=True)]

    def sample_ids_of(self, update: int, global_batch_size: int, seed: int) -> np.ndarray:
        """Ids (int64) of the samples of update `update` (0-based), by their positions in the run.

        A source is gone through in a permutation of its own in each of its epochs. One that is short comes again, even
        within an update.
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
