"""Errors of a full disk and of limits on files: the disk that is meant, and the status in run.json."""

import errno
import json
import os
import resource
import subprocess
from contextlib import contextmanager
from subprocess import PIPE

import pytest
from conftest import ROOT, base_env, quick_python
from filelock import FileLock

from common.disk_errors import explain_disk_error, write_status_in_place
from common.files import replace_text
from common.process import this_process


@contextmanager
def largest_file(size):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def fill(disk):
    """Leaves no byte on the disk; returns the error."""
    with pytest.raises(OSError) as raised, open(disk / "ballast", "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    return raised.value


def test_a_limit_on_the_size_of_files_is_one_line(tmp_path):
    with largest_file(1000), pytest.raises(OSError) as raised, open(tmp_path / "x", "wb", buffering=0) as file:
        while True:
            file.write(bytes(600))
    assert raised.value.errno == errno.EFBIG
    assert "ulimit -f" in explain_disk_error(raised.value, None)
    assert explain_disk_error(FileNotFoundError(errno.ENOENT, "no file", "x"), None) is None  # a mistake of the code


def test_an_error_without_a_path_names_the_disk_that_is_full(small_disk, tmp_path):
    disk = small_disk(tmp_path / "disk", "64K")
    error = fill(disk)
    assert error.filename is None and error.errno == errno.ENOSPC
    locks = this_process().output_locks
    locks[disk] = FileLock(disk / ".lock")
    try:
        assert f"({disk}); 0 free" in explain_disk_error(error, None)
    finally:
        del locks[disk]
    assert str(disk) not in explain_disk_error(error, None)  # the control: no run writes there


def test_a_full_disk_of_the_output_is_the_one_that_is_named():
    """And nothing is said of a checkpoint, because no update began. The control writes to a file."""
    command = [quick_python(), "recipes/vision.py", "--dry_run"]
    how = {"cwd": ROOT, "env": base_env(PYTHONUNBUFFERED=None), "stderr": PIPE}  # what is buffered is written at exit
    with open("/dev/full", "w") as full, open(os.devnull, "w") as file:
        failed, control = (subprocess.run(command, stdout=output, **how) for output in (full, file))
    assert control.returncode == 0, control.stderr
    assert failed.returncode == 2 and failed.stderr.count(b"\n") == 1
    assert b"No space left on device (/dev/full)" in failed.stderr and b"--resume" not in failed.stderr


def test_a_full_disk_keeps_the_status_of_the_run(small_disk, tmp_path):
    """The control: a new file does not fit."""
    disk = small_disk(tmp_path / "disk", "64K")
    run = {"status": "running", "arguments": {"name": "x" * 5000}}
    (disk / "run.json").write_text(json.dumps(run, indent=2) + "\n")
    fill(disk)
    with pytest.raises(OSError, match="No space left"):
        replace_text(disk / "run.json", json.dumps(run | {"status": "failed"}))
    write_status_in_place(disk, "failed at update 3")
    assert json.loads((disk / "run.json").read_text()) == run | {"status": "failed at update 3"}
    write_status_in_place(disk, "failed again")  # only a run that is running has failed
    assert json.loads((disk / "run.json").read_text())["status"] == "failed at update 3"
    assert sorted(os.listdir(disk)) == ["ballast", "run.json"]


def test_a_status_that_does_not_fit_changes_nothing(small_disk, tmp_path):
    disk = small_disk(tmp_path / "disk", "64K")
    text = json.dumps({"status": "running", "name": "x" * 4000}, indent=2)
    (disk / "run.json").write_text(text)
    fill(disk)
    write_status_in_place(disk, "f" * 4000)
    assert (disk / "run.json").read_text() == text
