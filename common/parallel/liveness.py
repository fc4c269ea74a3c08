"""Connects ranks outside of collectives: they wait for each other, ask rank 0, end together, and report a failure.

With several processes, `rank_watch` detects a process that dies or hangs.
"""

import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed as dist

from common.errors import UserError

LOST_STATUS = 3  # exit status of a process that ends because a different process died or failed
MISTAKE_STATUS = 2  # exit status after a user error, on all ranks alike
GRACE = 1.0  # seconds until it is known whether an error occurs on all ranks, or is the result of a dead rank
SHARED_TIMEOUT = 10  # seconds in which a new file must be visible on all hosts: network file systems cache listings
update: int | None = None  # the current update of this process; the loop sets it
# Whether this process is in the loop; the loop sets it. Before and after the loop, silence means nothing, because a
# library may hold Python's lock while it reads or writes a model.
in_loop = False
OPTIONAL_TIMEOUT = 30.0  # seconds that a rank with an error in an `optional` block waits for the others to leave it
# Writes a failure into the run's results, given a line with the reason; called in one process.
note_failure: Callable[[str], None] | None = None
watch: Any = None  # the `rank_watch.RankWatch` of a launch with several processes
_num_waits = _num_optional = 0
_num_asked: Counter[str] = Counter()


def reset() -> None:
    """Resets the state that an earlier run of this process left."""
    global update, in_loop, note_failure
    update, in_loop, note_failure = None, False, None


def leave(reason: str | None = None, status: int = 1) -> None:
    """Announces the end of this process; with a `reason` (lines of text), the others end too and report it.

    A second call has no effect.
    """
    global watch
    left, watch = watch, None
    if left is not None:
        left.leave(reason, status)
    elif reason is not None:
        record_reason(reason)
        if int(os.environ.get("RANK", 0)) == 0:
            note(reason)


def wait_for_all() -> None:
    """Returns when all ranks have called it, without a time limit for the work of a rank before.

    A collective would reach its time limit (NCCL: 10 minutes). If a rank dies, the others end here too.
    """
    global _num_waits
    if watch is None:
        return
    _num_waits += 1
    key, pause = f"{watch.key}-wait-{_num_waits}", 0.01
    num_here = watch.store.add(key, 1)
    while num_here < watch.world_size:  # torch's store barrier ignores Ctrl-C until all ranks have come
        time.sleep(pause)
        num_here, pause = watch.store.add(key, 0), min(0.5, 2 * pause)


def decided_by_main(question: str, answer: Callable[[], Any]) -> Any:
    """Returns rank 0's result of `answer`, as JSON, on all ranks, because a disk or the hub may look different to each.

    Every rank calls it with the same questions. It waits for rank 0 without a time limit, as in `wait_for_all`.
    """
    if watch is None:
        return json.loads(json.dumps(answer()))
    _num_asked[question] += 1
    key, pause = f"{watch.key}-{question}-{_num_asked[question]}", 0.01
    if watch.rank == 0:
        watch.store.set(key, json.dumps(answer()))
    while not watch.store.check([key]):
        time.sleep(pause)
        pause = min(0.5, 2 * pause)
    return json.loads(watch.store.get(key))


def is_soon(condition: Callable[[], bool]) -> bool:
    """Returns whether the condition holds within `SHARED_TIMEOUT`; for example, that this rank sees rank 0's file."""
    deadline = time.monotonic() + SHARED_TIMEOUT
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


@contextmanager
def optional(report: Callable[[Exception], None]) -> Iterator[None]:
    """A block of all ranks that the run does not need: an error inside ends the block and is passed to `report`.

    If rank 0 has an error, only rank 0 reports. The block must end on every rank. If the others do not leave it,
    because they wait inside for the rank with the error, that rank raises the error after OPTIONAL_TIMEOUT.
    """
    global _num_optional
    _num_optional += 1
    problem = None
    try:
        yield
    except Exception as error:  # any library may raise it
        problem = error
    if watch is None:
        if problem is not None:
            report(problem)
        return
    key, deadline = f"{watch.key}-optional-{_num_optional}", time.monotonic() + OPTIONAL_TIMEOUT
    watch.store.add(f"{key}-main", int(watch.rank == 0 and problem is not None))
    num_left = watch.store.add(key, 1)
    if problem is None:
        return
    while num_left < watch.world_size:
        if time.monotonic() > deadline:
            raise problem
        time.sleep(0.1)
        num_left = watch.store.add(key, 0)
    if watch.rank == 0 or not watch.store.add(f"{key}-main", 0):
        report(problem)


@contextmanager
def connecting(timeout: float) -> Iterator[None]:
    """Limits the calls in the block, which create the process group, to `timeout` seconds.

    Raises UserError: the processes cannot connect.
    """
    if watch is None:
        yield
        return
    wait_for_all()  # earlier work, such as compiling an extension, may take longer on some hosts
    me = f"rank {watch.rank} on host {watch.host}"
    what = "all ranks are there, but do not connect to each other"
    mend = "name the network between the hosts, GLOO_SOCKET_IFNAME=eth0 (CPU) or NCCL_SOCKET_IFNAME=eth0 (GPU)"
    line = f"{me}: {what} within {timeout:g} s; {mend}, or raise --connect_timeout"
    try:
        with at_most(timeout, [line] if watch.rank == watch.first_here else []):
            yield
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "connect" not in str(error):
            raise
        raise UserError(f"{me}: {what} ({str(error).splitlines()[0]}); {mend}") from error


@contextmanager
def at_most(seconds: float, lines: list[str]) -> Iterator[None]:
    """Limits the block to `seconds` seconds; then the process prints these lines and ends with LOST_STATUS."""
    timer = threading.Timer(seconds, exit_now, (lines, LOST_STATUS))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def note(reason: str) -> None:
    """Writes a failure into the run's results, once."""
    global note_failure
    write, note_failure = note_failure, None
    if write is not None:
        where = describe_place()
        with suppress(OSError):  # a full disk, for example; the failure is printed anyway
            write(f"failed {where}: {reason.splitlines()[0]}")


def record_reason(reason: str) -> None:
    """Writes the reason for torch's launcher, which prints it after its own text on a failed process.

    It replaces torch's `@record`, which neither hides secrets nor distinguishes user errors.
    """
    if (path := os.environ.get("TORCHELASTIC_ERROR_FILE")) and not os.path.exists(path):
        with suppress(OSError), open(path, "w") as file:
            message = "; ".join(reason.splitlines())
            json.dump({"message": {"message": message, "extraInfo": {"timestamp": str(int(time.time()))}}}, file)


def describe_place() -> str:
    """Returns the position of this process in the run, in words."""
    return "before the first update" if update is None else f"at update {update}"


def print_errors(lines: list[str]) -> None:
    if lines:  # the first newline ends a progress bar, which the main thread may be writing
        with suppress(OSError):  # the terminal, or the reader of a pipe, may have closed
            os.write(sys.stderr.fileno(), ("".join(f"\nerror: {line}" for line in lines) + "\n").encode())


def exit_now(lines: list[str], status: int) -> None:
    """Ends the process from any thread, since the main thread may be in a collective that does not return."""
    print_errors(lines)
    os._exit(status)
