"""Commands that run at the same time, their ranks and their updates."""

import contextlib
import itertools
import os
import re
import shutil
import socket
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from conftest import ROOT, base_env, kill_all, quick_python, quickly, read_metrics

os.environ["PATH"] += ":/usr/sbin:/sbin"  # a shell's PATH may lack them; tc, sshd and SLURM's daemons are there


class Run:
    """Commands that run at the same time, and all end with the block."""

    def __init__(self, directory):
        self.directory, self.processes = directory, []

    def start(self, command, env=None, cwd=ROOT, quick=True):
        """quick: not where the launcher is to die alone: workers of tests/recipe_server.py do not know theirs."""
        command = quickly(command) if quick else [str(part) for part in command]
        variables = base_env(CUDA_VISIBLE_DEVICES="", **(env or {}))
        with open(self.directory / f"output-{len(self.processes)}", "w") as output:
            streams = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
            process = subprocess.Popen(command, env=variables, cwd=cwd, **streams)
        self.processes.append(process)
        return process

    def wait(self, timeout):
        """The exit statuses."""
        deadline = time.monotonic() + timeout
        return [process.wait(timeout=max(0.1, deadline - time.monotonic())) for process in self.processes]

    def output(self, number=0):
        return (self.directory / f"output-{number}").read_text()

    def errors(self, number=0):
        """The lines that our own code tells."""
        return [line for line in self.output(number).splitlines() if line.startswith("error: ")]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            if process.poll() is None:
                kill_all([psutil.Process(process.pid)])
                process.wait()


def set_world(monkeypatch, size):
    """The variables of the first of so many processes on one machine."""
    world = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "RANK": 0, "LOCAL_RANK": 0}
    for variable, value in {**world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500}.items():
        monkeypatch.setenv(variable, str(value))


def settings_shown(output):
    """The view of a dry run: each setting's name with its value and where it comes from."""
    lines = output.split("where it comes from:\n")[1].splitlines()
    columns = [re.split(r"\s{2,}", line) for line in lines]
    return {name: (value, source) for name, value, source in (row for row in columns if len(row) == 3)}


def program_of(process):
    """The process that does what one was started for: another one where that is a client of tests/recipe_server.py."""
    link = Path(quick_python()).with_name(str(process.pid))
    return psutil.Process(int(os.readlink(link))) if link.is_symlink() else psutil.Process(process.pid)


def children(process):
    """All that it started, and that these started; without those that have ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        started = program_of(process).children()
        return started + [one for child in started for one in children(child)]
    return []


def find_rank(launcher, rank):
    """A worker of a launcher."""
    for process in children(launcher):
        with contextlib.suppress(psutil.Error):
            if process.environ().get("RANK") == str(rank):
                return program_of(process)
    raise AssertionError(f"no rank {rank} below {launcher.args}")


def wait_until(condition, seconds=300):
    """A start alone takes a loaded machine a minute."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.1)


def num_updates(output_dir):
    return len(read_metrics(output_dir)) if (Path(output_dir) / "metrics.jsonl").exists() else 0


def paths_in(directory):
    """Returns all paths below a directory, also while a run deletes some of them, which ends Path.rglob."""
    return {os.path.join(parent, name) for parent, *names in os.walk(directory) for name in sum(names, [])}


def wait_for_updates(output_dir, number):
    wait_until(lambda: num_updates(output_dir) >= number)


# Below the ports that a system gives to connections, where one could take a port before its server starts. Each test
# process has a thousand of its own; a system asked for a free port twice may give the same one.
WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
PORTS = itertools.cycle(range(10_000 + WORKER % 18 * 1_000, 11_000 + WORKER % 18 * 1_000))


def free_port():
    """A port where no server listens; the same one only after a thousand others."""
    for port in PORTS:
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            return port


def give_up(message):
    pytest.fail(message) if os.environ.get("REQUIRE_HOSTS") == "1" else pytest.skip(message)


def need(reason, **programs):
    """Skips where a program is missing; the keys are Debian's packages."""
    missing = [package for package, program in programs.items() if shutil.which(program) is None]
    if os.geteuid() != 0:
        missing.append("root")
    if missing:
        give_up(f"{reason} needs {', '.join(name.replace('_', '-') for name in missing)}")
