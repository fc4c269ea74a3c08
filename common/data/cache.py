"""Caches preprocessed data on disk: one process computes, the others wait; an entry is complete or absent."""

import errno
import hashlib
import json
import os
import stat
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from common.errors import UserError, one_line
from common.files import CHECKED, CONTENTS, PARTIAL, complete_or_absent, remove, size_and_digest

FORMAT = 5  # increase this when the meaning of a cached file changes


def cached(
    kind: str, identity: list[Any], write: Callable[[Path], object], cache_dir: str | Path | None = None
) -> Path:
    """Returns a cache directory filled by `write`; of several concurrent processes, only one calls `write`.

    The cache is $XDG_CACHE_HOME/accelerate_recipes (default: ~/.cache/accelerate_recipes). Replaces damaged entries.

    Args:
        identity: everything that the files depend on, as JSON values.
        cache_dir: replaces the default cache.
    """
    directory = cache_path(kind, identity, cache_dir)
    with only_one(directory):
        _remove_unfinished(directory.parent)
        if directory.exists():
            from common.data.cache_check import remove_damaged

            remove_damaged(directory)
        if not directory.exists():
            try:
                with complete_or_absent(directory, "start again, or set XDG_CACHE_HOME to another disk") as partial:
                    write(partial)
                    (partial / CONTENTS).write_text(
                        json.dumps({path.name: size_and_digest(path) for path in sorted(partial.iterdir())})
                    )
            except OSError as error:
                # A different host may have filled the directory, but this host's directory listing was outdated.
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
    return directory


def cache_path(kind: str, identity: list[Any], cache_dir: str | Path | None = None) -> Path:
    """Returns the path that `cached` returns; the directory exists only if it has been filled."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "accelerate_recipes"
    digest = hashlib.blake2b(json.dumps([kind, FORMAT, *identity]).encode(), digest_size=10).hexdigest()
    return Path(cache_dir or root) / f"{kind}-{digest}"


def only_one(directory: Path) -> AbstractContextManager:
    """Acquires the lock of a cache directory: a collective would time out while one process tokenises for hours.

    Raises UserError if the cache cannot be written, or if a different user could have written its files.
    """
    try:
        root = directory.parent
        root.parent.mkdir(parents=True, exist_ok=True)
        root.mkdir(mode=0o700, exist_ok=True)
        status = root.stat()
        if {status.st_uid, root.lstat().st_uid} != {os.geteuid()} or status.st_mode & stat.S_IWOTH:
            raise OSError(f"it belongs to user {status.st_uid}, or every user can write to it")
        return FileLock(f"{directory}.lock").acquire()
    except OSError as error:
        problem = f"cache {directory.parent}: cannot be written ({one_line(error)}); set XDG_CACHE_HOME"
        raise UserError(problem) from error


def _remove_unfinished(root: Path) -> None:
    """Removes incomplete entries of killed processes; entries that are still being written are locked and remain."""
    for path in root.glob(f"*{PARTIAL}"):
        name = path.name.removesuffix(PARTIAL).removesuffix(".old").removesuffix(CHECKED)
        with suppress(Timeout, OSError), FileLock(root / f"{name}.lock", timeout=0):
            remove(path)


def hash_files(directory: Path) -> str:
    """Returns a hash of the contents of a directory's files, sorted by name."""
    digest = hashlib.blake2b(digest_size=10)
    for path in sorted(directory.iterdir()):
        with open(path, "rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
