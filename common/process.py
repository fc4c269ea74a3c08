"""The state of this process that its threads, its end after an error and its talks with other ranks need.

They may run before the objects of the run exist. All other state belongs to an object that is passed as an argument.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from filelock import FileLock

ELASTIC_ID = "ELASTIC_ID"  # environment variable of the processes of launchers/elastic.py: names the launch


@dataclass
class ProcessState:
    """State of one process; a field is set once, unless its comment says who changes it."""

    update: int | None = None  # the current update; the loop changes it
    in_loop: bool = False  # set by the loop; outside of it, heartbeats may be late, because libraries hold the GIL
    note_failure: Callable[[str], None] | None = None  # writes a failure, as a line of text, as the status in run.json
    explain_error: Callable[[BaseException], None] | None = None  # adds a note with advice to an error
    rank_watch: Any = None  # the `rank_watch.RankWatch` of a launch with several processes, until this process leaves
    remote: Any = None  # the `remote_output.RemoteOutput` on rank 0, if --output_dir is a URL
    num_watches: int = 0  # each connection to the other ranks increases it
    output_locks: dict[Path, FileLock] = field(default_factory=dict)  # by output directory; held until the process ends
    lock_inodes: dict[Path, int] = field(default_factory=dict)  # inode of each lock file when it was locked
    waiting: dict[Any, Any] = field(default_factory=dict)  # processes of `limited_process` between two blocks
    has_document_mask: bool = False  # whether a token attends only to its own document (`document_masks`)
    has_fake_weights: bool = False  # whether all models are on the `meta` device, because a plan traces the run


@cache
def this_process() -> ProcessState:
    """Returns the state of this process, always the same object."""
    return ProcessState()
