"""What tests/run_recipe.py changes around a run of a recipe, by subject. A change is a function of one value.

All of them change by what stands here, or leave in `UNDO` how it is undone: the next run finds nothing of it.
"""

import os
from contextlib import ExitStack
from unittest import mock

from common.training import accumulation

RANK = int(os.environ.get("RANK", 0))  # of this process
UNDO = ExitStack()  # closed after each run


def change(owner, name, value):
    """`owner.name` is `value` until the run has ended."""
    UNDO.enter_context(mock.patch.object(owner, name, value))


def before(owner, name, action):
    """Calls `action` with the arguments of each call of `owner.name`, before it."""
    original = getattr(owner, name)

    def changed(*args, **kwargs):
        action(*args, **kwargs)
        return original(*args, **kwargs)

    change(owner, name, changed)


def after(owner, name, action):
    """Calls `action` with what each call of `owner.name` returned and with its arguments, behind it."""
    original = getattr(owner, name)

    def changed(*args, **kwargs):
        result = original(*args, **kwargs)
        action(result, *args, **kwargs)
        return result

    change(owner, name, changed)


def before_reduce(action):
    """Calls `action` with the Accelerator and the number of the update, before the ranks agree on its end."""

    def act(accelerator, loss_sums, grad_norm, batch, values):
        action(accelerator, batch.update)

    before(accumulation, "reduce_update", act)
