"""Runs a command under an enforced memory limit, and reports whether it survived and how much memory it used.

The limit is a cgroup's, below the caller's own, as in containers and SLURM jobs. It applies to all processes together,
without file caches, because the kernel drops those first. If no cgroup can be created, the limit is RLIMIT_DATA, as
`ulimit -d` sets it. It applies to each process alone, and counts its private writable memory, resident or not.
"""

import os
import re
import resource
import subprocess
import tempfile
import time
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

CGROUPS = Path("/sys/fs/cgroup")
# Of each version of cgroups: the limits (of memory, of swap), what says who was killed, and what nobody can drop.
FILES = {
    1: (("memory.limit_in_bytes", "memory.memsw.limit_in_bytes"), "memory.oom_control", ("rss", "shmem")),
    2: (("memory.max", "memory.swap.max"), "memory.events", ("anon", "shmem")),
}
REFUSALS = r"(?i)can't allocate memory|cannot allocate memory|MemoryError|bad_alloc|can't start new thread"
STALLED = 600  # seconds; who takes longer is ended


@dataclass
class Ended:
    """The outcome of a command."""

    status: int  # as `subprocess` has it
    output: str  # of both streams
    peak: int  # bytes of all its processes together, without files
    seconds: float
    died: str  # of the limit: how, in words; "" if it did not

    @property
    def failed(self) -> bool:
        """Whether it ended badly, for another reason than the limit."""
        return self.status != 0 and not self.died


def run_limited(command, limit, kind="cgroup", **settings) -> Ended:
    """Runs a command of which all processes (`cgroup`) or each one (`rlimit`) may take `limit` bytes, None for any.

    settings: of subprocess.Popen. Raises OSError: no cgroup can be made here.
    """
    with _cgroup(limit) if kind == "cgroup" else nullcontext() as group, tempfile.TemporaryFile("w+") as output:

        def enter():
            if group:
                (group[0] / "cgroup.procs").write_text(str(os.getpid()))
            elif limit:
                resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))

        begun, peak = time.monotonic(), 0
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, preexec_fn=enter, **settings)
        try:
            while process.poll() is None and time.monotonic() - begun < STALLED:
                peak = max(peak, _held(*group) if group else _held_by_tree(process.pid))
                time.sleep(0.02)
        finally:
            died = "" if process.returncode is not None else f"ended after {STALLED} s"
            if died:
                for one in [*psutil.Process(process.pid).children(recursive=True), process]:
                    one.kill()
                process.wait()
        output.seek(0)
        printed = output.read()
        if group and (killed := _number("oom_kill", group[0] / FILES[group[1]][1])):
            died = f"OOM killer ({killed})"
        elif process.returncode and (refused := re.search(REFUSALS, printed)):
            died = f'"{refused[0]}"'
        return Ended(process.returncode, printed, peak, time.monotonic() - begun, died)


def cgroups_can_be_made() -> str:
    """Why they cannot; empty where they can."""
    try:
        with _cgroup(2**40):
            return ""
    except OSError as error:
        return f"no cgroup with a limit of memory can be made here ({error})"


@contextmanager
def _cgroup(limit):
    """Creates a group below the caller's own; returns it and its version of cgroups."""
    version, own = _own_cgroup()
    group = own / f"limited-{os.getpid()}"
    group.mkdir()
    try:
        limits = FILES[version][0]
        if not (group / limits[0]).exists():
            raise OSError(f"{own} hands the limit of memory to no group below it")
        if limit:
            (group / limits[0]).write_text(str(limit))
            with suppress(FileNotFoundError):  # the kernel counts no swap
                (group / limits[1]).write_text(str(limit if version == 1 else 0))
        yield group, version
    finally:
        for _ in range(100):  # processes that end take a moment to leave
            try:
                group.rmdir()
                break
            except OSError:
                time.sleep(0.1)


def _own_cgroup():
    """Returns the version of cgroups that counts this process's memory, and the group in which it can create others."""
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    for _, controllers, path in lines:
        if "memory" in controllers.split(","):
            own = CGROUPS / "memory" / path.strip("/")
            return 1, own if own.is_dir() else CGROUPS / "memory"  # a container may see its own as the top
    path = next((path for _, controllers, path in lines if not controllers), "/")
    own = CGROUPS / path.strip("/")
    return 2, own if own.is_dir() else CGROUPS


def _number(name, path):
    return int(re.search(rf"^{name} (\d+)$", path.read_text(), re.MULTILINE)[1])


def _held(group, version):
    """Returns the bytes of a group that the kernel cannot drop: of its processes, and of files in memory."""
    return sum(_number(name, group / "memory.stat") for name in FILES[version][2])


def _held_by_tree(pid):
    """Returns the same for a process and its descendants; memory shared by forked processes counts twice."""
    total = 0
    with suppress(psutil.Error):
        for one in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
            with suppress(psutil.Error):
                memory = one.memory_info()
                total += memory.rss - memory.shared
    return total
