"""Assigns micro-batches to several ranks with equal work.

Each step (one micro-batch per rank) uses the next range of the samples, which are sorted by length. Within this range,
each rank gets consecutive samples until its work is near its share of the total. Later steps, with shorter samples,
compensate for remaining differences. Work is in tokens (`padding.row_work`).
"""

import heapq
import math
from collections.abc import Callable
from functools import partial

import numpy as np

from common.training.padding import cheapest_counts, cheapest_ends, longest_of, row_work

TOLERANCE = 0.02  # tolerated excess of a rank's work over its lower bound; above it, more steps are tried
MAX_ATTEMPTS = 5  # maximum number of splits tried per update
FEW_RANKS = 8  # fewer ranks may also share the micro-batches of the cheapest split for a single rank
UNLIMITED = 1e18  # more than the work of any update


def assign(
    lengths: np.ndarray, counts: np.ndarray, world_size: int, attention_length: float
) -> tuple[np.ndarray, np.ndarray]:
    """Assigns m micro-batches of `counts` samples to ranks; returns the rank of each (m,), and the work of each rank.

    All ranks get the same number of micro-batches. In order of decreasing work, each goes to the rank with the least
    work that is not full. Then the ranks with the most and the least work swap micro-batches while they get closer.
    """
    work = counts * row_work(longest_of(lengths, counts), attention_length)
    assigned: list[list[int]] = [[] for _ in range(world_size)]
    heap = [(0.0, rank) for rank in range(world_size)]
    for index in np.argsort(-work, kind="stable").tolist():
        load, rank = heapq.heappop(heap)
        assigned[rank].append(index)
        if len(assigned[rank]) < len(counts) // world_size:
            heapq.heappush(heap, (load + float(work[index]), rank))
    indices = np.array(assigned)
    loads = work[indices].sum(1)
    for _ in range(world_size):
        most, least = loads.argmax(), loads.argmin()
        moved = work[indices[most]][:, None] - work[indices[least]]  # work that the swap of a pair moves
        i, j = np.unravel_index(np.abs(moved - (loads[most] - loads[least]) / 2).argmin(), moved.shape)
        if not 0 < moved[i, j] < loads[most] - loads[least]:
            break
        indices[most, i], indices[least, j] = indices[least, j], indices[most, i]
        loads[most], loads[least] = loads[most] - moved[i, j], loads[least] + moved[i, j]
    ranks = np.zeros(len(counts), np.int64)
    ranks[indices] = np.arange(world_size)[:, None]
    return ranks, loads


