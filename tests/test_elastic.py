"""Elastic launches: hosts that die, leave, hang and return; --resume auto; --save_every auto.

The hosts are network namespaces of this machine (tests/elastic_runs.py, which also runs random schedules for hours).
"""

import json
import os
import re
import shutil
import subprocess
import threading

import pytest
from conftest import BIN, ROOT, assert_refused, base_env, launch, quick_python, read_metrics, run
from elastic_runs import Cluster, ElasticRun, compare
from running import give_up, need

from common.checkpoint.save_interval import FIRST, SaveInterval
from common.checkpoint.training_state import TrainingState
from common.errors import UserError
from common.report.totals import SAVING
from launchers.shared_files import SharedFiles, make_directory

TOKEN = "one-secret-of-all-hosts"


@pytest.fixture(scope="module")
def cluster():
    need("a network of three hosts", iproute2="ip")
    try:
        found = Cluster(f"t{os.getpid() % 100000}")
    except subprocess.CalledProcessError as error:
        give_up(f"no network namespaces here: {error}")
    yield found
    found.close()


def flags(functions_file, model_dir, num_updates):
    """Of a run without --output_dir."""
    words = ["--train_file", functions_file, "--model_name_or_path", model_dir, "--shape", "examples"]
    words += ["--sequence_length", 64, "--num_updates", num_updates, "--global_batch_size", 12]
    return [*words, "--micro_batch_tokens", 256, "--max_grad_norm", 0.5]


def recipe(*words):
    return ["recipes/lm.py", *words, "--save_every", 4]


def test_a_run_continues_while_hosts_die_leave_and_return(cluster, functions_file, model_dir, tmp_path):
    """Each update once, with the samples, learning rate and loss of one process, on three, two, one and three hosts.

    Control: with `use_started_hosts` removed, or with the number of hosts of the first start, no update is made.
    """
    words = flags(functions_file, model_dir, 200)
    launch(*words, "--output_dir", tmp_path / "one", "--save_every", 0)
    elastic = ElasticRun(cluster, tmp_path, "fsdp2", ["--mixed_precision", "no"], recipe(*words), wait=1)
    events = [("launcher", 0), ("leave", 1), ("return", 0), ("kill", 2), ("return", 1), ("return", 2)]
    try:
        for host in range(cluster.num_hosts):
            elastic.start(host)
        elastic.wait_for(lambda line: line["update"] >= 5)
        for (kind, host), size in zip(events, (2, 1, 2, 1, 2, 3), strict=True):
            elastic.bring_back(host) if kind == "return" else elastic.lose(host, kind)
            elastic.wait_for(lambda line, size=size: line["world_size"] == size)
        assert set(elastic.wait().values()) == {0}, elastic.tails()
    finally:
        elastic.close()
    lines = read_metrics(elastic.out)
    assert compare(read_metrics(tmp_path / "one"), lines, 1e-5) == []
    assert {line["world_size"] for line in lines} == {1, 2, 3}
    repeated = json.loads((elastic.out / "run.json").read_text())["repeated"].get("repeated_updates", 0)
    assert repeated <= 5  # one kill, and a checkpoint every four updates; hosts that leave or return lose nothing
    assert TOKEN not in "".join(path.read_text(errors="replace") for path in elastic.directory.rglob("*.json"))


def test_a_host_with_different_software_is_rejected(cluster, functions_file, model_dir, tmp_path):
    """Control: without `check_software`, the second host joins, and the run goes on with both."""
    older = tmp_path / "older"
    ignored = shutil.ignore_patterns(".git", ".venv", "runs", "__pycache__", "results")
    shutil.copytree(ROOT, older, ignore=ignored)
    with open(older / "common/process.py", "a") as file:
        file.write("# older\n")
    words = recipe(*flags(functions_file, model_dir, 5000))
    elastic = ElasticRun(cluster, tmp_path, "multi_cpu", [], words, wait=1)
    try:
        elastic.start(0)
        elastic.wait_for(lambda line: True)
        elastic.start(1, cwd=older)
        assert elastic.processes.pop(1).wait(60) == 2
        line = elastic.logs[1].read_text().strip().splitlines()[-1]
        assert line.startswith("error: host host1 differs from host host0: common/process.py; make both the same"), line
        assert elastic.processes[0].poll() is None
    finally:
        elastic.close()


@pytest.mark.parametrize("config", ["multi_cpu", "zero3"])
def test_a_user_error_ends_the_launch_in_one_line(config, tmp_path):
    """Control: without the note of the processes, the launcher starts them again, ten times."""
    command = [quick_python(), "launchers/elastic.py", "--hosts", 1, "--address", "127.0.0.1"]
    command += ["--processes_per_host", 2]
    command += ["accelerate", "launch", "--config_file", f"accelerate_configs/{config}.yaml", "recipes/lm.py"]
    command += ["--train_file", tmp_path / "missing.jsonl", "--output_dir", tmp_path / "run", "--resume", "auto"]
    result = run(command, LAUNCH_TOKEN=TOKEN)
    assert result.returncode == 2
    assert len(re.findall("^error: .*missing.jsonl", result.stderr, re.MULTILINE)) == 1, result.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "token", "line"),
    [
        (["--num_machines", 2], TOKEN, "--num_machines is set by the hosts that are there; remove it"),
        ([], "", "LAUNCH_TOKEN: not set"),
        (["--config_file", "accelerate_configs/cpu.yaml"], TOKEN, "starts a single process, which cannot be joined"),
        (["--config_file", "accelerate_configs/hsdp.yaml"], TOKEN, "fixes the number of replicas"),
        (["--config_file", "accelerate_configs/tensor_parallel.yaml"], TOKEN, "over 2 processes, and a host has 1"),
    ],
)
def test_wrong_launches_end_before_they_begin(words, token, line, tmp_path):
    command = [quick_python(), "launchers/elastic.py", "--hosts", "1:3", "accelerate", "launch"]
    words = words if "--config_file" in words else ["--config_file", "accelerate_configs/multi_cpu.yaml", *words]
    result = run([*command, *words, "recipes/lm.py", "--output_dir", tmp_path / "run"], LAUNCH_TOKEN=token)
    assert result.returncode == 2
    assert line in result.stderr and "--resume auto is missing" in result.stderr
    assert all(text.startswith("error: ") for text in result.stderr.strip().splitlines()), result.stderr
    assert list(tmp_path.iterdir()) == []


