"""Connects ranks outside of collectives: they wait for each other, ask rank 0, and leave the run together.

With several processes, `rank_watch` detects a process that dies or hangs, and `failures` reports errors.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

update: int | None = None  # the current update of this process; the loop sets it
# Whether this process is in the loop; the loop sets it. Before and after the loop, silence means nothing, because a
# library may hold Python's lock while it reads or writes a model.
in_loop = False
# Writes a failure into the run's results, given a line with the reason; called in one process.
note_failure: Callable[[str], None] | None = None
watch: Any = None  # the `rank_watch.RankWatch` of a launch with several processes


def reset() -> None:
    """Resets the state that an earlier run of this process left."""
    global update, in_loop, note_failure
    update, in_loop, note_failure = None, False, None


def leave() -> None:
    """Announces the normal end of this process; a second call has no effect. After an error: `failures.leave`."""
    global watch
    left, watch = watch, None
    if left is not None:
        left.leave(None, 0)


def wait_for_all() -> None:
    """Returns when all ranks have called it, without a time limit for the work of a rank before.

    A collective would reach its time limit (NCCL: 10 minutes). If a rank dies, the others end here too.
    """
    if watch is not None:
        watch.store.wait_for_all()


def decided_by_main(question: str, answer: Callable[[], Any]) -> Any:
    """Returns rank 0's result of `answer`, as JSON, on all ranks, because a disk or the hub may look different to each.

    Every rank calls it with the same questions. It waits for rank 0 without a time limit, as in `wait_for_all`.
    """
    if watch is None:
        return json.loads(json.dumps(answer()))
    return watch.store.decided_by_main(question, answer)


@contextmanager
def optional(report: Callable[[Exception], None]) -> Iterator[None]:
    """A block of all ranks that the run does not need: an error inside ends the block and is passed to `report`.

    If rank 0 has an error, only rank 0 reports. The block must end on every rank. If the others do not leave it,
    because they wait inside for the rank with the error, that rank raises the error after a time limit.
    """
    problem = None
    try:
        yield
    except Exception as error:  # any library may raise it
        problem = error
    if watch is not None:
        problem = watch.store.leave_optional(problem)
    if problem is not None:
        report(problem)
