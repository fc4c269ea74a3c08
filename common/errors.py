"""A user's mistake, told in lines; everything else is a bug and keeps its traceback."""

import argparse
import logging
import os
import sys
import textwrap
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


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


def with_location(error: Exception) -> str:
    """The error on one line, with the file and line that raised it, unless it is a user's mistake."""
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, UserError) or not frames:
        return one_line(error)
    return f"{type(error).__name__}: {one_line(error)} ({frames[-1].filename}, line {frames[-1].lineno})"


@contextmanager
def reported_in_one_line(subject: str) -> Iterator[None]:
    """A block that a run can do without: an error inside ends the block and is printed on one line of stderr."""
    try:
        yield
    except Exception as error:  # of any library
        print(f"{subject}: {with_location(error)}", file=sys.stderr, flush=True)


def shorten(names: list[str], most: int = 12) -> str:
    """The first names of a list, for people."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def missing_column(where: str, missing: list[str], columns: list[str] | tuple[str, ...]) -> str:
    """The message for columns that are not there."""
    return (
        f"{where}: no column {', '.join(missing)}; there are: {', '.join(columns) or 'none'}; name or add the right one"
    )
