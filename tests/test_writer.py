"""How a checkpoint is written beside the training: what is copied when, and what a save leaves to the updates."""

import json
import threading
import time
import types
from pathlib import Path

import pytest
import torch
from conftest import BIN, ROOT, run
from running import wait_until
from safetensors.torch import load_file

from common import files
from common.checkpoint import host_copy, write
from common.checkpoint.agreement import Agreement
from common.checkpoint.parts import Piece
from common.checkpoint.read import DIGESTS
from common.files import PAGE, write_file


def make_writer(directory, device="cpu"):
    ranks = Agreement(types.SimpleNamespace(process_index=0, num_processes=1), Path(directory))
    return write.Writer(ranks, torch.device(device), 2, False)


def piece(name, tensor):
    return Piece(name, tensor, 0, tuple(tensor.shape), True)


def start(writer, *pieces, in_place=False):
    """A save of a model of its own; its optimizer."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    writer.finish()
    writer.start({"update": 1}, {}, list(pieces), optimizer, in_place)
    return optimizer


def saved(writer):
    return load_file(writer.ranks.directory / "update-000001/rank-00000.safetensors")


@pytest.fixture
def late(monkeypatch):
    """The copy begins when this event is set."""
    event, copy = threading.Event(), host_copy.HostCopy._copy

    def wait_and_copy(*args):
        event.wait()
        return copy(*args)

    monkeypatch.setattr(host_copy.HostCopy, "_copy", wait_and_copy)
    return event


def test_buffers_are_copied_before_the_next_forward_and_the_rest_before_the_step(late, tmp_path):
    """Control: a weight that changes before the step is saved as it is then; nothing but a step changes one."""
    writer, buffer, weight = make_writer(tmp_path), torch.zeros(4), torch.zeros(4)
    optimizer = start(writer, piece("buffer/mean", buffer), piece("weight/w", weight))
    buffer += 1  # a forward
    weight += 1
    threading.Timer(0.2, late.set).start()
    optimizer.step()
    assert late.is_set()
    weight += 1
    writer.finish()
    assert saved(writer)["buffer/mean"].tolist() == [0] * 4 and saved(writer)["weight/w"].tolist() == [1] * 4


def test_a_step_stands_in_line_behind_the_copy(tmp_path):
    """On a GPU, whose streams are noted here: the copy after what was computed, step and write after the copy."""
    done, writer = [], make_writer(tmp_path)
    writer.copy = host_copy.HostCopy(writer.device)

    class Stream:
        def wait_stream(self, other):
            done.append(f"beside waits for {other}")

    class Event:
        def record(self, stream):
            done.append("copied" if stream is writer.copy.copy_stream else "elsewhere")

        def wait(self):
            done.append("step waits")

        def synchronize(self):
            done.append("writing")

    streams = {"current_stream": lambda: "computing", "stream": torch.cpu.stream, "set_device": torch.cpu.set_device}
    writer.copy.streams = types.SimpleNamespace(Event=Event, Stream=Stream, **streams)
    writer.copy.copy_stream = Stream()
    optimizer = start(writer, piece("weight/w", torch.zeros(4)))
    optimizer.step()
    optimizer.step()
    writer.finish()
    assert done[:2] == ["beside waits for computing", "copied"] and sorted(done[2:]) == ["step waits", "writing"]


def test_the_thread_rests_while_nobody_waits_for_it(monkeypatch, tmp_path):
    """Control: without the rest, it is written at once."""
    for rest in (1e5, 0):
        monkeypatch.setattr(write, "PAUSE_RATIO", rest)
        writer = make_writer(tmp_path / str(rest))
        start(writer, piece("weight/w", torch.ones(100_000)))
        path = writer.ranks.directory / "update-000001.partial/rank-00000.safetensors"
        wait_until(lambda path=path: path.is_file() and path.stat().st_size > 400_000)
        time.sleep(0.3)
        assert writer.is_written() == (rest == 0)
        writer.finish()
        assert saved(writer)["weight/w"].tolist() == [1] * 100_000


@pytest.mark.parametrize(
    ("left", "held", "processes", "fits"),
    [
        (175, 0, 1, False),
        (176, 0, 1, True),
        (350, 0, 2, False),
        (351, 0, 2, True),
        (75, 100, 1, False),
        (76, 100, 1, True),
    ],
)
def test_a_copy_leaves_room_for_what_a_run_may_still_grow_by(left, held, processes, fits, monkeypatch):
    """A quarter more than the copies, and half of what each process has taken: 100 here. Controls: one byte."""
    monkeypatch.setattr(host_copy, "available_memory", lambda: left)
    monkeypatch.setattr(host_copy, "most_resident", lambda: 100)
    assert host_copy.has_memory(100, held, processes) == fits


def test_the_file_is_the_same_with_and_without_a_copy_and_safetensors_reads_it(tmp_path):
    """Elements of every size, tensors that are not contiguous, no elements."""
    made = torch.arange(12.0).view(3, 4)
    kept = {"weight/a": made.t(), "weight/b": made.to(torch.uint8)[:, :3], "weight/none": torch.zeros(0)}
    kept |= {"buffer/count": torch.tensor(7), "weight/d": made.double(), "weight/e": made.bfloat16()[:1]}
    found = []
    for in_place in (False, True):
        writer = make_writer(tmp_path / str(in_place))
        start(writer, *(piece(*one) for one in kept.items()), in_place=in_place)
        writer.finish()
        read = saved(writer)
        assert read.keys() == kept.keys() and all(read[name].equal(kept[name].flatten()) for name in kept)
        found.append(json.loads((writer.ranks.directory / "update-000001/rank-00000.json").read_text()))
    assert found[0] == found[1]


THREADS = """
import os, sys, torch
sys.path[:0] = ["tests", "."]
from test_writer import make_writer, piece, start, wait_until, write
def count():
    return len(os.listdir("/proc/self/task"))
