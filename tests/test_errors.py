"""A problem is one line of bounded length, whatever the names and values in files are."""

import json
import os
import socket

import pytest
from conftest import assert_refused, launch

from common.errors import LONGEST, MOST_PROBLEMS, UserError, raise_errors


@pytest.mark.parametrize("name", ["two\nlines", "a\rb", "a\x0bb\x0cc", "a\u2028b\x85c", "\x1b[2Jx", "x" * 1_000_000])
def test_a_name_in_a_file_does_not_end_the_line(name, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({name: "a text"}) + "\n")
    result = launch("--train_file", rows, "--output_dir", tmp_path / "run", check=False)
    assert_refused(result, "rows.jsonl: no column text")
    assert max(map(len, result.stderr.splitlines())) < 2 * LONGEST and "\x1b" not in result.stderr
    assert not (tmp_path / "run").exists()


def test_each_problem_has_its_line():
    with pytest.raises(UserError) as told:
        raise_errors(f"file {number}\nhere: wrong" for number in range(10 * MOST_PROBLEMS))
    first, *_, last = lines = str(told.value).splitlines()
    assert len(lines) == MOST_PROBLEMS + 1 and first == r"file 0\nhere: wrong"
    assert last == f"and {9 * MOST_PROBLEMS} problems more"
    raise_errors([])  # the control


@pytest.mark.parametrize("before", range(LONGEST - 40, LONGEST + 10, 7))
def test_the_end_of_a_long_line_is_no_part_of_a_secret(before, monkeypatch):
    secret = "wN7qZ2vK9pT4xB6mR1cJ"
    monkeypatch.setenv("HF_TOKEN", secret)
    line = str(UserError("x" * before + " " + secret + "y" * 5 * LONGEST))
    assert secret[:5] not in line and len(line) <= LONGEST + 4
    assert str(UserError("x" * 100)) == "x" * 100


@pytest.mark.parametrize(
    "flag", ["--output_dir", "--train_file", "--validation_file", "--model_name_or_path", "--chat_template"]
)
def test_a_path_that_no_file_system_can_have(flag, tmp_path):
    """A long name or path is told as such; a long text that names no file is not (a control)."""
    (tmp_path / "text.txt").write_text("a text\n")
    for value in ("n" * 300, "d/" * 3000):
        flags = {"--train_file": tmp_path / "text.txt", "--output_dir": tmp_path / "run"} | {flag: value}
        words = [word for pair in flags.items() for word in pair]
        assert_refused(launch(*words, check=False), f"{flag} {value[:60]}.*: file name too long; name a shorter path")
    flags = ["--train_file", tmp_path / "text.txt", "--output_dir", tmp_path / "run", "--text_column", "c" * 300]
    assert_refused(launch(*flags, check=False), "has no effect on .txt files")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("kind", ["pipe", "device", "socket"])
def test_what_is_no_regular_file_is_not_waited_for(kind, tmp_path):
    path = tmp_path / "data.jsonl"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        socket.socket(socket.AF_UNIX).bind(str(path))
    flags = ["--train_file", path, "--output_dir", tmp_path / "run"]
    assert_refused(launch(*flags, check=False), f"{path}: is not a regular file")
