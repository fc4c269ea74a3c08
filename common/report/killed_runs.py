"""Describes the progress of a killed run, from its run.json and metrics.jsonl."""

import fcntl
import json
import os
import re
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

from common.files import LOCK


def describe_killed(output_dir: Path, is_over: bool = False) -> str | None:
    """Describes the progress of a run that ended without recording it, for example by SIGKILL or at a memory limit.

    Its status in run.json is "running", and no process holds its lock; a lock may be invisible on a different host. If
    only some of its processes were killed, the others have set a status with the lost rank.
    is_over: whether this process holds the lock, so that the run of run.json cannot be alive.

    Returns None if the run recorded a different end, still runs, or its files cannot be read.
    """
    try:
        run = json.loads((output_dir / "run.json").read_bytes())
        lost = run["status"] if re.fullmatch("failed .* (was lost|stopped answering)", run["status"]) else None
        if not lost and (run["status"] != "running" or (not is_over and is_locked(output_dir / LOCK))):
            return None
        last = _read_last(output_dir / "metrics.jsonl")
    except (OSError, ValueError, TypeError, LookupError, RecursionError):
        return None
    how = lost or "killed before its first update"
    if last:
        how = lost or f"killed after update {last['update'] + 1}"
        how += f", peak memory {last['peak_memory_bytes'] / 2**30:.2f} GiB"
    if lost:
        return how
    if not is_over and run.get("host") not in (None, socket.gethostname()):
        return f"running on host {run['host']}, or {how}"
    return how


def is_locked(path: Path) -> bool:
    """Returns whether a process holds this lock file. Does not create or change it."""
    try:
        with open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # missing or not readable
        return False
    return False


def _read_last(path: Path) -> dict[str, Any] | None:
    """Returns the last complete line of metrics.jsonl, or None if there is none."""
    with open(path, "rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - (1 << 16)))
        lines = file.read().splitlines(keepends=True)
    for line in reversed(lines):
        with suppress(ValueError, RecursionError):
            record = json.loads(line)
            figures = [record.get(name) for name in ("update", "peak_memory_bytes")] if isinstance(record, dict) else []
            if line.endswith(b"\n") and figures and all(type(value) is int and value < 2**63 for value in figures):
                return record
    return None
