"""Requests to stop at any moment, several starts at once, and runs that were killed: no work is lost or hidden."""

import contextlib
import hashlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from conftest import (
    BIN,
    ROOT,
    assert_refused,
    base_env,
    launch,
    launch_command,
    quick_python,
    read_metrics,
    run,
    run_specs,
    specs_command,
    told,
    write_rows,
)
from filelock import FileLock
from recipe_server import kill_all
from running import Run, num_updates, wait_for_updates, wait_until

from common import launcher
from common.data.cache import cached
from common.files import PARTIAL
from common.report.killed_runs import describe_killed, is_locked
from tools.checkpoint import __main__ as checkpoint
from tools.compare.runs import read_runs

FLAGS = ["--num_updates", 10, "--global_batch_size", 8, "--micro_batch_size", 2, "--warmup_updates", 2]
FLAGS += ["--sequence_length", 32, "--eval_every", 2, "--save_every", 4, "--keep_best", "--patience", 3]
FLAGS += ["--learning_rate", 3e-3]
EXACT = ("update", "loss", "grad_norm", "learning_rate", "sample_digest", "validation_loss", "accuracy")


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("rows") / "rows.jsonl", 40)


def outcome(output_dir):
    """What a run leaves that must not depend on where it was stopped."""
    metrics = [{name: line.get(name) for name in EXACT} for line in read_metrics(output_dir)]
    (weights,) = (path.read_bytes() for path in (output_dir / "model").glob("*.safetensors"))
    results = json.loads((output_dir / "run.json").read_text())["results"]
    paths = sorted((output_dir / "checkpoints").glob("update-*/manifest.json"))
    position = json.loads(paths[-1].read_text())["position"]
    best = {"checkpoint": results["best"]["checkpoint"].rpartition("/")[2], "loss": results["best"]["loss"]}
    return metrics, hashlib.sha256(weights).hexdigest(), results["validation_loss"], best, position


def status_of(output_dir):
    return json.loads((output_dir / "run.json").read_text())["status"]


@pytest.mark.parametrize(("recipe", "config"), [("lm", "fsdp2"), ("classify", "multi_cpu"), ("lm", "cpu")])
def test_a_stop_within_an_evaluation_saves_at_once_and_loses_no_figure(recipe, config, rows, tmp_path):
    """After an update, in the evaluation that the resumed run repeats, and in the one at the end; asked of one rank."""
    last = 0 if config == "cpu" else 1
    stops = [
        (3, 2, 0, "SIGTERM", 4),
        (3, 3, last, "SIGHUP", 4),
        (5, 1, last, "SIGTERM", 6),
        ("end", 2, last, "SIGINT", 10),
    ]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    given = ["--train_file", rows, "--validation_file", rows, *FLAGS]
    specs = [([*given, "--output_dir", whole], {})]
    names = []
    for number, (*when, done) in enumerate(stops):
        # The repeated evaluation comes before the first update.
        at = [None, *when[1:]] if number == 1 else when
        names.append(
            ([*given, "--output_dir", parts, *(["--resume"] * (number > 0))], {"signal_in_evaluation": at}, done)
        )
    for flags, changes, done in names:
        specs.append((flags, changes | {"expect_status": [str(parts), f"stopped after update {done}"]}))
    specs.append(([*given, "--output_dir", parts, "--resume"], {}))
    run_specs(recipe, specs, tmp_path, config, "--mixed_precision", "no")
    assert status_of(parts) == status_of(whole) == "finished"
    assert outcome(parts) == outcome(whole)


# --- signals and launchers


@pytest.fixture(scope="module", autouse=True)
def hang_ups():
    """The tests may run under nohup: what they start begins as without it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


REQUESTS = """
import os, signal, sys, time
sys.path.insert(0, {root!r})
from common.training.stop_signals import StopRequests
{before}
with StopRequests() as stop:
    {within}
    print("asked" if stop.is_requested else "not asked", flush=True)
