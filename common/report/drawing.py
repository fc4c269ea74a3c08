"""Draws curves.png in a separate process, so that a training process does not load matplotlib."""

import subprocess
import sys
from pathlib import Path
from typing import Any

from common.errors import reported_in_one_line


def start_drawing(output_dir: Path, unit: str) -> subprocess.Popen:
    command = [sys.executable, str(Path(__file__).with_name("curves.py")), str(output_dir), unit]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def draw(output_dir: Path, unit: str, previous: Any = None, is_last: bool = True) -> subprocess.Popen | None:
    """Starts a drawing process, unless `previous` is still drawing; returns it. is_last: waits for both to end."""
    if previous is not None and not is_last and previous.poll() is None:
        return previous
    with reported_in_one_line("curves.png could not be drawn"):
        if previous is not None:
            previous.communicate()
        previous = start_drawing(output_dir, unit)
        if is_last and (problem := previous.communicate()[1]) and previous.returncode:
            print(f"curves.png could not be drawn: {problem.splitlines()[-1]}", file=sys.stderr)
    return previous
