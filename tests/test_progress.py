"""Progress is a bar on a terminal, and lines of text in a log."""

import os
import re
import subprocess
import termios

import pytest
from conftest import ROOT, base_env, example_flags, quick_python, run_specs

from common.report import progress

NUM_UPDATES = 12
LINE = r"update ([\d,]+) of 12 \(\d+\.\d%\), epoch \d+\.\d\d of \d+\.\d\d: loss \d\.\d{4}, "
LINE += r"learning rate \S+, [\d,]+ tokens/s, data-loading time \d+\.\d%, [\d:]+ left"


def flags(functions_file, model_dir, output_dir):
    evaluation = ["--validation_file", functions_file, "--eval_every", 6, "--save_every", 0]
    more = ["--num_updates", NUM_UPDATES, "--global_batch_size", 4, "--warmup_updates", 1, *evaluation]
    return [str(part) for part in example_flags(functions_file, model_dir, output_dir, *more)]


def test_a_log_gets_few_lines_and_no_bar(functions_file, model_dir, tmp_path):
    """The first and the last update are among them; other messages stand between them, each on a line of its own."""
    result = run_specs("lm", [(flags(functions_file, model_dir, tmp_path / "run"), {})], tmp_path, TQDM_DISABLE=None)
    assert "\r" not in result.stdout + result.stderr and "it/s" not in result.stderr
    shown = [match for match in (re.fullmatch(LINE, line) for line in result.stderr.splitlines()) if match]
    assert [shown[0][1], shown[-1][1]] == ["1", "12"] and len(shown) < NUM_UPDATES
    assert len(re.findall(r"^update (?:6|12): validation loss \d\.\d{4}", result.stdout, re.M)) == 2


def test_a_terminal_gets_a_bar(functions_file, model_dir, tmp_path):
    """The control of the test above: the same run on a pseudo-terminal."""
    terminal, theirs = os.openpty()
    termios.tcsetwinsize(terminal, (24, 200))
    command = [quick_python(), "recipes/lm.py", *flags(functions_file, model_dir, tmp_path / "run")]
    streams = {"stdin": subprocess.DEVNULL, "stdout": theirs, "stderr": theirs}
    with subprocess.Popen(command, cwd=ROOT, env=base_env(CUDA_VISIBLE_DEVICES=""), **streams) as process:
        os.close(theirs)
        printed = b""
        try:
            while part := os.read(terminal, 1 << 16):
                printed += part
        except OSError:  # Linux: the terminal has no other side any more
            pass
    os.close(terminal)
    text = printed.decode()
    assert process.returncode == 0, text[-2000:]
    assert re.search(r"\repoch [^\r\n]*12/12 \[", text) and not re.search(r"update 1 of 12 \(", text)
    assert len(re.findall(r"update (?:6|12): validation loss \d\.\d{4}[^\r\n]*\r\n", text)) == 2


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test sets."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now[0])
    return now


def record(seconds, **more):
    return {"loss": 2.0, "seconds": seconds, "waiting_for_data": 0.25, "skipped_updates": 0} | more


def lines_of(clock, capsys, num_updates, seconds, first=0):
    """The updates of which a run of `num_updates`, each of so many seconds, prints a line."""
    lines = progress.LogLines(first, num_updates)
    for done in range(first + 1, num_updates + 1):
        clock[0] += seconds
        lines.update(done, 100, "tokens", record(seconds))
    lines.close()
    printed = capsys.readouterr().err.splitlines()
    assert all(f" {100 / seconds:.0f} tokens/s, " in line for line in printed)
    return [int(line.split()[1].replace(",", "")) for line in printed]


def test_lines_come_after_ten_seconds_and_a_hundredth_of_the_run(clock, capsys):
    """In a run of days, after ten minutes at the latest."""
    assert lines_of(clock, capsys, 30, 1.0) == [1, 11, 21, 30]  # ten seconds
    assert lines_of(clock, capsys, 1000, 5.0, first=950) == [951, 961, 971, 981, 991, 1000]  # a hundredth
    assert lines_of(clock, capsys, 1_000_000, 1.0, first=998_500) == [998_501, 999_101, 999_701, 1_000_000]  # silence


@pytest.mark.parametrize(
    ("first", "others", "printed"),
    [(10.0, 2.0, [1, 2]), (10.0, 6.0, [1]), (9.0, 2.0, [1])],  # seconds; the others are controls
)
def test_after_a_slow_first_update_the_second_is_printed(first, others, printed, clock, capsys):
    """The estimate of the first, which also compiled, is far too long."""
    lines = progress.LogLines(0, 1000)
    for done in (1, 2, 3):
        seconds = first if done == 1 else others
        clock[0] += seconds
        lines.update(done, 10, "tokens", record(seconds))
    shown = capsys.readouterr().err.splitlines()
    assert [int(line.split()[1]) for line in shown] == printed
    if printed == [1, 2]:
        assert shown[0].endswith(" 2:46:30 left") and shown[1].endswith(" 33:16 left")


def test_the_time_left_forgets_the_first_half_of_the_updates(clock, capsys):
    """Several of the first may compile. The rest, evaluations between them included, decides."""
    lines = progress.LogLines(0, 100)
    for done in range(1, 11):
        clock[0] += 30.0 if done < 5 else 3.0
        lines.update(done, 10, "tokens", record(2.0))
    lines.close()
    assert capsys.readouterr().err.splitlines()[-1].endswith(" 04:30 left")  # 90 updates of 3 s


def test_a_run_that_ends_early_prints_its_last_update(clock, capsys):
    """As one that is stopped; the time left is that of the updates so far."""
    lines = progress.LogLines(0, 100)
    for done in range(1, 4):
        clock[0] += 2.0
        lines.update(done, 10, "pixels", record(1.0, skipped_updates=done // 3))  # half of the time is evaluation
    start = "loss 2.0000, 10 pixels/s, data-loading time 25.0%"
    assert capsys.readouterr().err == f"update 1 of 100 (1.0%): {start}, 01:39 left\n"
    lines.close()
    assert capsys.readouterr().err == f"update 3 of 100 (3.0%): {start}, 1 skipped, 03:14 left\n"
    lines.close()
    assert capsys.readouterr().err == ""
