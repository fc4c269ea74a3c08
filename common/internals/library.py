"""Access to private names of libraries, with a one-line error if the installed version does not have them."""

from importlib import import_module
from typing import Any

from common.errors import UserError


def private(owner: Any, name: str) -> Any:
    """Returns `owner.name`. Raises UserError: the installed version of the library does not have the name."""
    try:
        return getattr(import_module(owner) if isinstance(owner, str) else owner, name)
    except (ImportError, AttributeError) as error:
        from common.internals.missing_name import describe_missing_name

        if (problem := describe_missing_name(owner, name)) is None:
            raise
        raise UserError(problem) from error
