"""Data workers hand over whole global batches, with few open files and little shared memory, or the run ends."""

import os
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, base_env, equivalence_flags, read_metrics, told

from common.training import handover

LOADER = """
import resource, sys, types
import numpy as np, torch
from accelerate import Accelerator
from common.parallel.shutdown import exit_on_user_error
from common.training import batching
from common.training.process_grid import ProcessGrid
from common.training.recipe_traits import Traits

kind, num_files = sys.argv[1], int(sys.argv[2])
hard = num_files if kind != "error" else resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (num_files, hard))


class Numbers:
    unit, max_length, num_target_tokens = "tokens", 1000, 12000

    def __len__(self):
        return 6000

    def lengths(self, ids):
        return 200 + np.asarray(ids) % 800

    num_targets = lengths

    def __getitem__(self, index):
        if kind == "error" and index == 77:
            raise ValueError("no such sample")
        length = 200 + int(index) % 800
        ids = np.arange(length, dtype=np.int64) * 1_000_003 + int(index)
        return ids, ids + 1, np.arange(length)


args = types.SimpleNamespace(
    num_workers=2, global_batch_size=2000, micro_batch_size=1, micro_batch_tokens=None, seed=1, drop_last_window=False
)
collate = lambda samples, **_: batching.collate_tokens(samples, 0)  # noqa: E731
loader = batching.make_loader(args, Accelerator(cpu=True), Traits(), ProcessGrid(1), collate, 1e9, Numbers(), range(3))
print("open files", resource.getrlimit(resource.RLIMIT_NOFILE)[0])
if kind == "apart":  # the control: each tensor as it is
    loader.collate_fn = lambda batch: batch
with exit_on_user_error():
    for update, batch in enumerate(loader):
        expected = loader.dataset[update]
        assert batch[0] == update and len(batch.micro_batches) == len(expected.micro_batches) == 2000
        for got, micro_batch in zip(batch.micro_batches, expected.micro_batches):
            assert got.keys() == micro_batch.keys()
            assert all(torch.equal(got[name], tensor) for name, tensor in micro_batch.items())
        assert torch.equal(batch.rank_work, expected.rank_work) and batch.rank_work.dtype == torch.float64
        assert [batch[i] for i in (2, 3, 4, 5, 7)] == [expected[i] for i in (2, 3, 4, 5, 7)]
        assert all(one.data_ptr() % 8 == 0 for one in got.values())
        del batch, expected, got, micro_batch
print("same bits")
"""

# The recipe, which fails in update 1 and from there on cannot open a file.
NO_DESCRIPTOR = """
import resource, runpy
from accelerate import Accelerator
from common.process import this_process
clip = Accelerator.clip_grad_norm_

def fail(*args, **kwargs):
    if this_process().update == 1:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        raise RuntimeError("no descriptor left")
    return clip(*args, **kwargs)

Accelerator.clip_grad_norm_ = fail
runpy.run_path("recipes/lm.py", run_name="__main__")
"""


def load(kind, num_files, shared_memory=None):
    """The finished process of a loader of 2,000 micro-batches per update, with two workers."""
    command = [sys.executable, "-c", LOADER, kind, str(num_files)]
    if shared_memory:
        mount = f'mount -t tmpfs -o size={shared_memory} tmpfs /dev/shm && exec "$@"'
        command = ["unshare", "-m", "sh", "-c", mount, "sh", *command]
    env = base_env(PYTHONPATH=ROOT, CUDA_VISIBLE_DEVICES="")
    return subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=200)


def can_mount():
    return os.geteuid() == 0 and subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode == 0


@pytest.mark.parametrize("shared_memory", [None, "64m"])
def test_two_thousand_micro_batches_need_few_files_and_little_shared_memory(shared_memory):
    """Five updates that are under way take 150 MB."""
    if shared_memory and not can_mount():
        pytest.skip("a small /dev/shm needs root")
    result = load("whole", 256, shared_memory)
    assert result.returncode == 0 and result.stdout == "open files 256\nsame bits\n", result.stderr[-3000:]


def test_a_batch_that_cannot_be_sent_ends_the_run():
    """Where each tensor takes a file, as without `pack_batch`; it was printed, and the run waited for ever."""
    result = load("apart", 256)
    assert result.returncode == 1 and "Too many open files" in result.stderr, result.stderr[-3000:]


def test_a_sample_that_fails_ends_the_run_and_the_soft_limit_of_files_is_raised():
    result = load("error", 256)
    assert 256 < int(result.stdout.removeprefix("open files "))
    assert result.returncode == 1 and "ValueError: no such sample" in result.stderr, result.stderr[-3000:]


def test_a_run_without_a_descriptor_left_ends_its_workers(functions_file, model_dir, tmp_path):
    """What ends them is imported before: an import would fail, and Python would wait for the workers."""
    flags = equivalence_flags(functions_file, model_dir, tmp_path / "run", "--num_workers", 1)
    command = [sys.executable, "-c", NO_DESCRIPTOR, *map(str, flags)]
    env = base_env(PYTHONPATH=ROOT, CUDA_VISIBLE_DEVICES="")
    result = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert result.returncode == 1 and "no descriptor left" in result.stderr, told(result)
    assert len(read_metrics(tmp_path / "run")) == 1


def test_tensors_of_any_layout_arrive_with_the_same_bits():
    """Without elements or dimensions, expanded (also to one element, with stride 0), transposed, of any dtype."""
    ids = torch.arange(12, dtype=torch.int64).view(3, 4)
    sent = [ids.t(), ids[:, ::2], ids[:0], torch.tensor(7.5), torch.tensor([3]).expand(1), torch.tensor([3]).expand(5)]
    sent += [torch.tensor(9).expand(1), ids > 5, ids.to(torch.bfloat16), ids.to(torch.uint8)[1, 1:]]
    batch = handover.pack_batch({"tensors": sent, "number": 3})
    function, arguments = batch.__reduce__()
    got = function(*arguments)
    assert got["number"] == 3 and len(got["tensors"]) == len(sent)
    for one, expected in zip(got["tensors"], sent, strict=True):
        assert one.dtype == expected.dtype and one.shape == expected.shape and torch.equal(one, expected)
