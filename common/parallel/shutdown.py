"""Ends a run on all ranks together: finished, stopped, after a user error or after any other error."""

import errno
import gc
import io
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

import torch.distributed as dist
from accelerate import Accelerator

import common
from common import launcher
from common.errors import UserError, reported_in_one_line
from common.files import find_lost_directory
from common.parallel import liveness
from common.parallel.liveness import wait_for_all
from common.redaction import print_exception, redact
from common.training.stop_signals import keep_requests

explain_error: Callable[[BaseException], None] | None = None  # prints the known cause of an error; a run sets it


def end_run(accelerator: Accelerator, status: int = 0) -> None:
    """Ends a finished or stopped run on all ranks together; with several ranks, no code runs after it.

    If a rank leaves while a different rank still works, that rank can hang. Once everything is written, Python's own
    shutdown must not spoil the run. gloo's threads race with it (pytorch#179291): in about one of a hundred runs, a
    process hung there, or was aborted.
    """
    with suppress(dist.DistError):  # the store died with the launcher of rank 0; the barrier below waits as well
        if not launcher.has_died():
            wait_for_all()  # meanwhile rank 0 writes the model
    accelerator.wait_for_everyone()
    for tracker in accelerator.trackers:
        with reported_in_one_line(f"--report_to {tracker.name}: could not be ended"):
            tracker.finish()
    accelerator.trackers = []
    accelerator.end_training()
    leave_together(accelerator.num_processes, status)


def leave_together(num_processes: int, status: int) -> None:
    """Ends this process after `end_run`, when the ranks have nothing left to exchange."""
    liveness.leave()
    if num_processes > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    if status:
        sys.exit(status)


@contextmanager
def user_mistakes_end_here() -> Iterator[None]:
    """Context for a whole run: all ranks end together; a user error ends in lines on stderr and exit status 2.

    A user error is a `UserError`. Every other exception keeps its traceback.
    """
    _outlive_readers()
    gc.freeze()  # imported objects stay: they need not be scanned again, nor destroyed at the end
    gc.set_threshold(*common.GC_THRESHOLD)
    sys.excepthook = print_exception
    keep_requests()
    threading.Thread(target=_end_with_launcher, daemon=True, name="launcher").start()
    try:
        yield
    except UserError as error:
        _end_data_workers()
        exit_with_mistakes(str(error).splitlines())
    except KeyboardInterrupt:
        _end_data_workers()
        _end_interrupted()
    except BaseException as error:
        _end_data_workers()
        from common.disk_errors import explain_disk_error

        if line := explain_disk_error(error, find_lost_directory()):
            exit_with_mistakes([line])
        if explain_error:
            with suppress(MemoryError):  # the original error is more informative
                explain_error(error)
        is_end = isinstance(error, SystemExit) and not error.code
        liveness.leave(None if is_end else redact(f"{type(error).__name__}: {error}"))
        raise
    liveness.leave()


def _end_with_launcher() -> None:
    """Ends this process if its launcher dies before the loop; runs in a thread. In the loop, that is a request to stop.

    The other ranks would never arrive, because they connect through a store in the launcher.
    """
    while liveness.update is None and not liveness.in_loop:
        if launcher.has_died():
            line = f"the launcher of rank {os.environ.get('RANK', 0)} was lost {liveness.describe_place()}"
            liveness.exit_now([f"{line}; this process ends"] if _is_first_of_host() else [], liveness.LOST_STATUS)
        time.sleep(0.5)


def _end_interrupted() -> NoReturn:
    """Ends the process by SIGINT, like a program that Ctrl-C ends: a shell then ends the script that started it."""
    kept = "nothing was saved" if liveness.update is None else "--resume continues from the last checkpoint"
    if _is_first_of_host():
        print(f"\ninterrupted {liveness.describe_place()}; {kept}", file=sys.stderr, flush=True)
    liveness.leave("interrupted by SIGINT")
    sys.stdout.flush()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)
    os._exit(128 + signal.SIGINT)  # if SIGINT is blocked


class _Outliving(io.FileIO):
    """A stream that discards its output once its reader, or the terminal that shows it, is gone."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.is_terminal = self.isatty()

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            is_closed_terminal = self.is_terminal and error.errno == errno.EIO
            if not is_closed_terminal and not isinstance(error, BrokenPipeError):
                raise
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            return len(data)


def _outlive_readers() -> None:
    """Keeps the run alive if the reader of its output, such as `| tee log`, ends first.

    The Ctrl-C that requests the run to stop also ends the reader.
    """
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        with suppress(OSError, AttributeError):  # no stream, or a notebook's stream
            if stream.fileno() == number:
                stream.flush()
                raw = _Outliving(number, "w", closefd=False)
                buffer = raw if stream.write_through else io.BufferedWriter(raw)
                kept = {key: getattr(stream, key) for key in ("encoding", "line_buffering", "write_through")}
                # A character that the terminal cannot show must not end a run whose model is written.
                kept["errors"] = "backslashreplace" if stream.errors == "strict" else stream.errors
                setattr(sys, name, io.TextIOWrapper(buffer, **kept))


def _end_data_workers() -> None:
    """Kills the data workers: they ignore Python's signal to end, and Python would wait for them indefinitely.

    The signals are ignored in common.training.stop_signals. After a successful run, the loader's iterator has ended the
    workers. After an error, the traceback holds the iterator.
    """
    workers = multiprocessing.active_children()
    if workers:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would raise a further error per worker
    for worker in workers:
        worker.kill()


def _is_first_of_host() -> bool:
    """Returns whether this process reports the problems that all processes of its host have."""
    # Without torch's launcher, this host has no other processes, even if old variables are in the environment.
    return int(os.environ.get("LOCAL_RANK", 0)) == 0 or "TORCHELASTIC_RUN_ID" not in os.environ


def exit_with_mistakes(problems: list[str]) -> None:
    """Prints each problem on a line of stderr, once per host, and ends the process with status 2."""
    problems = [redact(problem) for problem in problems]
    is_first = _is_first_of_host()
    if is_first:
        print("\n".join(f"error: {problem}" for problem in problems), file=sys.stderr, flush=True)
    liveness.leave("\n".join(problems), liveness.MISTAKE_STATUS)
    if not is_first:
        # A launcher ends all ranks of its host when any of them ends, and the first rank must have printed by then.
        time.sleep(10)
    sys.exit(liveness.MISTAKE_STATUS)
