"""`--micro_batch_tokens auto`: the token budget of micro-batches, halved on all ranks when memory runs out.

An update whose forward or backward pass ran out of memory on any rank is retried: its gradients are dropped, the same
samples are split into smaller micro-batches, and the RNG states are restored. So the update is the same as in a run
with the smaller budget. If host memory ran out while a checkpoint in progress holds a copy of the state, only the copy
is freed instead.

Forward and backward must not communicate, because a rank that ran out of memory leaves them: gradients are averaged
after the last backward (`average_gradients`), and only if no rank has run out. The collective of the update
(`Run.all_finite`) then reports which ranks have.
"""

import argparse
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from accelerate import Accelerator

from common.internals.torch import divide_in_place
from common.training.batching import GlobalBatch, GlobalBatches, Samples
from common.training.out_of_memory import free_activations, is_out_of_memory, lacks_host_memory
from common.training.padding import round_up

# Names of the reduced values.
NUM_FAILED, FAILED_RANK, NUM_ON_HOST = "out_of_memory", "ranks_out_of_memory", "out_of_host_memory"
BUCKET_BYTES = 25 << 20  # smaller gradients are averaged together, because each collective has a latency


class TrialOver(Exception):
    """Interrupts the evaluation of a trial after the first batch."""


@dataclass
class TokenBudget:
    """The token budget of a run's micro-batches; the run and its `RunAccelerator` have it."""

    accelerator: Accelerator
    history: list[list[int]]  # pairs (first update, tokens)
    longest: int  # tokens of the longest sample, which is the minimum budget
    is_known: bool  # the budget comes from the resumed run
    can_free_more: Callable[[], Any]  # whether the ranks can free more host memory, instead of a smaller budget
    host_group: dist.ProcessGroup | None = None  # all ranks, over gloo; None for a single process
    tokens: int = 0  # the current budget
    is_trial: bool = False  # whether the current batch is a trial, not an update
    seconds: float = 0.0  # duration of a trial's last micro-batch, forward and backward
    has_run_out: bool = False  # out of memory on this rank, in this update
    is_host_short: bool = False  # this error, then those of all ranks, include one of the host's memory
    failed_ranks: str = ""  # the processes out of memory in this update; empty if none

    def at(self, update: int) -> int:
        """Returns the budget of an update."""
        return [tokens for first, tokens in self.history if first <= update][-1]

    def set_from(self, update: int, tokens: int) -> None:
        """Sets the budget for this and later updates; all ranks make the same call."""
        self.tokens = tokens
        self.history[:] = [entry for entry in self.history if entry[0] < update] + [[update, tokens]]

    def to_record(self, args: argparse.Namespace) -> dict[str, Any]:
        """Returns the entries of run.json."""
        return {"arguments": vars(args) | {"micro_batch_tokens": "auto"}, "micro_batch_tokens": self.history}

    @property
    def drops_update(self) -> bool:
        """Whether the last computed batch does not count as an update."""
        return self.is_trial or bool(self.failed_ranks)

    @contextmanager
    def catch_out_of_memory(self) -> Iterator[None]:
        """Catches and records an out-of-memory error in a forward and backward.

        The error is raised again if the budget is the minimum and no more memory can be freed.
        """
        try:
            yield
        except Exception as error:
            on_host = lacks_host_memory(error, self.accelerator.device)
            is_last = self.tokens <= self.longest and not (on_host and self.can_free_more())
            if is_last or not is_out_of_memory(error):
                raise
            free_activations(error)
            self.has_run_out, self.is_host_short = True, on_host
        if self.has_run_out:
            self.accelerator.sync_gradients = True  # otherwise the optimizer would keep the gradients
            if self.accelerator.device.type == "cuda":
                torch.cuda.empty_cache()

    def attempt(self, batch: GlobalBatch) -> Iterator[GlobalBatch]:
        """Yields the batch once; restores RNG states and fp16's loss scale if it is not an update (`drops_update`)."""
        device, scaler = self.accelerator.device, self.accelerator.scaler
        state, scale = torch.get_rng_state(), scaler and scaler.state_dict()
        gpu_state = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        self.has_run_out, self.is_host_short, self.failed_ranks = False, False, ""
        yield batch
        if self.failed_ranks:
            gc.collect()  # in Python 3.12, the error is in a cycle, and its frames' functions keep activations
        if self.drops_update:
            torch.set_rng_state(state)
            if gpu_state is not None:
                torch.cuda.set_rng_state(gpu_state, device)
            if scaler is not None:
                scaler.load_state_dict(scale)

    def until_out_of_memory(self, micro_batches: list[Any]) -> Iterator[Any]:
        """Yields an update's micro-batches until this rank runs out of memory; measures the time in a trial."""
        for micro_batch in micro_batches:
            start = self._now()
            yield micro_batch
            if self.has_run_out:
                return
            if self.is_trial:
                self.seconds = self._now() - start

    def _now(self) -> float:
        """Returns the time in seconds; in a trial, after the device has finished."""
        if self.is_trial and self.accelerator.device.type == "cuda":
            torch.cuda.synchronize(self.accelerator.device)
        return time.perf_counter()

    def evaluate_longest(self, run: Any, evaluate: Callable[[Any, Any], Any], model: torch.nn.Module) -> None:
        """Evaluates the longest held-out samples in a trial, and drops the metrics. run: a `common.run.Run`."""
        held_out, seconds = run.held_out, self.seconds
        if held_out is None or self.failed_ranks:
            return

        def longest() -> Iterator[GlobalBatch]:
            yield longest_batch(held_out.dataset)
            raise TrialOver

        run.held_out = longest()
        try:
            with self.catch_out_of_memory():
                evaluate(run, model)
        except TrialOver:
            pass
        finally:
            run.held_out, self.seconds = held_out, seconds
            model.train()

    def values_to_reduce(self) -> dict[str, float]:
        """Returns the values that are summed over the ranks together with the loss of an update."""
        rank = self.has_run_out * self.accelerator.process_index
        return {NUM_FAILED: self.has_run_out, FAILED_RANK: rank, NUM_ON_HOST: self.is_host_short}

    def note_out_of_memory(self, reduced: dict[str, Any]) -> bool:
        """Records which ranks ran out of memory, by the sums of `values_to_reduce`; returns `drops_update`."""
        number, rank = reduced.pop(NUM_FAILED), reduced.pop(FAILED_RANK)
        self.is_host_short = reduced.pop(NUM_ON_HOST) > 0
        self.failed_ranks = "" if not number else f"process {rank:.0f}" if number == 1 else f"{number:.0f} processes"
        return self.drops_update

    def connect(self) -> None:
        """Makes a large sum over the ranks, for which NCCL allocates its buffers; before a trial measures memory."""
        if self.accelerator.num_processes > 1:
            dist.all_reduce(torch.zeros(BUCKET_BYTES, dtype=torch.uint8, device=self.accelerator.device))

    def average_gradients(self, model: torch.nn.Module) -> None:
        """Averages the gradients over the ranks, as DDP does during a backward; not if a rank ran out of memory."""
        trained, buckets = [p for p in model.parameters() if p.requires_grad], []
        with self.catch_out_of_memory():  # all that is allocated, before the ranks decide
            if self.accelerator.num_processes > 1 and not self.has_run_out:
                for p in trained:
                    if p.grad is None:
                        p.grad = torch.zeros_like(p)
                buckets = list(split_into_buckets([p.grad for p in trained if p.grad is not None]))
                sizes = [sum(gradient.nbytes for gradient in bucket) for bucket in buckets if len(bucket) > 1]
                buffer = torch.empty(max(sizes, default=0), dtype=torch.uint8, device=self.accelerator.device)
        if self._has_any_run_out():
            if all(p.grad is None for p in trained):  # fp16's loss scale needs at least one gradient
                smallest = min(trained, key=torch.Tensor.numel)
                smallest.grad = torch.zeros_like(smallest)
            return
        for bucket in buckets:
            sum_bucket(bucket, buffer)
            divide_in_place(bucket, self.accelerator.num_processes)

    def _has_any_run_out(self) -> bool:
        """Returns whether any rank has run out of memory in this update. Waits for the hosts of all ranks only."""
        number = torch.tensor(float(self.has_run_out))
        if self.accelerator.num_processes > 1:
            dist.all_reduce(number, group=self.host_group)
        return bool(number)


