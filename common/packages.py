"""Packages that only some runs need."""

from importlib.util import find_spec


def find_missing(subject: str, package: str) -> list[str]:
    """Returns one line if a package is not installed, or []. subject: what needs it, such as a flag."""
    if find_spec(package) is not None:
        return []
    return [f"{subject}: the package {package} is not installed; pip install {package}"]
