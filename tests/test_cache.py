"""A damaged cache entry is found and made again, whatever was done to it; an entry without damage is not."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT, launch, read_metrics, write_rows

from common.data.cache import cached, only_one
from common.files import CONTENTS, size_and_digest
from common.tasks.dpo.reference import is_cached

TEXTS = {"tokens.bin": bytes(range(200)), "meta.json": b'{"tokens": 50}'}


def make(directory, calls):
    """The entry of a cache in `directory`; `calls` gets an item each time that it is written."""

    def write(partial):
        calls.append(partial)
        for name, content in TEXTS.items():
            (partial / name).write_bytes(content)

    return cached("made", [1], write, directory)


def shorten(path):
    path.write_bytes(path.read_bytes()[:-1])


def flip(path):
    """Changes a bit; size and time stay the same."""
    content, times = bytearray(path.read_bytes()), path.stat()
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def lengthen(path):
    path.write_bytes(path.read_bytes() + b" ")


def replace_by_directory(path):
    path.unlink()
    path.mkdir()


DAMAGES = [shorten, flip, lengthen, os.remove, replace_by_directory]


@pytest.mark.parametrize("name", [*TEXTS, CONTENTS])
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_file_is_made_again(name, damage, tmp_path, caplog):
    calls = []
    directory = make(tmp_path, calls)
    assert make(tmp_path, calls) == directory and len(calls) == 1  # the control
    damage(directory / name)
    if name == CONTENTS and damage in (os.remove, lengthen):  # as an older version wrote it; white space has no meaning
        assert make(tmp_path, calls) == directory and len(calls) == 1
        return
    assert make(tmp_path, calls) == directory and len(calls) == 2
    assert {path: (directory / path).read_bytes() for path in TEXTS} == TEXTS
    assert [record.getMessage() for record in caplog.records] and all(
        str(directory) in record.getMessage() and "made again" in record.getMessage() for record in caplog.records
    )
    assert make(tmp_path, calls) == directory and len(calls) == 2
    assert not [path for path in tmp_path.iterdir() if path.name.endswith(".partial")]


def test_names_in_the_list_of_files_do_not_leave_the_entry(tmp_path):
    """A list that names a file elsewhere is damaged: nothing outside of the entry is read."""
    calls, outside = [], tmp_path / "outside"
    outside.write_bytes(b"1")
    directory = make(tmp_path / "cache", calls)
    listed = json.loads((directory / CONTENTS).read_text())
    (directory / CONTENTS).write_text(json.dumps(listed | {"../../outside": size_and_digest(outside)}))
    assert make(tmp_path / "cache", calls) == directory and len(calls) == 2
    assert outside.read_bytes() == b"1"


PROCESS = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_cache import make
calls = []
make(Path(sys.argv[2]), calls)
print(len(calls))
"""


def test_processes_of_a_launch_read_an_entry_once(tmp_path):
    """The first process of a launch compares the contents; the others compare the sizes. One process always reads."""
    directory = make(tmp_path, [])

    def calls_in_process(world_size):
        command = [sys.executable, "-c", PROCESS, str(ROOT / "tests"), str(tmp_path)]
        env = os.environ | {"WORLD_SIZE": str(world_size), "PYTHONPATH": str(ROOT)}
        return int(subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout)

    assert calls_in_process(2) == 0
    flip(directory / "tokens.bin")
    assert calls_in_process(2) == 0  # this process is its launcher too: the contents have been compared
    shorten(directory / "tokens.bin")
    assert calls_in_process(2) == 1
    flip(directory / "tokens.bin")
    assert calls_in_process(1) == 1


def test_a_reference_that_is_damaged_is_computed_again(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    directory = cached("reference", [2], lambda partial: np.save(partial / "reference.npy", np.arange(9.0)))
    assert is_cached([2]) and not is_cached([3])
    flip(directory / "reference.npy")
    assert not is_cached([2]) and not directory.exists()


@pytest.mark.parametrize("damage", [shorten, flip], ids=lambda damage: damage.__name__)
def test_a_run_does_not_train_on_damaged_tokens(damage, tmp_path):
    """Two processes; the metrics are those of the run that made the entry."""
    write_rows(tmp_path / "rows.jsonl", 60)
    env = {"XDG_CACHE_HOME": tmp_path / "cache"}
    flags = ["--train_file", tmp_path / "rows.jsonl", "--num_updates", 2, "--sequence_length", 32]
    flags += ["--global_batch_size", 8]
    outputs = {}
    for name in ("first", "again", "damaged"):
        if name == "damaged":
            for entry in (tmp_path / "cache/accelerate_recipes").glob("samples-*/tokens.bin"):
                damage(entry)
        result = launch("--output_dir", tmp_path / name, *flags, config="multi_cpu", **env)
        outputs[name] = result.stdout + result.stderr
    losses = [[line["loss"] for line in read_metrics(tmp_path / name)] for name in outputs]
    assert losses[0] == losses[1] == losses[2]
    assert [output.count("it is made again") for output in outputs.values()] == [0, 0, 1]


def test_what_another_process_writes_beside_its_entry_is_not_removed(tmp_path):
    """While it holds the lock of its entry; afterwards it is what a killed process has left."""
    calls = []
    beside = tmp_path / "made-other.checked.partial"
    beside.write_text("[]")
    with only_one(tmp_path / "made-other"):
        make(tmp_path, calls)
        assert beside.exists()
    make(tmp_path, calls)
    assert not beside.exists() and len(calls) == 1
