"""Starts the process that draws curves.png, so that a training process need not load matplotlib."""

import subprocess
import sys
from pathlib import Path

FEWEST = 10  # updates that make a curve


CURVES = str(Path(__file__).with_name("curves.py"))


def start_drawing(output_dir: Path, unit: str) -> subprocess.Popen:
    """A process that writes curves.png, whole or not at all. unit: of what is counted, such as tokens."""
    return subprocess.Popen([sys.executable, CURVES, str(output_dir), unit], stderr=subprocess.PIPE, text=True)


def finish(drawing: subprocess.Popen) -> None:
    """Waits for it, and says what kept it from drawing."""
    if (problem := drawing.communicate()[1]) and drawing.returncode:
        print(f"curves.png could not be drawn: {problem.splitlines()[-1]}", file=sys.stderr)
