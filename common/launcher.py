"""Finds this process's launcher at the first import of `common`, because the launcher may end before the loop."""

import os
from pathlib import PurePath

import psutil


def find_launch_words(command: list[str]) -> list[str] | None:
    """Returns the words after `accelerate launch` in a process's command line, or None if it is a different command."""
    for at, word in enumerate(command):
        name = PurePath(word).name
        if name == "accelerate" and command[at + 1 : at + 2] == ["launch"]:
            return command[at + 2 :]
        if name == "accelerate-launch" or word == "accelerate.commands.launch":
            return command[at + 1 :]
    return None


def is_launcher(command: list[str]) -> bool:
    """Returns whether a command line starts `accelerate launch` or `torchrun`."""
    names = {*command, *(PurePath(word).name for word in command)}
    is_torchrun = not names.isdisjoint({"torchrun", "torch.distributed.run", "torch.distributed.launch"})
    return is_torchrun or find_launch_words(command) is not None


def _find_launcher() -> int | None:
    """Returns the process ID of the parent if it is a launcher, 0 if the launcher has died, None if there was none."""
    parent, is_elastic = os.getppid(), "TORCHELASTIC_RUN_ID" in os.environ
    try:
        command = psutil.Process(parent).cmdline()
    except psutil.Error:  # the parent has just ended, or belongs to a different user
        command = []
    if is_launcher(command) or (is_elastic and not command):  # the command line of an ending process is empty
        return parent
    return 0 if parent == 1 and is_elastic else None


LAUNCHER = _find_launcher()


def has_died() -> bool:
    """Returns whether the launcher that started this process has ended."""
    return LAUNCHER is not None and os.getppid() != LAUNCHER
