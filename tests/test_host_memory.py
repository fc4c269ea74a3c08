"""What a process may take of the host's memory: the machine's, or less where a cgroup says so."""

import psutil
import pytest

from common.memory import available_memory, pinned_bytes

GIB = 2**30


def cgroups(root, own, limits):
    """A /proc and a /sys in `root`. own: the lines of /proc/self/cgroup. limits: directory to (limit, use, cache)."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text("".join(f"{line}\n" for line in own))
    for path, (limit, use, cache) in limits.items():
        group = root / "sys/fs/cgroup" / path
        group.mkdir(parents=True, exist_ok=True)
        is_first_version = path.startswith("memory")
        names = ("limit_in_bytes", "usage_in_bytes") if is_first_version else ("max", "current")
        (group / f"memory.{names[0]}").write_text(f"{limit}\n")
        (group / f"memory.{names[1]}").write_text(f"{use}\n")
        total = "total_" if is_first_version else ""
        stat = f"anon 1\n{total}inactive_file {cache // 2}\n{total}active_file {cache - cache // 2}\n"
        own = f"inactive_file {cache}\n" if total else ""  # version 1 has those of the cgroup itself beside the total
        (group / "memory.stat").write_text(stat + own)


MACHINE = 64 * GIB
CASES = {
    "no cgroup": ([], {}, MACHINE),
    "v2, a container's own": (["0::/"], {"": (8 * GIB, 3 * GIB, 0)}, 5 * GIB),
    "v2, caches of files are free": (["0::/"], {"": (8 * GIB, 7 * GIB, 4 * GIB)}, 5 * GIB),
    "v2, no limit": (["0::/job/step"], {"job/step": ("max", 3 * GIB, 0), "job": ("max", 3 * GIB, 0)}, MACHINE),
    "v2, the limit of the job above": (
        ["0::/job/step"],
        {"job/step": (20 * GIB, 1 * GIB, 0), "job": (8 * GIB, 2 * GIB, 0), "other": (GIB, GIB, 0)},
        6 * GIB,
    ),
    "v2, the path is the host's": (["0::/docker/abc"], {"": (8 * GIB, 3 * GIB, 0)}, 5 * GIB),
    "v2, more than the machine": (["0::/"], {"": (999 * GIB, 3 * GIB, 0)}, MACHINE),
    "v2, over the limit": (["0::/"], {"": (8 * GIB, 9 * GIB, 0)}, 0),
    "v1": (["4:memory:/slurm/job", "0::/"], {"memory/slurm/job": (8 * GIB, 3 * GIB, GIB)}, 6 * GIB),
    "v1, no limit": (["4:memory:/"], {"memory": (2**63 - 4096, 3 * GIB, 0)}, MACHINE),
}


@pytest.mark.parametrize("case", CASES)
def test_available_memory_heeds_the_limits_of_cgroups(case, tmp_path, monkeypatch):
    own, limits, expected = CASES[case]
    machine = psutil.virtual_memory()._replace(available=MACHINE)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: machine)
    cgroups(tmp_path, own, limits)
    assert available_memory(tmp_path) == expected


def test_this_machine_has_memory():
    assert 0 < available_memory() <= psutil.virtual_memory().total


def test_pinned_blocks_are_powers_of_two():
    assert pinned_bytes([0, 1, 4, 4097, GIB, GIB + 1]) == 1 + 4 + 8192 + GIB + 2 * GIB
