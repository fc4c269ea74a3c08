"""What an out-of-memory error leaves behind, and how ranks average their gradients after one."""

import gc
import re
import types
import weakref

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from conftest import launch_command, run, told

from common.training.out_of_memory import is_out_of_memory
from common.training.token_budget import TokenBudget

DEVICE_ERROR = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
HOST_ERROR = RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory")
NCCL = (
    "NCCL error in: NCCLUtils.cpp:94, unhandled cuda error, NCCL version 2.29.3\nncclUnhandledCudaError: Call to CUDA "
)
NCCL += "function failed.\nLast error:\n{}"


class Held:
    """A tensor that a graph saves for its backward."""

    def __init__(self, tensor):
        self.tensor = tensor


@pytest.mark.parametrize("error", [DEVICE_ERROR, ValueError("no shortage")], ids=["out of memory", "control"])
def test_a_failed_backward_leaves_no_activation(error):
    """Also where a variable of the loop, which still runs, is a loss. Control: a different error ends the run."""
    budget, saved = TokenBudget(Accelerator(cpu=True), [[0, 8]], 1, False, lambda: False, tokens=8), []

    def save(tensor):
        held = Held(tensor)
        saved.append(weakref.ref(held))
        return held

    def compute():
        with torch.autograd.graph.saved_tensors_hooks(save, lambda held: held.tensor):
            return torch.ones(4, requires_grad=True).sin().sin().sum()  # sin saves its input

    try:
        with budget.catch_out_of_memory():
            loss_sum = compute()
            raise error
    except ValueError:
        assert loss_sum.grad_fn is not None and all(held() is not None for held in saved)
    else:
        assert budget.has_run_out and len(saved) == 2 and all(held() is None for held in saved)


@pytest.mark.parametrize("is_retried", [True, False])
def test_a_retried_update_starts_without_the_activations_of_a_failed_forward(is_retried):
    """Although the error, in a reference cycle, refers to a function's closure. Control: an update that is over."""
    budget, saved = TokenBudget(Accelerator(cpu=True), [[0, 8]], 1, False, lambda: False, tokens=8), []

    def forward():
        hidden = Held(torch.ones(4))
        saved.append(weakref.ref(hidden))
        hidden.itself = hidden  # as in Python 3.12 the error is

        def head():
            raise type(HOST_ERROR)(*HOST_ERROR.args, hidden)

        head()

    gc.disable()
    try:
        for _ in budget.attempt(None):
            with budget.catch_out_of_memory():
                forward()
            budget.failed_ranks = "process 0" if is_retried else ""
        assert budget.has_run_out and (saved[0]() is None) == is_retried
    finally:
        gc.enable()


@pytest.mark.parametrize(("error", "is_caught"), [(HOST_ERROR, True), (MemoryError(), True), (DEVICE_ERROR, False)])
def test_only_a_shortage_of_the_host_gives_up_the_copy_in_its_memory(error, is_caught):
    """With the smallest budget, where nothing else can be given up."""
    accelerator = types.SimpleNamespace(device=torch.device("cuda", 0), process_index=0)
    budget = TokenBudget(accelerator, [[0, 1]], 1, False, lambda: True, tokens=1)
    try:
        with budget.catch_out_of_memory():
            raise error
    except torch.OutOfMemoryError:
        assert not is_caught
    budget.note_out_of_memory(budget.values_to_reduce())
    assert bool(budget.failed_ranks) == budget.is_host_short == is_caught


def test_a_budget_that_can_shrink_is_halved_after_a_shortage_of_the_device():
    accelerator = types.SimpleNamespace(device=torch.device("cuda", 0), process_index=0)
    budget = TokenBudget(accelerator, [[0, 2]], 1, False, lambda: True, tokens=2)
    with budget.catch_out_of_memory():
        raise DEVICE_ERROR
    assert budget.note_out_of_memory(budget.values_to_reduce()) and not budget.is_host_short


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        ("Cuda failure 2 'out of memory'", True),
        ("Failed to CUDA calloc 4194304 bytes", True),
        ("Invalid argument", False),
    ],
)
def test_what_nccl_says_of_memory_is_known(reason, expected):
    assert is_out_of_memory(dist.DistBackendError(NCCL.format(reason))) == expected


AVERAGES = """
import sys

sys.path.insert(0, "")
import torch
import torch.distributed as dist
from accelerate import Accelerator

from common.training.token_budget import TokenBudget

accelerator, calls = Accelerator(cpu=True), []
rank, all_reduce = accelerator.process_index, dist.all_reduce
sizes = [(3,), (5, 7), (1000, 7000), (), (4, 4), *20 * [(300, 1000)]]
model = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(size)) for size in sizes])
model.append(torch.nn.Parameter(torch.zeros(6, dtype=torch.bfloat16)))
model.append(torch.nn.Parameter(torch.zeros(2, 8, 4, 4).to(memory_format=torch.channels_last)))
budget = TokenBudget(accelerator, [[0, 8]], 1, False, lambda: False, tokens=8)


def draw():
    torch.manual_seed(rank)
    for number, p in enumerate(model):
        p.grad = None if number == 4 and rank else torch.randn_like(p)  # a parameter that rank 1 did not use


def note(tensor, **kwargs):
    calls.append(tensor.nbytes)
    return all_reduce(tensor, **kwargs)


draw()
expected = [torch.zeros_like(p) if p.grad is None else p.grad for p in model]
for gradient in expected:
    all_reduce(gradient)
expected = [gradient / 2 for gradient in expected]
draw()
dist.all_reduce = note
budget.average_gradients(model)
assert all(p.grad.equal(e) for p, e in zip(model, expected, strict=True))
assert max(calls) == 28_000_000 and sorted(calls)[-2] <= 25 << 20, calls
sys.stdout.write(f"AVERAGED {len(calls)}\\n")  # at once, because both ranks write

calls.clear()
draw()
before = [p.grad for p in model]
if rank:
    model.zero_grad()
    with budget.catch_out_of_memory():
        raise torch.OutOfMemoryError
budget.average_gradients(model)
assert calls == [4], calls
if rank:
    assert sum(p.grad.numel() for p in model if p.grad is not None) == 1  # that of the smallest parameter
else:
    assert all(p.grad is gradient for p, gradient in zip(model, before, strict=True))
sys.stdout.write("SKIPPED\\n")
"""


def test_gradients_are_averaged_in_few_collectives_and_not_after_a_shortage(tmp_path):
    """The same bits as one collective per parameter, and no memory. Control: without a shortage, all are summed."""
    (tmp_path / "averages.py").write_text(AVERAGES)
    result = run([*launch_command("multi_cpu", "--mixed_precision", "no"), tmp_path / "averages.py"])
    counts = re.findall(r"AVERAGED (\d+)", result.stdout)
    assert len(counts) == result.stdout.count("SKIPPED") == 2 and max(map(int, counts)) <= 8, told(result)
