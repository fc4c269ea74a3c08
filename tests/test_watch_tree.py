"""Ranks of two hosts, each with two ranks: an error reaches all of them through the first ranks of the hosts."""

import json
import multiprocessing
import time

import pytest
import torch.distributed as dist
from conftest import ROOT
from running import wait_until
from watch_rank import be_rank


@pytest.fixture
def started(tmp_path, monkeypatch):
    """Starts the ranks; the processes by rank. A server forks them, because this process has threads."""
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'tests'}")
    context, processes = multiprocessing.get_context("forkserver"), {}
    context.set_forkserver_preload(["watch_rank"])
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # as in the launcher

    def start(ranks=range(4), timeout=30, mistaken=None):
        for rank in ranks:
            arguments = (rank, store.port, tmp_path, timeout, mistaken)
            processes[rank] = context.Process(target=be_rank, args=arguments)
            processes[rank].start()
        return processes

    yield start
    for process in processes.values():
        process.kill()
        process.join()


def ended(processes, directory):
    """The exit status and the errors of each process, all within 20 seconds."""
    deadline = time.monotonic() + 20
    for process in processes.values():
        process.join(max(0, deadline - time.monotonic()))
    return {rank: (process.exitcode, (directory / f"rank-{rank}").read_text()) for rank, process in processes.items()}


@pytest.mark.parametrize("lost", [0, 2, 3])
def test_a_lost_rank_is_named_once_per_host(lost, started, tmp_path):
    """Rank 0, the first rank of the other host, and one that rank 0 has no connection to."""
    processes, paths = started(), [tmp_path / f"peers-{rank}" for rank in range(4)]
    wait_until(lambda: all(path.exists() for path in paths))
    assert [json.loads(path.read_text()) for path in paths] == [[1, 2], [0], [0, 3], [2]]
    processes[lost].kill()
    ends = ended(processes, tmp_path)
    speakers = {1 if lost == 0 else 0, 3 if lost == 2 else 2}
    for rank in {0, 1, 2, 3} - {lost}:
        status, errors = ends[rank]
        assert status == 3, ends
        assert (f"error: rank {lost} on host" in errors) == (rank in speakers), ends


def test_a_mistake_of_one_rank_ends_all_with_its_line(started, tmp_path):
    ends = ended(started(mistaken=3), tmp_path)
    assert [status for status, _ in ends.values()] == [2, 2, 2, 2], ends
    assert [errors.count("x.json: no such file") for _, errors in ends.values()] == [1, 0, 1, 0], ends


def test_only_the_ranks_that_are_missing_are_named(started, tmp_path):
    """Rank 2 arrived, but does not connect to rank 0 without rank 3."""
    ends = ended(started(ranks=[0, 1, 2], timeout=3), tmp_path)
    assert [status for status, _ in ends.values()] == [2, 2, 2], ends
    assert all("rank 3 did not arrive within 3 s of rank" in errors for _, errors in ends.values()), ends
