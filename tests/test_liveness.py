"""When one process is lost, stops or fails, the others end soon and say who it was."""

import contextlib
import json
import re
import signal
import socket
import sys
import threading
import time

import pytest
from conftest import read_metrics, run_specs, specs_command
from running import Run, find_rank, num_updates, wait_for_updates, wait_until

from common.parallel import rank_watch
from common.parallel.channel import Channel
from common.training.process_grid import ProcessGrid

LINE = r"error: rank {rank} on host \S+ {what} at update \d+; this process \(rank \d+\) ends"


def flags(functions_file, output_dir, *more):
    return ["--train_file", functions_file, "--sequence_length", 64, "--output_dir", output_dir, *more]


@contextlib.contextmanager
def launched(tmp_path, functions_file, config="multi_cpu", **changes):
    """A launch of two processes, once they have trained for some updates; the launcher, ended at last."""
    given = flags(functions_file, tmp_path / "run", "--num_updates", 50_000)
    mode = (config, "--mixed_precision", "no", "--num_processes", 2)
    with Run(tmp_path) as run:
        launcher = run.start(specs_command("lm", [(given, changes)], tmp_path, *mode))
        wait_for_updates(tmp_path / "run", 3)
        yield launcher


def status_of(tmp_path):
    return json.loads((tmp_path / "run/run.json").read_text())["status"]


def named(tmp_path, rank, what):
    """The lines that say what became of a rank."""
    return re.findall(LINE.format(rank=rank, what=what), (tmp_path / "output-0").read_text())


def run_two(tmp_path, given, **changes):
    return run_specs("lm", [(given, changes)], tmp_path, "multi_cpu", check=False, timeout=120)


@pytest.mark.parametrize(
    ("config", "lost", "watched"), [("multi_cpu", 1, True), ("zero1", 0, True), ("fsdp2", 1, True), ("fsdp2", 1, False)]
)
def test_a_killed_process_ends_the_others_and_is_named(config, lost, watched, functions_file, tmp_path, extensions):
    """Also where the disk is slow, so that the launcher asks this process to end before it has ended by itself."""
    changes = {"slow_note": 1.0} | ({} if watched else {"no_watch": True})
    with launched(tmp_path, functions_file, config, **changes) as launcher:
        find_rank(launcher, lost).kill()
        killed = time.monotonic()
        assert launcher.wait(timeout=40) != 0  # less than gloo's own limit
        print(f"ended {time.monotonic() - killed:.1f} s after the kill", file=sys.stderr)
    assert len(named(tmp_path, lost, "was lost")) == (1 if watched else 0)
    cause = f"rank {lost} on host \\S+ was lost" if watched else "RuntimeError: "
    assert re.match(rf"failed at update \d+: {cause}", status_of(tmp_path))


def test_a_stopped_process_is_named_and_the_launch_ends(functions_file, tmp_path):
    with launched(tmp_path, functions_file, silence=5) as launcher:
        stopped = find_rank(launcher, 1)
        stopped.send_signal(signal.SIGSTOP)
        started = time.monotonic()
        assert launcher.wait(timeout=100) != 0  # it kills a process 30 s after it asked it to end
        print(f"ended {time.monotonic() - started:.1f} s after the stop", file=sys.stderr)
        wait_until(lambda: not stopped.is_running(), 10)
    assert len(named(tmp_path, 1, "stopped answering")) == 1


def test_a_stopped_rank_0_is_named_but_not_a_launch_that_was_stopped(functions_file, tmp_path):
    """Nor a process that holds Python's lock for some seconds."""
    with launched(tmp_path, functions_file, silence=6, hold_lock=[1, 1, 4]) as launcher:
        ranks = [find_rank(launcher, rank) for rank in (0, 1)]
        for number, seconds in ((signal.SIGSTOP, 8), (signal.SIGCONT, 2)):
            for process in ranks:
                process.send_signal(number)
            time.sleep(seconds)
        done = num_updates(tmp_path / "run")
        wait_until(lambda: num_updates(tmp_path / "run") > done)
        assert "stopped answering" not in (tmp_path / "output-0").read_text()
        ranks[0].send_signal(signal.SIGSTOP)
        wait_until(lambda: named(tmp_path, 0, "stopped answering"))


