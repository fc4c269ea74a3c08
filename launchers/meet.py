"""Runs `accelerate launch` on one of several machines, once all of them have met. Start it on each, with its own rank:

python launchers/meet.py accelerate launch --config_file accelerate_configs/multi_node.yaml \\
    --main_process_ip IP --machine_rank R recipes/lm.py ...

The variable LAUNCH_TOKEN holds one secret, the same on all machines: others that reach the port cannot take part.
By itself `accelerate launch` ends such a start in a traceback, after minutes (`multi_node*.yaml`: one). Here a wrong
address, a port in use, a machine that never comes, a rank given twice, or another number of machines is one line on
every machine, and exit status 2. The machines meet at --main_process_ip and --main_process_port, where the launchers
meet after them. SIGUSR1 goes on to the processes that train: they save and stop. (`accelerate launch` by itself would
die of it.)

In its place torch's own ways to meet were tried (2.13): `static` and `c10d` end in 40 lines that name no machine, and
let machines with different numbers start; `c10d` waits at the port of another program.
"""

import argparse
import errno
import os
import secrets
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

# Before the imports: a thread that one of them starts would take the signal. The ranks inherit it too: a request that
# comes before they train waits until they do (see common.training.stop_signals).
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # by nohup; torchrun would end the processes on it all the same
    os.environ.setdefault("PET_SIGNALS_TO_HANDLE", "SIGTERM,SIGINT,SIGQUIT")

import psutil  # noqa: E402
from accelerate.commands import launch  # noqa: E402

sys.path.insert(1, str(Path(__file__).resolve().parent.parent))

from common.command_parser import CommandParser  # noqa: E402
from common.errors import UserError, raise_errors  # noqa: E402
from common.output import guard_output  # noqa: E402
from common.parallel.channel import TOKEN, Channel, Door, find_token_problems, is_rank, is_text, launch_key  # noqa: E402
from common.parallel.launch import Launch, parse_launch  # noqa: E402
from common.parallel.process_checks import check_machines  # noqa: E402

DEFAULT_PORT = 29500  # Accelerate's
MEETING = "meeting"
HOST = socket.gethostname()


def connect(address: tuple[str, int], seconds: float, asked: Launch, own: str = "") -> Channel:
    """A connection to the machine with rank 0, on which this one has said who it is."""
    channel = Channel(socket.create_connection(address, timeout=max(0.1, seconds)), launch_key(MEETING))
    channel.send({"rank": asked.machine_rank, "host": HOST, "own": own, "flags": flags_of(asked)})
    return channel


def flags_of(asked: Launch) -> str:
    """Those that all machines must give alike."""
    return f"--num_machines {asked.num_machines} --num_processes {asked.num_processes}"


def check_token(asked: Launch) -> list[str]:
    """Problems with the secret that keeps other programs out."""
    return [] if asked.num_machines == 1 else find_token_problems()


def why(error: OSError) -> str:
    return error.strerror or str(error)


def open_port(port: int) -> Door:
    """Raises UserError where the port is taken."""
    try:
        return Door(port, launch_key(MEETING), num_clients=1024)
    except OSError as error:
        line, user = f"port {port} of this machine, {HOST}, cannot be used: {why(error)}", ""
        if error.errno != errno.EADDRINUSE:
            raise UserError(line) from error
    with suppress(psutil.Error):
        for found in psutil.net_connections("tcp"):
            if found.laddr and found.laddr.port == port and found.status == psutil.CONN_LISTEN and found.pid:
                user = f" by {psutil.Process(found.pid).name()} (process {found.pid})"
    line = f"port {port} of this machine, {HOST}, is in use{user}"
    raise UserError(f"{line}; give another --main_process_port on all machines")


def host_meeting(asked: Launch, address: tuple[str, int], timeout: float) -> None:
    """Machine rank 0: waits for the others, and tells them when all are there, or what is wrong.

    Raises:
        UserError: a line that says what is wrong.
    """
    here: dict[int, tuple[Channel, str]] = {}  # rank to connection and host
    answer = {"error": f"machine rank 0 on host {HOST} was stopped"}
    with open_port(address[1]) as door:
        try:
            gather(door, here, asked, address, timeout)
            answer = {"all_here": True}
        except UserError as error:
            answer = {"error": str(error)}
            raise
        finally:
            for channel, _ in here.values():
                channel.send(answer)
    # The others close first: a connection that this side has closed would keep the port for a while.
    for channel, _ in here.values():
        with suppress(OSError, EOFError):
            channel.receive(5)
        channel.close()


def gather(door: Door, here: dict, asked: Launch, address: tuple[str, int], timeout: float) -> None:
    """Fills `here`. This machine comes as the others do, over the address that they were given."""
    deadline = time.monotonic() + timeout
    number = secrets.token_hex(8)
    try:
        own = connect(address, min(10, timeout), asked, number)
    except OSError as error:
        raise no_way_here(address, why(error)) from error
    with own:
        while len(here) < asked.num_machines:
            if time.monotonic() >= deadline:
                missing = ", ".join(str(rank) for rank in range(asked.num_machines) if rank not in here)
                refused = f"; refused {door.num_refused} connections without this {TOKEN}" if door.num_refused else ""
                raise UserError(
                    f"machine rank {missing} of {asked.num_machines} did not come to {address[0]}:{address[1]} within "
                    f"{timeout:g} s{refused}; start the same command there, with its own --machine_rank"
                )
            admitted, ready = door.admit(deadline, [own, *(channel for channel, _ in here.values())])
            if own in ready:  # it is not this process that answers there
                answer = receive(own, 0)
                raise UserError(answer["error"]) if "error" in answer else no_way_here(address, "another answers")
            for rank in [rank for rank, (channel, _) in here.items() if channel in ready]:
                here.pop(rank)[0].close()  # went away, and may come back
            for channel, hello in admitted:
                admit(channel, hello, asked, number, here)


