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
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist
from accelerate import Accelerator

import common
from common import launcher
from common.errors import UserError, reported_in_one_line
from common.files import FULL_OR_BROKEN, disk_error_number, disk_line, find_lost_directory, lost_line
from common.parallel import liveness
from common.parallel.liveness import wait_for_all
from common.redaction import print_exception, redact
from common.training.stop_signals import keep_requests

explain_error: Callable[[BaseException], None] | None = None  # adds what is known of its cause; a run sets it


def end_run(accelerator: Accelerator, status: int = 0) -> None:
    """Ends a finished or stopped run on all ranks together; nothing after it runs where there are several.

    A rank that leaves while another still works can leave that one hanging. And once everything is written, Python's
    own end must not be able to spoil the run: gloo's threads race with it (pytorch#179291), and once in some hundred
    runs a process hung there, or was aborted.
    """
    with suppress(dist.DistError):  # the store has died with the launcher of rank 0; the barrier below waits as well
        if not launcher.has_died():
            wait_for_all()  # rank 0 writes the model
    accelerator.wait_for_everyone()
    for tracker in accelerator.trackers:
        with reported_in_one_line(f"--report_to {tracker.name}: could not be ended"):
            tracker.finish()
    accelerator.trackers = []
    accelerator.end_training()
    leave_together(accelerator.num_processes, status)


def leave_together(num_processes: int, status: int) -> None:
    """The end of `end_run`, for ranks that have no more to exchange."""
    liveness.leave()
    if num_processes > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    if status:
        sys.exit(status)


@contextmanager
def user_mistakes_end_here() -> Iterator[None]:
    """Around a whole run: it ends on all ranks together, and a user's mistake ends in lines on stderr with status 2.

    A mistake is a `UserError`. Every other exception keeps its traceback.
    """
    _outlive_readers()
    gc.freeze()  # what is imported stays, and need not be looked through again, nor be taken apart at the end
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
        lost = find_lost_directory()
        if lost is not None and isinstance(error, Exception):
            exit_with_mistakes([lost_line(lost)])
        if disk_error_number(error) in FULL_OR_BROKEN:
            where = Path(getattr(error, "filename", None) or ".")
            advice = "start again; a run goes on from its last checkpoint with --resume"
            exit_with_mistakes([disk_line(error, "a file could not be read or written", where, 0, advice)])
        if explain_error:
            with suppress(MemoryError):  # the error that is there says more
                explain_error(error)
        is_end = isinstance(error, SystemExit) and not error.code
        liveness.leave(None if is_end else redact(f"{type(error).__name__}: {error}"))
        raise
    liveness.leave()


def _end_with_launcher() -> None:
    """A thread that ends this process if its launcher dies before the loop; in the loop, that is a request to stop.

    The other ranks would be waited for in vain: they connect through a store that the launcher holds.
    """
    while liveness.update is None and not liveness.in_loop:
        if launcher.has_died():
            line = f"the launcher of rank {os.environ.get('RANK', 0)} was lost {liveness.describe_place()}"
            liveness.exit_now([f"{line}; this process ends"] if _is_first_of_host() else [], liveness.LOST_STATUS)
        time.sleep(0.5)


def _end_interrupted() -> NoReturn:
    """Ends the process by SIGINT, as programs do that Ctrl-C ends: a shell then ends the script that started it."""
    kept = "nothing was saved" if liveness.update is None else "--resume continues from the last checkpoint"
    if _is_first_of_host():
        print(f"\ninterrupted {liveness.describe_place()}; {kept}", file=sys.stderr, flush=True)
    liveness.leave("interrupted by SIGINT")
    sys.stdout.flush()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)
    os._exit(128 + signal.SIGINT)  # where it is blocked


class _Outliving(io.FileIO):
    """A stream that goes nowhere once its reader, or the terminal that shows it, is gone."""

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
    """What reads this run's output, as `| tee log`, may end before it: by the Ctrl-C that asks the run to stop."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        with suppress(OSError, AttributeError):  # none, or a notebook's
            if stream.fileno() == number:
                stream.flush()
                raw = _Outliving(number, "w", closefd=False)
                buffer = raw if stream.write_through else io.BufferedWriter(raw)
                kept = {key: getattr(stream, key) for key in ("encoding", "line_buffering", "write_through")}
                # A character that the terminal does not have must not end a run whose model is written.
                kept["errors"] = "backslashreplace" if stream.errors == "strict" else stream.errors
                setattr(sys, name, io.TextIOWrapper(buffer, **kept))


def _end_data_workers() -> None:
    """They ignore the signal by which Python ends them (see common.training.stop_signals), and it would wait for ever.

    In a run that ends well the loader's iterator has ended them, behind the loop; an error's traceback holds it.
    """
    workers = multiprocessing.active_children()
    if workers:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would raise another error for each
    for worker in workers:
        worker.kill()


def _is_first_of_host() -> bool:
    """Whether this process is the one of its host that reports a problem of all of them."""
    # Without torch's launcher there are no others on this host, whatever variables are left in the environment.
    return int(os.environ.get("LOCAL_RANK", 0)) == 0 or "TORCHELASTIC_RUN_ID" not in os.environ


def exit_with_mistakes(problems: list[str]) -> None:
    """Prints each problem on a line of stderr, once on each host, and ends the process with status 2."""
    problems = [redact(problem) for problem in problems]
    is_first = _is_first_of_host()
    if is_first:
        print("\n".join(f"error: {problem}" for problem in problems), file=sys.stderr, flush=True)
    liveness.leave("\n".join(problems), liveness.MISTAKE_STATUS)
    if not is_first:
        # A launcher ends all ranks of its host when the first one ends: that one must have printed by then.
        time.sleep(10)
    sys.exit(liveness.MISTAKE_STATUS)
