"""Several hosts: two network namespaces of this machine, joined by a cable of their own, each with its host name.

Where that cannot be had (it needs root and iproute2), two launchers on this one host, and some tests are skipped; with
REQUIRE_HOSTS=1 in the environment they fail. apt install iproute2 openssh-server parallel slurm-wlm munge
"""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from conftest import BIN, ROOT, equivalence_flags, launch_command, read_metrics
from safetensors.torch import load_file

CONFIGS = {"multi_node": "DDP", "multi_node_zero3": "DeepSpeed"}
MEET = [BIN / "python", "launchers/meet.py", "--timeout", 4]


def need(reason, **programs):
    """Skips where a program is missing; the keys are Debian's packages."""
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    missing = [package for package, program in programs.items() if shutil.which(program, path=path) is None]
    if os.geteuid() != 0:
        missing.append("root")
    if missing:
        message = f"{reason} needs {', '.join(name.replace('_', '-') for name in missing)}"
        pytest.fail(message) if os.environ.get("REQUIRE_HOSTS") == "1" else pytest.skip(message)


class Hosts:
    """Two hosts, 0 and 1. `command(host, ...)` is what runs a command on one."""

    def __init__(self):
        self.id = f"h{os.getpid() % 100000}"
        self.names = [f"{self.id}n0", f"{self.id}n1"]
        self.ips = ["10.83.0.1", "10.83.0.2"]
        self.are_real = False
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
        self.are_real = True

    @staticmethod
    def _ip(*words):
        subprocess.run(["ip", *words], check=True, capture_output=True)

    def command(self, host, *command):
        named = ["unshare", "--uts", "sh", "-c", 'hostname "$1"; shift; exec "$@"', "-", f"host{host}"]
        return ["ip", "netns", "exec", self.names[host], *named, *map(str, command)]

    def unplug(self):
        self._ip("-n", self.names[1], "link", "set", f"{self.id}v1", "down")

    def plug(self):
        self._ip("-n", self.names[1], "link", "set", f"{self.id}v1", "up")

    def close(self):
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


class OneHost:
    """Two launchers on this host, in the place of two hosts."""

    are_real = False
    ips = ["127.0.0.1", "127.0.0.1"]

    def command(self, host, *command):
        return [str(part) for part in command]

    def close(self):
        pass


@pytest.fixture(scope="module")
def hosts():
    try:
        found = Hosts()
    except (OSError, subprocess.CalledProcessError) as error:
        if os.environ.get("REQUIRE_HOSTS") == "1":
            pytest.fail(f"no network namespaces here: {error}")
        found = OneHost()
    yield found
    found.close()


@pytest.fixture
def two_hosts(hosts):
    if not hosts.are_real:
        pytest.skip("needs root and network namespaces" if shutil.which("ip") else "needs iproute2")
    return hosts


def free_port():
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]


class Run:
    """Commands that run at the same time, and all end with the block."""

    def __init__(self, directory):
        self.directory, self.processes = directory, []

    def start(self, command, **kwargs):
        number = len(self.processes)
        env = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TQDM_MININTERVAL": "5"} | kwargs.pop("env", {})
        with open(self.directory / f"output-{number}", "w") as output:
            kwargs = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output, "cwd": ROOT} | kwargs
            process = subprocess.Popen([str(part) for part in command], env=os.environ | env, **kwargs)
        self.processes.append(process)
        return process

    def wait(self, timeout):
        """The exit statuses."""
        deadline = time.monotonic() + timeout
        return [process.wait(timeout=max(0.1, deadline - time.monotonic())) for process in self.processes]

    def output(self, number):
        return (self.directory / f"output-{number}").read_text()

    def errors(self, number):
        """The lines that our own code tells."""
        return [line for line in self.output(number).splitlines() if line.startswith("error: ")]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            if process.poll() is None:
                for child in [*psutil.Process(process.pid).children(recursive=True), process]:
                    child.kill()
                process.wait()


def launchers(run, hosts, config, recipe, ip=None, port=None, options=(), **kwargs):
    """`accelerate launch` with a shipped config on each host."""
    port = port or free_port()
    for host in (0, 1):
        given = ["--mixed_precision", "no", "--main_process_ip", ip or hosts.ips[0], "--main_process_port", port]
        command = [*launch_command(config, *given, "--machine_rank", host, *options), *recipe]
        run.start(hosts.command(host, *command), **kwargs)


