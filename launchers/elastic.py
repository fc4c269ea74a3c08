"""Runs `accelerate launch` on 1 to N hosts that may come and go. Start the same command on each host:

    python launchers/elastic.py --hosts 1:4 accelerate launch --config_file accelerate_configs/fsdp2.yaml \\
        recipes/lm.py --train_file my.jsonl --output_dir runs/books --resume auto

If a host dies, hangs or leaves (SIGTERM), the others continue from the newest checkpoint without it. If a host arrives,
all save, and continue with it. The update does not depend on the number of hosts. All hosts share the repository, the
data and --output_dir. LAUNCH_TOKEN is one secret, the same on all hosts; a new launch needs a new one.

The engine is torch's elastic agent, as in `torchrun`. `accelerate launch` starts the same agent, but passes it a fixed
number of hosts. So this script reads the config as `accelerate launch` does, and starts the agent itself.

The hosts find each other through files in a shared directory. torch's own c10d rendezvous needs a store on one host,
and its loss ends the run on all; its file store grows with each heartbeat.
"""

import argparse
import json
import os
import signal
import socket
import sys
import tempfile
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import psutil
import torch
from accelerate.utils import prepare_deepspeed_cmd_env, prepare_multi_gpu_env
from torch.distributed import DistError, FileStore
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousTimeoutError,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousTimeout,
)
from torch.distributed.run import get_args_parser
from torch.distributed.run import main as torchrun

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(1, str(ROOT))

from common.arguments import positive  # noqa: E402
from common.command_parser import CommandParser  # noqa: E402
from common.elastic_launch import HOSTS, NOTE  # noqa: E402
from common.errors import UserError, raise_errors  # noqa: E402
from common.files import size_and_digest  # noqa: E402
from common.internals.accelerate import read_launch  # noqa: E402
from common.output import guard_output  # noqa: E402
from common.parallel.channel import TOKEN, find_token_problems  # noqa: E402
from common.parallel.launch import Launch, parse_launch  # noqa: E402
from common.parallel.rank_connection import own_address  # noqa: E402
from common.process import ELASTIC_ID  # noqa: E402
from common.training.stop_signals import STOPPED  # noqa: E402
from common.versions import versions  # noqa: E402
from launchers.shared_files import BEAT, MISSED, SharedFiles, make_directory  # noqa: E402

HOST = socket.gethostname()
JOIN_SECONDS = 7 * 24 * 3600  # how long a host waits for a place, or for the minimum number of hosts
SAVE_SECONDS = 600  # to save before a restart or before this host leaves; torch's default is 30
SET_BY_HOSTS = "num_machines num_processes machine_rank main_process_ip main_process_port".split()


class Hosts(RendezvousHandler):
    """torch's rendezvous, with reasons for which this host leaves instead of starting its processes again.

    Args:
        rendezvous: the rendezvous to which all calls go.
        note: file of this host in which its processes write their own user errors.
        output_dir: the run's; a new checkpoint in it counts as progress.
        max_restarts: restarts in a row without progress.
    """

    def __init__(self, rendezvous: RendezvousHandler, note: Path, output_dir: Path, max_restarts: int):
        self.rendezvous, self.note, self.output_dir, self.max_restarts = rendezvous, note, output_dir, max_restarts
        self.newest: str | None = None
        self.num_restarts, self.leaves = -1, False
        self.restart_at: float | None = None  # when processes that were asked to save are ended

    @property
    def use_agent_store(self) -> bool:
        return self.rendezvous.use_agent_store

    def next_rendezvous(self) -> RendezvousInfo:
        """Returns rank and number of hosts of the next start. Raises SystemExit: this host leaves the run."""
        if self.note.exists():  # the processes have printed it
            self._leave(2)
        newest = max((path.name for path in self.output_dir.glob("checkpoints/update-*[0-9]")), default="")
        self.num_restarts = 0 if newest != self.newest else self.num_restarts + 1
        self.newest = newest
        if self.num_restarts > self.max_restarts:
            say(f"error: host {HOST} leaves: no new checkpoint after {self.max_restarts} restarts in a row")
            self._leave(1)
        while True:
            self.restart_at = None
            try:
                info = self.rendezvous.next_rendezvous()
            except DistError:  # a host died during the rendezvous
                continue
            say(f"host {HOST} is number {info.rank} of {info.world_size}")
            return info

    def _leave(self, status: int) -> NoReturn:
        self.leaves = True
        raise SystemExit(status)

    def shutdown(self) -> bool:
        """Ends the launch for all hosts, unless only this host leaves."""
        return self.leaves or self.rendezvous.shutdown()

    def get_backend(self) -> str:
        return self.rendezvous.get_backend()

    def is_closed(self) -> bool:
        return self.rendezvous.is_closed()

    def set_closed(self) -> None:
        self.rendezvous.set_closed()

    def num_nodes_waiting(self) -> int:
        """Returns the number of hosts that wait to join, for which torch's agent restarts the processes of this host.

        The agent would kill a process that saves for more than 30 seconds. So the processes are asked to save and stop
        first, and the answer is 0 until they have ended, for up to SAVE_SECONDS; not if a process is stopped (SIGSTOP).
        """
        num_waiting = self.rendezvous.num_nodes_waiting()
        if num_waiting == 0:
            self.restart_at = None
            return 0
        processes = psutil.Process().children()
        if self.restart_at is None:
            self.restart_at = time.monotonic() + SAVE_SECONDS
            for process in processes:
                with suppress(psutil.Error):
                    process.send_signal(signal.SIGUSR1)
        with suppress(psutil.Error):
            if any(process.status() == psutil.STATUS_STOPPED for process in processes):
                return num_waiting
        return num_waiting if time.monotonic() > self.restart_at else 0

    def get_run_id(self) -> str:
        return self.rendezvous.get_run_id()


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def hosts_range(text: str) -> tuple[int, int]:
    """Returns the numbers of "1:4", or of "4" as (4, 4)."""
    least, _, most = text.partition(":")
    if not least.isdecimal() or not (most or least).isdecimal() or not 1 <= int(least) <= int(most or least):
        raise argparse.ArgumentTypeError(f"{text} is not MIN:MAX, such as 1:4")
    return int(least), int(most or least)