def split_into_buckets(tensors: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yields consecutive tensors of one dtype and at most BUCKET_BYTES; a larger tensor is in a bucket of its own."""
    bucket: list[torch.Tensor] = []
    for tensor in tensors:
        size = sum(other.nbytes for other in (*bucket, tensor))
        if bucket and (size > BUCKET_BYTES or tensor.dtype != bucket[0].dtype):
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket


def sum_bucket(bucket: list[torch.Tensor], buffer: torch.Tensor) -> None:
    """Sums tensors of one dtype over the ranks, in one collective, without further memory than `buffer`, of bytes."""
    if len(bucket) == 1:
        dist.all_reduce(bucket[0])
        return
    flat = buffer[: sum(tensor.nbytes for tensor in bucket)].view(bucket[0].dtype)
    parts = [
        part.view(tensor.shape) for part, tensor in zip(flat.split([t.numel() for t in bucket]), bucket, strict=True)
    ]
    for part, tensor in zip(parts, bucket, strict=True):
        part.copy_(tensor)
    dist.all_reduce(flat)
    for part, tensor in zip(parts, bucket, strict=True):
        tensor.copy_(part)


def longest_samples(samples: Samples, number: int) -> np.ndarray:
    """Returns the ids (number,) of the longest samples, longest first; repeated from the first if there are too few."""
    lengths = samples.lengths(np.arange(len(samples)))
    order = np.argsort(-lengths.reshape(len(lengths), -1).sum(1), kind="stable")
    return np.resize(order[:number], number)


def longest_batch(dataset: GlobalBatches) -> GlobalBatch:
    """Returns a batch of the longest samples, which has the highest peak memory; equal on all ranks."""
    assert dataset.micro_batch_tokens is not None
    share = -(-dataset.global_batch_size // dataset.world_size)
    rows = min(share, dataset.micro_batch_tokens // round_up(dataset.samples.max_length, dataset.multiple_of))
    samples = [dataset.samples[number] for number in longest_samples(dataset.samples, max(1, rows))]
    number = 1 if rows == share else 2  # the second runs while gradients are allocated
    micro_batch = dataset.collate(samples)
    return GlobalBatch(
        update=0,
        micro_batches=[micro_batch] * number,
        num_samples=number * len(samples) * dataset.world_size,
        num_targets=number * len(micro_batch["targets"]) * dataset.world_size,
        num_tokens=0,
        num_processed=0,
        rank_work=torch.zeros(1),
        sample_digest="",
        lengths=torch.zeros(1, dtype=torch.int64),
    )