"""


def asked(tmp_path, before="", within="pass", command=(BIN / "python",), **env):
    """What a process prints that does `before`, and `within` while requests count."""
    script = tmp_path / "requests.py"
    script.write_text(REQUESTS.format(root=str(ROOT), before=before, within=within))
    result = run([*command, script], **env)
    assert "asked" in result.stdout, result.stderr
    return "not asked" not in result.stdout


HANG_UP = "os.kill(os.getpid(), signal.SIGHUP)"
IGNORED = "signal.signal(signal.SIGHUP, signal.SIG_IGN)"  # as nohup leaves it


def test_a_hang_up_is_a_request_unless_nohup_ignores_it(tmp_path):
    """Below torchrun, which ends its processes on it even then, it is one as long as torchrun handles it."""
    torchrun = {"TORCHELASTIC_RUN_ID": "none"}
    assert asked(tmp_path, within=HANG_UP)
    assert not asked(tmp_path, IGNORED, HANG_UP)
    assert asked(tmp_path, IGNORED, HANG_UP, **torchrun)
    assert not asked(tmp_path, IGNORED, HANG_UP, TORCHELASTIC_SIGNALS_TO_HANDLE="SIGTERM,SIGINT", **torchrun)


def test_a_launcher_that_dies_before_the_loop_is_missed_in_it(tmp_path):
    """Controls: the same launcher that lives, and a shell script in a folder of its name that dies."""
    die = "parent = os.getppid(); os.kill(parent, signal.SIGKILL)\nwhile os.getppid() == parent: time.sleep(0.01)"
    script, output = tmp_path / "accelerate/launch.sh", tmp_path / "output"
    script.parent.mkdir()
    script.write_text('"$@"\ntrue\n')
    launch, shell = launch_command("cpu"), ["bash", script, BIN / "python"]
    for command, before, is_missed in ((launch, die, True), (launch, "", False), (shell, die, False)):
        path = tmp_path / "requests.py"
        path.write_text(REQUESTS.format(root=str(ROOT), before=before, within="pass"))
        with open(output, "w") as file:
            subprocess.run([str(part) for part in [*command, path]], stdout=file, stderr=file, cwd=ROOT)
        wait_until(lambda: "asked" in output.read_text(), 60)
        assert ("not asked" not in output.read_text()) == is_missed, command


@pytest.mark.parametrize("updates", [0, 3])
def test_processes_whose_launcher_is_killed_end_in_order(updates, rows, tmp_path):
    """Before the loop within seconds, though each waits for the store that the launcher held; in the loop they save."""
    out = tmp_path / "run"
    given = ["--train_file", rows, *FLAGS[:8], "--sequence_length", 32, "--learning_rate", 1e-3, "--output_dir", out]
    given += ["--num_updates", 5000, "--save_every", 0]
    with Run(tmp_path) as started:
        process = started.start([*launch_command("multi_cpu"), "recipes/lm.py", *given], quick=False)
        wait_until(lambda: len(ranks := psutil.Process(process.pid).children()) == 2 and all(map(environment, ranks)))
        ranks = psutil.Process(process.pid).children()
        if updates:
            wait_for_updates(out, updates)
        process.kill()
        _, alive = psutil.wait_procs(ranks, timeout=60)
        kill_all(alive)
        output = started.output()
        assert not alive and "Traceback" not in output, output
    if updates:
        done = num_updates(out)
        assert f"stopped after update {done}" in output and status_of(out) == f"stopped after update {done}"
        assert (out / f"checkpoints/update-{done:06}/manifest.json").is_file()
    else:
        assert "the launcher of rank 0 was lost before the first update; this process ends" in output
        assert not out.exists() or status_of(out) != "running"


def environment(process):
    """Of a process that has become its program."""
    try:
        return process.environ().get("RANK") and "recipes/lm.py" in process.cmdline()
    except psutil.Error:
        return None


def test_a_launcher_is_known_by_its_program():
    launches = "accelerate launch x.py", "/venv/bin/python /venv/bin/accelerate launch --config_file c.yaml x.py"
    launches += "python -m accelerate.commands.launch x.py", "python meet.py --timeout 5 accelerate launch x.py"
    launches += (
        "/venv/bin/accelerate-launch x.py",
        "python /venv/bin/torchrun x.py",
        "python -m torch.distributed.run x",
    )
    others = (
        "bash /home/me/accelerate/run.sh",
        "python accelerate/launch.py",
        "bash torchrun.sh",
        "my-accelerate launch",
    )
    assert all(launcher.is_launcher(command.split()) for command in launches)
    assert not any(launcher.is_launcher(command.split()) for command in others)


def test_a_closed_terminal_leaves_a_checkpoint(rows, tmp_path):
    """The end of an ssh session: SIGHUP, and every write to the terminal fails from then on."""
    out = tmp_path / "run"
    flags = [*FLAGS, "--train_file", rows, "--output_dir", out, "--num_updates", 50_000, "--eval_every", 0]
    flags.remove("--keep_best")
    at = flags.index("--patience")
    del flags[at : at + 2]
    command = [str(part) for part in [quick_python(), "recipes/lm.py", *flags]]
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(ROOT)
        os.execve(command[0], command, base_env())
    try:
        wait_for_updates(out, 3)
        os.close(terminal)
        wait_until(lambda: status_of(out).startswith("stopped after update"), 60)
    except BaseException:
        kill_all([psutil.Process(child)])
        raise
    done = num_updates(out)
    assert status_of(out) == f"stopped after update {done}"
    assert (out / f"checkpoints/update-{done:06}/manifest.json").is_file()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 75  # the last line went nowhere, and spoiled nothing


# --- several starts at once


def start_four(started, rows, tmp_path, changes, *flags):
    """Four starts of one command by clients of tests/recipe_server.py, whose end kills what they started."""
    given = ["--train_file", rows, *FLAGS[:8], "--sequence_length", 32, "--learning_rate", 1e-3, *flags]
    for number in range(4):
        directory = tmp_path / f"spec-{number}"
        directory.mkdir()
        started.start(specs_command("lm", [(given, changes)], directory), {"TQDM_DISABLE": "1"})


def _manifests(out):
    """Returns name -> manifest of each checkpoint; one that the run deletes in this moment is left out."""
    manifests = {}
    for path in out.glob("checkpoints/update-??????/manifest.json"):
        with contextlib.suppress(FileNotFoundError):
            manifests[path.parent.name] = path.read_bytes()
    return manifests


def test_four_starts_of_one_directory_delete_nothing_of_the_one_that_was_killed(rows, tmp_path):
    """Three wait for the first one's lock; then there are checkpoints, which only --overwrite may delete."""
    out = tmp_path / "run"
    with Run(tmp_path) as started:
        changes = {"slow_updates": 0.3, "start_together": [str(tmp_path / "ready"), 4]}
        start_four(started, rows, tmp_path, changes, "--output_dir", out, "--num_updates", 500, "--save_every", 2)
        wait_until(lambda: list(out.glob("checkpoints/update-??????/manifest.json")))
        waiting = "waiting for another process"
        wait_until(lambda: sum(waiting in started.output(n) for n in range(4)) == 3)
        first = next(n for n in range(4) if waiting not in started.output(n))
        killed = started.processes[first]
        before = _manifests(out)
        kill_all([psutil.Process(killed.pid)])  # also what it started: a run whose launcher alone is killed saves
        statuses = started.wait(120)
        for number in {*range(4)} - {first}:
            assert statuses[number] != 0
            (line,) = started.errors(number)
            assert re.search(
                f"--output_dir {out} holds a run, killed after update [0-9]+, peak memory 0.[0-9]+ GiB", line
            )
    left = _manifests(out)
    assert left and before.items() & left.items() and read_metrics(out)