@pytest.mark.parametrize(
    "holds", [{"hold_lock_in_profile": [0, 9]}, {"hold_lock": [0, 5, 9]}], ids=["profile", "control"]
)
def test_a_process_that_reads_its_profile_is_not_lost(holds, functions_file, tmp_path):
    """It holds Python's lock. Control: it holds it for as long in an update."""
    given = flags(functions_file, tmp_path / "run", "--num_updates", 7, "--profile")
    result = run_two(tmp_path, given, silence=5, **holds)
    lost = re.findall(LINE.format(rank=0, what="stopped answering"), result.stderr)
    assert (result.returncode == 0, len(lost)) == ((True, 0) if "hold_lock_in_profile" in holds else (False, 1))


def test_without_a_limit_a_stopped_process_is_waited_for(functions_file, tmp_path):
    """The control."""
    with launched(tmp_path, functions_file, silence="inf") as launcher:
        stopped = find_rank(launcher, 1)
        stopped.send_signal(signal.SIGSTOP)
        time.sleep(8)
        done = num_updates(tmp_path / "run")
        stopped.send_signal(signal.SIGCONT)
        wait_until(lambda: num_updates(tmp_path / "run") > done)
    assert not named(tmp_path, 1, "stopped answering")


def test_an_exception_of_one_process_is_told_by_the_others(functions_file, tmp_path):
    result = run_two(tmp_path, flags(functions_file, tmp_path / "run"), broken_rank=[1, 2])
    assert result.returncode != 0
    assert len(re.findall(LINE.format(rank=1, what="ended with RuntimeError: this rank is broken"), result.stderr)) == 1
    assert "at update 2;" in result.stderr
    reason = r"rank 1 on host \S+ ended with RuntimeError: this rank is broken"
    assert re.fullmatch(f"failed at update 2: {reason}", status_of(tmp_path))
    assert "traceback : RuntimeError: this rank is broken\n" in result.stderr  # at the end, by the launcher
    assert "user error" not in result.stderr


def test_an_exception_of_all_processes_is_nobodys_loss(functions_file, tmp_path):
    given = flags(functions_file, tmp_path / "run", "--max_skipped_updates", 2)
    result = run_two(tmp_path, given, nan_loss=[0, "all"])
    assert result.returncode != 0 and "not finite 2 times in a row" in result.stderr
    assert len(read_metrics(tmp_path / "run")) == 2
    assert "error: rank" not in result.stderr
    assert re.match("failed at update 1: RuntimeError: update 1: loss or gradient not finite", status_of(tmp_path))


def test_two_ranks_that_leave_together_spoil_neithers_good_bye(monkeypatch):
    """A rank's thread hears that the other one has gone while its main thread is about to write to it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    watches = {}

    def watch(rank):
        watches[rank] = rank_watch.RankWatch(rank, 2, 60, "together", ProcessGrid(2))

    starts = [threading.Thread(target=watch, args=[rank]) for rank in (0, 1)]
    for start in starts:
        start.start()
    for start in starts:
        start.join()
    send = Channel.send

    def after_the_other(channel, message):
        if threading.current_thread() is threading.main_thread() and channel in watches[0].peers:
            watches[1].leave(None, 0)
            time.sleep(0.5)  # in which it arrives
        send(channel, message)

    monkeypatch.setattr(Channel, "send", after_the_other)
    watches[0].leave(None, 0)


@pytest.mark.parametrize("seconds", [1, 60])
def test_a_process_that_never_arrives_is_named(seconds, functions_file, tmp_path):
    given = flags(functions_file, tmp_path / "run", "--num_updates", 2, "--connect_timeout", 15, "--dry_run")
    result = run_two(tmp_path, given, late=[1, seconds])
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    if seconds < 15:
        assert result.returncode == 0 and not errors, result.stderr
    else:
        assert len(errors) == 1 and re.search(r"rank 1 did not arrive within 15 s of rank 0 on host", errors[0]), errors
        assert re.search("\n  error: rank 1 did not arrive.*\n=+\n$", result.stderr)  # the line is the last one too
