"""Converts lengths in epochs to updates, when the number of updates per epoch is known."""

import argparse
import math
import re

EPOCHS = re.compile(r"([1-9]\d*)epochs?")


def are_asked(args: argparse.Namespace) -> bool:
    """Whether a flag counts in epochs, so that updates are not known before the data are."""
    return args.num_epochs is not None or any(isinstance(every, str) for every in (args.eval_every, args.save_every))


def settle(args: argparse.Namespace, updates_per_epoch: int) -> None:
    """Makes updates of what was asked in epochs; part of an update is a whole one."""
    if args.num_epochs is not None:
        # Rounded, for in floats 1.1 epochs of 10 updates are a little more than 11.
        args.num_updates = math.ceil(round(args.num_epochs * updates_per_epoch, 6))
    for name in ("eval_every", "save_every"):
        if isinstance(every := getattr(args, name), str):
            setattr(args, name, int(EPOCHS.fullmatch(every)[1]) * updates_per_epoch)
