"""Synchronises outcomes and the output directory over ranks: if a rank fails, no other rank continues."""

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
from common.files import PARTIAL, disk_line
from common.parallel.liveness import is_soon


class Agreement:
    """What the ranks of a run do together in its output directory; every method is called by all of them."""

    def __init__(self, accelerator: Accelerator, output_dir: Path):
        self.output_dir = output_dir
        self.needed = 0  # bytes of the newest save, over all ranks
        self.rank, self.world = accelerator.process_index, accelerator.num_processes
        self.group = None  # the ranks agree over the network between the hosts: the GPU is never waited for
        if self.world > 1:  # with time for what one of them does alone: to remove an old run, to write a large part
            self.group = torch.distributed.new_group(backend="gloo", timeout=timedelta(days=1))

    @property
    def directory(self) -> Path:
        """Where the checkpoints lie."""
        return self.output_dir / "checkpoints"

    def sum(self, *values: float) -> list[float]:
        """Each value summed over the ranks."""
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
        """Runs it on all ranks, or on the main one; raises UserError on all if it failed on any."""
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
        """Raises UserError on all ranks if one of them has a problem."""
        if self.sum(problem is not None)[0] == 0:
            return
        problems = [problem]
        if self.world > 1:
            problems = [None] * self.world
            torch.distributed.all_gather_object(problems, problem, group=self.group)
        raise UserError(next(one for one in problems if one is not None))

    def disk_line(self, error: OSError) -> str:
        """The line of this rank for an error of its disk."""
        has_any = any(not path.name.endswith(PARTIAL) for path in self.directory.glob("update-*"))
        advice = "start again with --resume: the last complete checkpoint is untouched" if has_any else "start again"
        return disk_line(error, "no checkpoint could be written", self.directory, self.needed, advice)

    def share_output_dir(self, args: argparse.Namespace) -> None:
        """All ranks take rank 0's (the default's name has the time in it), and each host sees what is written there.

        Raises UserError: the hosts do not share it.
        """
        if self.world == 1:
            return
        token, told = None, [None]

        def write() -> None:
            nonlocal token
            told[0] = (str(self.output_dir), None, socket.gethostname())
            if not args.dry_run and int(os.environ.get("LOCAL_WORLD_SIZE", self.world)) < self.world:
                # In what is there already: a mistake that is found later must not leave a directory.
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
