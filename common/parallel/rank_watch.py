"""Every process of a run detects that a different process has died or hangs, reports its rank, and ends.

The connections are a tree: the first rank of each host has a TCP connection to rank 0, and one to each other rank of
its host. Each process watches its connections in a thread, and a first rank relays errors. With a connection per rank,
rank 0 would need most of a core at 1,024 ranks (docs/scale.md). If a process dies for any reason, the kernel closes its
connections. TCP keep-alives detect an unreachable host within 15 seconds. Neither detects a stopped process (SIGSTOP, a
frozen container), because its kernel still answers. Therefore the threads also send heartbeats, and in the training
loop a rank without a heartbeat for `SILENCE` seconds counts as dead. A process that was itself stopped, for example
with the entire launch, restarts the count. The training loop has no overhead, and the method is independent of backend
and mode. A process that ends announces it, with the reason if that is an error.

The alternative was torchrun (either rendezvous) with `@record` and a process-group timeout of 10 seconds, tested with
torch 2.13 and gloo. Its error messages do not contain the update. They show a rank that failed on a different host as
an address, and a rank that never connected as a key of the store. A stopped rank is detected only after the full
timeout, and the message then blames the rank that waited for it. A timeout as short as `SILENCE`, instead of gloo's 30
or NCCL's 10 minutes, would also end each run in which a rank works alone for longer.

A stopped process cannot end itself. Its launcher ends it 30 seconds after any other process of its host has ended. If
it is alone on its host, it ends when it resumes. A process whose main thread hangs while its other threads run is not
detected here; the timeouts of the collectives detect it.
"""

import json
import os
import secrets
import selectors
import socket
import threading
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from common.errors import UserError
from common.parallel import failures
from common.parallel.channel import (
    MOST_TEXT,
    TOKEN,
    Channel,
    Door,
    is_rank,
    is_single_host,
    is_text,
    launch_key,
)
from common.parallel.failures import LOST_STATUS, MISTAKE_STATUS
from common.parallel.rank_store import RankStore
from common.process import ELASTIC_ID, this_process
from common.training.process_grid import ProcessGrid

LOCAL_VARIABLES = {"LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}  # of torch's launcher, and their defaults
GRACE = 1.0  # seconds until it is known whether an error occurs on all ranks, or is the result of a dead rank
BEAT = 1.0  # seconds between two heartbeats
LATE = 3.0  # seconds between two iterations of the thread; if exceeded, this process itself was stopped
# Seconds without a heartbeat after which a rank counts as dead; as long as TCP needs to detect an unreachable host. In
# the loop, a library that holds the GIL, or a host that swaps, delays the threads for less time. A launcher ends a
# stopped process 30 seconds later, so the launch ends within 50 seconds.
SILENCE = 15.0


def start(timeout: float, grid: ProcessGrid) -> None:
    """Waits until all ranks have arrived, then watches them; all ranks call it before they create the process group.

    Args:
        timeout: seconds to wait.
        grid: the process grid; a message names a rank's pipeline stage.

    Raises UserError: a rank has not arrived in time, or rank 0 cannot be reached.
    """
    process = this_process()
    if process.rank_watch is None:
        process.num_watches += 1  # a store may be reused
        # An elastic start has a new store, and its hosts differ in their numbers of restarts.
        restarts = 0 if ELASTIC_ID in os.environ else os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)
        key = f"liveness-{restarts}-{process.num_watches}"
        try:
            process.rank_watch = RankWatch(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), timeout, key, grid)
        except UserError as error:
            if ELASTIC_ID not in os.environ:
                raise
            failures.exit_now(str(error).splitlines(), LOST_STATUS)  # a host was lost; the others start again


def _keep_alive(connected: socket.socket) -> None:
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 5)):  # seconds, seconds, times
        if hasattr(socket, option):
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def _checked(message: dict[str, Any], world_size: int) -> dict[str, Any]:
    """Returns the announcement that a rank ends; raises EOFError if it is malformed."""
    rank, host, status, reason = (message.get(name) for name in ("rank", "host", "status", "reason"))
    if is_rank(rank, world_size) and is_text(host) and type(status) is int and isinstance(reason, str | None):
        return message
    raise EOFError


def _arrived(hello: dict[str, Any], world_size: int) -> range:
    """Returns the ranks that arrive with a rank's first message; none if it is malformed."""
    rank: Any = hello.get("rank")
    count: Any = hello.get("num_ranks")
    is_valid = is_rank(rank, world_size) and is_rank(count, world_size) and is_text(hello.get("host"))
    return range(rank, rank + count) if is_valid else range(0)


