"""Finds damaged files of a cache entry that an earlier run wrote."""

import json
import logging
import os
import socket
from pathlib import Path
from typing import Any

import psutil

from common.data.cache import FILES, cache_path, only_one, size_and_digest
from common.files import PARTIAL, remove, replace_text

logger = logging.getLogger(__name__)  # of any rank: the first process to arrive finds the damage, and only this one
CHECKED = ".checked"  # suffix of a file beside the entry: the launches that have compared its digests
MOST_LAUNCHES = 64  # that this file lists


def is_cached(kind: str, identity: list[Any]) -> bool:
    """Returns whether `cached` would find an entry without damage; a damaged entry is removed."""
    directory = cache_path(kind, identity)
    with only_one(directory):
        if directory.exists():
            remove_damaged(directory)
        return directory.exists()


def remove_damaged(directory: Path) -> None:
    """Removes a cache entry with a damaged file, and says so; the caller holds the lock of the entry.

    Each process compares the sizes. Only one process per host and launch compares the digests, because reading a large
    entry takes minutes. An entry without FILES, of an older version, is not compared.
    """
    if not (directory / FILES).exists():
        return
    checked, launch = directory.with_name(directory.name + CHECKED), _launch()
    launches = _read(checked) or []
    problem = _find_damage(directory, with_digests=launch is None or launch not in launches)
    if problem is not None:
        logger.warning("cache %s: %s; it is made again", directory, problem)
        damaged = directory.with_name(f"{directory.name}.old{PARTIAL}")
        remove(damaged)
        directory.rename(damaged)  # so that a process killed during the removal leaves no part of the entry
        remove(damaged)
    elif launch is not None and launch not in launches:
        replace_text(checked, json.dumps([*launches, launch][-MOST_LAUNCHES:]))


def _find_damage(directory: Path, with_digests: bool) -> str | None:
    files = _read(directory / FILES)
    if not isinstance(files, dict) or not all(isinstance(entry, list) and len(entry) == 2 for entry in files.values()):
        return f"{FILES} is damaged"
    for name, (size, digest) in files.items():
        path = directory / Path(name).name
        found = path.stat().st_size if path.is_file() else None
        if found != size:
            return (
                f"{path.name} is missing" if found is None else f"{path.name} has {found:,} bytes instead of {size:,}"
            )
        if with_digests and size_and_digest(path) != [size, digest]:
            return f"the content of {path.name} has changed since it was written"
    return None


def _read(path: Path) -> Any:
    """Returns the content of a JSON file, or None if there is none."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None


def _launch() -> list[Any] | None:
    """Returns what the processes of a launch on this host have in common; None for a single process.

    It is the process that started them (accelerate, torchrun, srun or mpirun), and the port through which they connect.
    """
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return None
    launcher = psutil.Process(os.getppid())
    return [socket.gethostname(), launcher.pid, launcher.create_time(), os.environ.get("MASTER_PORT")]
