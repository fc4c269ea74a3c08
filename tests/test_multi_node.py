"""Several hosts: two network namespaces of this machine, joined by a cable of their own, each with its host name.

Where that cannot be had (it needs root and iproute2) they are skipped; with REQUIRE_HOSTS=1 in the environment they
fail. apt install iproute2 openssh-server slurm-wlm munge
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import psutil
import pytest
from conftest import BIN, ROOT, equivalence_flags, launch_command, quick_python, quickly, read_metrics
from running import Run, find_rank, free_port, give_up, need, wait_for_updates
from test_modes import assert_is_the_run_of

from common.parallel.launch import parse_launch

CONFIGS = {"multi_node": "DDP", "multi_node_zero3": "DeepSpeed"}


def meet(seconds, python=None):
    """`accelerate launch` once all hosts have met, up to its second word."""
    return [python or quick_python(), "launchers/meet.py", "--timeout", seconds, "accelerate"]


class Hosts:
    """Two hosts, 0 and 1. `command(host, ...)` is what runs a command on one."""

    def __init__(self):
        self.id = f"h{os.getpid() % 100000}"
        self.names = [f"{self.id}n0", f"{self.id}n1"]
        # Above 127.0.0.1, because of two ranks, gloo lets the one with the higher address connect to the other.
        self.ips = ["192.168.83.1", "192.168.83.2"]
        for host in (0, 1):
            self._ip("netns", "add", self.names[host])
        try:
            ends = ["name", f"{self.id}v0", "netns", self.names[0], "type", "veth"]
            self._ip("link", "add", *ends, "peer", "name", f"{self.id}v1", "netns", self.names[1])
            for host, (name, ip) in enumerate(zip(self.names, self.ips, strict=True)):
                self._ip("-n", name, "addr", "add", f"{ip}/24", "dev", f"{self.id}v{host}")
                self._ip("-n", name, "link", "set", f"{self.id}v{host}", "up")
                self._ip("-n", name, "link", "set", "lo", "up")
        except subprocess.CalledProcessError:
            self.close()
            raise

    @staticmethod
    def _ip(*words):
        subprocess.run(["ip", *words], check=True, capture_output=True)

    def command(self, host, *command, names="/etc/hosts"):
        """names: the file that is this host's /etc/hosts."""
        named = 'hostname "$1"; mount --bind "$2" /etc/hosts; shift 2; exec "$@"'
        named = ["unshare", "--uts", "--mount", "sh", "-c", named, "-", f"host{host}", names]
        return ["ip", "netns", "exec", self.names[host], *named, *map(str, command)]

    def plug(self, state):
        """The cable of the second host: "up" or "down"."""
        self._ip("-n", self.names[1], "link", "set", f"{self.id}v1", state)

    def close(self):
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


@pytest.fixture(scope="module")
def hosts():
    need("a network of two hosts", iproute2="ip")
    try:
        found = Hosts()
    except subprocess.CalledProcessError as error:
        give_up(f"no network namespaces here: {error}")
    yield found
    found.close()


def launchers(
    run, hosts, config, *recipe, ranks=(0, 1), options=((), ()), ip=None, port=None, before=None, names=None, **kwargs
):
    """`accelerate launch` with a shipped config on each host; `before`: in its place, what ends with these words."""
    given = ["--mixed_precision", "no", "--main_process_ip", ip or hosts.ips[0], "--main_process_port"]
    given += [port or free_port(), "--machine_rank"]
    for host, rank in enumerate(ranks):
        command = launch_command(config, *given, rank, *options[host])
        command = [*before, *command[1:]] if before else quickly(command)
        command = hosts.command(host, *command, *recipe, names=names[host] if names else "/etc/hosts")
        own = {name: values[host] for name, values in kwargs.items()}
        run.start(command, **own | {"env": {"LAUNCH_TOKEN": "one-secret-of-all-hosts"} | own.get("env", {})})


def training(functions_file, out, *more):
    """A run of the recipe that does not end by itself."""
    return ["recipes/lm.py", "--train_file", functions_file, "--num_updates", 5000, "--output_dir", out, *more]