def default_address() -> str:
    """Returns the address of this host on its default route, or its name without one."""
    with suppress(OSError):
        return own_address("192.0.2.1")  # an address for documentation; nothing is sent to it
    return HOST


def find_flag(words: list[str], flag: str) -> str | None:
    """Returns the value of a flag in a command line; "" for the flag without value, None without the flag."""
    value = None
    for at, word in enumerate(words):
        if word == flag:
            after = words[at + 1] if at + 1 < len(words) else ""
            value = "" if after.startswith("--") else after
        elif word.startswith(f"{flag}="):
            value = word.partition("=")[2]
    return value


def check(launch: Launch, recipe: list[str], per_host: int) -> list[str]:
    """Returns one line per mistake in the command line."""
    problems = list(launch.file_problems)
    for name in sorted(launch.given.intersection(SET_BY_HOSTS)):
        problems.append(f"--{name} is set by the hosts that are there; remove it (--processes_per_host N)")
    if launch.mode == "plain":
        problems.append(
            f"{launch.source} starts a single process, which cannot be joined; use a config such as "
            "multi_gpu.yaml, multi_cpu.yaml or fsdp2.yaml"
        )
    sizes = launch.sizes
    if (within := sizes["sp"] * sizes["tp"] * sizes["pp"]) > 1 and per_host % within:
        problems.append(
            f"{launch.source} splits a model or sample over {within} processes, and a host has {per_host}; "
            "use a multiple, so that they stay on one host"
        )
    if sizes["dp_replicate"] > 1:
        problems.append(f"{launch.source} fixes the number of replicas (dp_replicate_size); use fsdp2.yaml")
    if not find_flag(recipe, "--output_dir"):
        problems.append("--output_dir is missing: the hosts continue from its checkpoints")
    if find_flag(recipe, "--resume") != "auto":
        problems.append("--resume auto is missing: without it, a restart would begin anew; add it to the recipe")
    return problems + find_token_problems()


def describe_software(launch: Launch, recipe: list[str], per_host: int) -> dict[str, Any]:
    """Returns everything in which a host could differ: files of the repository, versions and the command line."""
    paths = [
        *ROOT.glob("common/**/*.py"),
        *ROOT.glob("launchers/*.py"),
        *ROOT.glob("recipes/*.py"),
        *ROOT.glob("ds_configs/*.json"),
    ]
    paths += [Path(name) for name in (recipe[0], launch.config_file) if name]
    files = {os.path.relpath(path, ROOT): size_and_digest(path)[1] for path in paths}
    command = " ".join([*launch.command[2:], *recipe, f"--processes_per_host {per_host}"])
    return {"host": HOST, "command": command, **versions(), **files}


def check_software(directory: Path, own: dict[str, Any]) -> None:
    """Raises UserError: this host differs from the host that came first, whose description is in the directory."""
    first = directory / "software.json"
    with tempfile.NamedTemporaryFile("w", dir=directory, prefix="new.") as file:
        json.dump(own, file)
        file.flush()
        with suppress(FileExistsError):
            os.link(file.name, first)
    others = json.loads(first.read_text())
    names = [name for name in {**others, **own} if name != "host" and others.get(name) != own.get(name)]
    what = [f"{name} {own.get(name)} instead of {others.get(name)}" if "/" not in name else name for name in names[:3]]
    if names:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise UserError(
            f"host {HOST} differs from host {others['host']}: {', '.join(what)}{more}; make both the same, "
            f"or start a new launch with a new {TOKEN}"
        )


def prepare_environment(words: list[str], launch: Launch, per_host: int) -> None:
    """Sets the variables of the config file that `accelerate launch` would set."""
    args, config, _ = read_launch(words)
    args.num_machines, args.machine_rank, args.num_processes, args.main_process_port = 1, 0, per_host, 0
    if launch.mode == "DeepSpeed":
        from_config = config is not None and config.mixed_precision and "mixed_precision" not in launch.given
        fields = [*(config.deepspeed_config if config else ()), *(["mixed_precision"] if from_config else [])]
        args.deepspeed_fields_from_accelerate_config = ",".join(fields)
        os.environ.update(prepare_deepspeed_cmd_env(args)[1])
    else:
        os.environ.update(prepare_multi_gpu_env(args))


