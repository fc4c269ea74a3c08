"""Every process of a run detects when another process dies or hangs, reports its rank, and ends.

Rank 0 holds a TCP connection to each other rank, watched by a thread. If a process dies for any reason, the kernel
closes the connection. TCP keep-alives detect an unreachable host within 15 seconds. Neither detects a process that was
stopped (SIGSTOP, a frozen container), because its kernel still answers. Therefore the threads also send a few bytes per
second, and in the training loop a silence of `SILENCE` seconds counts as a dead process. A process that was late
itself, for example because the whole launch was stopped, restarts its count. The training loop has no overhead, and the
method is independent of backend and mode. A process that ends normally announces it, with the reason if that is an
error.

The alternative was torchrun with `@record`, either rendezvous and a process-group timeout of 10 seconds (torch 2.13,
gloo). It has three disadvantages. It does not know the update. It reports a rank that died or failed on a different
host as an address, and a rank that never connected as a key of the store. A stopped rank uses up the whole timeout, and
the rank that waited for it is reported as the cause. A timeout as short as `SILENCE`, instead of gloo's 30 and NCCL's
10 minutes, would end each run in which a rank works alone for longer.

A stopped process cannot end itself. Its launcher ends it 30 seconds after another process of its host has ended. If it
is alone on its host, it ends when it resumes. A process whose main thread hangs while its other threads run is not
detected here; the timeouts of the collectives detect it.
"""

import json
import os
import secrets
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch.distributed as dist

from common.errors import UserError
from common.training.process_grid import stage_of

LOST_STATUS = 3  # exit status of a process that ends because another one was lost or failed
MISTAKE_STATUS = 2  # of a user's mistake, on all ranks alike
GRACE = 1.0  # seconds in which a failure of all ranks shows as theirs, and the true cause of an error as a lost rank
BEAT = 1.0  # seconds between two signs of life
LATE = 3.0  # seconds between two turns of the thread, after which it was this process that stood still
# Seconds without a sign of life. As long as TCP takes for a host that is gone, and longer than what keeps the threads
# of a process waiting in the loop: a library that holds Python's lock, a host that swaps. A launcher ends the stopped
# process 30 seconds later, so that the launch ends within 50.
SILENCE = 15.0
SHARED_TIMEOUT = 10  # seconds in which a new file must be seen on all hosts: network file systems keep old listings
update: int | None = None  # the update that this process is at; the loop sets it
# Whether it is in the loop, which sets it: before and after, a library may hold Python's lock for as long as it reads
# or writes a model, and silence means nothing.
in_loop = False
OPTIONAL_TIMEOUT = 30.0  # seconds that a rank with an error in an `optional` block waits for the others to leave it
# What the run writes about its own failure, given a line that says why; called in one process.
note_failure: Callable[[str], None] | None = None
_watch: "_Watch | None" = None
_num_watches = _num_waits = _num_optional = 0
_num_asked: Counter[str] = Counter()


def start(timeout: float) -> None:
    """Waits until all ranks of the launch are there, then watches them; every rank calls it before it connects.

    timeout: seconds to wait.

    Raises UserError: a rank is not there by then, or rank 0 cannot be reached.
    """
    global _watch, _num_watches, update, in_loop, note_failure
    update, in_loop, note_failure = None, False, None
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    if world_size > 1 and _watch is None:
        _num_watches += 1
        key = f"liveness-{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}-{_num_watches}"  # a store is used again
        _watch = _Watch(int(os.environ["RANK"]), world_size, timeout, key)


def leave(reason: str | None = None, status: int = 1) -> None:
    """The good-bye of this process; with a `reason`, lines of text, the others end too and tell it. Harmless twice."""
    global _watch
    watch, _watch = _watch, None
    if watch is not None:
        watch.leave(reason, status)
    elif reason is not None:
        _record(reason)
        if int(os.environ.get("RANK", 0)) == 0:
            _note(reason)


def wait_for_all() -> None:
    """Returns when all ranks have called it, however long one of them works before.

    A collective would reach its time limit (NCCL: 10 minutes). The loss of a rank ends the others here as anywhere.
    """
    global _num_waits
    if _watch is None:
        return
    _num_waits += 1
    key, pause = f"{_watch.key}-wait-{_num_waits}", 0.01
    num_here = _watch.store.add(key, 1)
    while num_here < _watch.world_size:  # torch's own barrier of a store does not hear Ctrl-C until all have come
        time.sleep(pause)
        num_here, pause = _watch.store.add(key, 0), min(0.5, 2 * pause)


