"""The peak memory of this process."""

import re
import resource
import sys
from pathlib import Path


def most_resident() -> int:
    """Returns the peak resident memory of this process in bytes.

    A process on Linux inherits `ru_maxrss` from its parent, so there the value is read from /proc.
    """
    status = Path("/proc/self/status").read_text() if sys.platform == "linux" else ""
    if match := re.search(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE):
        return int(match[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts in bytes, other systems in KiB
