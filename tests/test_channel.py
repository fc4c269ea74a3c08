"""Only the processes of a launch take part in it, whatever others send to its ports."""

import json
import socket
import sys
import threading
import time

import pytest
from conftest import ROOT

from common.errors import UserError
from common.parallel import channel, rank_watch
from common.parallel.channel import Channel, Door, launch_key
from common.parallel.launch import parse_launch
from common.training.process_grid import ProcessGrid

# Bytes of those who have no key, and messages of those who have it.
STRANGERS = [b"", b"x", b"\0\0\0\x10", b"GET / HTTP/1.1\r\n\r\n", b"{}\n", b"[" * 100_000, b"a" * 64 + b" {}\n"]
RANKS = [7, -1, "1", 1.0, True, None, {}, [1], 10**30]
HOSTS = ["", "a\33[2J", "a\nb", "a" * 256, "a\u202e", 7, None, {}]


def signed(key, text):
    with socket.socket() as unconnected:
        return Channel(unconnected, key)._sign(text) + b" " + text + b"\n"


def send(port, content):
    connected = socket.create_connection(("127.0.0.1", port))
    connected.sendall(content)
    return connected


def admit_one(door, seconds=30):
    """The first message that the door admits; fails after many seconds."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for admitted, message in door.admit(deadline)[0]:
            admitted.close()
            return message
    raise AssertionError("nobody was admitted")


def test_strangers_neither_enter_nor_keep_others_out(monkeypatch):
    key = launch_key("number")
    monkeypatch.setattr(channel, "MOST_PENDING", 40)
    invalid = [signed(key, text) for text in (b"[]", b"7", b'"x"', b"{", b"[" * 50_000, b"\xff")]
    invalid += [signed(b"another key", b'{"rank": 1}'), signed(key, b'{"rank": 1}')[:-1]]  # the last: never complete
    with Door(0, key, 1, is_local=True) as door:
        strangers = [send(door.port, content) for content in 8 * [*STRANGERS, *invalid]]
        own = Channel(socket.create_connection(("127.0.0.1", door.port)), key)
        own.send({"rank": 1})
        assert admit_one(door) == {"rank": 1}
        assert door.pending and door.num_refused  # the silent ones are still there
        monkeypatch.setattr(door.pending[-1], "until", 0)
        last = door.pending[-1]
        door.admit(0)
        assert last not in door.pending  # its time was over
        for connected in (*strangers, own):
            connected.close()


@pytest.fixture
def watched(monkeypatch):
    """Starts the two ranks of a launch, once a function was called with the port and the key of rank 0."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("MASTER_PORT", str(server.getsockname()[1]))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", "/x/none_secret/attempt_0/0/error.json")
    watches = {}

    def start(before):
        def rank_0():
            watches[0] = rank_watch.RankWatch(0, 2, 60, "strangers", ProcessGrid(2))

        def rank_1():
            connect = rank_watch.RankWatch._connect

            def after_strangers(watch, parent):
                port, number, _ = json.loads(watch.store.store.get("strangers"))
                before(port, launch_key(number), number)
                connect(watch, parent)

            monkeypatch.setattr(rank_watch.RankWatch, "_connect", after_strangers)
            watches[1] = rank_watch.RankWatch(1, 2, 60, "strangers", ProcessGrid(2))

        threads = [threading.Thread(target=rank) for rank in (rank_0, rank_1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return watches

    yield start
    for watch in watches.values():
        watch.leave(None, 0)


def test_only_the_missing_rank_is_admitted(watched):
    strangers = []

    def before(port, key, number):
        hellos = [{"rank": rank, "host": "h"} for rank in RANKS] + [{"rank": 1, "host": host} for host in HOSTS]
        hellos = [hello | {"num_ranks": 1} for hello in hellos]
        hellos += [{"rank": 1, "host": "h", "num_ranks": count} for count in [*RANKS, 0]]
        strangers.extend(send(port, content) for content in STRANGERS)
        strangers.extend(send(port, signed(key, json.dumps(hello).encode())) for hello in [*hellos, {}])
        # Whoever reads the number in torch's store still lacks the secret.
        guessed = channel.hashlib.sha256(f" {number}".encode()).digest()
        strangers.append(send(port, signed(guessed, b'{"rank": 1, "host": "guessed", "num_ranks": 1}')))

    watches = watched(before)
    assert [*watches[0].peers.values()] == [(1, socket.gethostname())]
    assert [*watches[1].peers.values()] == [(0, socket.gethostname())]
    address = next(iter(watches[0].peers)).socket.getsockname()[0]
    assert address == "127.0.0.1"  # of the listening socket too: no other address was open
    for connected in strangers:
        connected.close()


def test_malformed_announcements_are_a_lost_rank():
    sound = {"rank": 1, "host": "h", "status": 1, "reason": None}
    assert rank_watch._checked(sound, 2) == sound
    changes = [{"rank": rank} for rank in RANKS] + [{"host": host} for host in HOSTS]
    for change in [*changes, {"status": "1"}, {"status": True}, {"reason": 7}, {"reason": ["x"]}]:
        with pytest.raises(EOFError):
            rank_watch._checked(sound | change, 2)


@pytest.fixture
def meet(monkeypatch):
    """launchers/meet.py, imported: it blocks a signal and inserts a path, which this undoes."""
    import signal

    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT / "launchers")])
    import meet

    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return meet


def test_only_the_missing_machine_is_admitted(meet, monkeypatch):
    config = str(ROOT / "accelerate_configs/multi_node.yaml")
    asked = [parse_launch(["--config_file", config, "--machine_rank", str(rank), "recipes/lm.py"]) for rank in (0, 1)]
    monkeypatch.setenv("LAUNCH_TOKEN", "x" * 16)
    key, flags, strangers = launch_key(meet.MEETING), meet.flags_of(asked[0]), []
    hello = {"rank": 1, "host": "h", "own": "", "flags": flags}
    changes = [{"rank": rank} for rank in RANKS] + [{"host": host} for host in HOSTS] + [{"flags": "\33"}, {"flags": 7}]
    with meet.open_port(0) as door:
        strangers += [send(door.port, content) for content in STRANGERS]
        strangers += [send(door.port, signed(key, json.dumps(hello | change).encode())) for change in changes]
        strangers.append(send(door.port, signed(launch_key("another"), json.dumps(hello).encode())))
        here = {}
        with pytest.raises(UserError, match=r"^machine rank 1 of 2 did not come .* refused \d+ conn") as ended:
            meet.gather(door, here, asked[0], ("127.0.0.1", door.port), 2)
        assert str(ended.value).isprintable() and here.keys() == {0}
        here.clear()
        real = meet.connect(("127.0.0.1", door.port), 5, asked[1])
        meet.gather(door, here, asked[0], ("127.0.0.1", door.port), 60)
        assert here[1][1] == meet.HOST
        for connected in (*strangers, real, *(there for there, _ in here.values())):
            connected.close()


def test_a_launch_on_several_machines_needs_a_token(meet, monkeypatch):
    config = str(ROOT / "accelerate_configs/multi_node.yaml")
    asked = parse_launch(["--config_file", config, "--machine_rank", "0", "recipes/lm.py"])
    monkeypatch.delenv("LAUNCH_TOKEN", raising=False)
    for token, expected in ((None, "not set"), ("short", "not 16"), ("x" * 16, None)):
        if token:
            monkeypatch.setenv("LAUNCH_TOKEN", token)
        lines = meet.check_token(asked)
        assert len(lines) == (expected is not None) and all(f"LAUNCH_TOKEN: {expected}" in line for line in lines)
