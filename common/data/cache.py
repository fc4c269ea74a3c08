"""Work that is done once and kept: by one process while the others wait, complete or absent."""

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock
from tqdm import tqdm

from common.data.rows import Row
from common.errors import UserError, one_line
from common.files import complete_or_absent

MANIFEST = "sizes.json"  # the size of every file beside it


def default_cache_dir() -> Path:
    """$XDG_CACHE_HOME/accelerate_recipes, else ~/.cache/accelerate_recipes."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "accelerate_recipes"


def cached(kind: str, identity: list[Any], write: Callable[[Path], None], cache_dir: str | Path | None = None) -> Path:
    """The directory of the cache that `write` fills, once for each `identity`: what its files depend on, as JSON.

    Of many processes that call this one works and the others wait.
    """
    directory = Path(cache_dir or default_cache_dir()) / f"{kind}-{_hash(identity)}"
    with _only_one(directory):
        if not _is_complete(directory):
            with _complete_or_absent(directory) as partial:
                write(partial)
    return directory


def _hash(parts: list[Any]) -> str:
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=10).hexdigest()


@contextmanager
def _only_one(directory: Path) -> Iterator[None]:
    """One process at a time. A lock and not a collective: that would time out while rank 0 tokenises for hours.

    The system frees the lock of a process that dies.
    """
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(f"{directory}.lock")
        lock.acquire()
    except OSError as error:
        raise UserError(
            f"cache {directory.parent}: cannot be written ({one_line(error)}); set XDG_CACHE_HOME"
        ) from error
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _complete_or_absent(directory: Path) -> Iterator[Path]:
    """`complete_or_absent` with the sizes of the files, and nothing left behind where it fails."""
    with complete_or_absent(directory, "start again, or set XDG_CACHE_HOME to another disk") as partial:
        yield partial
        sizes = {path.name: path.stat().st_size for path in partial.iterdir()}
        (partial / MANIFEST).write_text(json.dumps(sizes))


def _is_complete(directory: Path) -> bool:
    """Whether the files have the sizes that were recorded. (Reading all of them each time would take too long.)"""
    try:
        sizes = json.loads((directory / MANIFEST).read_text())
        return all((directory / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError):
        return False


def hash_files(directory: Path) -> str:
    """Of the contents of its files, in the order of their names."""
    digest = hashlib.blake2b(digest_size=10)
    for path in sorted(directory.iterdir()):
        with open(path, "rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def with_progress(rows: Iterator[Row], name: str) -> Iterator[Row]:
    with tqdm(desc=f"tokenising {name}", unit="B", unit_scale=True, disable=None) as bar:  # None: only on a terminal
        for row in rows:
            yield row
            bar.update(sum(len(str(value)) for value in row.values.values()))
