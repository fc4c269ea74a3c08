"""The output directory of a run without --output_dir."""

import argparse
import itertools
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from accelerate import Accelerator


def make_default(args: argparse.Namespace, accelerator: Accelerator, share: Callable[[str], str]) -> Path:
    """Creates and returns the default output directory, on all ranks; with a suffix if another run has created it.

    share: broadcasts the main process's argument, and returns it on all ranks.
    """
    path = Path(share(str(_make_new(Path(args.output_dir))) if accelerator.is_main_process else ""))
    if str(path) != args.output_dir:
        accelerator.print(f"output directory {path}: another run has {args.output_dir}", flush=True)
    args.output_dir = str(path)
    accelerator.project_configuration.project_dir = accelerator.project_configuration.logging_dir = str(path)
    return path


def _make_new(path: Path) -> Path:
    """Creates and returns a new directory: `path`, path-2, path-3, ...; concurrent processes get different ones."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        directory = path if number == 1 else path.with_name(f"{path.name}-{number}")
        with suppress(FileExistsError):
            directory.mkdir()
            return directory
    raise AssertionError("unreachable")
