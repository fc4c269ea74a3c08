"""Starts the process that draws curves.png, so that a training process does not load matplotlib."""

import subprocess
import sys
from pathlib import Path

from common.errors import reported_in_one_line

CURVES = str(Path(__file__).with_name("curves.py"))


def start_drawing(output_dir: Path, unit: str) -> subprocess.Popen:
    """Starts a process that writes curves.png, completely or not at all. unit: the counted unit, such as tokens."""
    return subprocess.Popen([sys.executable, CURVES, str(output_dir), unit], stderr=subprocess.PIPE, text=True)


def finish(drawing: subprocess.Popen) -> None:
    """Waits for the process, and prints the reason if it failed."""
    if (problem := drawing.communicate()[1]) and drawing.returncode:
        print(f"curves.png could not be drawn: {problem.splitlines()[-1]}", file=sys.stderr)


def draw(output_dir: Path, unit: str, previous: subprocess.Popen | None, is_last: bool) -> subprocess.Popen | None:
    """Starts drawing, unless the `previous` process still draws; the last time, waits for both. Returns the process."""
    if previous is not None and not is_last and previous.poll() is None:
        return previous
    with reported_in_one_line("curves.png could not be drawn"):
        if previous is not None:
            previous.communicate()
        previous = start_drawing(output_dir, unit)
        if is_last:
            finish(previous)
    return previous
