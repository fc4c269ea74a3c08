"""launchers/slurm.sbatch: in a SLURM of three nodes on this machine, and with stand-ins for its commands.

Where SLURM cannot be had they are skipped; with REQUIRE_HOSTS=1 in the environment they fail.
apt install slurm-wlm munge
"""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import BIN, ROOT, base_env, equivalence_flags, quick_python, read_metrics
from running import free_port, need, num_updates
from test_modes import assert_is_the_run_of


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
            # Counted too: without one of the daemons, a node whose port is another's also looks idle.
            if states.stdout.strip() == "3 idle" and all(service.poll() is None for service in running):
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
    given = {"MAIN_IP": "127.0.0.1", "PYTHON": quick_python(), "LAUNCH_FLAGS": "--mixed_precision no"} | given
    (directory / "log").unlink(missing_ok=True)  # an earlier job's, which SLURM would append to
    command = ["sbatch", "--parsable", "--nodes", nodes, "--output", directory / "log", *options, script, *recipe]
    env = base_env(**env, TIMEOUT=30) | given
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
        assert time.monotonic() < deadline, (facts, Path(facts["StdOut"]).read_text())
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


def test_the_same_sbatch_file_runs_on_one_node_with_another_config(
    slurm_env, functions_file, model_dir, tmp_path, extensions
):
    recipe = ["recipes/lm.py", "--train_file", functions_file, "--sequence_length", 64, "--dry_run"]
    recipe += ["--model_name_or_path", model_dir]
    given = {"CONFIG": "accelerate_configs/zero3.yaml", "PROCESSES_PER_NODE": "2"}
    state, log = submit(slurm_env, "launchers/slurm.sbatch", 1, recipe, tmp_path, **given)
    assert state == "COMPLETED" and "DeepSpeed ZeRO-3, 2 processes" in log, log


@pytest.mark.parametrize("odd", [False, True])
def test_a_job_that_is_to_check_its_nodes_first_trains_only_where_nothing_is_odd(
    odd, slurm_env, functions_file, model_dir, tmp_path
):
    """By CHECK=yes of launchers/slurm.sbatch; what is odd is a package of the second node. Control: the first case.

    In the first case other programs of this machine may slow down a node, which is odd too: then the job is handed in
    again.
    """
    recipe = ["recipes/lm.py", *equivalence_flags(functions_file, model_dir, tmp_path / "a run")]
    given = {"CHECK": "yes"}
    if odd:
        packages = tmp_path / "packages/datasets-0.1.dist-info"
        packages.mkdir(parents=True)
        (packages / "METADATA").write_text("Name: datasets\nVersion: 0.1\n")
        python = tmp_path / "python"
        python.write_text(
            f'#!/bin/sh\n[ "$SLURM_NODEID" != 1 ] || export PYTHONPATH={packages.parent}\nexec {quick_python()} "$@"\n'
        )
        python.chmod(0o755)
        given["PYTHON"] = str(python)
    for _ in range(1 if odd else 4):
        state, log = submit(slurm_env, "launchers/slurm.sbatch", 2, recipe, tmp_path, **given)
        assert "links between machines, over gloo" in log, log
        assert ("  <- " in log) == (state == "FAILED") == (not (tmp_path / "a run").exists()), log
        if state == "COMPLETED":
            break
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


def set_seconds(path, number):
    """At once: a rank may read the file at any moment, and an empty one would end its run."""
    path.with_suffix(".new").write_text(str(number))
    path.with_suffix(".new").replace(path)


def wait_for_job_updates(env, job, out, number):
    """Waits until a run has made so many; a job that ends before does so with its log."""
    wait_for_job(env, job, lambda facts: num_updates(out) >= number or has_ended(facts), timeout=300)
    assert num_updates(out) >= number, (out.parent / "log").read_text()


def requeued(number):
    return lambda facts: facts["Restarts"] == str(number) and facts["JobState"] == "PENDING"


