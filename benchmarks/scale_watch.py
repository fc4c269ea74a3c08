"""Rank 0's liveness watch with thousands of connections, on this machine; `benchmarks/scale.py` starts it.

    python benchmarks/scale_watch.py 8192 8

Starts three processes: the launcher's key-value store, rank 0 with a real `RankWatch`, and a process with the other
ends of rank 0's connections. That process sends what real ranks send: the first message, and a heartbeat per second.
"""

import argparse
import json
import os
import resource
import secrets
import selectors
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

sys.path.insert(1, str(Path(__file__).resolve().parent.parent))

from common.parallel import rank_watch
from common.parallel.channel import TOKEN, Channel, launch_key
from common.training.process_grid import ProcessGrid

KEY = "scale"
TIMEOUT = 120.0  # seconds until all connections are open
MEASURED = 10.0  # seconds


def rank_0(world_size: int) -> None:
    """Prints the CPU seconds until all ranks have arrived, and then the CPU time of the watch per second."""
    used = time.process_time()
    watch = rank_watch.RankWatch(0, world_size, TIMEOUT, KEY, ProcessGrid(world_size))
    results = {"connections": len(watch.peers), "CPU seconds to connect": time.process_time() - used}
    time.sleep(2)  # the first heartbeats of all come together
    began, used = time.perf_counter(), time.process_time()
    time.sleep(MEASURED)
    results["share of a core"] = (time.process_time() - used) / (time.perf_counter() - began)
    print(json.dumps(results), flush=True)
    os._exit(0)


def open_connections(world_size: int, per_host: int, store: dist.TCPStore) -> list[Channel]:
    """Returns the other ends of rank 0's connections: the ranks of its own host, and the first rank of each other."""
    port, number, _ = json.loads(store.get(KEY))
    firsts = range(per_host, world_size, per_host)
    channels = []
    for rank in [*range(1, per_host), *firsts]:
        channel = Channel(socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT), launch_key(number))
        count = per_host if rank in firsts else 1
        channel.send({"rank": rank, "host": f"host{rank // per_host}", "num_ranks": count})
        channels.append(channel)
    return channels


def other_ranks(world_size: int, per_host: int, port: int) -> None:
    """Sends a heartbeat per second on each connection, spread over the second, until rank 0 closes."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=TIMEOUT))
    channels = open_connections(world_size, per_host, store)
    selector = selectors.EpollSelector()
    for channel in channels:
        channel.socket.setblocking(False)
        selector.register(channel.socket, selectors.EVENT_READ)
    beat = channels[0]._sign(b"{}") + b" {}\n"
    began, sent = time.perf_counter(), 0
    try:
        while True:
            while sent < (time.perf_counter() - began) / rank_watch.BEAT * len(channels):
                channels[sent % len(channels)].socket.send(beat)
                sent += 1
            for key, _ in selector.select(0.001):
                if not key.fileobj.recv(1 << 16):
                    return
    except OSError:
        return  # rank 0 has ended


def measure(world_size: int, per_host: int) -> dict:
    """Returns the measurements of `rank_0` for a run with `per_host` ranks on each host."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # the launcher's, in its process
    env = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), TOKEN: secrets.token_hex(16)}
    env |= {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(per_host), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    env |= {"RANK": "0", "LOCAL_RANK": "0"}
    command = [sys.executable, __file__, str(world_size), str(per_host)]
    main = subprocess.Popen([*command, "--role", "0"], env=env, stdout=subprocess.PIPE, text=True)
    others = subprocess.Popen([*command, "--role", str(store.port)], env=env)
    output, _ = main.communicate()
    others.wait()
    return {"ranks": world_size, "ranks per host": per_host} | json.loads(output.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("world_size", type=int)
    parser.add_argument("per_host", type=int, help="ranks per host")
    parser.add_argument("--role", type=int, help="0: rank 0; else the port of the store (it starts itself so)")
    options = parser.parse_args()
    hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
    if options.role is None:
        print(json.dumps(measure(options.world_size, options.per_host)))
    elif options.role == 0:
        rank_0(options.world_size)
    else:
        other_ranks(options.world_size, options.per_host, options.role)


if __name__ == "__main__":
    main()
