"""Assigns micro-batches to several ranks with equal work.

Each step (one micro-batch on every rank) uses the next range of the samples, which are sorted by length. Each rank gets
consecutive samples of this range. A rank gets samples until its work is near its share of the total. Later steps, with
shorter samples, compensate for remaining differences.
"""

import heapq
import math
from collections.abc import Callable
from functools import partial

import numpy as np

from common.training.padding import cheapest_counts, cheapest_ends, longest_of, row_work

UNEQUAL = 0.02  # tolerated load imbalance: excess over the least possible maximum; above it, more steps are tried
MOST_TRIES = 5  # maximum number of plans per update
FEW = 8  # ranks; fewer ranks can also share the micro-batches of a single rank, in any order
EVERYTHING = 1e18  # more work than any update has


def spread(
    lengths: np.ndarray, counts: np.ndarray, world_size: int, attention_length: float
) -> tuple[np.ndarray, np.ndarray]:
    """Assigns m runs of `counts` samples to ranks; returns the rank of each run (m,), and the work of each rank.

    All ranks get the same number of runs. The run with the most work goes to the rank with the least work, and so on,
    until a rank has its number of runs. Then the ranks with the most and the least work exchange runs, as long as this
    reduces the difference.
    """
    work = counts * row_work(longest_of(lengths, counts), attention_length)
    mine: list[list[int]] = [[] for _ in range(world_size)]
    idlest = [(0.0, rank) for rank in range(world_size)]
    for run in np.argsort(-work, kind="stable").tolist():
        had, rank = heapq.heappop(idlest)
        mine[rank].append(run)
        if len(mine[rank]) < len(counts) // world_size:
            heapq.heappush(idlest, (had + float(work[run]), rank))
    runs = np.array(mine)
    done = work[runs].sum(1)
    for _ in range(world_size):
        most, least = done.argmax(), done.argmin()
        less = work[runs[most]][:, None] - work[runs[least]]
        given, taken = np.unravel_index(np.abs(less - (done[most] - done[least]) / 2).argmin(), less.shape)
        if not 0 < less[given, taken] < done[most] - done[least]:
            break
        runs[most, given], runs[least, taken] = runs[least, taken], runs[most, given]
        done[most], done[least] = done[most] - less[given, taken], done[least] + less[given, taken]
    ranks = np.zeros(len(counts), np.int64)
    ranks[runs] = np.arange(world_size)[:, None]
    return ranks, done


