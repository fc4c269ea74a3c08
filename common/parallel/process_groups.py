"""Groups of ranks that exchange or sum tensors with each other."""

from collections.abc import Callable
from datetime import timedelta
from functools import cache

import torch.distributed as dist
from accelerate.utils import DistributedDataParallelKwargs

from common.training.process_grid import ProcessGrid, current_grid


def group_ranks(grid: ProcessGrid, rank: int) -> list[int]:
    """Returns the ranks of a sequence or tensor group: same samples and layers as `rank`, including `rank`."""
    start = rank // grid.group_size * grid.group_size
    return list(range(start, start + grid.group_size))


def pipeline_ranks(grid: ProcessGrid, rank: int) -> list[int]:
    """Returns the ranks of all pipeline stages that process the samples of `rank`, including `rank`."""
    return list(range(rank % grid.stage_size, grid.num_processes, grid.stage_size))


def first_and_last_stage(grid: ProcessGrid, rank: int) -> list[int]:
    """Returns the first and the last of `pipeline_ranks` if `rank` is one of the two, otherwise only `rank`."""
    first, *_, last = pipeline_ranks(grid, rank)
    return [first, last] if rank in (first, last) else [rank]


def gradient_peers(grid: ProcessGrid, rank: int) -> list[int]:
    """Returns the ranks with the same weights as `rank`, including `rank`; they average their gradients."""
    start = grid.stage(rank) * grid.stage_size
    return list(range(start + rank % grid.tensor, start + grid.stage_size, grid.tensor))


@cache
def group_of(members: Callable[[ProcessGrid, int], list[int]]) -> dist.ProcessGroup:
    """Returns this rank's process group; created at the first call, which all ranks make together.

    Args:
        members: returns the ranks in the group of a rank, such as `group_ranks`.
    """
    all_groups = dict.fromkeys(tuple(members(current_grid(), rank)) for rank in range(dist.get_world_size()))
    made = {ranks: dist.new_group(list(ranks)) for ranks in all_groups}  # every rank must create all groups
    return next(group for ranks, group in made.items() if dist.get_rank() in ranks)


@cache
def host_group() -> dist.ProcessGroup | None:
    """Returns a gloo group of all ranks, whose operations do not wait for a GPU; None for a single process.

    All ranks make the first call together, within the time limit of the start. Later operations have a long limit,
    because other ranks wait while a rank removes an old run or writes; `rank_watch` detects ranks that die.
    """
    is_alone = not dist.is_initialized() or dist.get_world_size() == 1
    return None if is_alone else dist.new_group(backend="gloo", timeout=timedelta(days=1))


class AveragedByPeers(DistributedDataParallelKwargs):
    """DDP settings that average gradients only over the ranks with the same weights (`gradient_peers`)."""

    def to_kwargs(self):
        more = {"process_group": group_of(gradient_peers)} if current_grid().model_parallel > 1 else {}
        return super().to_kwargs() | more
