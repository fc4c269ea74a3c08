"""Output directories that exist already: their names, and links in them."""

import itertools
import os
from contextlib import suppress
from pathlib import Path

from common.errors import UserError


def make_new_directory(path: Path) -> Path:
    """Creates and returns a new directory: `path`, path-2, path-3, ...; concurrent processes get different ones."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        directory = path if number == 1 else path.with_name(f"{path.name}-{number}")
        with suppress(FileExistsError):
            directory.mkdir()
            return directory
    raise AssertionError("unreachable")


def refuse_links(directory: Path) -> None:
    """Raises UserError: a link is where a run writes its files; the run would change files outside of the directory."""
    for entry in os.scandir(directory):
        if entry.is_symlink():
            raise UserError(f"{entry.path}: is a link to {os.readlink(entry.path)}; remove it, or use a new directory")
        if entry.is_dir() and directory.name != "checkpoints":  # a checkpoint is written under a new name
            refuse_links(Path(entry.path))
