"""A start of launchers/elastic.py: its processes are restarted on the hosts that are left, and take over their lock."""

import os
from pathlib import Path
from typing import Any

from common.process import ELASTIC_ID

HOSTS = "ELASTIC_HOSTS"  # environment variable: minimum and maximum number of hosts, such as 1:4
NOTE = "ELASTIC_NOTE"  # environment variable: file in which the processes of this host write their own user errors


def use_started_hosts(launch: Any) -> None:
    """Replaces the requested numbers of machines and processes by those of this start. launch: a `Launch`."""
    launch.num_machines = int(os.environ["GROUP_WORLD_SIZE"])
    launch.machine_rank, launch.num_processes = int(os.environ["GROUP_RANK"]), int(os.environ["WORLD_SIZE"])
    if (launch.settings.get("parallelism_config_dp_shard_size") or 1) > 1:
        sizes = launch.sizes
        shards = launch.num_processes // (sizes["sp"] * sizes["tp"] * sizes["pp"])
        launch.settings["parallelism_config_dp_shard_size"] = shards


def note_user_error(text: str) -> None:
    """Lets the launcher of this host leave the run, because a new start of its processes would fail again."""
    if path := os.environ.get(NOTE):
        Path(path).write_text(text)


def take_over(path: Path) -> bool:
    """Removes a lock file that a process of an earlier start of this launch holds; returns whether it was one.

    The process that holds the lock has written the launch into it. The rendezvous has excluded that process, but its
    host may be frozen, and would then hold the lock for ever.
    """
    try:
        is_own = path.read_text() == os.environ[ELASTIC_ID]
    except OSError:
        return False
    if is_own:
        path.unlink(missing_ok=True)
    return is_own
