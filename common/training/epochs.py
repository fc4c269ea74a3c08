"""Converts numbers of epochs to numbers of updates, when the number of updates per epoch is known."""

import argparse
import math
import re

from common.errors import UserError

EPOCHS = re.compile(r"([1-9]\d*)epochs?|auto")


def resolve(args: argparse.Namespace, updates_per_epoch: int) -> None:
    """Converts flags in epochs to updates, in place; a fraction of an update is rounded up."""
    if args.num_epochs is not None:
        # Rounded, because in floating point 1.1 epochs of 10 updates are slightly more than 11.
        args.num_updates = math.ceil(round(args.num_epochs * updates_per_epoch, 6))
    for name in ("eval_every", "save_every"):
        value = getattr(args, name)
        if value == "auto":
            if name == "eval_every":
                raise UserError("--eval_every auto: only --save_every can be auto; pass a number of updates or epochs")
        elif isinstance(value, str):  # such as "2epochs"
            setattr(args, name, int(value.partition("epoch")[0]) * updates_per_epoch)
