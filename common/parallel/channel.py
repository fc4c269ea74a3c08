"""Messages between the processes of one launch over TCP; other programs that reach the port have no effect.

Every message is a line: an HMAC-SHA256 of the text with the key of the launch, and the text, a JSON object. A line of a
different key is not parsed. Reading never waits for the rest of a line, and the length of a line is limited.

`multiprocessing.connection` was the alternative. Its `Listener` authenticates clients one after the other and without a
time limit, so a client that sends nothing keeps all others out.
"""

import errno
import hashlib
import hmac
import json
import os
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from typing import Any

from common.parallel.launch import started_world_size

TOKEN = "LAUNCH_TOKEN"  # environment variable: a secret that all hosts of a launch share
LIMIT = 1 << 16  # bytes of a line
MOST_TEXT = 5_000  # characters of a text in a message; JSON needs at most 12 bytes for each
HELLO_SECONDS = 5.0  # from the connection until the first message has arrived completely
SEND_SECONDS = 5.0
MOST_PENDING = 256  # connections without a message; the oldest is closed first


def is_single_host() -> bool:
    """Returns whether all ranks of this launch run on this host."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1)) == started_world_size()


def find_token_problems() -> list[str]:
    """Returns a line if LAUNCH_TOKEN, which keeps other programs out of a launch on several hosts, is not a secret."""
    token = os.environ.get(TOKEN, "")
    if len(token) >= 16:
        return []
    problem = "not 16 characters long" if token else "not set"
    return [f"{TOKEN}: {problem}; set it to one secret on all machines, such as the output of: openssl rand -hex 16"]


def launch_key(number: str) -> bytes:
    """Returns the key for the messages of this launch.

    It is derived from LAUNCH_TOKEN, which launchers/hosts.sh and launchers/slurm.sbatch create. Without a token, the
    ranks of a single host share the random name of the launcher's log directory, which only their user can read.

    Args:
        number: a random text of rank 0, so that messages of an earlier launch are not valid.
    """
    secret = os.environ.get(TOKEN, "")
    if not secret and is_single_host():
        secret = os.path.dirname(os.path.dirname(os.environ.get("TORCHELASTIC_ERROR_FILE", "")))
    return hashlib.sha256(f"{secret} {number}".encode()).digest()


def is_rank(value: Any, num_ranks: int) -> bool:
    """Returns whether a value of a message is an integer in range(num_ranks); True and 1.0 are not."""
    return type(value) is int and 0 <= value < num_ranks


def is_text(value: Any) -> bool:
    """Returns whether a value of a message is a short line without control characters."""
    return isinstance(value, str) and value.isprintable() and 0 < len(value) <= 255


def wait_until(deadline: float, channels: Sequence[Any]) -> list[Any]:
    """Returns the channels and sockets that are ready, as soon as there is one or at the deadline."""
    return wait(channels, max(0.0, deadline - time.monotonic()))


class Channel:
    """A connection to a process of this launch; `multiprocessing.connection.wait` accepts it.

    Args:
        connected: the socket.
        key: of `launch_key`.
    """

    def __init__(self, connected: socket.socket, key: bytes):
        connected.settimeout(SEND_SECONDS)
        self.socket, self.key, self.buffer, self.until = connected, key, b"", time.monotonic() + HELLO_SECONDS
        self.unread: list[dict[str, Any]] = []  # arrived together with the message that `receive` has returned

    def fileno(self) -> int:
        return self.socket.fileno()

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> "Channel":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _sign(self, text: bytes) -> bytes:
        return hmac.new(self.key, text, hashlib.sha256).hexdigest().encode()

    def send(self, message: dict[str, Any]) -> None:
        text = json.dumps(message).encode()
        with suppress(OSError):  # a process that has ended needs no message
            self.socket.sendall(self._sign(text) + b" " + text + b"\n")

    def read(self) -> list[dict[str, Any]]:
        """Returns the messages that are complete, after `wait` has reported that the channel is ready.

        Raises EOFError: the connection is closed, or a line is not a message of this launch.
        """
        received = self.socket.recv(LIMIT)
        *lines, self.buffer = (self.buffer + received).split(b"\n")
        messages, self.unread = self.unread + [self._parse(line) for line in lines], []
        if not (received or messages) or len(self.buffer) > LIMIT:
            raise EOFError
        return messages

    def _parse(self, line: bytes) -> dict[str, Any]:
        signature, _, text = line.partition(b" ")
        if not hmac.compare_digest(signature, self._sign(text)):
            raise EOFError
        try:
            message = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise EOFError from error
        if not isinstance(message, dict):
            raise EOFError
        return message

    def receive(self, seconds: float) -> dict[str, Any] | None:
        """Returns the next message, or None if it has not arrived completely within `seconds`; raises EOFError."""
        deadline = time.monotonic() + seconds
        while wait_until(deadline, [self]):
            if messages := self.read():
                message, *self.unread = messages
                return message
        return None


class Door:
    """A server socket that admits connections whose first message is of this launch. A slow client delays no other.

    Args:
        port: 0 selects a free port.
        key: of `launch_key`.
        num_clients: expected number of clients.
        is_local: listens on 127.0.0.1 instead of on all addresses, IPv4 and IPv6.
    """

    def __init__(self, port: int, key: bytes, num_clients: int, is_local: bool = False):
        is_dual = socket.has_dualstack_ipv6() and not is_local
        family = socket.AF_INET6 if is_dual else socket.AF_INET
        address = ("127.0.0.1" if is_local else "", port)
        self.server = socket.create_server(address, family=family, dualstack_ipv6=is_dual, backlog=1024)
        self.server.setblocking(False)
        self.port: int = self.server.getsockname()[1]
        self.key, self.most_pending, self.num_refused = key, num_clients + MOST_PENDING, 0
        self.pending: list[Channel] = []  # connections without a complete message, the oldest first

    def __enter__(self) -> "Door":
        return self

    def __exit__(self, *_: object) -> None:
        self.server.close()
        for channel in self.pending:
            channel.close()

    def admit(self, deadline: float, others: Sequence[Any] = ()) -> tuple[list[tuple[Channel, dict[str, Any]]], list]:
        """Waits until the deadline or until something is ready.

        Returns the new channels with their first messages, and those of `others` that are ready.
        """
        until = min([deadline, *(channel.until for channel in self.pending)])
        ready = wait_until(until, [self.server, *self.pending, *others])
        admitted = []
        for channel in list(self.pending):
            try:
                if channel in ready and (messages := channel.read()):
                    first, *channel.unread = messages
                    admitted.append((channel, first))
                    self.pending.remove(channel)
                elif time.monotonic() > channel.until:
                    self._refuse(channel)
            except (OSError, EOFError):
                self._refuse(channel)
        if self.server in ready:
            self._accept()
        return admitted, [other for other in others if other in ready]

    def _accept(self) -> None:
        is_full = len(self.pending) >= self.most_pending
        try:
            self.pending.append(Channel(self.server.accept()[0], self.key))
        except OSError as error:  # the client has gone, or this process has too many open files
            is_full = error.errno in (errno.EMFILE, errno.ENFILE) and bool(self.pending)
        if is_full:
            self._refuse(self.pending[0])

    def _refuse(self, channel: Channel) -> None:
        self.pending.remove(channel)
        self.num_refused += 1
        channel.close()
