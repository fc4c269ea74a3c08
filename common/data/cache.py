"""Caches preprocessed data on disk: one process computes, the others wait; an entry is complete or absent."""

import errno
import hashlib
import json
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from common.errors import UserError, one_line
from common.files import PARTIAL, complete_or_absent, remove

FORMAT = 4  # raise it when the meaning of a file in the cache changes


def cached(kind: str, identity: list[Any], write: Callable[[Path], None], cache_dir: str | Path | None = None) -> Path:
    """The directory of the cache that `write` fills, once for each `identity`: what its files depend on, as JSON.

    Of many processes that call this one works and the others wait. The cache is $XDG_CACHE_HOME/accelerate_recipes,
    else ~/.cache/accelerate_recipes.
    """
    directory = place_of(kind, identity, cache_dir)
    _remove_unfinished(directory.parent)
    with _only_one(directory):
        if not directory.exists():
            try:
                with complete_or_absent(directory, "start again, or set XDG_CACHE_HOME to another disk") as partial:
                    write(partial)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise  # else another host has filled it, and an old listing hid that: it is the same
    return directory


def place_of(kind: str, identity: list[Any], cache_dir: str | Path | None = None) -> Path:
    """The directory that `cached` returns; it is there if it has been filled."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "accelerate_recipes"
    digest = hashlib.blake2b(json.dumps([kind, FORMAT, *identity]).encode(), digest_size=10).hexdigest()
    return Path(cache_dir or root) / f"{kind}-{digest}"


def _only_one(directory: Path) -> AbstractContextManager:
    """One process at a time. A lock and not a collective: that would time out while rank 0 tokenises for hours.

    The system frees the lock of a process that dies.
    """
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        return FileLock(f"{directory}.lock").acquire()
    except OSError as error:
        raise UserError(
            f"cache {directory.parent}: cannot be written ({one_line(error)}); set XDG_CACHE_HOME"
        ) from error


def _remove_unfinished(root: Path) -> None:
    """Removes what killed processes have left half written; what a process still writes is locked, and stays."""
    for path in root.glob(f"*{PARTIAL}"):
        name = path.name.removesuffix(PARTIAL).removesuffix(".old")
        with suppress(Timeout, OSError), FileLock(root / f"{name}.lock", timeout=0):
            remove(path)


def hash_files(directory: Path) -> str:
    """Of the contents of its files, in the order of their names."""
    digest = hashlib.blake2b(digest_size=10)
    for path in sorted(directory.iterdir()):
        with open(path, "rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