writer, state = make_writer(sys.argv[1]), torch.ones(1 << 20)
state += 1  # which begins the threads of the training
write.PAUSE_RATIO, before = 0, count()
if sys.argv[2] == "control":
    writer.pool.submit(state.clone).result()
start(writer, piece("weight/w", state))
writer.writing.result()
wait_until(lambda: count() <= before + (2 if sys.argv[2] == "control" else 1))
print(count() - before)
"""


@pytest.mark.parametrize(("kind", "more"), [("save", 1), ("control", 2)])
def test_a_save_leaves_no_second_team_of_threads(kind, more, tmp_path):
    """One thread more, that writes. Control: once it has computed with torch, it has a team of its own."""
    result = run([BIN / "python", "-c", THREADS, tmp_path, kind], cwd=ROOT, OMP_NUM_THREADS=2)
    assert result.returncode == 0 and int(result.stdout) == more, result.stdout + result.stderr


@pytest.mark.parametrize("how", ["whole pages", "other places", "refused"])
def test_a_file_holds_what_was_written_however_it_went_to_the_disk(how, monkeypatch, tmp_path):
    """Past the kernel's cache where all lies on pages; through it elsewhere, and where the system refuses (EINVAL)."""
    room = torch.randint(256, (5 * PAGE + 777,), dtype=torch.uint8)
    begin = -room.data_ptr() % PAGE + (how != "whole pages")
    content = memoryview(room.numpy())[begin : begin + 4 * PAGE + 77]
    if how == "refused":
        monkeypatch.setattr(files, "PAGE", 1)
    direct, written = files._write_directly, []
    monkeypatch.setattr(files, "_write_directly", lambda *args: written.append(direct(*args)) or written[-1])
    facts = write_file(tmp_path / "file", [content[: 2 * PAGE], content[2 * PAGE :]])
    assert (tmp_path / "file").read_bytes() == content
    assert facts == {"bytes": len(content), "xxh3_128": DIGESTS["xxh3_128"](content).hexdigest()}
    assert written == {"whole pages": [2 * PAGE, 2 * PAGE], "other places": [], "refused": [0, 0]}[how]
