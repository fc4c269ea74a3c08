"""UserError: a mistake the user can fix, reported in one line per problem. Other exceptions keep their traceback."""

import logging
import os
import sys
import textwrap
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from common.redaction import on_one_line, redact

MOST_PROBLEMS, LONGEST = 100, 4000  # lines of an error, and characters of a line: names in files have any length


class UserError(Exception):
    """A mistake that the user can fix: one line per problem, with the problem, its location and the fix.

    `exit_on_user_error` prints the lines and ends the run with status 2.
    """

    def __init__(self, *problems: str):
        # torch raises a data worker's exception again with the traceback as its text; only the lines are kept.
        if problems and (found := problems[0].rpartition(f"\n{__name__}.UserError: "))[1]:
            problems = tuple(found[2].strip().splitlines())
        more = [f"and {len(problems) - MOST_PROBLEMS} problems more"] if len(problems) > MOST_PROBLEMS else []
        super().__init__("\n".join([*map(_line, problems[:MOST_PROBLEMS]), *more]))


def _line(problem: str) -> str:
    # Cut twice, so that the end of the line is not the beginning of a secret that is not recognised any more.
    line = on_one_line(redact(problem[: 2 * LONGEST].strip()))
    return line if len(line) <= LONGEST else line[:LONGEST] + " ..."


def main_logger(name: str) -> logging.Logger:
    """Returns a logger that writes only on rank 0, so that a warning on all ranks appears once."""
    logger = logging.getLogger(name)
    logger.addFilter(lambda _: os.environ.get("RANK", "0") == "0")
    return logger


def raise_errors(problems: Iterable[str]) -> None:
    """Raises a UserError that lists all problems, one per line; returns if there are none."""
    if lines := list(problems):
        raise UserError(*lines)


def one_line(error: BaseException) -> str:
    """Returns the error's message on one line, shortened to 300 characters because library messages can fill a page."""
    return textwrap.shorten(" ".join(str(error).split()) or type(error).__name__, 300, placeholder=" ...")


def with_location(error: Exception) -> str:
    """Returns the error on one line, with the file and line that raised it unless it is a UserError."""
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, UserError) or not frames:
        return one_line(error)
    return f"{type(error).__name__}: {one_line(error)} ({frames[-1].filename}, line {frames[-1].lineno})"


@contextmanager
def reported_in_one_line(subject: str) -> Iterator[None]:
    """Context manager for optional steps: an error inside ends the block and prints one line to stderr."""
    try:
        yield
    except Exception as error:  # any library may raise it
        print(f"{subject}: {with_location(error)}", file=sys.stderr, flush=True)


def shorten(names: list[str], most: int = 12) -> str:
    """Returns the first `most` names of a list, and the number of the others, for messages."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
