"""Runs `accelerate launch` on one of several machines, once all of them have met. Start it on each, with its own rank:

python launchers/meet.py accelerate launch --config_file accelerate_configs/multi_node.yaml \\
    --main_process_ip IP --machine_rank R recipes/lm.py ...

By itself `accelerate launch` ends such a start in a traceback, after minutes (`multi_node*.yaml`: one). Here a wrong
address, a port in use, a machine that never comes, a rank given twice, or another number of machines is one line on
every machine, and exit status 2. The machines meet at --main_process_ip and --main_process_port, where the launchers
meet after them. SIGUSR1 goes on to the processes that train: they save and stop. (`accelerate launch` by itself would
die of it.)
"""

import argparse
import errno
import json
import secrets
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path

# Before the imports: a thread that one of them starts would take the signal. The ranks inherit it too: a request that
# comes before they train waits until they do (see common.stopping).
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})

import psutil  # noqa: E402
from accelerate.commands import launch  # noqa: E402

sys.path.insert(1, str(Path(__file__).resolve().parent.parent))

from common.errors import UserError
from common.parallel.launch import Launch, check_machines, parse_launch  # noqa: E402

DEFAULT_PORT = 29500  # Accelerate's


def send(connection: Connection, message: dict) -> None:
    with suppress(OSError):  # whoever has gone needs no message
        connection.send_bytes(json.dumps(message).encode())


def receive(connection: Connection) -> dict:
    """Raises OSError, EOFError or ValueError where a message of these machines does not come."""
    message = json.loads(connection.recv_bytes(1 << 16))
    if not isinstance(message, dict):
        raise ValueError("not one of our messages")
    return message


def connect(address: tuple[str, int], seconds: float) -> Connection:
    connected = socket.create_connection(address, timeout=max(0.1, seconds))
    connected.setblocking(True)
    return Connection(connected.detach())


def introduction(asked: Launch, token: str = "") -> dict:
    same = {"--num_machines": asked.num_machines, "--num_processes": asked.num_processes}
    return {"rank": asked.machine_rank, "host": socket.gethostname(), "token": token, "same": same}


