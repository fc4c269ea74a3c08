"""Starts the process that draws curves.png, so that a training process does not load matplotlib."""

import subprocess
import sys
from pathlib import Path

FEWEST = 10  # minimum number of updates for a curve


CURVES = str(Path(__file__).with_name("curves.py"))


def start_drawing(output_dir: Path, unit: str) -> subprocess.Popen:
    """Starts a process that writes curves.png, completely or not at all. unit: the counted unit, such as tokens."""
    return subprocess.Popen([sys.executable, CURVES, str(output_dir), unit], stderr=subprocess.PIPE, text=True)


def finish(drawing: subprocess.Popen) -> None:
    """Waits for the process, and prints the reason if it failed."""
    if (problem := drawing.communicate()[1]) and drawing.returncode:
        print(f"curves.png could not be drawn: {problem.splitlines()[-1]}", file=sys.stderr)
