"""Lengths of padded samples, their work, and the cheapest split of sorted samples into micro-batches on one rank."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np


def round_up(lengths: Any, multiple_of: int) -> Any:
    """Returns the smallest multiple of `multiple_of` >= `lengths`, an int or an array."""
    return -(-lengths // multiple_of) * multiple_of


def row_work(lengths: np.ndarray, attention_length: float = math.inf) -> np.ndarray:
    """Returns the work (n,), float64, of rows with padded lengths (n, columns), in units of a token of a short row.

    A row's attention grows with the square of its length; at `attention_length` it costs as much as all other work. If
    a row has a source and a target, the target attends to both.
    """
    pairs = (lengths.astype(float) ** 2).sum(1) + (lengths.prod(1) if lengths.shape[1] == 2 else 0)
    return lengths.sum(1) + pairs / attention_length


def longest_of(lengths: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Returns (m, columns): maximum lengths in each of m micro-batches of `counts` samples; 0 if empty."""
    longest = np.zeros((len(counts), lengths.shape[1]), np.int64)
    filled = counts > 0
    longest[filled] = np.maximum.reduceat(lengths, (np.cumsum(counts) - counts)[filled])
    return longest


def cheapest_ends(num_samples: int, sizes_from: Callable[[int], np.ndarray], price: float) -> np.ndarray:
    """Returns the ends of the micro-batches that minimise their total size plus `price` per micro-batch.

    sizes_from: maps the index of the first sample to the sizes of the allowed micro-batches of 1, 2, ... samples. The
    method is dynamic programming from the first sample.
    """
    cost, previous = np.full(num_samples + 1, np.inf), np.zeros(num_samples + 1, np.int64)
    cost[0] = 0
    for start in range(num_samples):
        costs = cost[start] + sizes_from(start) + price
        ends = slice(start + 1, start + 1 + len(costs))
        better = costs < cost[ends]
        cost[ends][better] = costs[better]
        previous[ends][better] = start
    stops = [num_samples]
    while previous[stops[-1]] > 0:
        stops.append(int(previous[stops[-1]]))
    return np.array(stops[::-1])


def cheapest_counts(descending: np.ndarray, budget: int) -> np.ndarray:
    """Returns the sizes of micro-batches of at most `budget` tokens, with minimal tokens plus a price for each."""
    lengths = descending.sum(1).tolist()

    def sizes_from(start: int) -> np.ndarray:
        longest = np.maximum.accumulate(descending[start : start + budget // lengths[start]]).sum(1)
        sizes = longest * np.arange(1, len(longest) + 1)
        return sizes[sizes <= budget]

    return np.diff(cheapest_ends(len(descending), sizes_from, budget / 16), prepend=0)
