"""Ends a run after an error: on all ranks together, with the reason once per host, and without secrets."""

import json
import multiprocessing
import os
import signal
import sys
import time
from contextlib import suppress
from typing import NoReturn

from common.disk_errors import explain_disk_error, write_status_in_place
from common.errors import UserError
from common.files import find_lost_directory
from common.parallel import liveness
from common.process import ELASTIC_ID, this_process
from common.redaction import cleaned

LOST_STATUS = 3  # exit status of a process that ends because a different process died or failed
MISTAKE_STATUS = 2  # exit status after a user error, on all ranks alike


def end_failed(error: BaseException) -> None:
    """Ends the process after a user error, Ctrl-C or a disk error; returns if the error keeps its traceback.

    Args:
        explain: adds a note with advice to an error, such as to an out-of-memory error.
    """
    _end_data_workers()
    if isinstance(error, UserError):
        exit_with_errors(str(error).splitlines())
    if isinstance(error, KeyboardInterrupt):
        _end_interrupted()
    if line := explain_disk_error(error, find_lost_directory()):
        exit_with_errors([line])
    if explain := this_process().explain_error:
        with suppress(Exception):  # the original error is more informative
            explain(error)
    if isinstance(error, SystemExit) and not error.code:
        liveness.leave()
    else:
        leave(cleaned(f"{type(error).__name__}: {error}"))


def exit_with_errors(problems: list[str]) -> NoReturn:
    """Prints each problem on a line of stderr, once per host, and ends the process with status 2."""
    problems = [cleaned(problem) for problem in problems]
    if ELASTIC_ID in os.environ and find_lost_directory() is None:
        from common.elastic_launch import note_user_error

        note_user_error("\n".join(problems))
    is_first = _is_first_of_host()
    if is_first:
        print("\n".join(f"error: {problem}" for problem in problems), file=sys.stderr, flush=True)
    leave("\n".join(problems), MISTAKE_STATUS)
    if not is_first:
        # A launcher ends all ranks of its host when any of them ends, and the first rank must have printed by then.
        time.sleep(10)
    sys.exit(MISTAKE_STATUS)


def exit_with_parser_error(message: str) -> NoReturn:
    """Prints an error of `argparse`, and ends the process with status 2."""
    if "ignored explicit argument" in message:
        flag = message.split(":")[0].removeprefix("argument ")
        exit_with_errors([f"{flag} is a switch and takes no value; pass only the flag, or remove it"])
    if message.endswith(("(choose from 'auto')", "(choose from auto)")):
        flag = message.split(":")[0].removeprefix("argument ")
        without = "; --no-compile compiles nothing" if flag == "--compile" else ""
        exit_with_errors([f"{flag} takes no value, or auto{without}"])
    exit_with_errors([f"{message} (--help lists the flags)"])


def leave(reason: str, status: int = 1) -> None:
    """Announces to the other ranks that this process ends, with the reason (lines of text); they report it and end too.

    If this function or `liveness.leave` was called before, it only records the reason.
    """
    process = this_process()
    left, process.rank_watch = process.rank_watch, None
    if left is not None:
        left.leave(reason, status)
        return
    record_reason(reason, status)
    if int(os.environ.get("RANK", 0)) == 0:
        note(reason)


def end_without_launcher() -> None:
    """Ends this process because its launcher has died."""
    line = f"the launcher of rank {os.environ.get('RANK', 0)} was lost {describe_place()}"
    exit_now([f"{line}; this process ends"] if _is_first_of_host() else [], LOST_STATUS)


def _end_interrupted() -> NoReturn:
    """Ends the process by the default action of SIGINT, so that a shell also ends the script that started it."""
    kept = "nothing was saved" if this_process().update is None else "--resume continues from the last checkpoint"
    if _is_first_of_host():
        print(f"\ninterrupted {describe_place()}; {kept}", file=sys.stderr, flush=True)
    leave("interrupted by SIGINT")
    sys.stdout.flush()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)
    os._exit(128 + signal.SIGINT)  # if SIGINT is blocked


def _end_data_workers() -> None:
    """Kills the data workers: they ignore the SIGTERM that Python sends at exit, and Python would wait indefinitely.

    `training.handover.start_worker` lets them ignore it. After a successful run, the loader's iterator has ended the
    workers; after an error it has not, because the traceback references it.
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


def note(reason: str) -> None:
    """Writes a failure as the status of the run into run.json, once."""
    process = this_process()
    write, process.note_failure = process.note_failure, None
    if write is not None and find_lost_directory() is None:
        status = f"failed {describe_place()}: {reason.splitlines()[0]}"
        try:
            write(status)
        except OSError:  # a full disk, for example; the failure is printed anyway
            with suppress(OSError, ValueError):
                for directory in process.output_locks:
                    write_status_in_place(directory, cleaned(status))


def record_reason(reason: str, status: int) -> None:
    """Writes the reason to the file from which torch's launcher reads the error of a failed process.

    The launcher ends with a traceback of its own, and with this text in its last lines, after "traceback : ". They are
    therefore the place for the error lines of a user. This replaces torch's `@record`, which neither hides secrets nor
    distinguishes user errors.
    """
    if (path := os.environ.get("TORCHELASTIC_ERROR_FILE")) and not os.path.exists(path):
        text = "; ".join(reason.splitlines())
        if status == MISTAKE_STATUS:
            lines = "\n".join(f"error: {line}" for line in reason.splitlines())
            text = f"none, because this is a user error; ignore the launcher's traceback above\n\n{lines}"
        with suppress(OSError), open(path, "w") as file:
            json.dump({"message": {"message": text, "extraInfo": {"timestamp": str(int(time.time()))}}}, file)


def describe_place() -> str:
    """Returns the progress of this process as text: the current update, or "before the first update"."""
    update = this_process().update
    return "before the first update" if update is None else f"at update {update}"


def print_errors(lines: list[str]) -> None:
    if lines:  # the first newline ends a progress bar, which the main thread may be writing
        with suppress(OSError):  # the terminal, or the reader of a pipe, may have closed
            os.write(sys.stderr.fileno(), cleaned("".join(f"\nerror: {line}" for line in lines) + "\n").encode())


def exit_now(lines: list[str], status: int) -> NoReturn:
    """Prints error lines and ends the process, from any thread: the main thread may hang in a collective."""
    print_errors(lines)
    os._exit(status)
