"""Versions of Python and of the packages that affect results, and the tested versions."""

import os
import platform
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

from common.errors import main_logger, refuse

PACKAGES = "torch accelerate transformers tokenizers datasets bitsandbytes peft deepspeed numpy".split()
# The oldest and the newest tested version. requirements.txt pins the newest.
TESTED = {
    "torch": ("2.11.0", "2.13.0"),
    "accelerate": ("1.15.0", "1.15.0"),
    "transformers": ("5.17.0", "5.23.0"),
    "tokenizers": ("0.23.3", "0.23.3"),
    "datasets": ("5.2.0", "5.2.0"),
    "bitsandbytes": ("0.50.2", "0.50.2"),
    "peft": ("0.21.2", "0.21.2"),
    "deepspeed": ("0.19.8", "0.19.8"),
    "numpy": ("2.4.6", "2.4.6"),
}
# Oldest working version of each package, and the attribute that earlier versions lack.
OLDEST = {
    "torch": ("2.6", "torch.distributed.fsdp.FSDPModule"),
    "accelerate": ("1.10", "accelerate.parallelism_config"),
    "transformers": ("5.0", "transformers.PreTrainedConfig"),
}
logger = main_logger(__name__)


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the installed packages."""
    installed = {"python": platform.python_version()}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            installed[package] = version(package)
    return installed


def broken_versions(installed: Mapping[str, str]) -> Iterator[str]:
    """Yields one line for each version that is known not to work. installed: version of each package."""
    from packaging.version import Version  # here because the launcher's own process does not need it

    for package, (oldest, name) in OLDEST.items():
        if package in installed and Version(installed[package]) < Version(oldest):
            yield f"{package} {installed[package]}: has no {name}; install {package}=={TESTED[package][-1]}"


def untested_versions(installed: Mapping[str, str]) -> Iterator[str]:
    """Yields each package outside the tested range, with that range. installed: version of each package."""
    from packaging.version import Version

    for package, (oldest, newest) in TESTED.items():
        if package in installed:
            found = Version(installed[package])
            release = Version(found.base_version)  # without the build, such as +cpu
            if found.is_prerelease or not Version(oldest) <= release <= Version(newest):
                yield f"{package} {found} (tested: {newest if oldest == newest else f'{oldest} to {newest}'})"


def check_versions(installed: Mapping[str, str] | None = None) -> None:
    """Warns in one line if packages are outside the tested range.

    Args:
        installed: version of each package; None: those that are installed.

    Raises UserError: one line for each version that is known not to work.
    """
    installed = installed or versions()
    refuse(broken_versions(installed))
    if untested := list(untested_versions(installed)):
        logger.warning("untested versions: %s; if something fails, install requirements.txt", ", ".join(untested))


def exit_if_broken() -> None:
    """Ends the process with status 2, before an import fails, if a version is known not to work."""
    if problems := list(broken_versions(versions())):
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print("\n".join(f"error: {problem}" for problem in problems), file=sys.stderr, flush=True)
        else:
            time.sleep(2)  # when a rank ends, the launcher ends all ranks, so the first rank must print before
        sys.exit(2)
