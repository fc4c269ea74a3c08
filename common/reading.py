"""Malformed input of any format as a user error."""

from collections.abc import Iterator
from contextlib import contextmanager

from common.errors import as_user_error


@contextmanager
def reading(location: object, fix: str = "fix or remove the row") -> Iterator[None]:
    """Context manager for malformed input: any error inside becomes a UserError with the location and the fix."""
    try:
        yield
    except Exception as error:  # the type depends on the library and on the value
        raise as_user_error(error, location, fix) from error
