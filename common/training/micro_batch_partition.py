"""Splits a global batch into micro-batches and assigns them to ranks.

The samples are sorted by length, and a micro-batch contains consecutive samples, so there is little padding. On several
ranks, `load_balancing` gives all ranks equal work.
"""

import math

import numpy as np

from common.training.padding import cheapest_counts, longest_of


def split_global_batch(
    lengths: np.ndarray,
    world_size: int,
    micro_batch_size: int | None = None,
    micro_batch_tokens: int | None = None,
    attention_length: float = math.inf,
) -> list[list[np.ndarray]]:
    """Splits a global batch into micro-batches and assigns them: `result[rank][step]` holds positions in `lengths`.

    A micro-batch has `micro_batch_size` samples, or at most as many as fit into `micro_batch_tokens` tokens with
    padding. Every rank gets the same number of micro-batches; if there are too few, an empty array replaces a
    micro-batch. The ranks get nearly equal work (`row_work`); samples are not split.

    `lengths` is (n,), or (n, 2) if a sample has two sequences that are padded separately (a source and a target). Such
    samples are sorted by their sum. The length of a micro-batch is then its longest source plus its longest target.
    """
    lengths = lengths.reshape(len(lengths), -1)
    totals = lengths.sum(1)
    # In the smallest dtype, because numpy sorts 16 bits in a tenth of the time.
    order = np.argsort((totals.max() - totals).astype(np.min_scalar_type(totals.max())), kind="stable")
    descending = lengths[order]
    if micro_batch_size is not None:
        num_full, rest = divmod(len(order), world_size * micro_batch_size)
        last = [(rest + rank) // world_size for rank in range(world_size)] if rest else []  # an equal split of the rest
        counts = np.array([micro_batch_size] * (num_full * world_size) + last)
        ranks = np.zeros_like(counts)
        if world_size > 1:
            from common.training import load_balancing

            ranks, _ = load_balancing.assign(descending, counts, world_size, attention_length)
    else:
        assert micro_batch_tokens is not None and totals.max() <= micro_batch_tokens, "a sample exceeds the budget"
        if world_size == 1:
            counts = cheapest_counts(descending, micro_batch_tokens)
            ranks = np.zeros_like(counts)
        else:
            from common.training import load_balancing

            resorted, counts, ranks = load_balancing.split(descending, world_size, micro_batch_tokens, attention_length)
            order = order[resorted]
    # The largest steps run first, so that an OOM occurs at once. A step runs on all ranks at the same time.
    tokens = counts.ravel() * longest_of(lengths[order], counts.ravel()).sum(1)
    sizes = tokens.reshape(len(counts), -1).sum(1)
    largest = np.argsort(-sizes, kind="stable")
    ends = np.cumsum(counts).reshape(counts.shape)
    assigned: list[list[np.ndarray]] = [[] for _ in range(world_size)]
    columns = (ranks[largest], (ends - counts)[largest], ends[largest])
    for rank, start, end in zip(*(values.ravel().tolist() for values in columns), strict=True):
        assigned[rank].append(order[start:end])
    return assigned
