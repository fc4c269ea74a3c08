"""Trackers of --report_to: started or continued with the run, they receive the metrics of each update."""

import argparse
import re
import sys
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from common.errors import with_location
from common.redaction import redact

# Trackers' names for the ID with which a run is continued. (Other trackers use the same directory or experiment.)
RUN_NAMES = {"wandb": "id", "trackio": "name"}


def start_trackers(args: argparse.Namespace, accelerator: Accelerator, state: Any) -> None:
    """Starts the trackers, or continues those of the run, and notes their IDs in the training state."""
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
    """Sends the numbers of a record to the trackers; a tracker that fails is removed.

    Some trackers (MLflow) reject the * in names of sources that are patterns.
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
