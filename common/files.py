"""Files and directories that are either complete or absent, and locks of output directories."""

import errno
import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import xxhash
from filelock import FileLock, Timeout

from common.errors import UserError
from common.process import ELASTIC_ID, this_process

PARTIAL = ".partial"
LOCK = ".lock"
CONTENTS = "contents.json"  # of a cache entry: size and XXH3 digest of each other file, which `cache_check` compares
CHECKED = ".checked"  # suffix of a file next to a cache entry: the launches that have compared its digests
PAGE = 4096  # bytes; direct writes must begin and end at multiples of it
DIRECT = getattr(os, "O_DIRECT", 0)  # only on Linux


def fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def open_new(path: Path, buffering: int = -1) -> Any:
    """Opens a new binary file instead of a file or link of this name; a link is never followed."""
    path.unlink(missing_ok=True)
    return open(path, "xb", buffering=buffering)


def open_to_append(path: Path) -> TextIO:
    """Opens a text file to which each line is written at once. Raises OSError: it is a link."""
    return open(path, "a", buffering=1, opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, 0o666))


def write_file(path: Path, parts: Iterable[Any]) -> dict[str, Any]:
    """Writes and flushes a file; returns its size and XXH3 digest.

    The digest is computed while writing, because reading the file again would take as long. Parts that are page-aligned
    in memory and in the file bypass the kernel's page cache: copying them to it takes nine times the CPU time.
    """
    digest, size = xxhash.xxh3_128(), 0
    with open_new(path, buffering=0) as file:
        for part in parts:
            is_aligned = (size | np.frombuffer(part, np.uint8).ctypes.data) % PAGE == 0
            done = _write_directly(file, memoryview(part)) if is_aligned else 0
            while done < len(part):
                done += file.write(memoryview(part)[done:])
            digest.update(part)
            size += len(part)
        os.fsync(file.fileno())
    return {"bytes": size, "xxh3_128": digest.hexdigest()}


def size_and_digest(path: Path) -> list[Any]:
    """Returns the size of a file in bytes and its XXH3 digest."""
    with open(path, "rb") as file:
        return [os.fstat(file.fileno()).st_size, hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()]


def _write_directly(file: FileIO, part: memoryview) -> int:
    """Writes full pages with O_DIRECT if the file system supports it; returns the number of bytes written."""
    flags, done, whole = fcntl.fcntl(file, fcntl.F_GETFL), 0, len(part) // PAGE * PAGE
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, flags | DIRECT)
        while done < whole:
            done += file.write(part[done:whole])
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EFAULT, errno.EOPNOTSUPP):  # the file system does not support it
            raise
    finally:
        fcntl.fcntl(file, fcntl.F_SETFL, flags)
    return done


def nearest_existing(path: Path) -> Path:
    """Returns the path if it exists, otherwise its nearest existing parent."""
    return next(parent for parent in (path, *path.absolute().parents) if parent.exists())


def replace_text(path: Path, text: str) -> None:
    """Writes a temporary file and renames it, so that the file is never incomplete."""
    unfinished = path.with_name(path.name + PARTIAL)
    with open_new(unfinished) as file:
        file.write(text.encode(errors="backslashreplace"))
    os.replace(unfinished, path)


def why_not_writable(directory: Path | str) -> str | None:
    """Returns the reason why no file can be created in a directory, or None.

    A file is created as a test, because for root os.access returns True even if the directory is not writable.
    """
    try:
        tempfile.TemporaryFile(dir=directory).close()
    except OSError as error:
        return error.strerror
    return None


@contextmanager
def complete_or_absent(
    directory: Path, advice: str = "start again; with --resume a run continues from its last checkpoint"
) -> Iterator[Path]:
    """Context manager: yields a temporary directory, which replaces `directory` once all its files are on the disk.

    Raises UserError: one line for a disk error; then the temporary directory is removed.
    """
    partial = directory.with_name(directory.name + PARTIAL)
    try:
        remove(partial)
        partial.mkdir(parents=True)
        yield partial
        for path in [*partial.rglob("*"), partial]:
            fsync(path)
        replace_directory(partial, directory)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        from common.disk_errors import disk_error_number, disk_line

        if not isinstance(error, Exception) or disk_error_number(error) is None:
            raise
        raise UserError(disk_line(error, f"{directory} could not be written", directory.parent, 0, advice)) from error


def find_lost_directory() -> Path | None:
    """Returns an output directory that was deleted, moved or taken over although this process locked it, or None."""
    locks = [(directory, directory / LOCK, inode) for directory, inode in this_process().lock_inodes.items()]
    return next((place for place, lock, inode in locks if not lock.exists() or lock.stat().st_ino != inode), None)


def lock_output_dir(directory: Path) -> None:
    """Locks an output directory for this process until it ends. Calling it again has no effect.

    Raises UserError: a different process holds the lock for more than `output_dirs.LOCK_TIMEOUT` seconds.
    """
    lock = this_process().output_locks.setdefault(directory.absolute(), FileLock(directory / LOCK))
    if lock.is_locked:
        return
    if directory.is_dir() and any(directory.iterdir()):
        from common.output_dirs import refuse_links

        refuse_links(directory)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        from common.output_dirs import wait_for_lock

        wait_for_lock(lock, directory)
    if (launch := os.environ.get(ELASTIC_ID, "")) or (directory / LOCK).stat().st_size:
        (directory / LOCK).write_text(launch)  # see `elastic_launch.take_over`
    this_process().lock_inodes[directory.absolute()] = (directory / LOCK).stat().st_ino


def remove(path: Path) -> None:
    """Removes a directory with its contents, or a file."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def set_aside(directory: Path) -> Path:
    """Renames a directory so that it counts as incomplete, also if its removal is interrupted; returns the new path."""
    old = directory.with_name(directory.name + ".old" + PARTIAL)
    remove(old)
    return directory.rename(old)


def replace_directory(partial: Path, directory: Path) -> None:
    """Renames the complete directory `partial` to `directory`; removes an existing `directory`."""
    old = set_aside(directory) if directory.exists() else None
    partial.rename(directory)
    if old is not None:
        remove(old)
    fsync(directory.parent)