def test_four_starts_of_one_second_take_a_directory_each(rows, tmp_path):
    with Run(tmp_path) as started:
        changes = {"default_output_dir": str(tmp_path / "runs/lm-now"), "start_together": [str(tmp_path / "ready"), 4]}
        start_four(started, rows, tmp_path, changes, "--num_updates", 3, "--save_every", 2)
        assert started.wait(120) == [0] * 4, started.output()
    found = sorted((tmp_path / "runs").iterdir())
    assert [path.name for path in found] == ["lm-now", "lm-now-2", "lm-now-3", "lm-now-4"]
    for path in found:
        assert status_of(path) == "finished" and len(read_metrics(path)) == 3
        record = json.loads((path / "run.json").read_text())
        assert record["arguments"]["output_dir"] == str(path)
        assert len(list(path.glob("checkpoints/update-*/manifest.json"))) == 2


# --- runs that were killed, interrupted, or lost their directory


def killed_run(rows, out, started, tmp_path):
    given = ["--train_file", rows, *FLAGS[:8], "--sequence_length", 32, "--learning_rate", 1e-3, "--output_dir", out]
    given += ["--num_updates", 5000, "--save_every", 4]
    command = specs_command("lm", [(given, {"slow_updates": 0.05})], tmp_path)
    return given, started.start(command)


