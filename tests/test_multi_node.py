"""Several hosts: two network namespaces of this machine, joined by a cable of their own, each with its host name.

Where that cannot be had (it needs root and iproute2) they are skipped; with REQUIRE_HOSTS=1 in the environment they
fail. apt install iproute2 openssh-server slurm-wlm munge
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

import psutil
import pytest
from conftest import BIN, ROOT, equivalence_flags, launch_command, read_metrics
from running import Run, find_rank, wait_for_updates
from test_modes import assert_is_the_run_of

from common.parallel.launch import parse_launch

CONFIGS = {"multi_node": "DDP", "multi_node_zero3": "DeepSpeed"}
MEET = [BIN / "python", "launchers/meet.py", "--timeout", 4, "accelerate"]


def give_up(message):
    pytest.fail(message) if os.environ.get("REQUIRE_HOSTS") == "1" else pytest.skip(message)


def need(reason, **programs):
    """Skips where a program is missing; the keys are Debian's packages."""
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    missing = [package for package, program in programs.items() if shutil.which(program, path=path) is None]
    if os.geteuid() != 0:
        missing.append("root")
    if missing:
        give_up(f"{reason} needs {', '.join(name.replace('_', '-') for name in missing)}")


class Hosts:
    """Two hosts, 0 and 1. `command(host, ...)` is what runs a command on one."""

    def __init__(self):
        self.id = f"h{os.getpid() % 100000}"
        self.names = [f"{self.id}n0", f"{self.id}n1"]
        self.ips = ["10.83.0.1", "10.83.0.2"]
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

    def command(self, host, *command):
        named = ["unshare", "--uts", "sh", "-c", 'hostname "$1"; shift; exec "$@"', "-", f"host{host}"]
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


def free_port():
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]


def launchers(run, hosts, config, *recipe, ranks=(0, 1), options=((), ()), ip=None, port=None, before=None, **kwargs):
    """`accelerate launch` with a shipped config on each host; `before`: in its place, what ends with these words."""
    given = ["--mixed_precision", "no", "--main_process_ip", ip or hosts.ips[0], "--main_process_port"]
    given += [port or free_port(), "--machine_rank"]
    for host, rank in enumerate(ranks):
        command = launch_command(config, *given, rank, *options[host])
        command = [*before, *command[1:]] if before else command
        run.start(hosts.command(host, *command, *recipe), **{name: values[host] for name, values in kwargs.items()})


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
    recipe, what = ["--output_dir", "runs/x"], r"--output_dir runs/x: what rank 0 on host \S+ writes there is not"
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
        assert all(run.wait(60))
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
        r"10.83.0.9 does not lead to this machine, host0|host host1 did not reach machine rank 0 at 10.83.0.9",
    ),
}


@pytest.mark.parametrize("case", MEETINGS)
def test_hosts_that_do_not_meet_are_told_in_one_line(case, hosts, tmp_path):
    ranks, options, pattern = MEETINGS[case]
    port, ip = free_port(), "10.83.0.9" if case == "no address" else None
    with Run(tmp_path) as run:
        num_other = 0
        if case in ("port in use", "another program"):
            code = f"import socket, time; s = socket.create_server(('', {port})); time.sleep(60)"
            run.start(hosts.command(0, BIN / "python", "-c", code))
            time.sleep(1)
            num_other = 1
        # A slow machine starts the second launcher late; where one is to be missed, the wait is short.
        before = [*MEET[:-2], 60, "accelerate"] if case == "other numbers" else MEET
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
        for out, command in zip(outs, ([*MEET, *launch[1:]], launch), strict=True):
            recipe = training(functions_file, out, "--model_name_or_path", model_dir, "--sequence_length", 64)
            run.start([*command, *recipe], env={"OPENBLAS_NUM_THREADS": "2"})
        for out in outs:
            wait_for_updates(out, 1)
        for process in run.processes:
            process.send_signal(signal.SIGUSR1)
        statuses = run.wait(60)
        assert statuses == [1, -signal.SIGUSR1], run.output(0)
    assert json.loads((outs[0] / "run.json").read_text())["status"].startswith("stopped after update")


