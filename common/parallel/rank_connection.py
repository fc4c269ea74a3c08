"""Network interface and time limit while the ranks of a launch with several processes connect."""

import ipaddress
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import torch.distributed as dist

from common.errors import UserError
from common.parallel import liveness, main_decisions
from common.parallel.channel import is_single_host
from common.parallel.failures import LOST_STATUS, exit_now
from common.parallel.launch import Launch, runs_on_cpu
from common.process import ELASTIC_ID, this_process


def default_timeout(launch: Launch) -> float:
    """Returns the default of --connect_timeout, in seconds.

    With GPUs, a machine may import torch in 16 processes at once, from a file system that many machines share.
    """
    return 60.0 if runs_on_cpu(launch) else 300.0


def name_interface() -> None:
    """With several machines, sets gloo's network interface to one that connects them, unless already set.

    By default, gloo uses the address to which the host's name resolves, which on many systems is a loopback address.
    MASTER_ADDR may be this name too. The main machine then uses the interface that leads to a different machine.
    """
    if is_single_host() or "GLOO_SOCKET_IFNAME" in os.environ:
        return
    remote = main_decisions.decided_by_main("remote address", _remote_address)
    mine = own_address(os.environ["MASTER_ADDR"])
    if remote is not None and ipaddress.ip_address(mine).is_loopback:
        mine = own_address(remote)
    for name, addresses in psutil.net_if_addrs().items():
        if mine in [interface.address.split("%")[0] for interface in addresses]:
            os.environ["GLOO_SOCKET_IFNAME"] = name


def own_address(other: str) -> str:
    """Returns the address of this host on the route to a different host."""
    family, kind, _, _, address = socket.getaddrinfo(other, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # UDP: sends nothing, but selects the route
        return probe.getsockname()[0].split("%")[0]


def _remote_address() -> str | None:
    """Returns the address from which a rank has connected to rank 0 over a network; None if all are on this host."""
    for channel in this_process().rank_watch.peers:
        address = channel.socket.getpeername()[0].removeprefix("::ffff:")  # IPv4 on a socket for both versions
        if not ipaddress.ip_address(address.split("%")[0]).is_loopback:
            return address
    return None


@contextmanager
def connecting(timeout: float) -> Iterator[None]:
    """Names gloo's interface; limits the calls in the block, which create process groups, to `timeout` seconds.

    Raises UserError: the processes cannot connect.
    """
    watch = this_process().rank_watch
    liveness.wait_for_all()  # earlier work, such as compiling an extension, may take longer on some hosts
    subject = f"rank {watch.rank} on host {watch.host}: all ranks have started, but do not connect to each other"
    fix = "set the network between the hosts, GLOO_SOCKET_IFNAME=eth0 (CPU) or NCCL_SOCKET_IFNAME=eth0 (GPU)"
    line = f"{subject} within {timeout:g} s; {fix}, or raise --connect_timeout"
    try:
        with at_most(timeout, [line] if watch.rank == watch.first_here else []):
            name_interface()
            yield
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "connect" not in str(error):
            raise
        line = f"{subject} ({str(error).splitlines()[0]}); {fix}"
        if ELASTIC_ID in os.environ:
            exit_now([line], LOST_STATUS)
        raise UserError(line) from error


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