def test_a_job_goes_on_after_its_time_limit_and_a_preemption(
    slurm_env, two_node_job, functions_file, model_dir, tmp_path
):
    """The weights are those of the job that nothing disturbed. Control: a job that asks for no signal runs out."""
    out, deaf = tmp_path / "run", tmp_path / "deaf"
    recipe, seconds = slow_recipe(tmp_path)
    set_seconds(seconds, 4)
    # On the third node, at the same time; its update takes longer than its two minutes.
    deaf_recipe, deaf_seconds = slow_recipe(deaf)
    set_seconds(deaf_seconds, 300)
    script = (ROOT / "launchers/slurm.sbatch").read_text()
    (deaf / "deaf.sbatch").write_text(script.replace("#SBATCH --signal", "# --signal"))
    command = [deaf_recipe, *equivalence_flags(functions_file, model_dir, deaf / "run", "--num_updates", 99)]
    python = {"PYTHON": str(BIN / "python")}  # what SLURM ends is then the program itself
    cpu = python | {"CONFIG": "accelerate_configs/cpu.yaml"}
    deaf_job = start_job(slurm_env, deaf / "deaf.sbatch", 1, command, deaf, "--time=2", **cpu)

    def change(job, **settings):
        words = [f"{key}={value}" for key, value in settings.items()]
        subprocess.run(["scontrol", "update", f"JobId={job}", *words], env=slurm_env, check=True)

    command = [recipe, *equivalence_flags(functions_file, model_dir, out, "--save_every", 1)]
    limit = "--time=4"  # below the signal's 300 s
    job = start_job(slurm_env, "launchers/slurm.sbatch", 2, command, tmp_path, limit, **python)
    wait_for_job(slurm_env, job, requeued(1))
    status = json.loads((out / "run.json").read_text())["status"]
    assert status.startswith("stopped after update"), (tmp_path / "log").read_text()
    done = int(status.split()[-1])
    change(job, TimeLimit=30, StartTime="now")  # SLURM itself waits for two minutes
    wait_for_job_updates(slurm_env, job, out, done + 1)
    set_seconds(seconds, 20)  # longer than SLURM waits for it to end (KillWait)
    wait_for_job_updates(slurm_env, job, out, done + 2)
    subprocess.run(["scontrol", "requeue", job], env=slurm_env, check=True)
    wait_for_job(slurm_env, job, requeued(2))
    set_seconds(seconds, 0)
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


def test_a_job_that_loses_a_node_goes_on_with_fewer(slurm_env, two_node_job, functions_file, model_dir, tmp_path):
    """SLURM queues it again, with as many nodes as are free; the updates are those of two nodes."""
    out, (recipe, seconds) = tmp_path / "run", slow_recipe(tmp_path)
    set_seconds(seconds, 2)

    def set_node(name, state):
        words = [f"NodeName={name}", f"State={state}", "Reason=test"]
        subprocess.run(["scontrol", "update", *words], env=slurm_env, check=True)

    command = [recipe, *equivalence_flags(functions_file, model_dir, out, "--save_every", 1)]
    job = start_job(slurm_env, "launchers/slurm.sbatch", "1-2", command, tmp_path, PYTHON=str(BIN / "python"))
    wait_for_job_updates(slurm_env, job, out, 3)
    try:
        for name in ("n2", "n3"):
            set_node(name, "DRAIN")  # no new job, also after SLURM has found a lost node again
        set_node("n2", "DOWN")
        wait_for_job(slurm_env, job, requeued(1))
        set_seconds(seconds, 0)
        subprocess.run(["scontrol", "update", f"JobId={job}", "StartTime=now"], env=slurm_env, check=True)
        facts = wait_for_job(slurm_env, job, has_ended)
    finally:
        for name in ("n2", "n3"):
            set_node(name, "RESUME")
    assert (facts["JobState"], facts["NumNodes"]) == ("COMPLETED", "1"), (tmp_path / "log").read_text()
    lines = read_metrics(out)
    assert {line["world_size"] for line in lines} == {1, 2}
    for one, other in zip(lines, read_metrics(two_node_job[2]), strict=True):
        assert one["sample_digest"] == other["sample_digest"] and one["learning_rate"] == other["learning_rate"]
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)


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
