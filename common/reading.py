"""Malformed input of any format as a user error."""

from collections.abc import Iterator
from contextlib import contextmanager

from common.errors import UserError, one_line


def as_user_error(error: Exception, location: object, fix: str) -> UserError:
    """Returns the error of a library about malformed input as a UserError; a UserError is returned unchanged."""
    text = f"{location}: cannot be used ({type(error).__name__}: {one_line(error)}); {fix}"
    return error if isinstance(error, UserError) else UserError(text)


def location_after(path: str, row: str | None) -> str:
    """Returns the location after the last row of a file that was read, for a message. row: the location of that row."""
    place = row.removeprefix(path).removeprefix(", ") if row else ""
    return f"{path}, after {place}" if place else path


@contextmanager
def reading(location: object, fix: str = "fix or remove the row") -> Iterator[None]:
    """Context manager for malformed input: any error inside becomes a UserError with the location and the fix."""
    try:
        yield
    except Exception as error:  # the type depends on the library and on the value
        raise as_user_error(error, location, fix) from error
