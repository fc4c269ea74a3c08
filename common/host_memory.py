"""How much memory of the host a process may still take, and how much pinned memory takes."""

import re
import resource
import sys
from collections.abc import Iterable
from pathlib import Path

import psutil


def format_bytes(size: float) -> str:
    """Formats a size in GiB, or in MiB below one GiB."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


def available_memory() -> int:
    """Bytes that this process can take for good: those left to it, without what it gave back since it held most.

    On a CPU, the next update takes the memory of its activations again.
    """
    given_back = max(0, most_resident() - psutil.Process().memory_info().rss)
    return max(0, left_to_one() - given_back)


def most_resident() -> int:
    """Bytes that this process has had in memory when it had most.

    Linux hands `ru_maxrss` down to the processes that a process starts, so the figure there is that of /proc.
    """
    status = Path("/proc/self/status").read_text() if sys.platform == "linux" else ""
    if found := re.search(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE):
        return int(found[1]) * 1024
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024  # macOS counts bytes


def left_to_one() -> int:
    """Bytes that are left to this process: those left to all, or less by its own limits (`ulimit -d`, `-v`).

    Own limits count all that may be written, and all addresses, whether touched or not.
    """
    memory = psutil.Process().memory_info()
    left = [left_to_all()]
    for limit, used in ((resource.RLIMIT_DATA, getattr(memory, "data", 0)), (resource.RLIMIT_AS, memory.vms)):
        most, _ = resource.getrlimit(limit)
        left += [most - used] if most != resource.RLIM_INFINITY else []
    return max(0, min(left))


def left_to_all(root: Path = Path("/")) -> int:
    """Bytes that this process and others beside it can take together: those of the machine, or of its cgroups, if less.

    Containers and the jobs of SLURM have limits of cgroups, and whoever goes over one is killed. Caches of files count
    as free, in both: the kernel drops them first. `root` is where `proc` and `sys` are.
    """
    left = [psutil.virtual_memory().available]
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # not Linux
        return left[0]
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        # Version 2 has one hierarchy, which lies beside those of version 1 where there are both.
        mount, limit, usage, caches = (
            ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))
            if controllers
            else ("", "memory.max", "memory.current", ("inactive_file", "active_file"))
        )
        top = root / "sys/fs/cgroup" / mount
        # A limit holds for all below it. A container may see its own cgroup as the top, whatever its path says.
        own = top / path.strip("/")
        for group in [own, *own.parents]:
            if group == top or top in group.parents:
                left += _left_in(group, limit, usage, caches)
    return max(0, min(left))


def _left_in(group: Path, limit: str, usage: str, caches: tuple[str, ...]) -> list[int]:
    """What one cgroup's limit leaves; nothing where it has none."""
    try:
        most = int((group / limit).read_text())  # version 2 says "max" where there is none, version 1 a huge number
        used = int((group / usage).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return []
    return [most - used + sum(int(stat.get(name, 0)) for name in caches)]


def pinned_bytes(sizes: Iterable[int]) -> int:
    """What tensors of these sizes take in pinned memory: torch rounds each block up to a power of two."""
    return sum(1 << (size - 1).bit_length() for size in sizes if size)