class RankWatch:
    """This process's connections to the other ranks, and the thread that watches them."""

    def __init__(self, rank: int, world_size: int, timeout: float, key: str, grid: ProcessGrid):
        self.rank, self.grid = rank, grid
        self.host = socket.gethostname()
        local_rank, num_local = (int(os.environ.get(name, least)) for name, least in LOCAL_VARIABLES.items())
        self.first_here = rank - local_rank  # the first rank on this host
        self.is_first = local_rank == 0 or num_local == 1  # also if the launcher does not state the ranks per host
        # The ranks that connect through this rank: all for rank 0, the others of its host for another first rank.
        self.below = range(1, world_size) if rank == 0 else range(rank + 1, rank + num_local * self.is_first)
        self.peers: dict[Channel, tuple[int, str]] = {}  # rank and host
        self.is_failing = self.has_left = False
        self.sending = threading.Lock()  # otherwise messages of the main thread and the watching thread interleave
        self.deadline = time.monotonic() + timeout
        try:
            store, *_ = next(dist.rendezvous("env://", rank, world_size, timeout=timedelta(seconds=timeout)))
            self.store = RankStore(store, key, rank, world_size)
            store.set(f"{key}-here-{rank}", "")
            self._meet(timeout)
        except (OSError, EOFError, dist.DistError) as error:
            where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            reason = (str(error) or "connection closed").splitlines()[0]
            me = f"rank {rank} on host {self.host}"
            raise UserError(f"{me} does not reach rank 0 by {where} ({reason}); see rank 0's own output") from error
        # A data worker is forked with the connections, and would keep them open after this process has died.
        os.register_at_fork(after_in_child=self._close_all)
        self.thread = threading.Thread(target=self._listen, daemon=True, name="liveness")
        self.thread.start()

    def _close_all(self) -> None:
        for connection in self.peers:
            connection.close()

    def _meet(self, timeout: float) -> None:
        """Connects to the ranks below, then to rank 0 or the first rank of this host, and waits until all are there."""
        answer: dict[str, Any] = {"error": f"rank {self.rank} on host {self.host} has not reached rank 0"}
        try:
            if self.below:
                self._accept(timeout)
            if self.rank > 0:
                self._connect(0 if self.is_first else self.first_here)
            answer = {}
        except UserError as error:
            answer = {"error": str(error)}
            raise
        finally:
            for channel, (rank, _) in self.peers.items():
                if rank in self.below:
                    channel.send(answer)

    def _key_of(self, rank: int) -> str:
        """Returns the store's key under which a first rank publishes its port."""
        return self.store.prefix if rank == 0 else f"{self.store.prefix}-{rank}"

    def _accept(self, timeout: float) -> None:
        """Waits until all ranks below have connected, those of other hosts through their first rank."""
        number, size = secrets.token_hex(8), self.store.world_size
        missing = {*self.below}
        with Door(0, launch_key(number), len(missing), self.rank > 0 or is_single_host()) as door:
            self.store.store.set(self._key_of(self.rank), json.dumps([door.port, number, self.host]))
            while missing:
                if time.monotonic() >= self.deadline:
                    raise UserError(self._describe_missing(missing, timeout, door.num_refused))
                for channel, hello in door.admit(self.deadline)[0]:
                    if (arrived := _arrived(hello, size)) and missing.issuperset(arrived):
                        _keep_alive(channel.socket)
                        self.peers[channel] = (arrived[0], hello["host"])
                        missing.difference_update(arrived)
                    else:
                        channel.close()

    def _describe_missing(self, missing: set[int], timeout: float, num_refused: int) -> str:
        """Returns the error that names the ranks that did not arrive."""
        # A rank of another host may be among `missing` only because a different rank of its host has not arrived.
        store = self.store.store
        absent = [rank for rank in sorted(missing) if not store.check([f"{self.store.prefix}-here-{rank}"])]
        ranks = ", ".join(map(str, absent or sorted(missing)))
        line = f"rank {ranks} did not arrive within {timeout:g} s of rank {self.rank} on host {self.host}; see the "
        line += "output there, or raise --connect_timeout if it only starts slowly"
        if num_refused:
            line += f" ({num_refused} other connections were refused: is {TOKEN} equal on all hosts?)"
        return line

    def _connect(self, parent: int) -> None:
        """Connects to rank 0 or the first rank of this host, and waits for its answer that all ranks have arrived."""
        port, number, host = json.loads(self.store.store.get(self._key_of(parent)))
        seconds_left = max(1.0, self.deadline - time.monotonic())
        address = "127.0.0.1" if is_single_host() or not self.is_first else os.environ["MASTER_ADDR"]
        channel = Channel(socket.create_connection((address, port), timeout=seconds_left), launch_key(number))
        _keep_alive(channel.socket)
        channel.send({"rank": self.rank, "host": self.host, "num_ranks": 1 + len(self.below)})
        # The other rank may have started later, and reports missing ranks. A first rank waits for rank 0 in turn.
        answer = channel.receive(seconds_left + (10 if self.is_first else 20))
        if answer is None:
            raise TimeoutError("it does not answer")
        if "error" in answer:
            raise UserError(answer["error"])
        self.peers[channel] = (parent, host)

    def _listen(self) -> None:
        """Runs in the watching thread: receives messages and heartbeats; ends this process if another rank fails."""
        failure, due = None, 0.0
        failed: list[Channel] = []  # kept open until this process ends too: the other side waits for it
        now = next_beat = time.monotonic()
        heard = dict.fromkeys(self.peers, now)  # time of the last message on each connection
        # multiprocessing's `wait` would register all connections for each heartbeat of one.
        selector = selectors.DefaultSelector()
        for connection in self.peers:
            selector.register(connection, selectors.EVENT_READ)
        while self.peers or failure:
            until = next_beat if failure is None else min(next_beat, due)
            ready: list[Any] = [key.fileobj for key, _ in selector.select(max(0.0, until - time.monotonic()))]
            before, now = now, time.monotonic()
            if now - before > LATE or not this_process().in_loop:
                heard = dict.fromkeys(self.peers, now)
            for connection in ready:
                heard[connection] = now
                rank, host = self.peers[connection]
                try:
                    messages = [message for message in connection.read() if message]  # the others are heartbeats
                    if not messages:
                        continue
                    message = _checked(messages[0], self.store.world_size)
                except (EOFError, OSError):
                    message = {"rank": rank, "host": host, "status": LOST_STATUS, "reason": None}
                if (message["status"] == LOST_STATUS or "is_relayed" in message) and not self.has_left:
                    self._end(message)
                if message["reason"] and failure is None:
                    failure, due = message, time.monotonic() + GRACE
                selector.unregister(connection)
                with self.sending:  # the main thread may be sending on this connection
                    del self.peers[connection]
                    failed.append(connection) if message["reason"] else connection.close()
            if failure and time.monotonic() >= due:
                if not self.is_failing:
                    self._end(failure)
                failure = None
            if now >= next_beat:
                next_beat = now + BEAT
                self._beat(heard, now)
        selector.close()
        for connection in failed:
            connection.close()

    def _beat(self, heard: dict[Channel, float], now: float) -> None:
        """Sends a heartbeat to the other ranks; ends this process if a rank was silent for too long."""
        if self.has_left:
            return
        self._tell({})
        for connection, (rank, host) in self.peers.items():
            if now - heard[connection] > SILENCE and not self.is_failing:
                self._end({"rank": rank, "host": host, "status": LOST_STATUS, "reason": None, "is_silent": True})

    def _tell(self, message: dict[str, Any]) -> None:
        """Sends a message to all connected ranks."""
        with self.sending:
            for connection in list(self.peers):
                connection.send(message)

    def leave(self, reason: str | None, status: int) -> None:
        self.is_failing = reason is not None
        if self.is_failing and status != MISTAKE_STATUS:
            # If a dead rank caused the error, for example in a collective, the watching thread ends this process here.
            time.sleep(GRACE)
        self.has_left = True
        if reason is not None:
            failures.record_reason(reason, status)
            if self.rank == 0:
                failures.note(reason)
        text = reason and reason[:MOST_TEXT]
        self._tell({"rank": self.rank, "host": self.host, "status": status, "reason": text})
        if self.is_failing:
            # Wait, because a launcher ends all ranks of its host after the first; they must print their reasons before.
            self.thread.join(3 * GRACE)

    def _end(self, message: dict[str, Any]) -> None:
        """Ends this process because of a different process; one process per host reports the reason."""
        rank, host, reason, status = (message[key] for key in ("rank", "host", "reason", "status"))
        if self.below:  # the receivers do not wait for `GRACE` again
            relayed = message if status == MISTAKE_STATUS else message | {"status": LOST_STATUS}
            self._tell(relayed | {"is_relayed": True})
        where = failures.describe_place()
        num_stages = self.grid.pipeline
        stage = f" (stage {self.grid.stage(rank) + 1} of {num_stages})" if num_stages > 1 else ""
        who = f"rank {rank}{stage} on host {host}"
        if status == MISTAKE_STATUS:
            lines = [f"{who}: {line}" for line in reason.splitlines()]
        else:
            what = "stopped answering" if message.get("is_silent") else "was lost"
            what = f"ended with {reason.splitlines()[0]}" if reason else what
            lines = [f"{who} {what} {where}; this process (rank {self.rank}) ends; see the output there"]
        speaker: int | None = self.first_here
        if rank == self.first_here:  # this rank has reported its user error itself
            speaker = None if status == MISTAKE_STATUS else rank + 1
        failures.print_errors(lines if self.rank == speaker else [])
        failures.record_reason("\n".join(lines), status)
        if self.rank == 0 or (rank == 0 and self.rank == 1):  # last, because a disk may be slow
            failures.note(lines[0] if status == MISTAKE_STATUS else f"{who} {what}")
        os._exit(LOST_STATUS if status != MISTAKE_STATUS else status)