def parse() -> tuple[argparse.Namespace, list[str], Launch, list[str]]:
    """Returns the flags of this script, the words after `accelerate launch`, the launch, and the recipe's words."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = CommandParser(description=__doc__, formatter_class=formatter, allow_abbrev=False)
    parser.add_argument("--hosts", type=hosts_range, required=True, metavar="MIN:MAX", help="number of hosts")
    parser.add_argument("--processes_per_host", type=positive, metavar="P", help="default: GPUs of this host, or 1")
    parser.add_argument("--rendezvous", metavar="DIR", help="shared by all hosts (default: OUTPUT_DIR.hosts)")
    parser.add_argument("--address", metavar="IP", help="of this host for the others (default: of its default route)")
    parser.add_argument("--wait", type=positive, default=30, metavar="S", help="seconds to wait for more hosts (30)")
    about = "restarts in a row without a new checkpoint, before a host leaves (10)"
    parser.add_argument("--max_restarts", type=positive, default=10, metavar="N", help=about)
    parser.add_argument("command", nargs=argparse.REMAINDER, help="accelerate launch, and all that follows it")
    args = parser.parse_args()
    if len(args.command) < 3 or Path(args.command[0]).name != "accelerate" or args.command[1] != "launch":
        parser.error("after its own flags comes: accelerate launch --config_file ... recipes/lm.py ...")
    words = args.command[2:]
    launch = parse_launch(words)
    if args.processes_per_host is None:
        args.processes_per_host = 1 if launch.use_cpu else max(1, torch.cuda.device_count())
    recipe = [launch.settings["training_script"], *launch.settings["training_script_args"]]
    raise_errors(check(launch, recipe, args.processes_per_host))
    return args, words, launch, recipe


def run(args: argparse.Namespace, words: list[str], launch: Launch, recipe: list[str], note: Path) -> None:
    """Runs torch's elastic agent on this host until the run has ended or this host leaves."""
    place = find_flag(recipe, "--output_dir") or ""
    output_dir = Path(place)
    if "://" in place:
        from common.remote_output import local_directory

        output_dir = local_directory(place.rstrip("/"))
    directory = make_directory(Path(args.rendezvous or f"{output_dir}.hosts"))
    check_software(directory, describe_software(launch, recipe, args.processes_per_host))
    prepare_environment(words, launch, args.processes_per_host)
    variables = {
        HOSTS: "{}:{}".format(*args.hosts),
        ELASTIC_ID: directory.name,
        NOTE: str(note),
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # a new store for each start, because keys of an earlier one remain
        "TORCH_ELASTIC_WORKER_IDENTICAL": "1",  # `check_software` compares the number of processes
    }
    os.environ.update(variables)

    def make_handler(parameters: RendezvousParameters) -> Hosts:
        store = FileStore(str(directory / "store"))
        store.set_timeout(timedelta(seconds=60))
        timeout = RendezvousTimeout(timedelta(seconds=JOIN_SECONDS), timedelta(seconds=args.wait))
        rendezvous = DynamicRendezvousHandler.from_backend(
            parameters.run_id, store, SharedFiles(directory), *args.hosts, parameters.local_addr, timeout, BEAT, MISSED
        )
        return Hosts(rendezvous, note, output_dir, args.max_restarts)

    rendezvous_handler_registry.register("shared-files", make_handler)
    options = {
        "nnodes": os.environ[HOSTS],
        "nproc-per-node": args.processes_per_host,
        "rdzv-backend": "shared-files",
        "rdzv-endpoint": directory,
        "rdzv-id": directory.name,
        "max-restarts": 10**9,  # `Hosts` counts them, because torch also counts those after a lost host
        "monitor-interval": 0.5,
        "local-addr": args.address or default_address(),
        "signals-to-handle": "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",
    }
    if "--shutdown-timeout" in get_args_parser().format_help():  # torch 2.11 has a fixed timeout
        options["shutdown-timeout"] = SAVE_SECONDS
    torchrun([*(f"--{name}={value}" for name, value in options.items()), *recipe])


def main() -> None:
    guard_output()
    try:
        with tempfile.TemporaryDirectory() as private:
            run(*parse(), Path(private) / "user_error")
    except UserError as error:
        say("\n".join(f"error: {line}" for line in str(error).splitlines()))
        sys.exit(2)
    except SignalException:
        say(f"host {HOST} leaves the run; the other hosts continue without it")
        sys.exit(STOPPED)
    except RendezvousClosedError:
        say(f"this launch has ended; a new one needs a new {TOKEN}")
    except RendezvousTimeoutError:
        say(f"error: no place for host {HOST} among {sys.argv[1:3]} within {JOIN_SECONDS} s")
        sys.exit(3)


if __name__ == "__main__":
    main()