@pytest.fixture(scope="module")
def slurm_env(tmp_path_factory):
    """A SLURM of three nodes on this machine: the environment in which its commands reach it."""
    need("SLURM", slurm_wlm="slurmctld", munge="munged")
    directory = tmp_path_factory.mktemp("slurm")
    directory.chmod(0o755)
    for part in ("state", "spool-n1", "spool-n2", "spool-n3", "munge"):
        (directory / part).mkdir()
    ports = [free_port() for _ in range(4)]
    node = "NodeName=n{0} NodeHostname=localhost NodeAddr=127.0.0.1 Port={1} CPUs=1"
    nodes = "\n".join(node.format(number, ports[number]) for number in (1, 2, 3))
    (directory / "slurm.conf").write_text(
        f"""ClusterName=test
SlurmctldHost={socket.gethostname()}(127.0.0.1)
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
{nodes}
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
    services = [munged, ["/usr/sbin/slurmctld", "-D", "-i"]]
    services += [["/usr/sbin/slurmd", "-D", "-N", name] for name in ("n1", "n2", "n3")]
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
    assert_is_the_run_of(reference, out)


def test_the_same_sbatch_file_runs_on_one_node_with_another_config(slurm_env, functions_file, tmp_path, extensions):
    recipe = ["recipes/lm.py", "--train_file", functions_file, "--sequence_length", 64, "--dry_run"]
    given = {"CONFIG": "accelerate_configs/zero3.yaml", "PROCESSES_PER_NODE": "2"}
    state, log = submit(slurm_env, "launchers/slurm.sbatch", 1, recipe, tmp_path, **given)
    assert state == "COMPLETED" and "DeepSpeed ZeRO-3, 2 processes" in log, log


@pytest.mark.parametrize("odd", [False, True])
def test_a_job_that_is_to_check_its_nodes_first_trains_only_where_nothing_is_odd(
    odd, slurm_env, functions_file, model_dir, tmp_path
):
    """By CHECK=yes of launchers/slurm.sbatch; what is odd is a package of the second node. Control: the first case."""
    recipe = ["recipes/lm.py", *equivalence_flags(functions_file, model_dir, tmp_path / "a run")]
    given = {"CHECK": "yes"}
    if odd:
        packages = tmp_path / "packages/numpy-0.1.dist-info"
        packages.mkdir(parents=True)
        (packages / "METADATA").write_text("Name: numpy\nVersion: 0.1\n")
        python = tmp_path / "python"
        python.write_text(
            f'#!/bin/sh\n[ "$SLURM_NODEID" != 1 ] || export PYTHONPATH={packages.parent}\nexec {BIN}/python "$@"\n'
        )
        python.chmod(0o755)
        given["PYTHON"] = str(python)
    state, log = submit(slurm_env, "launchers/slurm.sbatch", 2, recipe, tmp_path, **given)
    assert "links between machines, over gloo" in log, log
    assert state == ("FAILED" if odd else "COMPLETED"), log
    assert ("0.1 at rank 1" in log) == odd and (tmp_path / "a run").exists() != odd, log


def slow_recipe(directory):
    """The recipe with updates that last as many seconds as the file says that is returned too."""
    directory.mkdir(exist_ok=True)
    seconds, script = directory / "seconds", directory / "slow.py"
    script.write_text(f"""import pathlib, runpy, sys, time
sys.path.insert(0, {str(ROOT)!r})
from accelerate import Accelerator
clip = Accelerator.clip_grad_norm_
def slow(*args):
    time.sleep(float(pathlib.Path({str(seconds)!r}).read_text()))
    return clip(*args)
Accelerator.clip_grad_norm_ = slow
runpy.run_path({str(ROOT / "recipes/lm.py")!r}, run_name="__main__")
""")
    return script, seconds


def requeued(number):
    return lambda facts: facts["Restarts"] == str(number) and facts["JobState"] == "PENDING"


def test_a_job_goes_on_after_its_time_limit_and_a_preemption(
    slurm_env, two_node_job, functions_file, model_dir, tmp_path
):
    """The weights are those of the job that nothing disturbed. Control: a job that asks for no signal runs out."""
    out, deaf = tmp_path / "run", tmp_path / "deaf"
    recipe, seconds = slow_recipe(tmp_path)
    seconds.write_text("4")
    # On the third node, at the same time; its update takes longer than its two minutes.
    deaf_recipe, deaf_seconds = slow_recipe(deaf)
    deaf_seconds.write_text("300")
    script = (ROOT / "launchers/slurm.sbatch").read_text()
    (deaf / "deaf.sbatch").write_text(script.replace("#SBATCH --signal", "# --signal"))
    command = [deaf_recipe, *equivalence_flags(functions_file, model_dir, deaf / "run", "--num_updates", 99)]
    cpu = {"CONFIG": "accelerate_configs/cpu.yaml"}
    deaf_job = start_job(slurm_env, deaf / "deaf.sbatch", 1, command, deaf, "--time=2", **cpu)

    def change(job, **settings):
        words = [f"{key}={value}" for key, value in settings.items()]
        subprocess.run(["scontrol", "update", f"JobId={job}", *words], env=slurm_env, check=True)

    command = [recipe, *equivalence_flags(functions_file, model_dir, out, "--save_every", 1)]
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
    assert json.loads((deaf / "run/run.json").read_text())["status"] == "running"


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
    result, ran, told = run_job_script(tmp_path, "--seed", 1, returncode=1)
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
