"""What a process may take of the host's memory: the machine's, or less where a cgroup says so."""

import subprocess
import sys

import psutil
import pytest
from conftest import ROOT

from common.host_memory import available_memory, available_total, pinned_bytes

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
def test_what_is_left_to_all_heeds_the_limits_of_cgroups(case, tmp_path, monkeypatch):
    own, limits, expected = CASES[case]
    machine = psutil.virtual_memory()._replace(available=MACHINE)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: machine)
    cgroups(tmp_path, own, limits)
    assert available_total(tmp_path) == expected


def test_this_machine_has_memory():
    assert 0 < available_memory() <= psutil.virtual_memory().total


def test_pinned_blocks_are_powers_of_two():
    assert pinned_bytes([0, 1, 4, 4097, GIB, GIB + 1]) == 1 + 4 + 8192 + GIB + 2 * GIB


def told_by(program):
    """The words that a Python process of its own prints."""
    program = f"from common.host_memory import available_memory, available_total, available_per_process\n{program}"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    return [float(word) for word in result.stdout.split()]


@pytest.mark.parametrize("limit", ["RLIMIT_DATA", "RLIMIT_AS"])
def test_what_is_left_to_one_heeds_the_limits_of_the_process(limit):
    """A limit that leaves a gibibyte leaves as much. Control: what is left to all is more, before and after."""
    before, after, left = told_by(f"""if True:
        import psutil, resource
        memory = psutil.Process().memory_info()
        most = 2**30 + (memory.data if "{limit}" == "RLIMIT_DATA" else memory.vms)
        print(available_per_process())
        resource.setrlimit(resource.{limit}, (most, most))
        print(available_total(), available_per_process())
    """)
    assert min(before, after) > 2 * GIB
    assert 0.98 * GIB < left <= GIB


def test_the_most_is_that_of_the_process_itself():
    """And not of the one that started it. Control: the kernel's own figure is."""
    block = bytearray(GIB)
    own, handed_down = told_by("""if True:
        import resource
        from common.peak_memory import most_resident
        print(most_resident(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    """)
    assert own < GIB / 2 < len(block) <= handed_down


def test_what_was_given_back_is_not_available():
    """An update will take it again. Control: it is left.

    A limit of its own keeps what the processes beside it take out of both figures.
    """
    left, available = told_by("""if True:
        import resource
        resource.setrlimit(resource.RLIMIT_DATA, (2 * 2**30, 2 * 2**30))
        block = bytearray(2**30)
        del block
        print(available_per_process(), available_memory())
    """)
    assert left - available == pytest.approx(GIB, rel=0.1)
