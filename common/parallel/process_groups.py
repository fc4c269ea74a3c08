"""Groups of ranks that exchange or sum tensors with each other."""

from collections.abc import Callable

import torch.distributed as dist
from accelerate.utils import DistributedDataParallelKwargs

from common.training.process_grid import running

_made: dict[tuple[tuple[int, ...], ...], dist.ProcessGroup] = {}


def group_of(members: Callable[[int], list[int]]) -> dist.ProcessGroup:
    """Returns this rank's process group; created at the first call, which all ranks make together.

    Args:
        members: returns the ranks in the group of a rank.
    """
    all_groups = tuple(dict.fromkeys(tuple(members(rank)) for rank in range(dist.get_world_size())))
    if all_groups not in _made:
        for ranks in all_groups:  # torch requires that every rank creates all groups
            group = dist.new_group(list(ranks))
            if dist.get_rank() in ranks:
                _made[all_groups] = group
    return _made[all_groups]


class AveragedByPeers(DistributedDataParallelKwargs):
    """DDP settings that average gradients over the ranks with the same weights, if other ranks hold other parts."""

    def to_kwargs(self):
        degrees = running()
        more = {"process_group": group_of(degrees.peers)} if degrees.copies > 1 else {}
        return super().to_kwargs() | more
