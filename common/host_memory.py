"""Host memory that a process can still allocate, and the size of tensors in pinned memory."""

import resource
from collections.abc import Iterable
from pathlib import Path

import psutil

from common.peak_memory import most_resident


def format_bytes(size: float) -> str:
    """Formats a size in GiB, or in MiB below one GiB."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


def available_memory() -> int:
    """Returns the bytes by which this process can exceed its peak: available memory minus memory freed since the peak.

    The freed memory is subtracted because the next update of a CPU run allocates it again for activations.
    """
    given_back = max(0, most_resident() - psutil.Process().memory_info().rss)
    return max(0, available_per_process() - given_back)


def available_per_process() -> int:
    """Returns the bytes available to this process: `available_total()`, or less if its limits (`ulimit`) leave less.

    `ulimit -d` limits all writable memory, `ulimit -v` the full address space; both include non-resident memory.
    """
    memory = psutil.Process().memory_info()
    left = [available_total()]
    for limit, used in ((resource.RLIMIT_DATA, getattr(memory, "data", 0)), (resource.RLIMIT_AS, memory.vms)):
        most, _ = resource.getrlimit(limit)
        left += [most - used] if most != resource.RLIM_INFINITY else []
    return max(0, min(left))


def available_total(root: Path = Path("/")) -> int:
    """Returns the bytes available to all processes together: on the machine, or in its cgroups if less.

    Containers and SLURM jobs have cgroup limits, and a process that exceeds such a limit is killed. File caches count
    as available memory in both cases, because the kernel frees them first. root: directory that contains `proc` and
    `sys`.
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
        # Version 1 of cgroups has a hierarchy per controller; version 2 has a single hierarchy, without a name here.
        mount, limit, usage, caches = (
            ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))
            if controllers
            else ("", "memory.max", "memory.current", ("inactive_file", "active_file"))
        )
        top = root / "sys/fs/cgroup" / mount
        # A cgroup's limit also applies to its descendants. In a container, `top` may be its cgroup and `own` missing.
        own = top / path.strip("/")
        for group in [own, *own.parents]:
            if group == top or top in group.parents:
                left += _left_in(group, limit, usage, caches)
    return max(0, min(left))


def _left_in(group: Path, limit: str, usage: str, caches: tuple[str, ...]) -> list[int]:
    """Returns [the bytes that a cgroup's limit leaves, file caches included]; [] without a limit."""
    try:
        most = int((group / limit).read_text())  # without a limit, it is "max" in version 2 and huge in version 1
        used = int((group / usage).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return []
    return [most - used + sum(int(stat.get(name, 0)) for name in caches)]


def pinned_bytes(sizes: Iterable[int]) -> int:
    """Returns the bytes of pinned memory for tensors of these sizes: torch rounds each block up to a power of two."""
    return sum(1 << (size - 1).bit_length() for size in sizes if size)