def split(
    descending: np.ndarray, world_size: int, budget: int, attention_length: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns an order of the samples, and the counts and ranks of the micro-batches into which it is split.

    Counts and ranks are (steps, world), or flat if the micro-batches may run in any order. Splits with more and more
    steps are tried, until the maximum work per rank is close to its lower bound. If no split reaches it, the cheapest
    split is returned, preferably with balanced ranks.
    """
    num_samples, columns = descending.shape
    order = np.arange(num_samples)
    totals, work = descending.sum(1), row_work(descending, attention_length)
    lower_bound = max(work.sum() / world_size, work.max())
    price = min(budget / 16, 50)  # per step, in tokens; measured for a model with 14 M parameters on a CPU

    def cost_of(loads: np.ndarray, steps: int) -> tuple[bool, float]:
        return loads.max() > (1 + TOLERANCE) * max(loads.mean(), lower_bound), loads.max() + steps * price

    best = (True, math.inf), order, order, order
    if world_size < FEW_RANKS:
        counts = cheapest_counts(descending, budget)
        counts = np.pad(counts, (0, -len(counts) % world_size))
        ranks, loads = assign(descending, counts, world_size, attention_length)
        best = cost_of(loads, len(counts) // world_size), order, counts, ranks
    tried = set()
    for smaller in budget * 0.75 ** np.arange(3 * MAX_ATTEMPTS):  # a smaller budget gives more steps
        ends = _cheapest_ends(totals, world_size, smaller) * world_size
        step_sizes = np.diff(np.minimum(ends, num_samples), prepend=0)
        if len(ends) in tried:
            continue
        tried.add(len(ends))
        sample_work, max_rows = work, budget // totals
        if columns > 1:
            order = _sort_in_blocks(descending, round((len(ends) * world_size) ** 0.5))
            sample_work, max_rows = _guess_rows(descending[order], step_sizes, world_size, budget, attention_length)
        counts, ranks, loads = _fill(sample_work, max_rows, step_sizes, world_size, lower_bound)
        cost = cost_of(loads, len(counts))
        if cost < best[0]:
            best = cost, order, counts, ranks
        if loads.max() <= (1 + TOLERANCE) * lower_bound or len(tried) == MAX_ATTEMPTS:
            break
    return best[1:]


def _cheapest_ends(descending: np.ndarray, world_size: int, budget: float) -> np.ndarray:
    """Returns the ends of the steps, in samples per rank, that minimise tokens with padding plus a price per step.

    An approximation of `padding.cheapest_counts` for several ranks: a rank has each `world_size`-th sample of
    `descending` (n,), and its padding is the padding of the full step divided by `world_size`, because the ranks split
    the step into micro-batches of consecutive samples.
    """
    own = descending[::world_size]
    sums = np.add.reduceat(descending, np.arange(0, len(descending), world_size)) / world_size
    before, numbers = np.concatenate([[0], np.cumsum(sums)]), np.arange(1, len(own) + 1)

    def sizes_from(start: int) -> np.ndarray:
        end = int(np.searchsorted(before, before[start] + budget, "right"))
        without = before[start + 1 : end + 1] - before[start]
        sizes = without + (own[start] * numbers[: len(without)] - without) / world_size
        return sizes[: max(1, np.count_nonzero(sizes <= budget))]

    return cheapest_ends(len(own), sizes_from, budget / 24)


def _sort_in_blocks(descending: np.ndarray, num_blocks: int) -> np.ndarray:
    """Returns an order of samples (n, 2) with descending sums: in blocks, each sorted by its first column."""
    block = np.arange(len(descending)) * num_blocks // len(descending)
    first = descending[:, 0]
    return np.lexsort((np.where(block % 2, first, -first), block))  # alternating directions: no jumps between blocks


def _guess_rows(
    lengths: np.ndarray, step_sizes: np.ndarray, world_size: int, budget: int, attention_length: float
) -> tuple[np.ndarray, np.ndarray]:
    """Estimates the work per row, and the maximum number of rows, of the micro-batch that starts at each sample (n, 2).

    A row is as long as the micro-batch's longest source plus its longest target. The number of rows is estimated from
    a rank's share of the work of the step.
    """
    work = row_work(lengths, attention_length)
    share = np.add.reduceat(work, np.cumsum(step_sizes) - step_sizes) / world_size
    max_rows = np.ceil(1.1 * np.repeat(share, step_sizes) / work).astype(np.int64)
    max_rows = np.minimum(np.minimum(max_rows, budget // lengths.sum(1)), np.arange(len(work), 0, -1))
    longest, wider, level = np.empty_like(lengths), lengths, np.frexp(max_rows)[1] - 1
    for power in range(int(level.max()) + 1):  # maximum over 2**power samples; two such ranges cover a micro-batch
        at_level, width = np.flatnonzero(level == power), 1 << power
        longest[at_level] = np.maximum(wider[at_level], wider[at_level + max_rows[at_level] - width])
        wider = np.maximum(wider[:-width], wider[width:])
    max_rows = np.maximum(1, np.minimum(max_rows, budget // longest.sum(1)))
    return np.where(max_rows == 1, work, row_work(longest, attention_length)), max_rows


def _fill(
    sample_work: np.ndarray, max_rows: np.ndarray, step_sizes: np.ndarray, world_size: int, lower_bound: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Assigns micro-batches to ranks; returns counts and ranks (steps, world), and the work of each rank.

    Args:
        sample_work: (n,), work of a row in a micro-batch that starts at this sample.
        max_rows: (n,), maximum samples of this micro-batch.
        step_sizes: approximate number of samples per step; if samples remain, steps are added.
        lower_bound: lower bound of the maximum work per rank, for any split.
    """
    remaining, ends = np.append(np.cumsum(sample_work[::-1])[::-1], 0), np.cumsum(step_sizes)
    shares = (1 - remaining[ends] / remaining[ends - step_sizes]).tolist()  # per step: its share of the remaining work
    loads, start = np.zeros(world_size), 0
    counts: list[list[int]] = []
    ranks: list[np.ndarray] = []
    take = partial(_take, sample_work.tolist(), max_rows.tolist())
    while start < len(sample_work):
        order = np.argsort(loads, kind="stable")  # the rank with the least work gets the longest samples
        before, step = loads[order], len(counts)
        target = _fill_level(before, remaining[start])
        unlimited = np.full(world_size, UNLIMITED)
        if step >= len(shares) - 1 and take(start, unlimited, unlimited)[1] == len(sample_work):
            taken = _fill_last(partial(take, start), before, target, lower_bound, len(sample_work))
            end = len(sample_work)
        else:
            room = (target - before).clip(0)
            most_for_one = max(target, lower_bound) - before if step < len(shares) else np.where(room > 0, UNLIMITED, 0)
            share = shares[step] if step < len(shares) - 1 else 0.5
            taken, end = take(start, room * share, most_for_one, rounding=0.5)
        first = np.minimum(start + np.cumsum(taken) - taken, len(sample_work) - 1)
        loads[order] += sample_work[first] * taken
        counts.append(taken)
        ranks.append(order)
        start = end
    return np.array(counts), np.array(ranks), loads


def _fill_last(
    take: Callable[[np.ndarray, np.ndarray], tuple[list[int], int]],
    before: np.ndarray,
    target: float,
    lower_bound: float,
    num_samples: int,
) -> list[int]:
    """Returns the samples per rank in the last step, for the lowest limit of work per rank that fits all samples."""

    def fill(limit: float) -> tuple[list[int], int]:
        return take((limit - before).clip(0), max(limit, lower_bound) - before)

    low, high = target, 1.005 * target
    taken, end = fill(high)
    while end < num_samples:
        low, high = high, high + 2 * (high - low)
        taken, end = fill(high)
    while high - low > 0.003 * lower_bound:
        fewer, end = fill(middle := (low + high) / 2)
        low, high, taken = (middle, high, taken) if end < num_samples else (low, middle, fewer)
    return taken


def _fill_level(loads: np.ndarray, work: float) -> float:
    """Returns the level of water-filling: the work per rank after `work` is added to the lowest of `loads` (ascending).

    A rank above this level gets no work.
    """
    levels = (work + np.cumsum(loads)) / np.arange(1, len(loads) + 1)
    return float(levels[np.flatnonzero(levels >= loads)[-1]])


def _take(
    work: list[float], limits: list[int], start: int, wanted: np.ndarray, most_for_one: np.ndarray, rounding: float = 0
) -> tuple[list[int], int]:
    """Returns the number of samples that each rank takes, in order from sample `start`, and the end of the last.

    Args:
        work, limits: `sample_work` and `max_rows` of `_fill`.
        wanted: target work of each rank.
        most_for_one: a rank whose `wanted` is less than a sample takes the sample if its work is at most this limit.
        rounding: 0.5 rounds to the nearest number, 0 rounds down.
    """
    taken, end = [], start
    for target, limit in zip(wanted.tolist(), most_for_one.tolist(), strict=True):
        if end == len(work):
            break
        count = int(target / work[end] + rounding) or int(limit >= work[end])
        if count > limits[end]:  # (faster than min())
            count = limits[end]
        count = count if end + count <= len(work) else len(work) - end
        taken.append(count)
        end += count
    return taken + [0] * (len(wanted) - len(taken)), end