def test_every_config_for_several_nodes_is_tested_here():
    assert {path.stem for path in (ROOT / "accelerate_configs").glob("multi_node*.yaml")} == set(CONFIGS)


@pytest.mark.parametrize("config", CONFIGS)
def test_two_hosts_make_the_update_of_one(config, hosts, reference, functions_file, model_dir, tmp_path, extensions):
    out = tmp_path / "run"
    with Run(tmp_path) as run:
        launchers(run, hosts, config, "recipes/lm.py", *equivalence_flags(functions_file, model_dir, out))
        assert run.wait(200) == [0, 0], run.output(0) + run.output(1)
        assert not run.errors(0) and not run.errors(1)
    settings = json.loads((out / "run.json").read_text())
    assert (settings["mode"], settings["world_size"]) == (CONFIGS[config], 2)
    assert_is_the_run_of(reference, out)


def test_hosts_whose_own_names_lead_to_themselves_connect(hosts, functions_file, tmp_path):
    """As in Debian's /etc/hosts. Control: the test below, in which gloo takes the loopback interface."""
    names = [tmp_path / "hosts0", tmp_path / "hosts1"]
    for host, path in enumerate(names):
        path.write_text(f"127.0.0.1 localhost\n127.0.1.1 host{host}\n{hosts.ips[1 - host]} host{1 - host}\n")
    small = ["--sequence_length", 64, "--num_updates", 2, "--connect_timeout", 20]
    with Run(tmp_path) as run:
        recipe = training(functions_file, tmp_path / "run", *small)
        launchers(run, hosts, "multi_node", *recipe, ip="host0", names=names, before=[BIN / "accelerate"])
        assert run.wait(200) == [0, 0], run.output(0) + run.output(1)
    assert len(read_metrics(tmp_path / "run")) == 2


@pytest.mark.parametrize("fault", ["killed", "cut"])
def test_what_is_lost_on_one_host_ends_the_other(fault, hosts, functions_file, tmp_path):
    """A killed process; a cut network, where no connection is closed and only the keep-alives tell."""
    out = tmp_path / "run"
    with Run(tmp_path) as run:
        launchers(run, hosts, "multi_node", *training(functions_file, out))
        wait_for_updates(out, 3)
        started = time.monotonic()
        if fault == "killed":
            find_rank(run.processes[1], 1).kill()
            assert all(run.wait(10)) and not run.errors(1)
            assert "exitcode  : 3" in run.output(0)
        else:
            hosts.plug("down")
            try:
                assert run.processes[0].wait(timeout=40) != 0
            finally:
                hosts.plug("up")
        print(f"ended {time.monotonic() - started:.1f} s after it was {fault}", file=sys.stderr)
        what = "was lost" if fault == "killed" else "(was lost|stopped answering)"
        assert len(run.errors(0)) == 1, run.output(0)
        pattern = rf"error: rank 1 on host host1 {what} at update \d+; this process \(rank 0\) ends"
        assert re.match(pattern, run.errors(0)[0]), run.output(0)


@pytest.mark.parametrize("case", ["a file that one lacks", "an output directory of each"])
def test_a_mistake_that_one_host_sees_is_told_on_both(case, hosts, functions_file, tmp_path):
    """Nothing is left there. Control: all other tests, whose hosts share their files."""
    directories = [tmp_path / f"host{host}" for host in (0, 1)]
    for directory in directories:
        directory.mkdir()
    recipe, what = ["--output_dir", "runs/x"], r"--output_dir runs/x: a file that rank 0 on host \S+ wrote there"
    if case == "a file that one lacks":
        shutil.copy(functions_file, directories[0] / "mine.jsonl")
        recipe, what = ["--train_file", "mine.jsonl", "--output_dir", tmp_path / "run"], "mine.jsonl: no such file"
    with Run(tmp_path) as run:
        launchers(run, hosts, "multi_node", ROOT / "recipes/lm.py", *recipe, cwd=directories)
        assert all(run.wait(120))
        for host in (0, 1):
            assert len(run.errors(host)) == 1, run.output(host)
            assert re.match(rf"error: (rank \d on host \S+: )?{what}", run.errors(host)[0]), run.output(host)
        assert not (tmp_path / "run").exists() and list(directories[1].iterdir()) == []
        assert {path.name for path in directories[0].iterdir()} <= {"mine.jsonl"}


