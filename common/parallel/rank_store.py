"""Communication between ranks through torch's key-value store, without the time limit of collectives."""

import json
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

OPTIONAL_TIMEOUT = 30.0  # seconds that a rank with an error waits for the others to leave an optional block
SHARED_TIMEOUT = 10  # seconds in which a new file must be visible on all hosts: network file systems cache listings


def is_soon(condition: Callable[[], bool]) -> bool:
    """Returns whether the condition becomes true within `SHARED_TIMEOUT`: for example, rank 0's file is visible."""
    deadline = time.monotonic() + SHARED_TIMEOUT
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


class RankStore:
    """The key-value store of a launch. `prefix` makes the keys unique, because the launcher may reuse its store."""

    def __init__(self, store: Any, prefix: str, rank: int, world_size: int):
        self.store, self.prefix, self.rank, self.world_size = store, prefix, rank, world_size
        self.counts: Counter[str] = Counter()

    def _new_key(self, name: str) -> str:
        self.counts[name] += 1
        return f"{self.prefix}-{name}-{self.counts[name]}"

    def wait_for_all(self) -> None:
        """Implements `liveness.wait_for_all`."""
        key, pause = self._new_key("wait"), 0.01
        num_here = self.store.add(key, 1)
        while num_here < self.world_size:  # torch's store barrier ignores Ctrl-C until all arrive
            time.sleep(pause)
            num_here, pause = self.store.add(key, 0), min(0.5, 2 * pause)

    def decided_by_main(self, question: str, answer: Callable[[], Any]) -> Any:
        """Implements `liveness.decided_by_main`."""
        key, pause = self._new_key(f"question-{question}"), 0.01
        if self.rank == 0:
            self.store.set(key, json.dumps(answer()))
        while not self.store.check([key]):
            time.sleep(pause)
            pause = min(0.5, 2 * pause)
        return json.loads(self.store.get(key))

    def leave_optional(self, problem: Exception | None) -> Exception | None:
        """Ends a block of `liveness.optional`; returns the problem if this rank reports it.

        Raises `problem`: the other ranks have not left the block within OPTIONAL_TIMEOUT.
        """
        key, deadline = self._new_key("optional"), time.monotonic() + OPTIONAL_TIMEOUT
        self.store.add(f"{key}-main", int(self.rank == 0 and problem is not None))
        num_left = self.store.add(key, 1)
        if problem is None:
            return None
        while num_left < self.world_size:
            if time.monotonic() > deadline:
                raise problem
            time.sleep(0.1)
            num_left = self.store.add(key, 0)
        is_reported = self.rank != 0 and self.store.add(f"{key}-main", 0)
        return None if is_reported else problem
