"""Output directories that exist already: locks that another process holds, and links."""

import os
from pathlib import Path

from filelock import FileLock, Timeout

from common.errors import UserError

# Seconds to wait for a lock. It may be held for some seconds by data workers of a killed run, or for an update by ranks
# whose launcher has died.
LOCK_TIMEOUT = 60


def wait_for_lock(lock: FileLock, directory: Path) -> None:
    """Waits until another process releases the lock. Raises UserError: it does not within LOCK_TIMEOUT seconds."""
    print("waiting for another process that writes to this output directory ...", flush=True)
    try:
        lock.acquire(timeout=LOCK_TIMEOUT)
    except Timeout:
        raise UserError(
            f"--output_dir {directory}: another run writes there; end it, or use a different directory"
        ) from None


def refuse_links(directory: Path) -> None:
    """Raises UserError: a link is where a run writes its files; the run would change files outside of the directory."""
    for entry in os.scandir(directory):
        if entry.is_symlink():
            raise UserError(f"{entry.path}: is a link to {os.readlink(entry.path)}; remove it, or use a new directory")
        if entry.is_dir() and directory.name != "checkpoints":  # a checkpoint is written under a new name
            refuse_links(Path(entry.path))
