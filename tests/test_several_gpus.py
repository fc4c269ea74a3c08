"""What would fail first on a machine with several GPUs, as far as a CPU can show it."""

import re
import threading
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from conftest import BIN, launch_command, run, told
from test_writer import make_writer, piece, start

from common.checkpoint import host_copy, write
from common.parallel import matmul_throughput
from common.parallel.launch import parse_launch
from common.parallel.rank_connection import default_timeout

NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
SEGMENTS = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


@pytest.mark.parametrize("own", [{}, *({name: "max_split_size_mb:64"} for name in NAMES)], ids=str)
def test_the_allocator_has_expandable_segments_unless_the_user_configured_it(own):
    """Set before torch is imported. Control: a user's own value, by each name that torch reads, stays the only one."""
    program = "import os, sys, common; print('torch' in sys.modules, {n: v for n, v in os.environ.items() if n in "
    result = run([BIN / "python", "-c", f"{program}{NAMES}}})"], **(dict.fromkeys(NAMES) | own))
    assert result.stdout.strip() == f"False {own or SEGMENTS}", result.stderr


@pytest.mark.parametrize("in_place", [False, True])
def test_each_thread_of_a_save_sets_its_device_before_it_uses_it(in_place, monkeypatch, tmp_path):
    """On a GPU, whose streams are noted here. Control: a thread that does not, whose device would be GPU 0."""
    current, used = threading.local(), []

    def use(*_):
        used.append((threading.current_thread().name.split("_")[0], getattr(current, "device", 0)))

    monkeypatch.setattr(torch.cpu, "set_device", lambda number: setattr(current, "device", number))
    writer, chunks = make_writer(tmp_path, "cpu:3"), write.in_chunks
    monkeypatch.setattr(write, "in_chunks", lambda contents: use() or chunks(contents))
    writer.copy = host_copy.HostCopy(writer.device)
    Event = type("Event", (), {"record": use, "wait": lambda _: None, "synchronize": use})
    streams = {"stream": lambda stream: use() or torch.cpu.stream(stream), "current_stream": torch.cpu.current_stream}
    writer.copy.streams = types.SimpleNamespace(Event=Event, set_device=torch.cpu.set_device, **streams)
    start(writer, piece("weight/w", torch.zeros(4)), in_place=in_place)
    writer.finish()
    ThreadPoolExecutor(1, "control").submit(use).result()
    copied = [("checkpoint copy", 3)] * 2 + [("checkpoint", 3)]
    assert used == [*([] if in_place else copied), ("checkpoint", 3), ("control", 0)]


def test_matmuls_are_timed_on_their_own_gpu_without_their_launch(monkeypatch):
    """Several between two events of a device that is not the current one. Control: a wait for the current device."""
    recorded, launched = [], []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self, stream):
            recorded.append((stream, len(launched)))

        def synchronize(self):
            recorded.append("waits")

        def elapsed_time(self, end):
            return 1000 * len(launched)  # milliseconds

    class Matrix:
        is_cuda, device = True, torch.device("cuda:3")

        def __matmul__(self, other):
            launched.append(other)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: f"stream of {device}")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: recorded.append("waits for the current device"))
    assert matmul_throughput.seconds_of(Matrix(), Matrix()) == 1
    assert recorded == [("stream of cuda:3", 0), ("stream of cuda:3", len(launched)), "waits"] and len(launched) > 1


def test_a_measurement_multiplies_random_numbers_and_draws_none_of_the_run(monkeypatch):
    """Control: numbers that are drawn without a generator of their own."""
    seen, cpu = [], torch.device("cpu")
    monkeypatch.setattr(matmul_throughput, "seconds_of", lambda a, b: seen.extend([a, b]) or 1.0)
    torch.manual_seed(0)
    expected = torch.rand(1)
    for draw in (lambda: matmul_throughput.matmul_durations(cpu, "bf16", 0.5), lambda: torch.randn(1)):
        torch.manual_seed(0)
        draw()
        seen.append(torch.rand(1) == expected)
    (a, b), (stays, changes) = seen[:2], seen[2:]
    assert a.dtype == torch.bfloat16 and 0.9 < a.float().std() < 1.1 and not a.equal(b)
    assert stays and not changes


@pytest.mark.parametrize(("has_gpu", "seconds"), [(True, 300), (False, 60)])
def test_processes_on_gpus_have_five_minutes_to_arrive(has_gpu, seconds, monkeypatch):
    """Because 16 of them import torch from one file system. Control: without a GPU, a minute."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: has_gpu)
    words = [str(word) for word in launch_command("multi_gpu", "recipes/lm.py")]
    assert default_timeout(parse_launch(words[2:])) == seconds


GROUPS = """
import runpy, sys
from contextlib import contextmanager

sys.argv = sys.argv[1:]
sys.path.insert(0, "")
import torch.distributed as dist

from common.parallel import rank_connection

is_guarded, at_most, new_group = [False], rank_connection.at_most, dist.new_group


@contextmanager
def noted(*args):
    with at_most(*args):
        is_guarded[0] = True
        yield
        is_guarded[0] = False


def note(*args, **kwargs):
    sys.stdout.write(f"GROUP {kwargs['backend']} {is_guarded[0]}\\n")  # at once, because both ranks write
    return new_group(*args, **kwargs)


rank_connection.at_most, dist.new_group = noted, note
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_the_group_of_saves_connects_within_the_time_limit_of_the_start(functions_file, model_dir, tmp_path):
    """Later it waits for a day, also in a wrong network. Control: that each rank creates such a group."""
    (tmp_path / "groups.py").write_text(GROUPS)
    recipe = ["recipes/lm.py", "--train_file", functions_file, "--model_name_or_path", model_dir, "--dry_run"]
    result = run([*launch_command("multi_cpu", "--mixed_precision", "no"), tmp_path / "groups.py", *recipe])
    assert re.findall(r"GROUP (\w+ (?:True|False))", result.stdout) == ["gloo True"] * 2, told(result)
