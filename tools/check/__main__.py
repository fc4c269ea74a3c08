"""Checks machines for outliers. Use this command before a long run, on one machine or on all ranks together:

    python -m tools.check
    accelerate launch --config_file accelerate_configs/multi_node.yaml ... -m tools.check

Within seconds, it measures matmul throughput, memory, and the disk of --directory. With several ranks, it also measures
latency and bandwidth of each pair (over gloo, or NCCL on GPUs), and compares clocks and versions. Rank 0 prints tables
with an arrow at each outlier. Exit status: 0 for no outliers, 1 for outliers, 2 for a user error; `accelerate launch`
exits with 1 instead of 2.
"""

import argparse
import json
import mmap
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from common.command_parser import CommandParser
from common.disk_errors import disk_line
from common.errors import UserError, raise_errors
from common.files import nearest_existing, replace_text, why_not_writable, write_file
from common.host_memory import available_memory
from common.parallel import liveness, rank_watch
from common.parallel.launch import Launch, find_launch, runs_on_cpu, started_world_size
from common.parallel.precision_choice import sustained_rates
from common.parallel.process_checks import check_started
from common.parallel.rank_connection import at_most, connecting, default_timeout
from common.parallel.shutdown import exit_on_user_error, leave_together
from common.redaction import redact
from common.training.process_grid import ProcessGrid
from common.versions import versions
from tools.check.report import report

MULTIPLY = 0.5  # seconds of matmuls per precision
# Disk: bytes per block; maximum number of blocks; seconds after which no further block is written.
BLOCK, MOST_BLOCKS, WRITE = 8 << 20, 32, 1.0
NUM_FSYNCS = 20
NUM_PINGS = 100
# Messages grow from SMALLEST bytes by factors of 4, until a round trip takes LONG_ENOUGH seconds. Messages are sent for
# TRANSFER seconds in total, because on a busy machine other work may delay a few of them.
SMALLEST, LARGEST, LONG_ENOUGH, TRANSFER = 1 << 20, {"cpu": 64 << 20, "cuda": 256 << 20}, 0.03, 0.4
ALL_PAIRS = 64  # with more ranks, only ranks with the same local rank are paired between machines
MOST_ROUNDS = 63  # maximum number of other machines with which a machine is paired


