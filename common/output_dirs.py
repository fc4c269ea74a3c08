"""Output directories that exist already: locks that another process holds, and links."""

import os
from contextlib import suppress
from pathlib import Path

from filelock import FileLock, Timeout

from common.errors import UserError
from common.process import ELASTIC_ID

# Seconds to wait for a lock. It may be held for some seconds by data workers of a killed run, or for an update by ranks
# whose launcher has died.
LOCK_TIMEOUT = 60
ELASTIC_TIMEOUT = 10  # seconds until a lock is taken over from an earlier start of the same elastic launch


def wait_for_lock(lock: FileLock, directory: Path) -> None:
    """Waits until another process releases the lock. Raises UserError: it does not within LOCK_TIMEOUT seconds."""
    is_elastic = ELASTIC_ID in os.environ
    print("waiting for another process that writes to this output directory ...", flush=True)
    for seconds in (ELASTIC_TIMEOUT, LOCK_TIMEOUT) if is_elastic else (LOCK_TIMEOUT,):
        with suppress(Timeout):
            lock.acquire(timeout=seconds)
            return
        if is_elastic:
            from common.elastic_launch import take_over

            take_over(Path(lock.lock_file))
    raise UserError(f"--output_dir {directory}: another run writes there; end it, or use a different directory")


def refuse_links(directory: Path) -> None:
    """Raises UserError: a link is where a run writes its files; the run would change files outside of the directory."""
    for entry in os.scandir(directory):
        if entry.is_symlink():
            raise UserError(f"{entry.path}: is a link to {os.readlink(entry.path)}; remove it, or use a new directory")
        if entry.is_dir() and directory.name != "checkpoints":  # a checkpoint is written under a new name
            refuse_links(Path(entry.path))