def test_resume_auto_starts_continues_and_replaces(functions_file, model_dir, tmp_path):
    """A new run, a run with a checkpoint, and a run that was killed before its first."""
    out = tmp_path / "run"
    words = [*flags(functions_file, model_dir, 6), "--output_dir", out, "--resume", "auto", "--save_every", 3]
    launch(*words)
    expected = read_metrics(out)
    shutil.rmtree(out / "checkpoints/update-000006")
    assert "after update 3" in launch(*words).stdout
    assert [line["loss"] for line in read_metrics(out)] == [line["loss"] for line in expected]
    shutil.rmtree(out / "checkpoints")
    assert_refused(launch(*words, check=False), f"{out} holds a run")
    record = json.loads((out / "run.json").read_text())
    (out / "run.json").write_text(json.dumps(record | {"status": "running"}))
    changed = launch(*words, "--seed", 1, check=False)
    assert_refused(changed, "holds a run of other flags that was stopped before its first checkpoint")
    launch(*words)
    assert [line["loss"] for line in read_metrics(out)] == [line["loss"] for line in expected]


def test_the_shared_state_is_set_only_after_the_state_that_was_read(tmp_path):
    """Control: without the check of the newest number, the host that was frozen sets a state of its own."""
    files = SharedFiles(tmp_path)
    assert files.get_state() is None
    assert files.set_state(b"1") == (b"1", 1, True)
    assert files.set_state(b"other", None) == (b"1", 1, False)
    for number in range(1, 40):
        assert files.set_state(str(number + 1).encode(), number) == (str(number + 1).encode(), number + 1, True)
    assert files.set_state(b"stale", 1) == (b"40", 40, False)
    assert files.get_state() == (b"40", 40)
    assert len(list(tmp_path.iterdir())) <= files.KEPT


def test_a_directory_of_a_running_launch_or_of_others_is_rejected(tmp_path, monkeypatch):
    monkeypatch.setenv("LAUNCH_TOKEN", TOKEN)
    monkeypatch.setattr("launchers.shared_files.BEAT", 0.2)
    directory = make_directory(tmp_path / "hosts")
    assert directory.stat().st_mode & 0o777 == 0o700 and make_directory(tmp_path / "hosts") == directory
    SharedFiles(directory).set_state(b"first")
    monkeypatch.setenv("LAUNCH_TOKEN", "a-different-secret")
    assert make_directory(tmp_path / "hosts") != directory  # the other launch sends nothing more
    SharedFiles(directory).set_state(b"second", 1)
    beat = threading.Timer(0.4, SharedFiles(directory).set_state, (b"third", 2))
    beat.start()
    with pytest.raises(UserError, match="a launch with a different LAUNCH_TOKEN is running there"):
        make_directory(tmp_path / "hosts")
    beat.join()
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(UserError, match="can be written by others"):
        make_directory(tmp_path / "open")


LOCK = """
import sys
from pathlib import Path
from common import files, output_dirs
output_dirs.ELASTIC_TIMEOUT, output_dirs.LOCK_TIMEOUT = 0.2, 0.5
files.lock_output_dir(Path(sys.argv[1]))
print("locked", flush=True)
input()
print("lost" if files.find_lost_directory() else "kept")
"""


def test_a_lock_is_taken_over_only_by_a_later_start_of_the_same_launch(tmp_path):
    """The process that held it, of a frozen host, notices. Control: without the mark, every launch takes it over."""
    command, options = [BIN / "python", "-c", LOCK, tmp_path], {"cwd": ROOT, "text": True}
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)

    def start(launch):
        return subprocess.Popen(command, env=base_env(ELASTIC_ID=launch), **options, **pipes)

    holder = start("one")
    assert holder.stdout.readline() == "locked\n"
    for other in ("two", None):
        _, errors = start(other).communicate("\n", timeout=60)
        assert "another run writes there" in errors
    output, errors = start("one").communicate("\n", timeout=60)
    assert output.splitlines()[-2:] == ["locked", "kept"], errors
    assert holder.communicate("\n", timeout=60)[0] == "lost\n"


def test_the_save_interval_is_youngs(tmp_path, monkeypatch):
    """sqrt(2 C M), with M from the failures so far; a run that fails often saves more often."""
    now = [0.0]
    monkeypatch.setattr("common.checkpoint.save_interval.time.monotonic", lambda: now[0])
    state = TrainingState(training={"seconds": 36_000.0, SAVING: 0.0})
    for num_starts, seconds in ((0, 668.1), (10, 66.5)):
        (tmp_path / "run.json").write_text(json.dumps({"command": [], "commands": [[]] * num_starts}))
        now[0], state.training[SAVING] = 0.0, 0.0
        interval = SaveInterval(tmp_path)
        assert interval.seconds(state) == FIRST and not interval.is_due(state)
        now[0] = FIRST
        assert interval.is_due(state)
        state.training[SAVING] = 0.5  # the cost of the save
        assert not interval.is_due(state)
        assert interval.seconds(state) == pytest.approx(seconds, rel=1e-3)
        now[0] += seconds + 1
        assert interval.is_due(state)