def test_every_config_for_several_nodes_is_tested_here():
    assert {path.stem for path in (ROOT / "accelerate_configs").glob("multi_node*.yaml")} == set(CONFIGS)


@pytest.mark.parametrize("config", CONFIGS)
def test_two_hosts_make_the_update_of_one(
    config, hosts, reference, functions_file, model_dir, tmp_path, extensions, monkeypatch
):
    expected, weights = reference
    out = tmp_path / "run"
    with Run(tmp_path) as run:
        launchers(run, hosts, config, ["recipes/lm.py", *equivalence_flags(functions_file, model_dir, out)])
        assert run.wait(200) == [0, 0], run.output(0) + run.output(1)
        assert not run.errors(0) and not run.errors(1)
    settings = json.loads((out / "run.json").read_text())
    assert (settings["mode"], settings["world_size"]) == (CONFIGS[config], 2)
    assert all(line["grad_norm"] > 0.5 for line in expected[:5])  # clipped
    for line, other in zip(read_metrics(out), expected, strict=True):
        assert line["sample_digest"] == other["sample_digest"]
        assert line["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert line["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
    for name, weight in load_file(out / "model/model.safetensors").items():
        assert (weight - weights[name]).abs().max() < 1e-5, name


def wait_for_updates(out, number):
    deadline = time.monotonic() + 300  # a start alone takes a loaded machine a minute
    while not ((out / "metrics.jsonl").exists() and len(read_metrics(out)) >= number):
        assert time.monotonic() < deadline, "no update was made"
        time.sleep(0.1)


def test_a_process_killed_on_one_host_ends_the_other_host(hosts, functions_file, tmp_path):
    out, lost = tmp_path / "run", 1
    recipe = ["recipes/lm.py", "--train_file", functions_file, "--num_updates", 5000, "--output_dir", out]
    with Run(tmp_path) as run:
        launchers(run, hosts, "multi_node", recipe)
        wait_for_updates(out, 3)
        launcher = psutil.Process(run.processes[lost].pid)
        next(p for p in launcher.children(recursive=True) if p.environ().get("RANK") == str(lost)).kill()
        killed = time.monotonic()
        assert all(run.wait(10))
        print(f"both hosts ended {time.monotonic() - killed:.1f} s after the kill", file=sys.stderr)
        name = f"host{lost}" if hosts.are_real else socket.gethostname()
        pattern = rf"error: rank {lost} on host {name} was lost at update \d+; this process \(rank {1 - lost}\) ends"
        assert len(run.errors(1 - lost)) == 1 and re.match(pattern, run.errors(1 - lost)[0]), run.output(1 - lost)
        assert "exitcode  : 3" in run.output(1 - lost)
        assert not run.errors(lost)


def test_a_host_that_is_gone_ends_the_other(two_hosts, functions_file, tmp_path):
    """Its network is cut: no connection is closed, only the keep-alives tell."""
    out = tmp_path / "run"
    recipe = ["recipes/lm.py", "--train_file", functions_file, "--num_updates", 5000, "--output_dir", out]
    with Run(tmp_path) as run:
        launchers(run, two_hosts, "multi_node", recipe)
        wait_for_updates(out, 3)
        two_hosts.unplug()
        try:
            cut = time.monotonic()
            assert run.processes[0].wait(timeout=40) != 0
            print(f"the first host ended {time.monotonic() - cut:.1f} s after the cut", file=sys.stderr)
            assert re.match(r"error: rank 1 on host host1 (was lost|stopped answering) at update \d+", run.errors(0)[0])
        finally:
            two_hosts.plug()


def test_a_mistake_on_one_host_is_told_by_the_other(hosts, functions_file, tmp_path):
    """A file that only the first host has."""
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    shutil.copy(functions_file, tmp_path / "here/mine.jsonl")
    recipe = [ROOT / "recipes/lm.py", "--train_file", "mine.jsonl", "--output_dir", tmp_path / "run"]
    port = free_port()
    with Run(tmp_path) as run:
        for host, directory in enumerate(("here", "there")):
            given = ["--mixed_precision", "no", "--main_process_ip", hosts.ips[0], "--main_process_port", port]
            command = [*launch_command("multi_node", *given, "--machine_rank", host), *recipe]
            run.start(hosts.command(host, *command), cwd=tmp_path / directory)
        assert all(run.wait(60))
        assert len(run.errors(1)) == 1 and "mine.jsonl: no such file" in run.errors(1)[0]
        assert len(run.errors(0)) == 1 and re.match(r"error: rank 1 on host \S+: mine.jsonl: no such", run.errors(0)[0])


def test_an_output_directory_that_hosts_do_not_share_is_refused_at_the_start(hosts, tmp_path):
    """Each host has its own. Nothing is left there. Control: all other tests, whose hosts share theirs."""
    with Run(tmp_path) as run:
        port = free_port()
        for host in (0, 1):
            (tmp_path / f"host{host}").mkdir()
            given = ["--mixed_precision", "no", "--main_process_ip", hosts.ips[0], "--main_process_port", port]
            command = [*launch_command("multi_node", *given, "--machine_rank", host), ROOT / "recipes/lm.py"]
            run.start(hosts.command(host, *command, "--output_dir", "runs/x"), cwd=tmp_path / f"host{host}")
        assert all(run.wait(120))
        for host in (0, 1):
            assert len(run.errors(host)) == 1, run.output(host)
            pattern = r"error: (rank \d on host \S+: )?--output_dir runs/x: what rank 0 on host \S+ writes there is not"
            assert re.match(pattern, run.errors(host)[0]), run.output(host)
            assert list((tmp_path / f"host{host}").iterdir()) == []


def test_a_network_that_does_not_connect_the_hosts_is_told(two_hosts, functions_file, tmp_path):
    recipe = ["recipes/lm.py", "--train_file", functions_file, "--connect_timeout", 8, "--output_dir", tmp_path / "run"]
    with Run(tmp_path) as run:
        launchers(run, two_hosts, "multi_node", recipe, env={"GLOO_SOCKET_IFNAME": "lo"})
        assert all(run.wait(60))
        errors = run.errors(0) + run.errors(1)
        assert errors and all("GLOO_SOCKET_IFNAME" in line for line in errors), run.output(0) + run.output(1)


def meet(run, hosts, host, ip, port, *options):
    given = ["--mixed_precision", "no", "--machine_rank", host, "--main_process_ip", ip, "--main_process_port", port]
    command = [*MEET, *launch_command("multi_node", *given, *options), "recipes/lm.py", "--dry_run"]
    return run.start(hosts.command(host, *command))


MEETINGS = {
    "never arrives": ([0], r"machine rank 1 of 2 did not come to \S+ within 4 s"),
    "port in use": ([0], r"port \d+ of this machine, \S+, is in use by \S+ \(process \d+\)"),
    "another program": ([1], r"which does not answer; is it the port of another program"),
    # Where both hosts are this one, the port is taken.
    "rank twice": ([0, 0], r"both have --machine_rank 0|does not lead to this machine|did not come to|is in use by"),
    "other numbers": ([0, 1], r"was started with --num_machines 2 --num_processes [24], host \S+ with"),
    "no number of processes": ([0], r"3 processes on 2 machines, which does not divide"),
}


@pytest.mark.parametrize("case", MEETINGS)
def test_hosts_that_do_not_meet_are_told_in_one_line(case, hosts, tmp_path):
    ranks, pattern = MEETINGS[case]
    port = free_port()
    with Run(tmp_path) as run:
        if case in ("port in use", "another program"):
            code = f"import socket, time; s = socket.create_server(('', {port})); time.sleep(60)"
            run.start(hosts.command(0, BIN / "python", "-c", code))
            time.sleep(1)
        other = run.processes[:]
        more = {"other numbers": [["--num_processes", 2], ["--num_processes", 4]]}.get(case, [[], []])
        more = [["--num_processes", 3]] if case.startswith("no number") else more
        started = time.monotonic()
        for number, rank in enumerate(ranks):
            if case == "rank twice" and number:
                given = ["--machine_rank", 0, "--main_process_ip", hosts.ips[0], "--main_process_port", port]
                run.start(hosts.command(1, *MEET, *launch_command("multi_node", *given), "recipes/lm.py"))
            else:
                meet(run, hosts, rank, hosts.ips[0], port, *more[number])
        statuses = [process.wait(timeout=40) for process in run.processes if process not in other]
        print(f"{case}: {time.monotonic() - started:.1f} s, imports included", file=sys.stderr)
        assert statuses == [2] * len(ranks)
        outputs = [run.output(number) for number in range(len(other), len(run.processes))]
        for number in range(len(other), len(run.processes)):
            assert len(run.errors(number)) == 1, outputs
            assert re.search(pattern, run.errors(number)[0]), outputs
        assert not any("Traceback" in output for output in outputs)


def test_an_address_of_no_host_is_told(two_hosts, tmp_path):
    with Run(tmp_path) as run:
        port = free_port()
        for host in (0, 1):
            meet(run, two_hosts, host, "10.83.0.9", port)
        assert run.wait(40) == [2, 2]
        assert "--main_process_ip 10.83.0.9 does not lead to this machine, host0" in run.errors(0)[0]
        assert "machine rank 1 on host host1 did not reach machine rank 0 at 10.83.0.9" in run.errors(1)[0]


@pytest.mark.parametrize("config", CONFIGS)
def test_accelerate_launch_alone_waits_a_minute_not_15(config, tmp_path):
    """The configs set the launcher's time; it ends in a traceback with a clear last line."""
    command = launch_command(config, "--machine_rank", 0, "--main_process_ip", "127.0.0.1", "recipes/lm.py")
    args, *_ = _validate_launch_command(launch_command_parser().parse_args([str(part) for part in command[2:]]))
    assert args.rdzv_conf == "timeout=60"
    if config == "multi_node":
        with Run(tmp_path) as run:
            given = ["--machine_rank", 0, "--main_process_ip", "127.0.0.1", "--main_process_port", free_port()]
            run.start([*launch_command(config, *given, "--rdzv_conf", "timeout=3"), "recipes/lm.py"])
            assert run.wait(40) == [1]
            assert re.search(r"Timed out after \d+ seconds waiting for clients. 1/2 clients joined", run.output(0))


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


def hosts_environment(hosts, ssh):
    python = {"PYTHON": str(BIN / "python"), "LAUNCH_FLAGS": "--mixed_precision no", "TIMEOUT": "20"}
    return python | {"SSH": ssh, "MAIN_IP": hosts.ips[0], "PORT": str(free_port()), "HF_HUB_OFFLINE": "1"}


def without_parallel(tmp_path):
    """A PATH that has all but GNU parallel."""
    (tmp_path / "bin").mkdir()
    for directory in os.environ["PATH"].split(":")[::-1]:
        for program in Path(directory).iterdir() if Path(directory).is_dir() else []:
            link = tmp_path / "bin" / program.name
            if program.name != "parallel":
                link.unlink(missing_ok=True)
                link.symlink_to(program)
    return {"PATH": str(tmp_path / "bin")}


def test_hosts_sh_starts_the_same_command_on_each_host(hosts, ssh, functions_file, tmp_path):
    """Arguments with blanks and quotes arrive, and every line has its host; with GNU parallel, where it is."""
    env = hosts_environment(hosts, ssh)
    out = tmp_path / 'it\'s a "run" $HOME'
    recipe = ["recipes/lm.py", "--train_file", functions_file, "--output_dir", out, "--sequence_length", 64]
    with Run(tmp_path) as run:
        command = ["launchers/hosts.sh", "host0 host1", "accelerate_configs/multi_node.yaml", *recipe]
        run.start(hosts.command(0, *command, "--num_updates", 2), env=env)
        assert run.wait(100) == [0], run.output(0)
        assert len(read_metrics(out)) == 2
        assert json.loads((out / "run.json").read_text())["world_size"] == 2
        assert re.search(r"^host0\t +model  LlamaForCausalLM", run.output(0), re.M), run.output(0)


def test_hosts_sh_ends_everywhere_when_one_host_fails(hosts, ssh, functions_file, tmp_path):
    out = tmp_path / "run"
    with Run(tmp_path) as run:
        command = ["launchers/hosts.sh", "host0 host1", "accelerate_configs/multi_node.yaml", "recipes/lm.py"]
        command += ["--train_file", functions_file, "--num_updates", 5000, "--output_dir", out]
        run.start(hosts.command(0, *command), env=hosts_environment(hosts, ssh))
        wait_for_updates(out, 2)
        workers = [p for p in psutil.process_iter() if str(out) in p.cmdline() and "RANK" in p.environ()]
        assert {worker.environ()["RANK"] for worker in workers} == {"0", "1"}
        launcher = next(worker for worker in workers if worker.environ()["RANK"] == "1").parent()
        launcher.send_signal(signal.SIGTERM)  # the launcher of host 1 ends
        assert run.processes[0].wait(timeout=20) != 0
        gone, alive = psutil.wait_procs(workers, timeout=10)
        assert not alive


def test_hosts_sh_is_stopped_everywhere(hosts, ssh, functions_file, tmp_path):
    """Ctrl-C at the head: the remote processes end too."""
    out = tmp_path / "run"
    with Run(tmp_path) as run:
        command = ["launchers/hosts.sh", "host0 host1", "accelerate_configs/multi_node.yaml", "recipes/lm.py"]
        command += ["--train_file", functions_file, "--num_updates", 5000, "--output_dir", out]
        head = run.start(hosts.command(0, *command), env=hosts_environment(hosts, ssh) | without_parallel(tmp_path))
        wait_for_updates(out, 2)
        workers = [p for p in psutil.process_iter() if str(out) in p.cmdline()]
        head.terminate()
        assert head.wait(timeout=20) != 0
        gone, alive = psutil.wait_procs(workers, timeout=15)
        assert not alive


def test_a_request_to_stop_goes_through_the_launcher(functions_file, model_dir, tmp_path):
    """SIGUSR1 to meet.py, which threads of numpy must not take. Control: `accelerate launch` by itself dies of it."""
    recipe = ["recipes/lm.py", "--train_file", functions_file, "--model_name_or_path", model_dir]
    recipe += ["--num_updates", 5000, "--sequence_length", 64]
    outs = [tmp_path / "met", tmp_path / "control"]
    with Run(tmp_path) as run:
        for out, before in zip(
            outs, ([BIN / "python", "launchers/meet.py", "accelerate", "launch"], None), strict=True
        ):
            command = launch_command("cpu")
            command = [*before, *command[2:]] if before else command
            run.start([*command, *recipe, "--output_dir", out], env={"OPENBLAS_NUM_THREADS": "2"})
        for out in outs:
            wait_for_updates(out, 1)
        for process in run.processes:
            process.send_signal(signal.SIGUSR1)
        statuses = run.wait(60)
        assert statuses == [1, -signal.SIGUSR1], run.output(0)
    assert json.loads((outs[0] / "run.json").read_text())["status"].startswith("stopped after update")


@contextmanager
def slurm(directory):
    """A SLURM of three nodes on this machine: the environment in which its commands reach it."""
    host = socket.gethostname()
    directory.chmod(0o755)
    for part in ("state", "spool-n1", "spool-n2", "spool-n3", "munge"):
        (directory / part).mkdir()
    ports = [free_port() for _ in range(4)]
    (directory / "slurm.conf").write_text(
        f"""ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={directory}/munge/socket
CryptoType=crypto/munge
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool-%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd-%n.pid
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/linear
ReturnToService=2
SwitchType=switch/none
MpiDefault=none
KillWait=2
NodeName=n1 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[1]} CPUs=1
NodeName=n2 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[2]} CPUs=1
NodeName=n3 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[3]} CPUs=1
PartitionName=all Nodes=n1,n2,n3 Default=YES State=UP
"""
    )
    env = os.environ | {"SLURM_CONF": str(directory / "slurm.conf")}
    key = directory / "munge/key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    shutil.chown(directory / "munge", "root", "root")
    munged = ["/usr/sbin/munged", "-F", "--force", "--key-file", key, "--socket", directory / "munge/socket"]
    munged += [f"--{name}-file={directory}/munge/{name}" for name in ("pid", "log", "seed")]
    services = [munged, ["/usr/sbin/slurmctld", "-D", "-i"], ["/usr/sbin/slurmd", "-D", "-N", "n1"]]
    services += [["/usr/sbin/slurmd", "-D", "-N", name] for name in ("n2", "n3")]
    running = []
    try:
        for number, service in enumerate(services):
            with open(directory / f"service-{number}", "w") as log:
                command = [str(part) for part in service]
                running.append(subprocess.Popen(command, env=env, stdout=log, stderr=log, stdin=subprocess.DEVNULL))
            time.sleep(1)
        deadline = time.monotonic() + 30
        while True:
            states = subprocess.run(["sinfo", "-h", "-o", "%D %t"], env=env, capture_output=True, text=True)
            if states.stdout.strip() == "3 idle":
                break
            logs = [(directory / f"service-{number}").read_text()[-2000:] for number in range(len(services))]
            assert time.monotonic() < deadline, [states, *logs]
            time.sleep(0.5)
        yield env
    finally:
        for service in reversed(running):
            service.terminate()
            try:
                service.wait(timeout=10)
            except subprocess.TimeoutExpired:
                service.kill()
                service.wait()


@pytest.fixture(scope="module")
def slurm_env(tmp_path_factory):
    need("SLURM", slurm_wlm="slurmctld", munge="munged")
    with slurm(tmp_path_factory.mktemp("slurm")) as env:
        yield env


def start_job(env, script, nodes, recipe, directory, *options, **given):
    """The number of a job that was handed in."""
    # All nodes are this machine, where their names lead nowhere.
    given = {"MAIN_IP": "127.0.0.1", "PYTHON": str(BIN / "python"), "LAUNCH_FLAGS": "--mixed_precision no"} | given
    command = ["sbatch", "--parsable", "--nodes", nodes, "--output", directory / "log", *options, script, *recipe]
    env = env | {"OMP_NUM_THREADS": "1", "TIMEOUT": "30"} | given
    result = subprocess.run([str(part) for part in command], env=env, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def job_facts(env, job):
    """State and so on, as SLURM shows them."""
    text = subprocess.run(["scontrol", "show", "job", job], env=env, capture_output=True, text=True).stdout
    return dict(word.split("=", 1) for word in text.split() if "=" in word)


def wait_for_job(env, job, wanted, timeout=240):
    """Waits until the facts of a job are as `wanted`, a function, has them."""
    deadline = time.monotonic() + timeout
    while not wanted(facts := job_facts(env, job)):
        assert time.monotonic() < deadline, facts
        time.sleep(0.3)
    return facts


def has_ended(facts):
    return facts["JobState"] not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING")


def submit(env, script, nodes, recipe, directory, **given):
    """A job's final state and output."""
    job = start_job(env, script, nodes, recipe, directory, **given)
    return wait_for_job(env, job, has_ended)["JobState"], (directory / "log").read_text()


@pytest.fixture(scope="module")
def two_node_job(slurm_env, functions_file, model_dir, tmp_path_factory):
    """A job on two nodes that nothing disturbs: its final state, its log, its output directory."""
    directory = tmp_path_factory.mktemp("job")
    recipe = ["recipes/lm.py", *equivalence_flags(functions_file, model_dir, directory / "a run")]
    return *submit(slurm_env, "launchers/slurm.sbatch", 2, recipe, directory), directory / "a run"


def test_the_same_sbatch_file_runs_on_two_nodes(two_node_job, reference):
    state, log, out = two_node_job
    assert state == "COMPLETED", log
    settings = json.loads((out / "run.json").read_text())
    assert (settings["mode"], settings["world_size"]) == ("DDP", 2)
    for line, other in zip(read_metrics(out), reference[0], strict=True):
        assert line["loss"] == pytest.approx(other["loss"], rel=1e-5)


def test_the_same_sbatch_file_runs_on_one_node_with_another_config(slurm_env, functions_file, tmp_path, extensions):
    recipe = ["recipes/lm.py", "--train_file", functions_file, "--sequence_length", 64, "--dry_run"]
    given = {"CONFIG": "accelerate_configs/zero3.yaml", "PROCESSES_PER_NODE": "2"}
    state, log = submit(slurm_env, "launchers/slurm.sbatch", 1, recipe, tmp_path, **given)
    assert state == "COMPLETED" and "DeepSpeed ZeRO-3, 2 processes" in log, log


def test_a_node_rank_expanded_on_the_first_node_is_told(slurm_env, functions_file, tmp_path):
    """The control: without the quotes every node has rank 0."""
    script = (ROOT / "launchers/slurm.sbatch").read_text()
    (tmp_path / "wrong.sbatch").write_text(script.replace('"$SLURM_NODEID"', "'\"$SLURM_NODEID\"'"))
    recipe = ["recipes/lm.py", "--train_file", functions_file, "--dry_run"]
    state, log = submit(slurm_env, tmp_path / "wrong.sbatch", 2, recipe, tmp_path, TIMEOUT="5")
    assert state == "FAILED", log
    # On two machines they both have rank 0; here, the second finds the port taken.
    assert re.search(r"error: (hosts \S+ and \S+ both have --machine_rank 0|port \d+ of this machine)", log), log


def slow_recipe(directory):
    """A copy of the recipe whose updates last as many seconds as the file says that is returned too."""
    (directory / "recipes").mkdir()
    (directory / "common").symlink_to(ROOT / "common")
    seconds, line = directory / "seconds", "    for batch in batches:\n"
    text = (ROOT / "recipes/lm.py").read_text()
    assert line in text
    slow = f"{line}        time.sleep(float(Path({str(seconds)!r}).read_text()))\n"
    text = text.replace("import sys\n", "import sys\nimport time\n", 1).replace(line, slow)
    (directory / "recipes/lm.py").write_text(text)
    return directory / "recipes/lm.py", seconds


def requeued(number):
    return lambda facts: facts["Restarts"] == str(number) and facts["JobState"] == "PENDING"


def test_a_job_goes_on_after_its_time_limit_and_a_preemption(
    slurm_env, two_node_job, functions_file, model_dir, tmp_path
):
    """The weights are those of the job that nothing disturbed. Control: a job that asks for no signal runs out."""
    recipe, seconds = slow_recipe(tmp_path)
    out, flags = tmp_path / "run", ["--save_every", 1]
    seconds.write_text("4")
    script = (ROOT / "launchers/slurm.sbatch").read_text()
    (tmp_path / "deaf.sbatch").write_text(script.replace("#SBATCH --signal", "# --signal"))
    (tmp_path / "deaf").mkdir()
    # On the third node, at the same time; its update takes longer than its two minutes.
    deaf_copy, deaf_seconds = slow_recipe(tmp_path / "deaf")  # the other one's updates become quick
    deaf_seconds.write_text("300")
    deaf_recipe = [deaf_copy, *equivalence_flags(functions_file, model_dir, tmp_path / "deaf/run", "--num_updates", 99)]
    deaf_job = start_job(
        slurm_env,
        tmp_path / "deaf.sbatch",
        1,
        deaf_recipe,
        tmp_path / "deaf",
        "--time=2",
        CONFIG="accelerate_configs/cpu.yaml",
    )

    def change(job, **settings):
        words = [f"{key}={value}" for key, value in settings.items()]
        subprocess.run(["scontrol", "update", f"JobId={job}", *words], env=slurm_env, check=True)

    command = [recipe, *equivalence_flags(functions_file, model_dir, out, *flags)]
    job = start_job(slurm_env, "launchers/slurm.sbatch", 2, command, tmp_path, "--time=4")  # below the signal's 300 s
    wait_for_job(slurm_env, job, requeued(1))
    status = json.loads((out / "run.json").read_text())["status"]
    assert status.startswith("stopped after update"), (tmp_path / "log").read_text()
    done = int(status.split()[-1])
    change(job, TimeLimit=30, StartTime="now")  # SLURM itself waits for two minutes
    wait_for_updates(out, done + 1)
    seconds.write_text("20")  # longer than SLURM waits for it to end (KillWait)
    wait_for_updates(out, done + 2)
    subprocess.run(["scontrol", "requeue", job], env=slurm_env, check=True)
    wait_for_job(slurm_env, job, requeued(2))
    seconds.write_text("0")
    change(job, StartTime="now")
    facts = wait_for_job(slurm_env, job, has_ended)
    log = (tmp_path / "log").read_text()
    assert facts["JobState"] == "COMPLETED" and facts["Restarts"] == "2", log
    first, second = dict.fromkeys(re.findall(r"resuming from .*, after update (\d+)", log))  # told on each node
    assert int(first) == done < int(second), log
    for one, other in zip(read_metrics(out), read_metrics(two_node_job[2]), strict=True):
        assert one["loss"] == other["loss"] and one["sample_digest"] == other["sample_digest"]
    weights = [directory / "model/model.safetensors" for directory in (out, two_node_job[2])]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    facts = wait_for_job(slurm_env, deaf_job, has_ended)
    assert (facts["JobState"], facts["Restarts"]) == ("TIMEOUT", "0")
    assert json.loads((tmp_path / "deaf/run/run.json").read_text())["status"] == "running"


def run_job_script(directory, *recipe, restarts=0, status=None, returncode=0, **given):
    """The job's script with stand-ins for SLURM's commands: its result, the recipe's flags, what scontrol was told.

    The task leaves its cores and threads in the file `task`.
    """
    fake = directory / "bin"
    fake.mkdir()
    (fake / "scontrol").write_text(f'#!/bin/sh\necho "$@" >> {directory}/told\n')
    end = f"""sed -i 's/"status": "[^"]*"/"status": "{status}"/' {directory}/run/run.json\n""" if status else ""
    srun = f'#!/bin/sh\nuntil [ "$1" = bash ]; do shift; done\nPYTHON={fake}/task exec "$@"\n'
    (fake / "srun").write_text(srun)
    task = f'#!/bin/sh\necho "$SRUN_CPUS_PER_TASK $OMP_NUM_THREADS" > {directory}/task\n'
    task += f'until [ "$1" = recipes/lm.py ]; do shift; done\nshift\necho "$@" > {directory}/ran\n{end}'
    (fake / "task").write_text(f"{task}exit {returncode}\n")
    for program in fake.iterdir():
        program.chmod(0o755)
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "n1", "MAIN_IP": "127.0.0.1"}
    env = os.environ | job | {"PATH": f"{fake}:{os.environ['PATH']}", "PYTHON": sys.executable}
    env["SLURM_RESTART_COUNT"] = str(restarts)
    env |= {"SLURM_NODEID": "0"} | given
    command = ["bash", "launchers/slurm.sbatch", "recipes/lm.py", *map(str, recipe)]
    result = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
    ran, told = (directory / name for name in ("ran", "told"))
    return result, ran.read_text().split() if ran.exists() else None, told.read_text() if told.exists() else ""


def leave_run(directory, status, job="7", checkpoint=True):
    (directory / "run").mkdir()
    (directory / "run/run.json").write_text(json.dumps({"slurm_job": job, "status": status}))
    for name in ("update-000002", "update-000004.partial") if checkpoint else ["update-000002.partial"]:
        (directory / "run/checkpoints" / name).mkdir(parents=True)
        (directory / "run/checkpoints" / name / "manifest.json").touch()


# What run.json said before and says after a start, the script's status, whether the job is queued again.
ENDS = {
    "came further": ("stopped after update 3", "stopped after update 5", 1, True),
    "came no further": ("stopped after update 3", None, 1, False),
    "failed": ("running", "running", 1, False),
    "finished": ("running", "finished", 0, False),
}


@pytest.mark.parametrize("end", ENDS)
def test_only_a_stopped_job_is_queued_again(end, tmp_path):
    before, after, returncode, is_requeued = ENDS[end]
    leave_run(tmp_path, before)
    result, _, told = run_job_script(tmp_path, "--output_dir", tmp_path / "run", status=after, returncode=returncode)
    assert told == ("requeue 7\n" if is_requeued else "")
    assert result.returncode == (0 if is_requeued else returncode), result.stderr


def test_a_job_without_an_output_directory_is_not_queued_again(tmp_path):
    leave_run(tmp_path, "running")
    result, ran, told = run_job_script(tmp_path, "--seed", 1, status="stopped after update 5", returncode=1)
    assert told == "update JobId=7 Requeue=0\n" and ran == ["--seed", "1"]
    assert re.fullmatch(r"note: without --output_dir .*\n", result.stderr) and result.returncode == 1


def test_each_process_of_a_job_gets_its_share_of_the_cores(tmp_path, monkeypatch):
    """Those of the task, which srun must be told. Controls: what the user sets stays; too few cores are told."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    here = len(os.sched_getaffinity(0))
    for number, (given, task, notes) in enumerate(
        [
            ({"SLURM_CPUS_PER_TASK": str(here), "SLURM_GPUS_ON_NODE": "1"}, f"{here} {here}", 1),
            ({"SLURM_CPUS_PER_TASK": "1", "PROCESSES_PER_NODE": str(2 * here)}, "1 1", 2),
            ({"SLURM_CPUS_ON_NODE": str(here), "OMP_NUM_THREADS": "5"}, " 5", 1),
        ]
    ):
        directory = tmp_path / str(number)
        directory.mkdir()
        result, *_ = run_job_script(directory, "--seed", 1, **given)
        assert result.returncode == 0, result.stderr
        assert (directory / "task").read_text() == f"{task}\n"
        assert result.stderr.count("note: ") == notes, result.stderr  # one is that there is no --output_dir
        assert ("--cpus-per-task" in result.stderr) == (notes == 2)


# What lies in the output directory when the job is started again, and the flags that come of --overwrite.
STARTS = {
    "its own run": ({}, ["--resume"]),
    "its own run, no checkpoint yet": ({"checkpoint": False}, ["--overwrite", "--overwrite"]),
    "another job's run": ({"job": "6"}, ["--overwrite"]),
    "its own run, finished": ({"status": "finished"}, None),
}


@pytest.mark.parametrize("start", STARTS)
def test_a_job_queued_again_goes_on_with_its_own_run_only(start, tmp_path):
    there, expected = STARTS[start]
    leave_run(tmp_path, **{"status": "running"} | there)
    out = f"--output_dir={tmp_path}/run"
    result, ran, _ = run_job_script(tmp_path, "--overwrite", out, restarts=1)
    assert result.returncode == 0, result.stderr
    assert sorted(ran or []) == (sorted([out, *expected]) if expected else [])