def test_a_killed_run_is_shown_as_killed_with_its_last_update_and_peak(rows, tmp_path, capsys, monkeypatch):
    """By `report`, `list` and the next start. Control: while it runs, it is shown as running."""
    out = tmp_path / "run"
    with Run(tmp_path) as started:
        given, process = killed_run(rows, out, started, tmp_path)
        wait_until(lambda: list(out.glob("checkpoints/update-??????/manifest.json")))
        assert describe_killed(out) is None and read_runs([out])[0].status() == "running"
        kill_all([psutil.Process(process.pid)])
        process.wait()
        wait_until(lambda: describe_killed(out), 30)
    last = read_metrics(out)[-1]
    how = f"killed after update {last['update'] + 1}, peak memory {last['peak_memory_bytes'] / 2**30:.2f} GiB"
    assert describe_killed(out) == read_runs([out])[0].status() == how
    with open(out / "metrics.jsonl", "a") as file:
        file.write('{"update": 99')  # the kill came within a write
    monkeypatch.setattr(sys, "argv", ["checkpoint", "list", str(out)])
    with pytest.raises(SystemExit) as ended:
        checkpoint.main()
    assert ended.value.code == 0 and f"{out}: the run: {how}\n" in capsys.readouterr().out
    done = last["update"] + 3
    result = launch(*given, "--resume", "--num_updates", done, "--allow_changed", "num_updates")
    assert f"the run before this start: {how}\n" in result.stdout
    assert status_of(out) == "finished" and len(read_metrics(out)) == done and describe_killed(out) is None
    record = json.loads((out / "run.json").read_text())
    (out / "run.json").write_text(json.dumps(record | {"status": "running", "host": "elsewhere"}))
    assert describe_killed(out).startswith("running on host elsewhere, or killed after update")
    lost = "failed at update 5: rank 1 on host somewhere was lost"  # as the others write if one process is killed
    for end in (lost, lost.replace("was lost", "stopped answering")):
        (out / "run.json").write_text(json.dumps(record | {"status": end}))
        assert re.fullmatch(f"{end}, peak memory 0.[0-9]+ GiB", describe_killed(out))


@pytest.mark.parametrize(("target", "config"), [("", "multi_cpu"), ("elsewhere", "cpu")])
def test_a_directory_that_is_lost_during_a_run_is_one_line(target, config, rows, tmp_path):
    out, target = tmp_path / "run", target and str(tmp_path / target)
    given = ["--train_file", rows, *FLAGS[:8], "--sequence_length", 32, "--learning_rate", 1e-3, "--output_dir", out]
    result = run_specs("lm", [(given, {"lose_output_dir": [str(out), 4, target]})], tmp_path, config, check=False)
    assert_refused(result, f"--output_dir {out}: the directory was deleted or moved while the run wrote there")
    assert "Traceback" not in told(result) and result.returncode == 1  # the launcher's
    assert config == "cpu" or re.search("exit status 2|exitcode *: 2", result.stderr)
    assert not out.exists()


def test_ctrl_c_during_the_imports_prints_nothing():
    command = [sys.executable, "recipes/lm.py", "--dry_run"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    wait_until(lambda: "libtorch_cpu" in Path(f"/proc/{process.pid}/maps").read_text())
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60)[0] == b"" and process.returncode == -signal.SIGINT


def test_an_interrupted_tokenisation_is_one_line_and_a_killed_one_is_cleared_away(rows, model_dir, tmp_path):
    """Control: what another process still writes stays."""
    text = tmp_path / "text.jsonl"
    text.write_text(rows.read_text() * 600)
    given = [*FLAGS[:8], "--sequence_length", 32, "--learning_rate", 1e-3, "--model_name_or_path", model_dir]
    cache = tmp_path / "cache"

    def start(started, path, out):
        files = ["--train_file", path, "--output_dir", tmp_path / out]
        command = [quick_python(), "recipes/lm.py", *files, *given, "--dry_run"]
        return started.start(command, {"XDG_CACHE_HOME": str(cache)})

    def unfinished():
        return list(cache.glob("accelerate_recipes/samples-*.partial/tokens.bin"))

    with Run(tmp_path) as started:
        process = start(started, text, "interrupted")
        wait_until(unfinished)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == -signal.SIGINT
        assert started.output().splitlines()[-1] == "interrupted before the first update; nothing was saved"
        assert "Traceback" not in started.output() and not unfinished() and not (tmp_path / "interrupted").exists()
        process = start(started, text, "killed")
        wait_until(unfinished)
        process.kill()
        (left,) = unfinished()
        wait_until(lambda: not is_locked(left.parent.with_suffix(".lock")), 30)
        another = cache / "accelerate_recipes/samples-another"
        another.with_name(another.name + PARTIAL).mkdir()
        with FileLock(f"{another}.lock"):
            assert start(started, rows, "next").wait(60) == 0
        assert not unfinished() and another.with_name(another.name + PARTIAL).exists()
        cached("test", [], lambda partial: None, cache / "accelerate_recipes")
        assert not another.with_name(another.name + PARTIAL).exists()
