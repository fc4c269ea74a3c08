"""Ends a run on all ranks together: finished, stopped, after a user error or after any other error."""

import gc
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch.distributed as dist
from accelerate import Accelerator

import common
from common import launcher
from common.errors import reported_in_one_line
from common.output import guard_output
from common.parallel import liveness
from common.parallel.liveness import wait_for_all
from common.process import ELASTIC_ID, this_process
from common.training.stop_signals import keep_early_requests


def end_run(accelerator: Accelerator, status: int = 0) -> None:
    """Ends a finished or stopped run on all ranks together; with several ranks, no code runs after it.

    The ranks wait for each other, because a rank can hang if another leaves while it still works. With several ranks,
    Python's own shutdown is skipped, because gloo's threads race with it (pytorch#179291): in about one of a hundred
    runs, a process hung or was aborted there, although all results were written.
    """
    if this_process().remote is not None:
        this_process().remote.finish()
    with suppress(dist.DistError):  # the store died with the launcher of rank 0; the barrier below waits as well
        if not launcher.has_died() or os.environ.get("GROUP_RANK", "0") != "0" or ELASTIC_ID in os.environ:
            wait_for_all()  # meanwhile rank 0 may still write results
    accelerator.wait_for_everyone()
    for tracker in accelerator.trackers:
        with reported_in_one_line(f"--report_to {tracker.name}: could not be ended"):
            tracker.finish()
    accelerator.trackers = []
    accelerator.end_training()
    leave_together(accelerator.num_processes, status)


def leave_together(num_processes: int, status: int) -> None:
    """Ends this process when the ranks have nothing left to communicate; with several ranks, by os._exit."""
    liveness.leave()
    if num_processes > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    if status:
        sys.exit(status)


@contextmanager
def exit_on_user_error() -> Iterator[None]:
    """Context for a whole run: all ranks end together; a user error ends in lines on stderr and exit status 2.

    A user error is a `UserError`. Every other exception keeps its traceback.
    """
    guard_output()
    gc.freeze()  # imported objects need neither garbage collection nor destruction at exit
    gc.set_threshold(*common.GC_THRESHOLD)
    keep_early_requests()
    threading.Thread(target=_end_with_launcher, daemon=True, name="launcher").start()
    try:
        yield
    except BaseException as error:
        from common.parallel import failures

        failures.end_failed(error)
        raise
    liveness.leave()


def _end_with_launcher() -> None:
    """Thread: ends this process if its launcher dies before the loop. In the loop, that counts as a request to stop.

    The ranks could not connect any more, because the store through which they connect is in the launcher.
    """
    process = this_process()
    while process.update is None and not process.in_loop:
        if launcher.has_died():
            from common.parallel import failures

            failures.end_without_launcher()
        time.sleep(0.5)
