"""A user's mistake, told in lines; everything else is a bug and keeps its traceback."""

import argparse
import logging
import os
import textwrap
from collections.abc import Iterable


class UserError(Exception):
    """What a user can mend: a line for each problem says what is wrong, where, and how to mend it.

    `user_mistakes_end_here` prints the lines and ends the run with status 2. It is raised where the
    mistake is known, never for an exception that merely looks like one. From a data worker torch hands it over inside
    the text of a traceback, of which only the lines are kept.
    """

    def __init__(self, text: str):
        kind = type(self)
        super().__init__(text.rpartition(f"\n{kind.__module__}.{kind.__qualname__}: ")[2].strip())


class CommandParser(argparse.ArgumentParser):
    """argparse that tells a mistake in the command, or in a subcommand, as a UserError of one line."""

    def error(self, message: str) -> None:
        raise UserError(f"{message} (--help lists the flags)")


def main_logger(name: str) -> logging.Logger:
    """A logger of which only the first of all processes writes, so that a warning to all comes once."""
    logger = logging.getLogger(name)
    logger.addFilter(lambda _: os.environ.get("RANK", "0") == "0")
    return logger


def refuse(problems: Iterable[str]) -> None:
    """Raises one UserError that tells all problems, a line each; without any returns."""
    if lines := list(problems):
        raise UserError("\n".join(lines))


def one_line(error: BaseException) -> str:
    """The error's message on one line, cut where a library's message turns into a page."""
    return textwrap.shorten(" ".join(str(error).split()) or type(error).__name__, 300, placeholder=" ...")


def shorten(names: list[str], most: int = 12) -> str:
    """The first names of a list, for people."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def missing_column(where: str, missing: list[str], columns: list[str] | tuple[str, ...]) -> str:
    """The message for columns that are not there."""
    return (
        f"{where}: no column {', '.join(missing)}; there are: {', '.join(columns) or 'none'}; name or add the right one"
    )
