"""Network interface and time limit while the ranks of a launch with several processes connect."""

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import torch.distributed as dist

from common.errors import UserError
from common.parallel import liveness
from common.parallel.failures import LOST_STATUS, exit_now
from common.parallel.launch import started_world_size


def name_interface() -> None:
    """With several machines, sets gloo's network interface to one that reaches the main machine, unless already set.

    By default, gloo uses the address to which the host's name resolves, which on many systems is a loopback address.
    """
    if int(os.environ.get("LOCAL_WORLD_SIZE", 1)) == started_world_size() or "GLOO_SOCKET_IFNAME" in os.environ:
        return
    family, kind, _, _, address = socket.getaddrinfo(os.environ["MASTER_ADDR"], 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # UDP: sends nothing, but selects the route
        mine = probe.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        if mine in [interface.address.split("%")[0] for interface in addresses]:
            os.environ["GLOO_SOCKET_IFNAME"] = name


@contextmanager
def connecting(timeout: float) -> Iterator[None]:
    """Limits the calls in the block, which create the process group, to `timeout` seconds.

    Raises UserError: the processes cannot connect.
    """
    watch = liveness.watch
    liveness.wait_for_all()  # earlier work, such as compiling an extension, may take longer on some hosts
    subject = f"rank {watch.rank} on host {watch.host}: all ranks have started, but do not connect to each other"
    fix = "set the network between the hosts, GLOO_SOCKET_IFNAME=eth0 (CPU) or NCCL_SOCKET_IFNAME=eth0 (GPU)"
    line = f"{subject} within {timeout:g} s; {fix}, or raise --connect_timeout"
    try:
        with at_most(timeout, [line] if watch.rank == watch.first_here else []):
            yield
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "connect" not in str(error):
            raise
        raise UserError(f"{subject} ({str(error).splitlines()[0]}); {fix}") from error


@contextmanager
def at_most(seconds: float, lines: list[str]) -> Iterator[None]:
    """Limits the block to `seconds` seconds; if it takes longer, the process prints `lines` and ends (LOST_STATUS)."""
    timer = threading.Timer(seconds, exit_now, (lines, LOST_STATUS))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
