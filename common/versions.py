"""Versions of Python and of the packages that affect results, and the tested versions."""

import platform
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from packaging.version import Version

from common.errors import main_logger

# The oldest and the newest tested version. requirements.txt pins the newest that supports Python 3.11.
TESTED = {
    "torch": ("2.11.0", "2.13.0"),
    "accelerate": ("1.15.0", "1.15.0"),
    "transformers": ("5.17.0", "5.23.0"),
    "tokenizers": ("0.23.2", "0.23.3"),
    "datasets": ("5.2.0", "5.2.0"),
    "bitsandbytes": ("0.50.2", "0.50.2"),
    "peft": ("0.21.2", "0.21.2"),
    "deepspeed": ("0.19.8", "0.19.8"),
    "numpy": ("2.4.6", "2.5.2"),
}
# Oldest working version of each package, and the attribute that earlier versions lack.
OLDEST = {
    "torch": ("2.6", "torch.distributed.fsdp.FSDPModule"),
    "accelerate": ("1.10", "accelerate.parallelism_config"),
    "transformers": ("5.0", "transformers.PreTrainedConfig"),
}
logger = main_logger(__name__)


@cache
def versions() -> dict[str, str]:
    """Returns the versions of Python and of the installed packages, read once per process: it takes 15 ms."""
    installed = {"python": platform.python_version()}
    for package in TESTED:
        with suppress(PackageNotFoundError):
            installed[package] = version(package)
    return installed


def broken_versions(installed: dict[str, str]) -> Iterator[str]:
    """Yields one line for each version that is known not to work. installed: version of each package."""
    for package, (oldest, name) in OLDEST.items():
        if package in installed and Version(installed[package]) < Version(oldest):
            yield f"{package} {installed[package]}: has no {name}; install {package}=={TESTED[package][-1]}"


def check_versions(installed: dict[str, str] | None = None) -> None:
    """Warns in one line of packages outside the tested range. installed: version per package; None: `versions()`."""
    installed, untested = installed or versions(), []
    for package, (oldest, newest) in TESTED.items():  # a base version lacks the build, such as +cpu
        if package in installed:
            found = Version(installed[package])
            if found.is_prerelease or not Version(oldest) <= Version(found.base_version) <= Version(newest):
                untested.append(f"{package} {found} (tested: {' to '.join(dict.fromkeys((oldest, newest)))})")
    if untested:
        logger.warning("untested versions: %s; if something fails, install requirements.txt", ", ".join(untested))
