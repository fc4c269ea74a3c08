"""Finds damaged files of a cache entry that an earlier run wrote."""

import json
import logging
import os
import socket
from pathlib import Path
from typing import Any

import psutil

from common.files import CHECKED, CONTENTS, remove, replace_text, set_aside, size_and_digest

logger = logging.getLogger(__name__)  # of any rank: the first process to arrive finds the damage, and only this one
MOST_LAUNCHES = 64  # that this file lists


def remove_damaged(directory: Path) -> None:
    """Removes a cache entry with a damaged file, and says so; the caller holds the lock of the entry.

    Each process compares the sizes. Only one process per host and launch compares the digests, because reading a large
    entry takes minutes. An entry without CONTENTS, of an older version, is not compared.
    """
    if not (directory / CONTENTS).exists():
        return
    checked, launch = directory.with_name(directory.name + CHECKED), _launch()
    launches = found if isinstance(found := _read(checked), list) else []
    problem = _find_damage(directory, with_digests=launch is None or launch not in launches)
    if problem is not None:
        logger.warning("cache %s: %s; it is made again", directory, problem)
        remove(set_aside(directory))
    elif launch is not None and launch not in launches:
        replace_text(checked, json.dumps([*launches, launch][-MOST_LAUNCHES:]))


def _find_damage(directory: Path, with_digests: bool) -> str | None:
    files = _read(directory / CONTENTS)
    entries = files.values() if isinstance(files, dict) else [None]
    if not all(isinstance(entry, list) and [type(item) for item in entry] == [int, str] for entry in entries):
        return f"{CONTENTS} is damaged"
    for name, (size, digest) in files.items():
        path = directory / Path(name).name
        if not path.is_file():
            return f"{path.name} is missing"
        if (found := path.stat().st_size) != size:
            return f"{path.name} has {found:,} bytes instead of {size:,}"
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
