"""Communication of ranks without collectives: to wait for each other, and to end together.

With several processes, `rank_watch` detects a process that dies or hangs, and `failures` reports errors.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from common.process import this_process


def reset() -> None:
    """Resets the state that an earlier run of this process left."""
    process = this_process()
    process.update, process.in_loop, process.note_failure = None, False, None


def leave() -> None:
    """Announces the normal end of this process; a second call has no effect. After an error, use `failures.leave`."""
    process = this_process()
    left, process.rank_watch = process.rank_watch, None
    if left is not None:
        left.leave(None, 0)


def wait_for_all() -> None:
    """Waits until all ranks have called this function, without a time limit, so a rank may first do long work.

    A collective would time out (NCCL: after 10 minutes). If a rank dies, the waiting ranks end too.
    """
    if watch := this_process().rank_watch:
        watch.store.wait_for_all()


@contextmanager
def optional(report: Callable[[Exception], None]) -> Iterator[None]:
    """Context manager for a block of optional work on all ranks: an error ends the block and is passed to `report`.

    If rank 0 has an error, only rank 0 reports. A rank with an error waits until the other ranks leave the block. If
    they exceed a time limit, because they wait for this rank inside the block, it raises the error.
    """
    problem = None
    try:
        yield
    except Exception as error:  # any library may raise it
        problem = error
    if watch := this_process().rank_watch:
        problem = watch.store.leave_optional(problem)
    if problem is not None:
        report(problem)
