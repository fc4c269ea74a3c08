"""The message for a private name that the installed version of a library does not have."""

from importlib.metadata import PackageNotFoundError, version
from typing import Any

from common.versions import TESTED


def describe_missing_name(owner: Any, name: str) -> str | None:
    """Returns the message for `owner.name`, or None if the library is not installed."""
    location = owner if isinstance(owner, str) else owner.__name__
    if isinstance(owner, type):
        location = f"{owner.__module__}.{owner.__qualname__}"
    library = location.partition(".")[0]
    try:
        installed = version(library)
    except PackageNotFoundError:
        return None
    fix = f"; install {library}=={TESTED[library][-1]}" if library in TESTED else ""
    return f"{library} {installed}: {location} has no {name}, which the recipes use{fix}"
