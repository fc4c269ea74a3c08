"""Private names of Python's standard library that only some runs need. Tested with Python 3.11."""

import multiprocessing.queues
from collections.abc import Callable
from typing import Any


def handle_unsent(handler: Callable[[BaseException, Any], None]) -> None:
    """Sets a function to call with (error, object) if this process cannot send an object through a queue.

    Overwrites `multiprocessing.queues.Queue._on_queue_feeder_error`, since Python 3.7, which only prints the error.
    """
    multiprocessing.queues.Queue._on_queue_feeder_error = staticmethod(handler)  # type: ignore[attr-defined]  # private