def why(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or "it closed the connection"


def port_user(port: int) -> str:
    """Who listens on a port of this machine, as far as it can be seen."""
    with suppress(psutil.Error):
        for connection in psutil.net_connections("tcp"):
            if connection.laddr and connection.laddr.port == port and connection.status == psutil.CONN_LISTEN:
                if connection.pid:
                    return f" by {psutil.Process(connection.pid).name()} (process {connection.pid})"
    return ""


def listen(port: int) -> socket.socket:
    """Raises UserError where the port is taken."""
    is_dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if is_dual else socket.AF_INET
    try:
        return socket.create_server(("", port), family=family, dualstack_ipv6=is_dual, backlog=1024)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise UserError(f"port {port} of this machine cannot be used: {why(error)}") from error
        line = f"port {port} of this machine, {socket.gethostname()}, is in use{port_user(port)}"
        raise UserError(f"{line}; give another --main_process_port on all machines") from error


def host_meeting(asked: Launch, address: tuple[str, int], timeout: float) -> None:
    """Machine rank 0: waits for the others, and tells them when all are there, or what is wrong.

    Raises:
        UserError: a line that says what is wrong.
    """
    here: dict[int, tuple[Connection, str]] = {}  # rank to connection and host
    answer = {"error": f"machine rank 0 on host {socket.gethostname()} was stopped"}
    with listen(address[1]) as server:
        try:
            gather(server, here, asked, address, timeout)
            answer = {"all_here": True}
        except UserError as error:
            answer = {"error": str(error)}
            raise
        finally:
            for connection, _ in here.values():
                send(connection, answer)
    # The others close first: a connection that this side has closed would keep the port for a while.
    for connection, _ in here.values():
        connection.poll(5)
        connection.close()


def gather(server: socket.socket, here: dict, asked: Launch, address: tuple[str, int], timeout: float) -> None:
    """Fills `here`. This machine comes as the others do, over the address that they were given."""
    deadline = time.monotonic() + timeout
    token = secrets.token_hex(8)
    try:
        with connect(address, min(10, timeout)) as own:
            send(own, introduction(asked, token))
            while len(here) < asked.num_machines:
                waiting = [server, own, *(connection for connection, _ in here.values())]
                ready = wait(waiting, max(0, deadline - time.monotonic()))
                if not ready:
                    missing = ", ".join(str(rank) for rank in range(asked.num_machines) if rank not in here)
                    raise UserError(
                        f"machine rank {missing} of {asked.num_machines} did not come to {address[0]}:{address[1]} "
                        f"within {timeout:g} s; start the same command there, with its own --machine_rank"
                    )
                if own in ready:  # it is not this process that answers there
                    raise UserError(receive(own)["error"])
                for rank in [rank for rank, (connection, _) in here.items() if connection in ready]:
                    here.pop(rank)[0].close()  # went away, and may come back
                if server in ready:
                    admit(Connection(server.accept()[0].detach()), asked, token, here)
    except (OSError, EOFError, KeyError) as error:
        addresses = [a.address for all_of_one in psutil.net_if_addrs().values() for a in all_of_one]
        raise UserError(
            f"--main_process_ip {address[0]} does not lead to this machine, {socket.gethostname()}, which has machine "
            f"rank 0 ({why(error)}); give an address of it that the others reach, of "
            f"{', '.join(a for a in addresses if a.count('.') == 3)}"
        ) from error


def admit(connection: Connection, asked: Launch, token: str, here: dict[int, tuple[Connection, str]]) -> None:
    """Adds a machine to those that are here. UserError: it does not fit to them."""
    try:
        hello = receive(connection) if connection.poll(5) else {}
        rank, host, same = hello["rank"], hello["host"], hello["same"]
    except (OSError, EOFError, ValueError, KeyError):
        return connection.close()  # somebody else, by chance
    mine = introduction(asked)["same"]
    line = ""
    if same != mine:
        theirs, ours = (" ".join(f"{flag} {value}" for flag, value in flags.items()) for flags in (same, mine))
        line = f"host {host} was started with {theirs}, host {socket.gethostname()} with {ours}; give all the same"
    elif rank in here or (rank == 0 and hello["token"] != token):
        other = here[rank][1] if rank in here else socket.gethostname()
        line = f"hosts {other} and {host} both have --machine_rank {rank}; give each its own, from 0 on"
    if line:
        send(connection, {"error": line})
        raise UserError(line)
    here[rank] = (connection, host)


def join_meeting(asked: Launch, address: tuple[str, int], timeout: float) -> None:
    """Another machine: comes to machine rank 0, which may start later, and waits for its word.

    Raises:
        UserError: a line that says what is wrong.
    """
    deadline = time.monotonic() + timeout
    me = f"machine rank {asked.machine_rank} on host {socket.gethostname()}"
    where = f"machine rank 0 at {address[0]}:{address[1]}"
    while True:
        try:
            connection = connect(address, min(5, deadline - time.monotonic()))
            send(connection, introduction(asked))
            if not connection.poll(timeout + 2):
                raise UserError(f"{me} reaches {where}, which does not answer; is it the port of another program?")
            answer = receive(connection)
            connection.close()
        except socket.gaierror as error:
            raise UserError(f"--main_process_ip {address[0]} is no address ({why(error)}); mend it") from error
        except (OSError, EOFError) as error:
            if time.monotonic() + 0.5 < deadline:
                time.sleep(0.5)
                continue
            raise UserError(
                f"{me} did not reach {where} within {timeout:g} s ({why(error)}); check --main_process_ip and "
                "--main_process_port, that the command runs there too, and that no firewall is between"
            ) from error
        if "error" in answer:
            raise UserError(answer["error"])
        return


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
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter, allow_abbrev=False)
    parser.add_argument("--timeout", type=float, default=60, metavar="SECONDS", help="to wait for each other (60)")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="accelerate launch, and all that follows it")
    args = parser.parse_args()
    if len(args.command) < 3 or Path(args.command[0]).name != "accelerate" or args.command[1] != "launch":
        parser.error("after its own flags comes: accelerate launch --config_file ... recipes/lm.py ...")
    words = args.command[2:]
    try:
        asked = parse_launch(words)
        if problems := check_machines(asked):
            raise UserError("\n".join(problems))
        if asked.num_machines > 1:
            address = (asked.main_process_ip, asked.main_process_port or DEFAULT_PORT)
            (join_meeting if asked.machine_rank else host_meeting)(asked, address, args.timeout)
            words = ["--rdzv_conf", f"timeout={max(60, args.timeout):.0f}", *words]  # a later one, of the user, wins
    except (UserError, OSError) as error:
        print("\n".join(f"error: {line}" for line in str(error).splitlines()), file=sys.stderr, flush=True)
        sys.exit(2)
    threading.Thread(target=hand_on_stop_requests, daemon=True).start()
    sys.argv = ["accelerate launch", *words]
    launch.main()


if __name__ == "__main__":
    main()