def decided_by_main(question: str, answer: Callable[[], Any]) -> Any:
    """What `answer` returns on rank 0, as JSON has it, on all ranks: from each a disk or the hub may look different.

    Every rank asks the same questions. It waits however long rank 0 works before, as in `wait_for_all`.
    """
    if _watch is None:
        return json.loads(json.dumps(answer()))
    _num_asked[question] += 1
    key, pause = f"{_watch.key}-{question}-{_num_asked[question]}", 0.01
    if _watch.rank == 0:
        _watch.store.set(key, json.dumps(answer()))
    while not _watch.store.check([key]):
        time.sleep(pause)
        pause = min(0.5, 2 * pause)
    return json.loads(_watch.store.get(key))


def is_soon(condition: Callable[[], bool]) -> bool:
    """Whether it comes true within `SHARED_TIMEOUT`: as what rank 0 sees on a disk should be seen by this rank."""
    deadline = time.monotonic() + SHARED_TIMEOUT
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


@contextmanager
def optional(report: Callable[[Exception], None]) -> Iterator[None]:
    """A block of all ranks that the run can do without: an error inside ends the block and goes to `report`.

    If several ranks have an error, rank 0 reports its own. The block must end on every rank: if the others do not leave
    it, because they wait inside for the rank with the error, that rank raises it after OPTIONAL_TIMEOUT.
    """
    global _num_optional
    _num_optional += 1
    problem = None
    try:
        yield
    except Exception as error:  # of any library
        problem = error
    if _watch is None:
        if problem is not None:
            report(problem)
        return
    key, deadline = f"{_watch.key}-optional-{_num_optional}", time.monotonic() + OPTIONAL_TIMEOUT
    _watch.store.add(f"{key}-main", int(_watch.rank == 0 and problem is not None))
    num_left = _watch.store.add(key, 1)
    if problem is None:
        return
    while num_left < _watch.world_size:
        if time.monotonic() > deadline:
            raise problem
        time.sleep(0.1)
        num_left = _watch.store.add(key, 0)
    if _watch.rank == 0 or not _watch.store.add(f"{key}-main", 0):
        report(problem)


@contextmanager
def connecting(timeout: float) -> Iterator[None]:
    """Around the calls that make the process group: it ends where they take longer than `timeout` seconds.

    Raises UserError: the processes cannot connect.
    """
    if _watch is None:
        yield
        return
    wait_for_all()  # what comes before, as compiling an extension, may take one host longer than another
    me = f"rank {_watch.rank} on host {_watch.host}"
    what = "all ranks are there, but do not connect to each other"
    mend = "name the network between the hosts, GLOO_SOCKET_IFNAME=eth0 (CPU) or NCCL_SOCKET_IFNAME=eth0 (GPU)"
    line = f"{me}: {what} within {timeout:g} s; {mend}, or raise --connect_timeout"
    try:
        with at_most(timeout, [line] if _watch.rank == _watch.first_here else []):
            yield
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "connect" not in str(error):
            raise
        raise UserError(f"{me}: {what} ({str(error).splitlines()[0]}); {mend}") from error


@contextmanager
def at_most(seconds: float, lines: list[str]) -> Iterator[None]:
    """Around what may not return: past so many seconds the process tells these lines and ends, as a lost one."""
    timer = threading.Timer(seconds, exit_now, (lines, LOST_STATUS))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _note(reason: str) -> None:
    """In what the run leaves behind, once."""
    global note_failure
    note, note_failure = note_failure, None
    if note is not None:
        where = describe_place()
        with suppress(OSError):  # of a full disk perhaps; what failed is told all the same
            note(f"failed {where}: {reason.splitlines()[0]}")


def _record(reason: str) -> None:
    """For torch's launcher, which ends with it what it prints itself about a failed process.

    In the place of torch's `@record`, which knows neither secrets nor what is a user's mistake.
    """
    if (path := os.environ.get("TORCHELASTIC_ERROR_FILE")) and not os.path.exists(path):
        with suppress(OSError), open(path, "w") as file:
            message = "; ".join(reason.splitlines())
            json.dump({"message": {"message": message, "extraInfo": {"timestamp": str(int(time.time()))}}}, file)