def test_a_network_that_does_not_connect_the_hosts_is_told(hosts, functions_file, tmp_path):
    recipe = training(functions_file, tmp_path / "run", "--connect_timeout", 8)
    with Run(tmp_path) as run:
        launchers(run, hosts, "multi_node", *recipe, env=2 * [{"GLOO_SOCKET_IFNAME": "lo"}])
        assert all(run.wait(180))
        errors = run.errors(0) + run.errors(1)
        assert errors and all("GLOO_SOCKET_IFNAME" in line for line in errors), run.output(0) + run.output(1)


SAME, THREE = ((), ()), (("--num_processes", 3),)
# The ranks that start, their flags, and the line that each prints; the address leads to the first host.
MEETINGS = {
    "never arrives": ([0], SAME, r"machine rank 1 of 2 did not come to \S+ within 4 s"),
    "port in use": ([0], SAME, r"port \d+ of this machine, \S+, is in use by \S+ \(process \d+\)"),
    "another program": ([1], SAME, r"which does not answer; is it the port of another program"),
    "rank twice": ([0, 0], SAME, r"both have --machine_rank 0|does not lead to this|did not come to"),
    "other numbers": (
        [0, 1],
        (("--num_processes", 2), ("--num_processes", 4)),
        r"was started with --num_machines 2 --num_processes [24], host \S+ with",
    ),
    "no number of processes": ([0], THREE, r"3 processes on 2 machines, which does not divide"),
    "no address": (
        [0, 1],
        SAME,
        r"192.168.83.9 does not lead to this machine, host0|host host1 did not reach machine rank 0 at 192.168.83.9",
    ),
}


@pytest.mark.parametrize("case", MEETINGS)
def test_hosts_that_do_not_meet_are_told_in_one_line(case, hosts, tmp_path):
    ranks, options, pattern = MEETINGS[case]
    port, ip = free_port(), "192.168.83.9" if case == "no address" else None
    with Run(tmp_path) as run:
        num_other = 0
        if case in ("port in use", "another program"):
            code = f"import socket, time; s = socket.create_server(('', {port})); time.sleep(60)"
            run.start(hosts.command(0, BIN / "python", "-c", code))
            time.sleep(1)
            num_other = 1
        # A slow machine starts the second launcher late; where one is to be missed, the wait is short.
        before = meet(60 if case == "other numbers" else 4)
        flags = {"ranks": ranks, "options": options, "ip": ip, "port": port, "before": before}
        launchers(run, hosts, "multi_node", "recipes/lm.py", "--dry_run", **flags)
        assert [process.wait(timeout=80) for process in run.processes[num_other:]] == [2] * len(ranks)
        for number in range(num_other, len(run.processes)):
            assert len(run.errors(number)) == 1 and re.search(pattern, run.errors(number)[0]), run.output(number)
            assert "Traceback" not in run.output(number)


@pytest.mark.parametrize("config", CONFIGS)
def test_accelerate_launch_alone_waits_a_minute_not_15(config):
    command = [str(part) for part in launch_command(config, "recipes/lm.py")]
    assert parse_launch(command[2:]).settings["rdzv_conf"] == "timeout=60"


