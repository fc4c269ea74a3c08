"""Synchronises outcomes and the output directory over ranks: if a rank fails, all ranks stop."""

import argparse
import os
import socket
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from common.errors import UserError
from common.files import PARTIAL
from common.parallel.liveness import is_soon


class Agreement:
    """Collective operations of a run's ranks on its output directory. All ranks call each method together."""

    def __init__(self, accelerator: Accelerator, output_dir: Path):
        self.output_dir = output_dir
        self.needed = 0  # bytes of the newest save, over all ranks
        self.rank, self.world = accelerator.process_index, accelerator.num_processes
        self.group = None  # a CPU group, so that no operation waits for the GPU
        if self.world > 1:  # a long timeout, because a rank may remove an old run or write a large part alone
            self.group = torch.distributed.new_group(backend="gloo", timeout=timedelta(days=1))

    @property
    def directory(self) -> Path:
        """Returns the directory of the checkpoints."""
        return self.output_dir / "checkpoints"

    def sum(self, *values: float) -> list[float]:
        """Returns each value summed over the ranks."""
        sums = torch.tensor(values, dtype=torch.float64)
        if self.world > 1:
            torch.distributed.all_reduce(sums, group=self.group)
        return sums.tolist()

    def share(self, value: Any) -> Any:
        """Returns the main rank's value on all ranks."""
        told = [value]
        if self.world > 1:
            torch.distributed.broadcast_object_list(told, src=0, group=self.group)
        return told[0]

    def together(self, action: Callable[[], Any], only_main: bool = False) -> None:
        """Runs `action` on all ranks, or only on the main rank; raises UserError on all ranks if it failed on any."""
        problem = None
        try:
            if self.rank == 0 or not only_main:
                action()
        except OSError as error:
            problem = self.disk_line(error)
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
        raise UserError(next(one for one in problems if one is not None))

    def disk_line(self, error: OSError) -> str:
        """Returns this rank's message for an error of its disk."""
        has_any = any(not path.name.endswith(PARTIAL) for path in self.directory.glob("update-*"))
        advice = "start again with --resume: the last complete checkpoint is untouched" if has_any else "start again"
        from common.disk_errors import disk_line

        return disk_line(error, "no checkpoint could be written", self.directory, self.needed, advice)

    def share_output_dir(self, args: argparse.Namespace) -> None:
        """Sets rank 0's output directory on all ranks, and checks that each host can see files in it.

        The default name contains the time, so it could differ between ranks.

        Raises UserError: the hosts do not share the directory.
        """
        if self.world == 1:
            return
        token, told = None, [None]

        def write() -> None:
            nonlocal token
            told[0] = (str(self.output_dir), None, socket.gethostname())
            if not args.dry_run and int(os.environ.get("LOCAL_WORLD_SIZE", self.world)) < self.world:
                # In an existing directory, because an error that is detected later must not leave a new directory.
                above = next(place for place in [self.output_dir, *self.output_dir.parents] if place.is_dir())
                token = tempfile.NamedTemporaryFile(dir=above, prefix=".shared-")
                told[0] = (str(self.output_dir), above / Path(token.name).name, socket.gethostname())

        self.together(write, only_main=True)
        args.output_dir, written, host = self.share(told[0])
        self.output_dir = Path(args.output_dir)
        if written is None:
            return
        is_seen = is_soon(written.exists)
        line = (
            f"--output_dir {self.output_dir}: what rank 0 on host {host} writes there is not seen on host "
            f"{socket.gethostname()}; name a directory that all hosts share, by its whole path"
        )
        self.raise_first(None if is_seen else line)
        if token is not None:
            token.close()
