"""What ranks do together outside of collectives: wait for each other, ask rank 0, end together, report a failure.

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

LOST_STATUS = 3  # exit status of a process that ends because another one was lost or failed
MISTAKE_STATUS = 2  # of a user's mistake, on all ranks alike
GRACE = 1.0  # seconds in which a failure of all ranks shows as theirs, and the true cause of an error as a lost rank
SHARED_TIMEOUT = 10  # seconds in which a new file must be seen on all hosts: network file systems keep old listings
update: int | None = None  # the update that this process is at; the loop sets it
# Whether it is in the loop, which sets it: before and after, a library may hold Python's lock for as long as it reads
# or writes a model, and silence means nothing.
in_loop = False
OPTIONAL_TIMEOUT = 30.0  # seconds that a rank with an error in an `optional` block waits for the others to leave it
# What the run writes about its own failure, given a line that says why; called in one process.
note_failure: Callable[[str], None] | None = None
watch: Any = None  # the `rank_watch.RankWatch` of a launch with several processes
_num_waits = _num_optional = 0
_num_asked: Counter[str] = Counter()


def reset() -> None:
    """Forgets an earlier run of this process."""
    global update, in_loop, note_failure
    update, in_loop, note_failure = None, False, None


def leave(reason: str | None = None, status: int = 1) -> None:
    """The good-bye of this process; with a `reason`, lines of text, the others end too and tell it. Harmless twice."""
    global watch
    left, watch = watch, None
    if left is not None:
        left.leave(reason, status)
    elif reason is not None:
        record_reason(reason)
        if int(os.environ.get("RANK", 0)) == 0:
            note(reason)


def wait_for_all() -> None:
    """Returns when all ranks have called it, however long one of them works before.

    A collective would reach its time limit (NCCL: 10 minutes). The loss of a rank ends the others here as anywhere.
    """
    global _num_waits
    if watch is None:
        return
    _num_waits += 1
    key, pause = f"{watch.key}-wait-{_num_waits}", 0.01
    num_here = watch.store.add(key, 1)
    while num_here < watch.world_size:  # torch's own barrier of a store does not hear Ctrl-C until all have come
        time.sleep(pause)
        num_here, pause = watch.store.add(key, 0), min(0.5, 2 * pause)


def decided_by_main(question: str, answer: Callable[[], Any]) -> Any:
    """What `answer` returns on rank 0, as JSON has it, on all ranks: from each a disk or the hub may look different.

    Every rank asks the same questions. It waits however long rank 0 works before, as in `wait_for_all`.
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
    """Whether it comes true within `SHARED_TIMEOUT`: as what rank 0 sees on a disk should be seen by this rank."""
    deadline = time.monotonic() + SHARED_TIMEOUT
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


@contextmanager
def optional(report: Callable[[Exception], None]) -> Iterator[None]:
    """A block of all ranks that the run can do without: an error inside ends the block and goes to `report`.

    If several ranks have an error, rank 0 reports its own. The block must end on every rank: if the others do not leave
    it, because they wait inside for the rank with the error, that rank raises it after OPTIONAL_TIMEOUT.
    """
    global _num_optional
    _num_optional += 1
    problem = None
    try:
        yield
    except Exception as error:  # of any library
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
    """Around the calls that make the process group: it ends where they take longer than `timeout` seconds.

    Raises UserError: the processes cannot connect.
    """
    if watch is None:
        yield
        return
    wait_for_all()  # what comes before, as compiling an extension, may take one host longer than another
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
    """Around what may not return: past so many seconds the process tells these lines and ends, as a lost one."""
    timer = threading.Timer(seconds, exit_now, (lines, LOST_STATUS))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def note(reason: str) -> None:
    """In what the run leaves behind, once."""
    global note_failure
    write, note_failure = note_failure, None
    if write is not None:
        where = describe_place()
        with suppress(OSError):  # of a full disk perhaps; what failed is told all the same
            write(f"failed {where}: {reason.splitlines()[0]}")


def record_reason(reason: str) -> None:
    """For torch's launcher, which ends with it what it prints itself about a failed process.

    In the place of torch's `@record`, which knows neither secrets nor what is a user's mistake.
    """
    if (path := os.environ.get("TORCHELASTIC_ERROR_FILE")) and not os.path.exists(path):
        with suppress(OSError), open(path, "w") as file:
            message = "; ".join(reason.splitlines())
            json.dump({"message": {"message": message, "extraInfo": {"timestamp": str(int(time.time()))}}}, file)


def describe_place() -> str:
    """Where in the run this process is, in words."""
    return "before the first update" if update is None else f"at update {update}"


def print_errors(lines: list[str]) -> None:
    if lines:  # the first newline ends a progress bar's line, which the main thread may be writing just now
        with suppress(OSError):  # the terminal or the reader of a pipe may be gone
            os.write(sys.stderr.fileno(), ("".join(f"\nerror: {line}" for line in lines) + "\n").encode())


def exit_now(lines: list[str], status: int) -> None:
    """Ends the process from any thread: the main one may sit in a collective that does not return."""
    print_errors(lines)
    os._exit(status)
