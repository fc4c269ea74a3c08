"""Which versions run: of Python and of the packages that shape a result."""

import platform
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

PACKAGES = "torch accelerate transformers tokenizers datasets bitsandbytes peft deepspeed numpy".split()


def versions() -> dict[str, str]:
    """Of Python and of those packages that are installed."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found
