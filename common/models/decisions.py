"""Decisions that depend on the weights: only processes that hold weights can make them."""

from collections.abc import Callable
from typing import Any

from accelerate.utils import broadcast_object_list

from common.models.single_copy import holds_weights, main_builds_weights
from common.parallel.liveness import wait_for_all


def decided_once(decide: Callable[[], Any]) -> Any:
    """Returns the result of `decide`; if only the main process holds weights, its result is broadcast to all ranks."""
    if not main_builds_weights():
        return decide()
    decided = [decide() if holds_weights() else None]
    wait_for_all()  # the main process may read the weights for a long time
    return broadcast_object_list(decided)[0]
