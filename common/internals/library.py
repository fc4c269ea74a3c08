"""Access to private names of libraries, with a one-line error if the installed version does not have them."""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from common.errors import UserError
from common.versions import TESTED


def private(owner: Any, name: str) -> Any:
    """Returns `owner.name`.

    Raises UserError: the installed version of the library does not have the name.
    """
    try:
        return getattr(import_module(owner) if isinstance(owner, str) else owner, name)
    except (ImportError, AttributeError) as error:
        location = owner if isinstance(owner, str) else owner.__name__
        if isinstance(owner, type):
            location = f"{owner.__module__}.{owner.__qualname__}"
        library = location.partition(".")[0]
        try:
            installed = version(library)
        except PackageNotFoundError:
            raise error from None
        fix = f"; install {library}=={TESTED[library][-1]}" if library in TESTED else ""
        raise UserError(f"{library} {installed}: {location} has no {name}, which the recipes use{fix}") from error