@pytest.fixture(scope="module")
def ssh(hosts, tmp_path_factory):
    """A real sshd on each host, with keys of its own: the ssh command that reaches host0 and host1."""
    need("ssh", openssh_server="sshd", openssh_client="ssh-keygen")
    directory = tmp_path_factory.mktemp("ssh")
    os.makedirs("/run/sshd", mode=0o755, exist_ok=True)
    for key in ("server", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", directory / key], check=True)
    servers, config = [], ""
    for host in (0, 1):
        port = free_port()
        settings = [f"Port {port}", f"HostKey {directory}/server", f"AuthorizedKeysFile {directory}/user.pub"]
        settings += ["PidFile none", "StrictModes no", "UsePAM no", "PermitRootLogin yes", "PasswordAuthentication no"]
        (directory / f"sshd-{host}").write_text("\n".join(settings) + "\n")
        command = ["/usr/sbin/sshd", "-D", "-e", "-f", directory / f"sshd-{host}"]
        with open(directory / f"log-{host}", "w") as log:
            servers.append(subprocess.Popen(hosts.command(host, *command), stdout=log, stderr=log))
        config += f"Host host{host}\n  HostName {hosts.ips[host]}\n  Port {port}\n"
    config += f"Host *\n  User root\n  IdentityFile {directory}/user\n  StrictHostKeyChecking no\n"
    config += "  UserKnownHostsFile /dev/null\n  LogLevel ERROR\n"
    (directory / "config").write_text(config)
    time.sleep(1)
    yield f"ssh -F {directory}/config"
    for server in servers:
        server.terminate()
        server.wait()


def start_by_ssh(run, hosts, ssh, *recipe):
    env = {"PYTHON": str(BIN / "python"), "LAUNCH_FLAGS": "--mixed_precision no", "TIMEOUT": "20", "SSH": ssh}
    env |= {"MAIN_IP": hosts.ips[0], "PORT": str(free_port()), "HF_HUB_OFFLINE": "1"}
    command = ["launchers/hosts.sh", "host0 host1", "accelerate_configs/multi_node.yaml", *recipe]
    return run.start(hosts.command(0, *command), env=env)


def test_hosts_sh_starts_the_same_command_on_each_host(hosts, ssh, functions_file, tmp_path):
    """Arguments with blanks and quotes arrive, and every line has its host."""
    out = tmp_path / 'it\'s a "run" $HOME'
    with Run(tmp_path) as run:
        start_by_ssh(run, hosts, ssh, *training(functions_file, out, "--sequence_length", 64, "--num_updates", 2))
        assert run.wait(100) == [0], run.output(0)
        assert len(read_metrics(out)) == 2
        assert json.loads((out / "run.json").read_text())["world_size"] == 2
        assert re.search(r"^host0\t +model  LlamaForCausalLM", run.output(0), re.M), run.output(0)


@pytest.mark.parametrize("ended", ["the launcher of host 1", "the script, as by Ctrl-C"])
def test_hosts_sh_ends_everywhere_when_one_part_ends(ended, hosts, ssh, functions_file, tmp_path):
    with Run(tmp_path) as run:
        head = start_by_ssh(run, hosts, ssh, *training(functions_file, tmp_path / "run"))
        wait_for_updates(tmp_path / "run", 2)
        running = psutil.process_iter(["cmdline", "environ"])  # of one that ends meanwhile: None
        known = [(process, *map(process.info.get, ("cmdline", "environ"))) for process in running]
        workers = [p for p, words, names in known if str(tmp_path / "run") in (words or ()) and "RANK" in (names or ())]
        ranks = {worker.environ()["RANK"]: worker for worker in workers}
        assert ranks.keys() == {"0", "1"}
        (ranks["1"].parent() if ended == "the launcher of host 1" else head).terminate()
        assert head.wait(timeout=20) != 0
        assert psutil.wait_procs(workers, timeout=15)[1] == []


def test_a_request_to_stop_goes_through_the_launcher(functions_file, model_dir, tmp_path):
    """SIGUSR1 to meet.py, which threads of numpy must not take. Control: `accelerate launch` by itself dies of it."""
    outs, launch = [tmp_path / "met", tmp_path / "control"], launch_command("cpu")
    with Run(tmp_path) as run:
        # Threads begin where numpy is imported: in a Python that does it itself.
        met = [*meet(4, BIN / "python"), *launch[1:]], {"OPENBLAS_NUM_THREADS": "2"}
        for out, (command, env) in zip(outs, (met, (launch, {})), strict=True):
            recipe = training(functions_file, out, "--model_name_or_path", model_dir, "--sequence_length", 64)
            run.start([*command, *recipe], env=env)
        for out in outs:
            wait_for_updates(out, 1)
        for process in run.processes:
            process.send_signal(signal.SIGUSR1)
        statuses = run.wait(60)
        assert statuses == [1, -signal.SIGUSR1], run.output(0)
    assert json.loads((outs[0] / "run.json").read_text())["status"].startswith("stopped after update")
