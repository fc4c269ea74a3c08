"""Ends a process that has a package whose version is known not to work."""

import os
import sys
import time
from typing import NoReturn


def exit_with(problems: list[str]) -> NoReturn:
    """Prints one line per problem, on one rank of each machine, and ends the process with status 2."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print("\n".join(f"error: {problem}" for problem in problems), file=sys.stderr, flush=True)
    else:
        time.sleep(2)  # because the launcher ends all ranks once a rank ends; the first must print before
    sys.exit(2)