def describe_place() -> str:
    """Where in the run this process is, in words."""
    return "before the first update" if update is None else f"at update {update}"


def _tell_user(lines: list[str]) -> None:
    if lines:  # the first newline ends a progress bar's line, which the main thread may be writing just now
        with suppress(OSError):  # the terminal or the reader of a pipe may be gone
            os.write(sys.stderr.fileno(), ("".join(f"\nerror: {line}" for line in lines) + "\n").encode())


def exit_now(lines: list[str], status: int) -> None:
    """Ends the process from any thread: the main one may sit in a collective that does not return."""
    _tell_user(lines)
    os._exit(status)


def _keep_alive(connected: socket.socket) -> Connection:
    connected.setblocking(True)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 5)):  # seconds, seconds, times
        if hasattr(socket, option):
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return Connection(connected.detach())


def listen(port: int, backlog: int) -> socket.socket:
    """On all addresses of this host, of both kinds where it has both."""
    is_dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if is_dual else socket.AF_INET
    return socket.create_server(("", port), family=family, dualstack_ipv6=is_dual, backlog=backlog)


def send(connection: Connection, message: dict[str, Any]) -> None:
    with suppress(OSError):  # whoever has gone needs no message
        connection.send_bytes(json.dumps(message).encode())


class _Watch:
    def __init__(self, rank: int, world_size: int, timeout: float, key: str):
        self.rank, self.world_size, self.key = rank, world_size, key
        self.host = socket.gethostname()
        self.first_here = rank - int(os.environ.get("LOCAL_RANK", 0))  # of the ranks on this host
        self.peers: dict[Connection, tuple[int, str]] = {}  # rank and host
        self.is_failing = self.has_left = False
        self.sending = threading.Lock()  # the main thread and ours would mix their messages
        self.deadline = time.monotonic() + timeout
        try:
            self.store, *_ = next(dist.rendezvous("env://", rank, world_size, timeout=timedelta(seconds=timeout)))
            self._accept(timeout) if rank == 0 else self._connect()
        except (OSError, EOFError, dist.DistError) as error:
            where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            reason = (str(error) or "connection closed").splitlines()[0]
            me = f"rank {rank} on host {self.host}"
            raise UserError(f"{me} does not reach rank 0 by {where} ({reason}); see rank 0's own output") from error
        # A worker of a data loader is forked with the connections and would keep them open when this process dies.
        os.register_at_fork(after_in_child=lambda: [connection.close() for connection in self.peers])
        self.thread = threading.Thread(target=self._listen, daemon=True, name="liveness")
        self.thread.start()

    def _accept(self, timeout: float) -> None:
        token = secrets.token_hex(8)  # whoever else connects by chance does not know it
        with listen(0, backlog=self.world_size) as server:
            self.store.set(self.key, json.dumps([server.getsockname()[1], token, self.host]))
            while len(self.peers) < self.world_size - 1:
                server.settimeout(max(0.01, self.deadline - time.monotonic()))
                try:
                    connection = _keep_alive(server.accept()[0])
                except TimeoutError:
                    missing = sorted({*range(1, self.world_size)} - {rank for rank, _ in self.peers.values()})
                    line = f"rank {', '.join(map(str, missing))} did not arrive within {timeout:g} s of rank 0 on host "
                    line += f"{self.host}; see the output there, or raise --connect_timeout if it only starts slowly"
                    self._tell({"error": line})
                    raise UserError(line) from None
                with suppress(OSError, EOFError, ValueError):
                    hello = json.loads(connection.recv_bytes(1024)) if connection.poll(5) else {}
                    if hello.get("token") == token:
                        self.peers[connection] = (hello["rank"], hello["host"])
        self._tell({})

    def _connect(self) -> None:
        port, token, host = json.loads(self.store.get(self.key))
        seconds_left = max(1.0, self.deadline - time.monotonic())
        connection = _keep_alive(socket.create_connection((os.environ["MASTER_ADDR"], port), timeout=seconds_left))
        send(connection, {"token": token, "rank": self.rank, "host": self.host})
        if not connection.poll(seconds_left + 10):  # rank 0 may have started later, and tells who is missing
            raise TimeoutError("it does not answer")
        if "error" in (answer := json.loads(connection.recv_bytes())):
            raise UserError(answer["error"])
        self.peers[connection] = (0, host)

    def _listen(self) -> None:
        """The thread."""
        failure, due = None, 0.0
        failed: list[Connection] = []  # kept open until this process ends too: the other side waits for that
        now = next_beat = time.monotonic()
        heard = dict.fromkeys(self.peers, now)  # when each was
        while self.peers or failure:
            until = next_beat if failure is None else min(next_beat, due)
            ready = wait(list(self.peers), max(0.0, until - time.monotonic()))
            before, now = now, time.monotonic()
            if now - before > LATE or not in_loop:
                heard = dict.fromkeys(self.peers, now)
            for connection in ready:
                heard[connection] = now
                rank, host = self.peers[connection]
                try:
                    message = json.loads(connection.recv_bytes())
                except (EOFError, OSError):
                    message = {"rank": rank, "host": host, "status": LOST_STATUS, "reason": None}
                if not message:  # a sign of life
                    continue
                if message["status"] == LOST_STATUS and not self.has_left:
                    self._end(message)
                if message["reason"] and failure is None:
                    failure, due = message, time.monotonic() + GRACE
                with self.sending:  # the main thread may be saying good-bye to it just now
                    del self.peers[connection]
                    failed.append(connection) if message["reason"] else connection.close()
            if failure and time.monotonic() >= due:
                if not self.is_failing:
                    self._end(failure)
                failure = None
            if now >= next_beat:
                next_beat = now + BEAT
                self._beat(heard, now)
        for connection in failed:
            connection.close()

    def _beat(self, heard: dict[Connection, float], now: float) -> None:
        """A sign of life to the others; ends this process where one of them gave none for too long."""
        if self.has_left:
            return
        self._tell({})
        for connection, (rank, host) in self.peers.items():
            if now - heard[connection] > SILENCE and not self.is_failing:
                self._end({"rank": rank, "host": host, "status": LOST_STATUS, "reason": None, "is_silent": True})

    def _tell(self, message: dict[str, Any]) -> None:
        """To all that are connected: rank 0, or from there all others."""
        with self.sending:
            for connection in list(self.peers):
                send(connection, message)

    def leave(self, reason: str | None, status: int) -> None:
        self.is_failing = reason is not None
        if self.is_failing and status != MISTAKE_STATUS:
            # Where a lost rank is the cause, as in a collective that it broke off, the thread ends us meanwhile.
            time.sleep(GRACE)
        self.has_left = True
        if reason is not None:
            _record(reason)
            if self.rank == 0:
                _note(reason)
        self._tell({"rank": self.rank, "host": self.host, "status": status, "reason": reason})
        if self.is_failing:
            self.thread.join(3 * GRACE)  # a launcher ends all ranks of its host with the first: let them say why

    def _end(self, message: dict[str, Any]) -> None:
        """Ends this process because of another; one process of each host tells why."""
        rank, host, reason, status = (message[key] for key in ("rank", "host", "reason", "status"))
        if self.rank == 0:
            self._tell(message | {"status": LOST_STATUS} if status != MISTAKE_STATUS else message)
        where = describe_place()
        who = f"rank {rank}{stage_of(rank)} on host {host}"
        if status == MISTAKE_STATUS:
            lines = [f"{who}: {line}" for line in reason.splitlines()]
        else:
            what = "stopped answering" if message.get("is_silent") else "was lost"
            what = f"ended with {reason.splitlines()[0]}" if reason else what
            lines = [f"{who} {what} {where}; this process (rank {self.rank}) ends; see the output there"]
        speaker = self.first_here
        if rank == self.first_here:  # it has told its user's mistake itself
            speaker = None if status == MISTAKE_STATUS else rank + 1
        _tell_user(lines if self.rank == speaker else [])
        if self.rank == 0 or (rank == 0 and self.rank == 1):  # last, since a disk may be slow
            _note(lines[0] if status == MISTAKE_STATUS else f"{who} {what}")
        os._exit(LOST_STATUS if status != MISTAKE_STATUS else status)
