"""When one process is lost or fails, the others end at once and say who it was."""

import json
import os
import re
import subprocess
import sys
import time

import psutil
import pytest
from conftest import ROOT, launch_command, read_metrics, run

LINE = r"error: rank {rank} on host \S+ {what} at update \d+; this process \(rank \d+\) ends"


def flags(functions_file, output_dir, *more):
    base = ["--train_file", functions_file, "--sequence_length", 64, "--output_dir", output_dir, *more]
    return [str(part) for part in base]


def wait_until(condition, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.1)


def kill_rank(launcher, rank):
    """SIGKILL for a worker of a launcher."""
    for process in psutil.Process(launcher.pid).children(recursive=True):
        if process.environ().get("RANK") == str(rank):
            return process.kill()
    raise AssertionError(f"no rank {rank} below {launcher.args}")


def write_spec(path, output_flags, **changes):
    path.write_text(json.dumps([{"flags": output_flags, "changes": changes}]))
    return ["tests/run_recipe.py", path]


@pytest.mark.parametrize(
    ("config", "lost", "watched"), [("multi_cpu", 1, True), ("zero1", 0, True), ("fsdp2", 1, True), ("fsdp2", 1, False)]
)
def test_a_killed_process_ends_the_others_and_is_named(config, lost, watched, functions_file, tmp_path, extensions):
    given = flags(functions_file, tmp_path / "run", "--num_updates", 5000)
    script = write_spec(tmp_path / "spec.json", given, **({} if watched else {"no_watch": True}))
    command = launch_command(config, "--mixed_precision", "no", "--num_processes", 2)
    env = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with open(tmp_path / "stderr", "w") as stderr:
        launcher = subprocess.Popen(
            [*map(str, command), *map(str, script)], cwd=ROOT, env=env, stderr=stderr, stdout=stderr
        )
    try:
        metrics = tmp_path / "run/metrics.jsonl"
        wait_until(lambda: metrics.exists() and len(read_metrics(tmp_path / "run")) > 2)
        kill_rank(launcher, lost)
        killed = time.monotonic()
        assert launcher.wait(timeout=10) != 0
        print(f"ended {time.monotonic() - killed:.1f} s after the kill", file=sys.stderr)
    finally:
        for process in psutil.Process(launcher.pid).children(recursive=True) if launcher.poll() is None else []:
            process.kill()
    lines = re.findall(LINE.format(rank=lost, what="was lost"), (tmp_path / "stderr").read_text())
    assert len(lines) == (1 if watched else 0)


def test_an_exception_of_one_process_is_told_by_the_others(functions_file, tmp_path):
    script = write_spec(tmp_path / "spec.json", flags(functions_file, tmp_path / "run"), broken_rank=[1, 2])
    started = time.monotonic()
    result = run([*launch_command("multi_cpu"), *script], timeout=100)
    assert result.returncode != 0 and time.monotonic() - started < 60
    assert len(re.findall(LINE.format(rank=1, what="ended with RuntimeError: this rank is broken"), result.stderr)) == 1
    assert "at update 2;" in result.stderr


def test_an_exception_of_all_processes_is_nobodys_loss(functions_file, tmp_path):
    given = flags(functions_file, tmp_path / "run", "--max_skipped_updates", 2)
    script = write_spec(tmp_path / "spec.json", given, nan_loss=[0, "all"])
    result = run([*launch_command("multi_cpu"), *script], timeout=100)
    assert result.returncode != 0 and "not finite 2 times in a row" in result.stderr
    assert "error: rank" not in result.stderr


@pytest.mark.parametrize("seconds", [1, 60])
def test_a_process_that_never_arrives_is_named(seconds, functions_file, tmp_path):
    given = flags(functions_file, tmp_path / "run", "--num_updates", 2, "--connect_timeout", 5, "--dry_run")
    script = write_spec(tmp_path / "spec.json", given, late=[1, seconds])
    result = run([*launch_command("multi_cpu"), *script], timeout=50)
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    if seconds < 5:
        assert result.returncode == 0 and not errors, result.stderr
    else:
        assert len(errors) == 1 and re.search(r"rank 1 did not arrive within 5 s of rank 0 on host", errors[0]), errors