def tournament(num: int) -> list[list[tuple[int, int]]]:
    """Returns a round robin of `num` items: rounds of disjoint pairs, each pair in one round (the circle method)."""
    even = num + num % 2  # if `num` is odd, the item that is paired with the added index pauses in this round
    rounds = []
    for turn in range(even - 1):
        circle = [even - 1, *((turn + place) % (even - 1) for place in range(even - 1))]
        pairs = [sorted(pair) for pair in zip(circle[: even // 2], reversed(circle[even // 2 :]), strict=True)]
        rounds.append([(a, b) for a, b in pairs if b < num])
    return rounds


def rounds(machines: list[list[int]]) -> Iterator[list[tuple[int, int]]]:
    """Yields rounds of disjoint pairs of ranks: first pairs within the machines, then pairs between them.

    In a round between machines, all ranks of a machine exchange with ranks of a single other machine at once, so that
    every pair gets an equal share of the network card. machines: the ranks of each machine.
    """
    width = max(map(len, machines))
    for pairs in tournament(width):
        yield [(ranks[a], ranks[b]) for ranks in machines for a, b in pairs if b < len(ranks)]
    shifts = range(width) if sum(map(len, machines)) <= ALL_PAIRS else range(1)
    for pairs in tournament(len(machines))[:MOST_ROUNDS]:
        for shift in shifts:
            yield [
                (rank, machines[b][(place + shift) % width])
                for a, b in pairs
                for place, rank in enumerate(machines[a])
                if (place + shift) % width < len(machines[b])
            ]


def connect(launch: Launch, timeout: float) -> torch.device:
    """Connects all ranks as in a recipe, but with a single process group, and returns this rank's device.

    Raises UserError: a rank is missing after `timeout` seconds, or the ranks cannot connect.
    """
    liveness.reset()
    if started_world_size() > 1:
        rank_watch.start(timeout, ProcessGrid(launch.num_processes))
    device = torch.device("cpu")
    if torch.cuda.is_available() and not runs_on_cpu(launch):
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")  # as in the recipes
    if launch.num_processes > 1:
        with connecting(timeout):
            if device.type == "cuda":
                dist.init_process_group("nccl", device_id=device)
            else:
                dist.init_process_group("gloo")
            dist.barrier()
    return device


def measure_devices(device: torch.device, num_processes: int) -> list[dict[str, Any]]:
    """Returns memory (bytes, before any measurement) and matmul throughput (FLOP/s) of this rank's device.

    If there is only one process, it measures all visible GPUs, one after the other.
    """
    if device.type == "cpu":
        name = f"threads: {torch.get_num_threads()}, {torch.backends.cpu.get_cpu_capability()}"
        return [{"device": str(device), "name": name, "rates": sustained_rates(device, MULTIPLY)}]
    devices = [device]
    if num_processes == 1:
        devices = [torch.device("cuda", number) for number in range(torch.cuda.device_count())]
    results = []
    for gpu in devices:
        name, (free, total) = torch.cuda.get_device_name(gpu), torch.cuda.mem_get_info(gpu)
        memory = {"free": free, "total": total}
        results.append({"device": str(gpu), "name": name, "memory": memory, "rates": sustained_rates(gpu, MULTIPLY)})
    return results


def existing_directory(directory: Path) -> Path:
    """Returns the directory, or its nearest existing parent. Raises UserError: it is not writable."""
    existing = nearest_existing(directory)
    if (reason := why_not_writable(existing)) is not None:
        location = f"{existing} on host {socket.gethostname()}"
        raise UserError(f"--directory {directory}: {location} is not writable: {reason}; use a different directory")
    return existing


def measure_disk(directory: Path) -> dict[str, Any]:
    """Returns free bytes, write throughput in bytes/s of a file written like a checkpoint, and median fsync time."""
    block = memoryview(mmap.mmap(-1, BLOCK))  # aligned to pages, for direct writes as in a checkpoint
    block[:] = os.urandom(BLOCK)  # a compressing file system would not store zeros
    start = time.perf_counter()

    def blocks() -> Iterator[memoryview]:
        for _ in range(MOST_BLOCKS):
            if time.perf_counter() - start < WRITE:
                yield block

    try:
        free = psutil.disk_usage(str(directory)).free
        with tempfile.TemporaryDirectory(dir=directory, prefix=".check-") as temporary:
            written = write_file(Path(temporary) / "large", blocks())["bytes"]
            write_seconds = time.perf_counter() - start
            fsync_seconds = []
            with open(Path(temporary) / "small", "wb", buffering=0) as file:
                for _ in range(NUM_FSYNCS):
                    file.write(block[:4096])
                    before = time.perf_counter()
                    os.fsync(file.fileno())
                    fsync_seconds.append(time.perf_counter() - before)
    except OSError as error:
        raise UserError(disk_line(error, "the disk could not be measured", directory, BLOCK, "start again")) from error
    rate, fsync = written / write_seconds, statistics.median(fsync_seconds)
    return {"directory": str(directory), "free": free, "write_rate": rate, "fsync_seconds": fsync}


def measure_link(partner: int, is_first: bool, device: torch.device) -> dict[str, float] | None:
    """Measures the link between two ranks, which both make this call. Returns the results on the first rank, else None.

    latency: seconds, half of the fastest round trip. bandwidth: bytes/s of the fastest round trip of a message.
    offset: seconds by which the partner's clock is ahead, computed from the fastest round trip as in NTP; the error is
    at most `latency`.
    """
    number = torch.zeros((), dtype=torch.int64, device=device)
    message = torch.zeros(LARGEST[device.type], dtype=torch.uint8, device=device)

    def receive() -> int:
        dist.recv(number, partner)
        return int(number)  # waits for the device

    if not is_first:
        for _ in range(NUM_PINGS):
            receive()
            dist.send(number.fill_(time.time_ns()), partner)
        while size := receive():
            dist.recv(message[:size], partner)
            dist.send(message[:size], partner)
        return None

    fastest, offset = float("inf"), 0.0
    for _ in range(NUM_PINGS):
        start, clock = time.perf_counter(), time.time_ns()
        dist.send(number, partner)
        there = receive()
        seconds, back = time.perf_counter() - start, time.time_ns()
        if seconds < fastest:
            fastest, offset = seconds, (2 * there - clock - back) / 2e9
    bandwidth, spent, size = 0.0, 0.0, SMALLEST
    while spent < TRANSFER:
        dist.send(number.fill_(size), partner)
        start = time.perf_counter()
        dist.send(message[:size], partner)
        dist.recv(message[:size], partner)
        int(message[0])
        seconds = time.perf_counter() - start
        bandwidth, spent = max(bandwidth, 2 * size / seconds), spent + seconds
        if seconds < LONG_ENOUGH:
            size = min(4 * size, message.numel())
    dist.send(number.fill_(0), partner)
    return {"latency": fastest / 2, "bandwidth": bandwidth, "offset": offset}


def measure_links(device: torch.device, timeout: float) -> dict[tuple[int, int], dict[str, float]]:
    """Returns the results of `measure_link` by pair of ranks, for pairs in which this rank is the lower.

    If the measurement of a pair takes more than `timeout` seconds, the pair is reported, and all ranks end.
    """
    rank = dist.get_rank()
    hosts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(hosts, (rank - int(os.environ["LOCAL_RANK"]), socket.gethostname()))
    machines: dict[int, list[int]] = {}
    for other, (first, _) in enumerate(hosts):
        machines.setdefault(first, []).append(other)
    links = {}
    for pairs in rounds(list(machines.values())):
        for low, high in (sorted(pair) for pair in pairs if rank in pair):
            message = f"nothing gets through between rank {low} on host {hosts[low][1]} and rank {high} on host "
            message += f"{hosts[high][1]} within {timeout:g} s, though they have connected; check the network there"
            with at_most(timeout, [message] if rank == low else []):
                link = measure_link(low + high - rank, rank == low, device)
            if link is not None:
                links[low, high] = link
        dist.barrier()  # so that rounds do not overlap and slow each other down
    return links


def measure(args: argparse.Namespace, launch: Launch) -> dict[str, Any] | None:
    """Returns the results on rank 0, else None: `ranks`, a list; `links`, by pairs of ranks; `backend`, a name.

    All ranks start each phase together.
    """
    timeout = args.connect_timeout or default_timeout(launch)
    device = connect(launch, timeout)
    rank, is_alone = int(os.environ.get("RANK", 0)), launch.num_processes == 1
    local_rank = 0 if is_alone else int(os.environ["LOCAL_RANK"])
    if local_rank == 0:  # first rank of its machine; an error on this rank ends the others too
        directory = existing_directory(args.directory)
    software: dict[str, Any] = dict(versions())
    if device.type == "cuda":
        software |= {"cuda": torch.version.cuda, "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
    mine = {"rank": rank, "machine": rank - local_rank, "host": socket.gethostname(), "versions": software}
    mine["memory"] = {"total": psutil.virtual_memory().total, "free": available_memory()}
    mine["devices"] = measure_devices(device, launch.num_processes)
    if is_alone:
        return {"ranks": [mine | {"disk": measure_disk(directory)}], "links": {}, "backend": None}
    dist.barrier()
    if local_rank == 0:  # all ranks of a machine use the same disk
        mine["disk"] = measure_disk(directory)
    dist.barrier()
    links = measure_links(device, timeout)
    everything: list[Any] | None = [None] * launch.num_processes if rank == 0 else None
    dist.gather_object((mine, links), everything)
    if everything is None:
        return None
    merged = {pair: link for _, links in everything for pair, link in links.items()}
    return {"ranks": [facts for facts, _ in everything], "links": merged, "backend": dist.get_backend()}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Returns the parsed flags. Raises UserError: an invalid flag."""
    options: Any = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
    parser = CommandParser(prog="python -m tools.check", description=__doc__, **options)
    about = "future location of checkpoints on each machine, or below an existing directory (default: %(default)s)"
    parser.add_argument("--directory", type=Path, default=Path("runs"), metavar="DIR", help=about)
    parser.add_argument("--json", type=Path, metavar="FILE", help="file to which the results are written too")
    about = "time limit for connecting, and for each pair of ranks (default: 60 on CPU, 300 on GPU)"
    parser.add_argument("--connect_timeout", type=float, metavar="SECONDS", help=about)
    args = parser.parse_args(argv)
    if args.connect_timeout is not None and not args.connect_timeout > 0:
        raise UserError(f"--connect_timeout {args.connect_timeout:g} is not above 0; pass seconds")
    if args.json and (args.json.is_dir() or not args.json.absolute().parent.is_dir()):
        raise UserError(f"--json {args.json}: name a file in an existing directory")
    if args.json and (reason := why_not_writable(args.json.absolute().parent)):
        raise UserError(f"--json {args.json} cannot be written: {reason}; name a file in a different directory")
    return args


def main() -> None:
    with exit_on_user_error():
        args, launch = parse(), find_launch()
        raise_errors(check_started(launch))
        figures, status = measure(args, launch), [0]
        if figures is not None:
            text, num_outliers = report(figures)
            print(text, flush=True)
            status = [int(num_outliers > 0)]
            if args.json:
                links = [{"ranks": pair, **link} for pair, link in sorted(figures["links"].items())]
                replace_text(args.json, json.dumps(redact(figures | {"links": links}), indent=1) + "\n")
        if launch.num_processes > 1:
            dist.broadcast_object_list(status)
            liveness.wait_for_all()
        leave_together(launch.num_processes, status[0])


if __name__ == "__main__":
    main()
