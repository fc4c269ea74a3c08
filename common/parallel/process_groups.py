"""Groups of ranks that exchange or sum tensors with each other."""

from collections.abc import Callable

import torch.distributed as dist
from accelerate.utils import DistributedDataParallelKwargs

from common.training.process_grid import running

_made: dict[tuple[tuple[int, ...], ...], dist.ProcessGroup] = {}


def group_of(members: Callable[[int], list[int]]) -> dist.ProcessGroup:
    """The group that this rank is in; made at the first call, which all ranks make together.

    members: of any rank, the ranks of its group.
    """
    all_groups = tuple(dict.fromkeys(tuple(members(rank)) for rank in range(dist.get_world_size())))
    if all_groups not in _made:
        for ranks in all_groups:  # every rank makes all groups, as torch wants it
            group = dist.new_group(list(ranks))
            if dist.get_rank() in ranks:
                _made[all_groups] = group
    return _made[all_groups]


class AveragedByPeers(DistributedDataParallelKwargs):
    """DDP averages gradients over the ranks with the same weights, where those of others are of other parts."""

    def to_kwargs(self):
        degrees = running()
        more = {"process_group": group_of(degrees.peers)} if degrees.copies > 1 else {}
        return super().to_kwargs() | more
