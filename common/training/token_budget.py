"""`--micro_batch_tokens auto`: the largest token budget that fits; halved on all ranks when memory runs out.

An update whose forward or backward pass ran out of memory on any rank is retried: its gradients are dropped, the same
samples are split into smaller micro-batches, and the RNG states are restored. So the update is the same as in a run
with the smaller budget. If a save holds a copy of the state, the copy is dropped first, and the budget stays.

The ranks synchronise this in the collective of each update. This requires ranks that compute independently between two
updates: gradients are summed after the last backward (`average_gradients`), and not during it.
"""

import argparse
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator

from common.training.batching import GlobalBatch
from common.training.out_of_memory import is_out_of_memory

NEWS, WHO = "out_of_memory", "ranks_out_of_memory"


@dataclass
class TokenBudget:
    """The token budget of this run's micro-batches, and its values by update."""

    accelerator: Accelerator
    history: list[list[int]]  # pairs (first update, tokens)
    longest: int  # tokens of the longest sample: the smallest possible budget
    tokens: int = 0  # the current budget
    is_known: bool = False  # taken from the resumed run
    is_trial: bool = False  # the current batch is not an update
    seconds: float = 0.0  # duration of a trial's last micro-batch, forward and backward
    has_run_out: bool = False  # out of memory on this rank, in this update
    where: str = ""  # the processes out of memory in this update; empty if none
    can_free_more: Callable[[], bool] = lambda: False  # whether the ranks hold memory that they can release

    def at(self, update: int) -> int:
        """Returns the budget of an update."""
        return [tokens for first, tokens in self.history if first <= update][-1]

    def to_record(self, args: argparse.Namespace) -> dict[str, Any]:
        """Returns the entries of run.json."""
        return {"arguments": vars(args) | {"micro_batch_tokens": "auto"}, "micro_batch_tokens": self.history}

    def halve(self, update: int) -> None:
        """Halves the budget for this and later updates; all ranks make the same call."""
        self.tokens = max(self.longest, self.tokens // 2)
        self.history[:] = [entry for entry in self.history if entry[0] < update] + [[update, self.tokens]]

    @contextmanager
    def spared(self) -> Iterator[None]:
        """Catches and records an out-of-memory error in a forward and backward.

        The error is raised again if neither a smaller budget nor memory to release is left.
        """
        try:
            yield
        except Exception as error:
            if not is_out_of_memory(error) or (self.tokens <= self.longest and not self.can_free_more()):
                raise
            traceback.clear_frames(error.__traceback__)  # the frames hold the activations
            self.has_run_out = True
        if self.has_run_out:
            self.accelerator.sync_gradients = True  # otherwise the optimizer would keep the gradients
            if self.accelerator.device.type == "cuda":
                torch.cuda.empty_cache()

    def attempt(self, batch: GlobalBatch) -> Iterator[GlobalBatch]:
        """Yields the batch once; restores RNG states and fp16's loss scale if it does not count as an update."""
        device, scaler = self.accelerator.device, self.accelerator.scaler
        stream, scale = torch.get_rng_state(), scaler and scaler.state_dict()
        stream_of_gpu = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        self.has_run_out, self.where = False, ""
        yield batch
        if is_repeated():
            torch.set_rng_state(stream)
            if stream_of_gpu is not None:
                torch.cuda.set_rng_state(stream_of_gpu, device)
            if scaler is not None:
                scaler.load_state_dict(scale)


_running: TokenBudget | None = None


def start(budget: TokenBudget) -> None:
    """Sets the token budget of this process's run."""
    global _running
    _running = budget


def adjusting() -> TokenBudget | None:
    """Returns the token budget of this process's run; None without a budget."""
    return _running


def while_there_is_memory(micro_batches: list[Any]) -> Iterator[Any]:
    """Yields an update's micro-batches until this rank runs out of memory; measures the time in a trial."""
    for micro_batch in micro_batches:
        start = _now()
        yield micro_batch
        if _running is not None:
            if _running.has_run_out:
                return
            if _running.is_trial:
                _running.seconds = _now() - start


def _now() -> float:
    """Returns the time in seconds; in a trial, after the device has finished."""
    if _running is not None and _running.is_trial and _running.accelerator.device.type == "cuda":
        torch.cuda.synchronize(_running.accelerator.device)
    return time.perf_counter()


class TrialOver(Exception):
    """Ends an evaluation in a trial after its first batch."""


def evaluate_longest(run: Any, evaluate: Callable[[Any, torch.nn.Module], Any], model: torch.nn.Module) -> None:
    """Evaluates the longest held-out samples in a trial, and drops the metrics. run: a `common.run.Run`."""
    held_out = run.held_out
    if held_out is None or _running.where:
        return

    def longest() -> Iterator[GlobalBatch]:
        yield held_out.dataset.of_longest()
        raise TrialOver

    run.held_out, seconds = longest(), _running.seconds
    try:
        with _running.spared():
            evaluate(run, model)
    except TrialOver:
        pass
    finally:
        run.held_out, _running.seconds = held_out, seconds
        model.train()


def is_trial() -> bool:
    """Returns whether the current batch is a trial of the budget."""
    return _running is not None and _running.is_trial


def is_repeated() -> bool:
    """Returns whether the last computed batch does not count as an update."""
    return _running is not None and (_running.is_trial or bool(_running.where))


def news() -> dict[str, float]:
    """Returns the values that are summed over the ranks together with the loss of an update."""
    if _running is None:
        return {}
    return {NEWS: _running.has_run_out, WHO: _running.has_run_out * _running.accelerator.process_index}


def learn(told: dict[str, Any]) -> bool:
    """Records from the sums of `news` whether a rank ran out of memory; returns whether the update does not count."""
    if _running is not None:
        number, rank = told.pop(NEWS), told.pop(WHO)
        _running.where = "" if not number else f"process {rank:.0f}" if number == 1 else f"{number:.0f} processes"
    return is_repeated()


def average_gradients(accelerator: Accelerator, model: torch.nn.Module) -> None:
    """Averages the gradients over the ranks, as DDP does during a backward; does nothing without a budget."""
    if _running is None:
        return
    trained = [p for p in model.parameters() if p.requires_grad]
    missing = [p for p in trained if p.grad is None]
    if _running.has_run_out and len(missing) == len(trained):  # fp16's loss scale needs at least one gradient
        smallest = min(trained, key=torch.Tensor.numel)
        smallest.grad = torch.zeros_like(smallest)
    if accelerator.num_processes == 1:
        return
    # A rank out of memory must still join the collectives. Its sums will be dropped, so they share one buffer.
    largest = max((p.numel() for p in missing), default=0)
    nothing = torch.zeros(largest, device=accelerator.device) if _running.has_run_out else None
    sums = []
    for p in trained:
        if p.grad is None and nothing is None:
            p.grad = torch.zeros_like(p)
        sent = nothing[: p.numel()].view_as(p) if p.grad is None else p.grad
        sums.append(dist.all_reduce(sent, async_op=True))
    for one in sums:
        one.wait()
    from common.internals.torch import divide_in_place

    divide_in_place([p.grad for p in trained if p.grad is not None], accelerator.num_processes)