def cut(
    descending: np.ndarray, world_size: int, budget: int, attention_length: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns an order of the samples, and the counts and ranks of the runs into which it is split.

    Counts and ranks are (steps, world), or flat if the order of the runs is free. A few ranks may share the cheapest
    split for one rank. Splits with more and more steps are tried, until the maximum work per rank is close to the lower
    bound. If no split reaches it, the best split with balanced ranks is returned.
    """
    num_samples, columns = descending.shape
    order = np.arange(num_samples)
    totals, work = descending.sum(1), row_work(descending, attention_length)
    possible = max(work.sum() / world_size, work.max())
    price = min(budget / 16, 50)  # per step, in tokens; measured for a model with 14 M parameters on a CPU

    def cost_of(done: np.ndarray, steps: int) -> tuple[bool, float]:
        return done.max() > (1 + UNEQUAL) * max(done.mean(), possible), done.max() + steps * price

    best = (True, math.inf), order, order, order
    if world_size < FEW:
        counts = cheapest_counts(descending, budget)
        counts = np.pad(counts, (0, -len(counts) % world_size))
        ranks, done = spread(descending, counts, world_size, attention_length)
        best = cost_of(done, len(counts) // world_size), order, counts, ranks
    tried = set()
    for smaller in budget * 0.75 ** np.arange(3 * MOST_TRIES):  # plans as if the budget were smaller
        ends = _cheapest_ends(totals, world_size, smaller) * world_size
        stretches = np.diff(np.minimum(ends, num_samples), prepend=0)
        if len(ends) in tried:
            continue
        tried.add(len(ends))
        rows, most = work, budget // totals
        if columns > 1:
            order = _sort_in_blocks(descending, round((len(ends) * world_size) ** 0.5))
            rows, most = _guess_rows(descending[order], stretches, world_size, budget, attention_length)
        counts, ranks, done = _fill(rows, most, stretches, world_size, possible)
        cost = cost_of(done, len(counts))
        if cost < best[0]:
            best = cost, order, counts, ranks
        if done.max() <= (1 + UNEQUAL) * possible or len(tried) == MOST_TRIES:
            break
    return best[1:]


def _cheapest_ends(descending: np.ndarray, world_size: int, budget: float) -> np.ndarray:
    """Returns the ends of the steps, in samples per rank, that minimise tokens with padding plus a price per step.

    It is `padding.cheapest_counts` for several ranks, where it is not exact: a rank has each `world_size`-th sample
    of `descending` (n,). Its padding is that of the full stretch divided by `world_size`, since the ranks split the
    stretch into runs.
    """
    mine = descending[::world_size]
    sums = np.add.reduceat(descending, np.arange(0, len(descending), world_size)) / world_size
    before, numbers = np.concatenate([[0], np.cumsum(sums)]), np.arange(1, len(mine) + 1)

    def sizes_from(start: int) -> np.ndarray:
        end = int(np.searchsorted(before, before[start] + budget, "right"))
        without = before[start + 1 : end + 1] - before[start]
        sizes = without + (mine[start] * numbers[: len(without)] - without) / world_size
        return sizes[: max(1, np.count_nonzero(sizes <= budget))]

    return cheapest_ends(len(mine), sizes_from, budget / 24)


def _sort_in_blocks(descending: np.ndarray, num_blocks: int) -> np.ndarray:
    """Returns an order of samples (n, 2) with descending sums: in blocks, each sorted by its first column."""
    block = np.arange(len(descending)) * num_blocks // len(descending)
    first = descending[:, 0]
    return np.lexsort((np.where(block % 2, first, -first), block))  # alternating directions: no jumps between blocks


def _guess_rows(
    lengths: np.ndarray, stretches: np.ndarray, world_size: int, budget: int, attention_length: float
) -> tuple[np.ndarray, np.ndarray]:
    """Estimates, for the run that starts at each sample (n, 2), the maximum work per row and the maximum rows for it.

    A row is as long as the run's longest source plus its longest target. The run has about as many rows as its share
    needs.
    """
    work = row_work(lengths, attention_length)
    share = np.add.reduceat(work, np.cumsum(stretches) - stretches) / world_size
    most = np.ceil(1.1 * np.repeat(share, stretches) / work).astype(np.int64)
    most = np.minimum(np.minimum(most, budget // lengths.sum(1)), np.arange(len(work), 0, -1))
    longest, wider, level = np.empty_like(lengths), lengths, np.frexp(most)[1] - 1
    for power in range(int(level.max()) + 1):  # maximum over 2**power samples; two such ranges cover a run
        here, width = np.flatnonzero(level == power), 1 << power
        longest[here] = np.maximum(wider[here], wider[here + most[here] - width])
        wider = np.maximum(wider[:-width], wider[width:])
    most = np.maximum(1, np.minimum(most, budget // longest.sum(1)))
    return np.where(most == 1, work, row_work(longest, attention_length)), most


def _fill(
    rows: np.ndarray, most: np.ndarray, stretches: np.ndarray, world_size: int, possible: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Assigns runs to ranks, in about these steps; returns counts and ranks (steps, world), and the work of each rank.

    Args:
        rows: (n,), work of a row in a run that starts at this sample.
        most: (n,), maximum samples of this run.
        stretches: number of samples per step; if samples remain, steps are added.
        possible: lower bound of the maximum work per rank, for any plan.
    """
    left, ends = np.append(np.cumsum(rows[::-1])[::-1], 0), np.cumsum(stretches)
    shares = (1 - left[ends] / left[ends - stretches]).tolist()  # share of the work that remains when a step begins
    done, start = np.zeros(world_size), 0
    counts: list[list[int]] = []
    ranks: list[np.ndarray] = []
    take = partial(_take, rows.tolist(), most.tolist())
    while start < len(rows):
        order = np.argsort(done, kind="stable")  # the rank with the least work gets the longest
        before, step = done[order], len(counts)
        level = _level(before, left[start])
        everything = np.full(world_size, EVERYTHING)
        if step >= len(shares) - 1 and take(start, everything, everything)[1] == len(rows):
            taken, end = _fill_last(partial(take, start), before, level, possible, len(rows)), len(rows)
        else:
            room = (level - before).clip(0)
            one = max(level, possible) - before if step < len(shares) else np.where(room > 0, EVERYTHING, 0)
            taken, end = take(start, room * (shares[step] if step < len(shares) - 1 else 0.5), one, rounding=0.5)
        first = np.minimum(start + np.cumsum(taken) - taken, len(rows) - 1)
        done[order] += rows[first] * taken
        counts.append(taken)
        ranks.append(order)
        start = end
    return np.array(counts), np.array(ranks), done


def _fill_last(
    take: Callable[[np.ndarray, np.ndarray], tuple[list[int], int]],
    before: np.ndarray,
    level: float,
    possible: float,
    num_samples: int,
) -> list[int]:
    """Returns the samples per rank in a last step, for the smallest limit of work within which all samples fit."""

    def fill(limit: float) -> tuple[list[int], int]:
        return take((limit - before).clip(0), max(limit, possible) - before)

    low, high = level, 1.005 * level
    taken, end = fill(high)
    while end < num_samples:
        low, high = high, high + 2 * (high - low)
        taken, end = fill(high)
    while high - low > 0.003 * possible:
        fewer, end = fill(middle := (low + high) / 2)
        low, high, taken = (middle, high, taken) if end < num_samples else (low, middle, fewer)
    return taken


def _level(done: np.ndarray, work: float) -> float:
    """Returns the work per rank after `work` is added to `done` (ascending), always to the rank with the least.

    (A rank with more work than this gets none.)
    """
    levels = (work + np.cumsum(done)) / np.arange(1, len(done) + 1)
    return float(levels[np.flatnonzero(levels >= done)[-1]])


def _take(
    rows: list[float], most: list[int], start: int, wanted: np.ndarray, one: np.ndarray, rounding: float = 0
) -> tuple[list[int], int]:
    """Returns the numbers of samples that the ranks take one after the other from `start`, and the end of the last.

    Args:
        rows, most: as in `_fill`.
        wanted: requested work of each rank.
        one: a rank takes at least one sample if the sample's work is not above this.
        rounding: 0.5 rounds to the nearest number, 0 rounds down.
    """
    taken, end = [], start
    for work, least in zip(wanted.tolist(), one.tolist(), strict=True):
        if end == len(rows):
            break
        row = rows[end]
        count = int(work / row + rounding) or int(least >= row)
        if count > most[end]:  # (faster than min())
            count = most[end]
        count = count if end + count <= len(rows) else len(rows) - end
        taken.append(count)
        end += count
    return taken + [0] * (len(wanted) - len(taken)), end
