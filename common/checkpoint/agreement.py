"""Synchronises outcomes over ranks: if a rank fails, all ranks stop."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from common.errors import UserError


class Agreement:
    """Collective operations of a run's ranks on its output directory. All ranks call each method together."""

    def __init__(self, accelerator: Accelerator, output_dir: Path):
        self.output_dir = output_dir
        self.needed = 0  # bytes of the current save, over all ranks
        self.rank, self.world = accelerator.process_index, accelerator.num_processes
        self.group = None
        if self.world > 1:
            from common.parallel.process_groups import host_group

            self.group = host_group()

    @property
    def directory(self) -> Path:  # of the checkpoints
        return self.output_dir / "checkpoints"

    def sum(self, *values: float) -> list[float]:
        """Returns each value summed over the ranks."""
        sums = torch.tensor(values, dtype=torch.float64)
        if self.world > 1:
            torch.distributed.all_reduce(sums, group=self.group)
        return sums.tolist()

    def share(self, value: Any) -> Any:
        """Returns the main rank's value on all ranks."""
        values = [value]
        if self.world > 1:
            torch.distributed.broadcast_object_list(values, src=0, group=self.group)
        return values[0]

    def together(self, action: Callable[[], Any], only_main: bool = False) -> None:
        """Runs `action` on all ranks, or only on the main rank; raises UserError on all ranks if any rank failed."""
        problem = None
        try:
            if self.rank == 0 or not only_main:
                action()
        except OSError as error:
            from common.disk_errors import checkpoint_line

            problem = checkpoint_line(error, self.directory, self.needed)
        except UserError as error:
            problem = str(error)
        self.raise_first(problem)

    def raise_first(self, problem: str | None) -> None:
        """Raises UserError on all ranks if any rank has a problem."""
        if self.sum(problem is not None)[0] == 0:
            return
        problems = [problem]
        if self.world > 1:
            problems = [None] * self.world
            torch.distributed.all_gather_object(problems, problem, group=self.group)
        raise UserError(next(text for text in problems if text is not None))