def receive(channel: Channel, seconds: float) -> dict[str, Any]:
    """The answer of machine rank 0; empty if it closes the connection or does not know the token."""
    with suppress(OSError, EOFError):
        message = channel.receive(seconds) or {}
        if message == {"all_here": True} or isinstance(message.get("error"), str):
            return message
    return {}


def no_way_here(address: tuple[str, int], reason: str) -> UserError:
    found = [a.address for interface in psutil.net_if_addrs().values() for a in interface if a.address.count(".") == 3]
    return UserError(
        f"--main_process_ip {address[0]} does not lead to this machine, {HOST}, which has machine rank 0 ({reason}); "
        f"give an address of it that the others reach, of {', '.join(found)}"
    )


def admit(channel: Channel, hello: dict, asked: Launch, number: str, here: dict[int, tuple[Channel, str]]) -> None:
    """Adds a machine to those that are here. UserError: it does not fit to them."""
    rank, host, flags, line = hello.get("rank"), hello.get("host"), hello.get("flags"), ""
    if not (is_text(host) and is_text(flags)):
        return channel.close()
    if flags != (mine := flags_of(asked)):
        line = f"host {host} was started with {flags}, host {HOST} with {mine}; give all the same"
    elif not is_rank(rank, asked.num_machines):
        return channel.close()
    elif rank in here or (rank == 0 and hello.get("own") != number):
        other = here[rank][1] if rank in here else HOST
        line = f"hosts {other} and {host} both have --machine_rank {rank}; give each its own, from 0 on"
    if line:
        channel.send({"error": line})
        raise UserError(line)
    here[rank] = (channel, host)


def join_meeting(asked: Launch, address: tuple[str, int], timeout: float) -> None:
    """Another machine: comes to machine rank 0, which may start later, and waits for its word.

    Raises:
        UserError: a line that says what is wrong.
    """
    deadline = time.monotonic() + timeout
    me = f"machine rank {asked.machine_rank} on host {HOST}"
    where = f"machine rank 0 at {address[0]}:{address[1]}"
    while True:
        reason = f"it closed the connection; is {TOKEN} the same there?"
        try:
            with connect(address, min(5, deadline - time.monotonic()), asked) as channel:
                if not wait([channel], timeout + 2):
                    raise UserError(f"{me} reaches {where}, which does not answer; is it the port of another program?")
                answer = receive(channel, 5)
            if "error" in answer:
                raise UserError(answer["error"])
            if answer:
                return
        except socket.gaierror as error:
            raise UserError(f"--main_process_ip {address[0]} is no address ({why(error)}); mend it") from error
        except OSError as error:
            reason = why(error)
        if time.monotonic() + 0.5 >= deadline:
            raise UserError(
                f"{me} did not reach {where} within {timeout:g} s ({reason}); check --main_process_ip and "
                "--main_process_port, that the command runs there too, and that no firewall is between"
            )
        time.sleep(0.5)


def hand_on_stop_requests() -> None:
    """The thread that sends this process's SIGUSR1 to its children, the ranks; it waits until there are any."""
    while True:
        signal.sigwait({signal.SIGUSR1})
        while not (ranks := psutil.Process().children()):
            time.sleep(0.1)
        for rank in ranks:
            with suppress(psutil.Error):
                rank.send_signal(signal.SIGUSR1)


def main() -> None:
    guard_output()
    formatter = argparse.RawDescriptionHelpFormatter
    parser = CommandParser(description=__doc__, formatter_class=formatter, allow_abbrev=False)
    parser.add_argument("--timeout", type=float, default=60, metavar="SECONDS", help="to wait for each other (60)")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="accelerate launch, and all that follows it")
    try:
        args = parser.parse_args()
        if len(args.command) < 3 or Path(args.command[0]).name != "accelerate" or args.command[1] != "launch":
            parser.error("after its own flags comes: accelerate launch --config_file ... recipes/lm.py ...")
        words = args.command[2:]
        asked = parse_launch(words)
        raise_errors([*check_machines(asked), *check_token(asked)])
        if asked.num_machines > 1:
            address = (asked.settings["main_process_ip"], asked.settings["main_process_port"] or DEFAULT_PORT)
            (join_meeting if asked.machine_rank else host_meeting)(asked, address, args.timeout)
            words = ["--rdzv_conf", f"timeout={max(60, args.timeout):.0f}", *words]  # a later one, of the user, wins
    except (UserError, OSError) as error:
        print("\n".join(f"error: {line}" for line in str(error).splitlines()), file=sys.stderr, flush=True)
        sys.exit(2)
    except KeyboardInterrupt:
        print("\ninterrupted before the machines had met", file=sys.stderr, flush=True)
        sys.exit(128 + signal.SIGINT)
    threading.Thread(target=hand_on_stop_requests, daemon=True).start()
    sys.argv = ["accelerate launch", *words]
    launch.main()


if __name__ == "__main__":
    main()
