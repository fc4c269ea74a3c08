"""Results of rank 0 on all ranks, without a collective, which would have a time limit."""

import json
from collections.abc import Callable
from typing import Any

from common.process import this_process


def decided_by_main(question: str, answer: Callable[[], Any]) -> Any:
    """Returns rank 0's result of `answer` on all ranks, because each may see different files or states of the hub.

    The result must be JSON. All ranks make the same calls, and wait for rank 0 without a time limit.
    """
    if watch := this_process().rank_watch:
        return watch.store.decided_by_main(question, answer)
    return json.loads(json.dumps(answer()))
