"""Builds the C++ extensions of DeepSpeed once, in one process, before the other processes need them.

`python -m common.parallel.extensions` builds all extensions that this machine supports: before the tests, or once for
all nodes that share a home directory.
"""

import os
import shutil
import sys
import time
from collections.abc import Iterable
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any

import psutil
from filelock import FileLock, Timeout

from common.errors import UserError, raise_errors
from common.packages import find_missing


def _build_extension(builder_name: str, package: str) -> None:
    """Loads one of DeepSpeed's C++ extensions; if necessary, one process builds it (minutes) while others wait.

    package: Debian package that the build needs. Raises UserError: the extension cannot be built; one line.
    """
    raise_errors(find_missing("DeepSpeed's extensions", "deepspeed"))
    import deepspeed  # imported here because it takes seconds
    from deepspeed.accelerator import get_accelerator

    from common.internals.deepspeed import build_without_debug_symbols, measure_cpu_once
    from common.internals.torch import extension_directory

    # This environment's ninja, even if it is not activated: a different version would rebuild everything.
    if (path := os.environ.get("PATH", "")).split(os.pathsep)[0] != (ours := str(Path(sys.executable).parent)):
        os.environ["PATH"] = os.pathsep.join([ours, path])
    measure_cpu_once()
    builder = get_accelerator().create_op_builder(builder_name)
    build_without_debug_symbols(builder)
    directory = extension_directory(builder.name)
    library = directory / f"{builder.name}.so"
    # DeepSpeed builds a second extension for async_io.
    locks = [directory / "lock", *([directory.parent / "pin_memory/lock"] if builder.name == "async_io" else [])]
    # The operating system releases our lock when its process ends for any reason. Torch's own lock is the existence of
    # a file: if a build is killed, the file remains, and later processes wait indefinitely. All processes of a run
    # acquire torch's lock while they hold ours, so a lock file that no process has open is stale.
    building = FileLock(directory.parent / f"{builder.name}.building")
    try:
        held = building.acquire(timeout=5)
    except Timeout:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"waiting for another process that builds DeepSpeed's extension {builder.name} ...", flush=True)
        held = building.acquire()
    with held:
        left = [lock for lock in locks if lock.exists() and not _is_open(lock)]
        for lock in left:
            print(f"{lock} was left by a build that was killed; removing it", flush=True)
            lock.unlink(missing_ok=True)
        # If the last build was of a different environment's DeepSpeed, ninja rebuilds everything.
        recipe = directory / "build.ninja"
        is_ours = recipe.exists() and str(Path(deepspeed.__file__).parent) in recipe.read_text()
        must_build = left or not library.exists() or not is_ours
        if must_build:
            if shutil.which(os.environ.get("CXX", "c++")) is None:
                raise UserError("DeepSpeed compiles an extension here and finds no C++ compiler; apt install g++")
            if not builder.is_compatible(verbose=False):
                raise UserError(
                    f"DeepSpeed's extension {builder.name} cannot be built on this machine; apt install {package}"
                )
            print(f"building DeepSpeed's extension {builder.name}: some minutes, only once ...", flush=True)
        started = time.perf_counter()
        _load(builder)
        if must_build:
            print(f"built in {time.perf_counter() - started:.0f} s", flush=True)


def _load(builder: Any) -> None:
    """Loads an extension. DeepSpeed caches loaded extensions, so later loads need no lock."""
    import torch
    from torch.utils.cpp_extension import CUDA_HOME

    try:
        with open(os.devnull, "w") as null, redirect_stdout(null):
            builder.load(verbose=False)
    except TypeError as error:
        if CUDA_HOME is not None:
            raise
        raise UserError(
            f"DeepSpeed's extension {builder.name} needs the CUDA toolkit (nvcc), and none is found; install that of "
            f"CUDA {torch.version.cuda}, or set CUDA_HOME to the directory where it is"
        ) from error  # TypeError: the path of the headers was built from CUDA_HOME, which is None
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[-1]
        raise UserError(f"DeepSpeed's extension {builder.name} does not compile ({reason})") from error


def _is_open(path: Path) -> bool:
    """Returns whether a process that this user may inspect has the file open."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if any(Path(file.path) == path for file in process.open_files()):
                return True
    return False


def build_extensions(offload_devices: Iterable[str]) -> None:
    """Builds the extensions for offload to these devices (none, cpu, nvme); on a CPU also for collectives.

    Raises UserError: an extension cannot be built; one line.
    """
    if os.environ.get("DS_ACCELERATOR") == "cpu":
        _build_extension("ShareMemCommBuilder", "g++")
    if set(offload_devices) - {"none"}:
        _build_extension("CPUAdamBuilder", "g++")
    if "nvme" in offload_devices:
        _build_extension("AsyncIOBuilder", "libaio-dev")


if __name__ == "__main__":
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        build_extensions(["nvme"])
    except UserError as error:
        print(f"{error}; features that need it are rejected")
