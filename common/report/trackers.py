"""Trackers of --report_to: starts or continues them with the run, and sends them the metrics of each update."""

import argparse
import re
import sys
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from common.errors import with_location
from common.redaction import redact

# Name of the argument and attribute with the ID of a tracker's run. (Others continue in the directory or experiment.)
RUN_NAMES = {"wandb": "id", "trackio": "name"}


def start_trackers(args: argparse.Namespace, accelerator: Accelerator, state: Any) -> None:
    """Starts the trackers, or continues those in `state.tracker_runs`, and sets their run IDs there."""
    flags = {
        key: value if isinstance(value, int | float | str) else str(value) for key, value in redact(vars(args)).items()
    }
    accelerator.init_trackers(
        Path(sys.argv[0]).stem,
        config=flags,
        init_kwargs={name: {RUN_NAMES[name]: run_id, "resume": "allow"} for name, run_id in state.tracker_runs.items()},
    )
    state.tracker_runs = {
        tracker.name: str(getattr(tracker.tracker, RUN_NAMES[tracker.name]))
        for tracker in accelerator.trackers
        if tracker.name in RUN_NAMES
    }


def log(progress: Any, metrics: dict[str, Any], update: int) -> None:
    """Sends the numbers in `metrics` to the trackers; a tracker that fails is removed, with a printed line.

    Special characters in names are replaced, because some trackers (MLflow) reject them, such as the * of a glob.
    """
    numbers = {key: value for key, value in metrics.items() if isinstance(value, int | float)}
    numbers = {re.sub(r"[^\w./ -]", "_", name): value for name, value in numbers.items()}
    trackers = progress.accelerator.trackers
    for tracker in trackers[:]:
        try:
            tracker.log(numbers, step=update)
        except Exception as error:  # any tracker may raise it
            trackers.remove(tracker)
            progress.print(f"--report_to {tracker.name}: stopped at update {update}: {with_location(error)}")
