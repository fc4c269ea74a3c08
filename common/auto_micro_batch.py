"""Searches the token budget of `--micro_batch_tokens auto` by trials, and halves it if memory runs out later.

A trial is a forward and backward pass of the longest training samples and a forward pass of the longest held-out
samples, without an optimizer step. The budget starts at the default and doubles while the trial fits and its throughput
improves. After a trial that does not fit, at most MAX_BISECTIONS bisections raise the budget. On a CPU, the kernel
kills a process over its cgroup limit, so the budget doubles only if twice the memory growth of the trials is available.
"""

import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import psutil
import torch
from accelerate.utils import broadcast_object_list, reduce

from common.checkpoint.host_copy import free_copy
from common.host_memory import available_per_process, available_total
from common.parallel.process_groups import host_group
from common.peak_memory import most_resident
from common.report.earlier_starts import read_earlier
from common.report.records import write_run
from common.training.batching import GlobalBatch
from common.training.optimizers import OPTIMIZERS
from common.training.token_budget import TokenBudget, longest_batch

MIN_SPEEDUP = 1.05  # ratio of tokens/s; a larger budget that gains less is not used
MAX_BISECTIONS = 3


def default_tokens(device_type: str, longest: int) -> int:
    """Returns the first budget to try, in tokens per process. longest: tokens of the longest sample."""
    return max(longest, 1024 if device_type == "cpu" else 8192)


def start_budget(run: Any, longest: int) -> TokenBudget | None:
    """Sets `args.micro_batch_tokens` on all ranks to the first budget: the default, or the budget of a resumed run.

    Returns the TokenBudget; None in a dry run, which needs only the number of tokens.

    run: a `common.run.Run`. longest: tokens of the longest sample.
    """
    history = None
    if run.args.resume and run.accelerator.is_main_process:
        history = read_earlier(Path(run.args.output_dir)).get("micro_batch_tokens")
    if run.accelerator.num_processes > 1:
        (history,) = broadcast_object_list([history])
    budget = TokenBudget(
        run.accelerator,
        history or [[run.state.update, default_tokens(run.device.type, longest)]],
        longest,
        is_known=bool(history),
        can_free_more=lambda: run.checkpoints.writer.holds_copy,
        host_group=host_group(),
    )
    run.args.micro_batch_tokens = budget.tokens = budget.at(run.state.update)
    if run.args.dry_run:
        return None
    run.accelerator.token_budget = budget
    return budget


def batches_with_oom_retry(run: Any) -> Generator[GlobalBatch, None, None]:
    """Yields the trial batches, then the run's global batches; repeats a batch that ran out of memory."""
    budget, update, end = run.budget, run.state.update, run.state.end(run.args)
    if update < end:
        yield from _trials(run, budget, update)
    while update < end:
        run.args.micro_batch_tokens = budget.tokens = budget.at(update)
        until = min([end, *(first for first, _ in budget.history if first > update)])
        for batch in run.progress.batches(run.load(range(update, until))):
            yield from budget.attempt(batch)
            if budget.failed_ranks:
                _recover(run, budget, batch.update)
                break
            update = batch.update + 1


def _trials(run: Any, budget: TokenBudget, update: int) -> Iterator[GlobalBatch]:
    """Yields the trial batches; then sets the budget for `update` and later updates."""
    budget.is_trial = True
    budget.connect()
    # Reserves the memory of the optimizer state, which the first step allocates only after the trials.
    trained = sum(p.numel() for p in run.model.parameters() if p.requires_grad)
    size = 0 if run.optimizer.state else OPTIMIZERS[run.args.optimizer].state_bytes * trained
    state = torch.empty(int(size), dtype=torch.uint8, device=run.device)
    if run.device.type == "cpu":
        state.fill_(0)  # memory becomes resident only when it is written
    share = -(-run.args.global_batch_size // run.accelerator.num_processes)
    search = _Search(budget.tokens, budget.longest, share * budget.longest, budget.is_known)
    resident = psutil.Process().memory_info().rss
    while search.tokens:
        yield from _trial(run, budget, search.tokens)
        ran_out, no_room, seconds = _sums(run, float(budget.has_run_out), not _has_room(run, resident), budget.seconds)
        search.note(not ran_out, not no_room, seconds)
    del state
    budget.is_trial, budget.failed_ranks = False, ""
    budget.set_from(update, search.best)
    _set_tokens(run, search.best)
    run.progress.last = time.perf_counter()  # the trials are not training time
    if run.accelerator.is_main_process:
        run.progress.print(f"--micro_batch_tokens auto: {search.best:,} tokens at once; {search.reason}")
        write_run(run.output_dir, read_earlier(run.output_dir) | budget.to_record(run.args))


class _Search:
    """Search for the best budget. `tokens`: next budget to try, 0 at the end. `best`: best budget so far, 0 if none."""

    def __init__(self, tokens: int, longest: int, limit: int, is_known: bool):
        self.tokens, self.longest, self.limit, self.is_known = tokens, longest, max(limit, longest), is_known
        self.best, self.too_large, self.seconds_per_token = 0, 0, 0.0
        self.num_bisections, self.reason = 0, ""

    def note(self, fits: bool, has_room: bool, seconds: float) -> None:
        """Notes the outcome of a trial of `tokens` and chooses the next budget."""
        tried = self.tokens
        per_token = seconds / (tried // self.longest * self.longest)  # the rows of a trial fill whole samples
        if not fits:
            self.too_large = tried
        elif self.best and per_token * MIN_SPEEDUP > self.seconds_per_token:
            self._end(f"{tried:,} would fit but not be faster")
            return
        else:
            self.best, self.seconds_per_token = tried, per_token
        if not self.best:  # not even the first budget fits; `catch_out_of_memory` raises at the smallest
            self.tokens = max(self.longest, tried // 2)
        elif self.is_known:
            self._end("as in the run before")
        elif self.too_large:
            middle = (self.best + self.too_large) // 2 // self.longest * self.longest
            self.num_bisections += 1
            if middle <= self.best or self.num_bisections > MAX_BISECTIONS:
                self._end(f"{self.too_large:,} do not fit")
            else:
                self.tokens = middle
        elif tried >= self.limit:
            self._end("a process's whole share of a global batch")
        elif not has_room:
            self._end("memory has no room for twice as many")
        else:
            self.tokens = min(2 * tried, self.limit)

    def _end(self, reason: str) -> None:
        self.tokens, self.reason = 0, reason


def _trial(run: Any, budget: TokenBudget, tokens: int) -> Iterator[GlobalBatch]:
    """Yields a batch of the longest samples; a batch of one micro-batch twice, because the first includes warm-up."""
    budget.tokens = tokens
    _set_tokens(run, tokens)
    batch = longest_batch(run.loader.dataset)
    for _ in range(1 if len(batch.micro_batches) > 1 else 2):
        yield from budget.attempt(batch)
        if budget.failed_ranks:
            return


def _set_tokens(run: Any, tokens: int) -> None:
    """Sets the budget of both loaders; that of evaluations may be twice as large (`loader_sizes.evaluation_sizes`)."""
    train, held_out = run.loader.dataset, run.held_out and run.held_out.dataset
    if held_out is not None:
        held_out.micro_batch_tokens = held_out.micro_batch_tokens * tokens // train.micro_batch_tokens
    train.micro_batch_tokens = tokens


def _sums(run: Any, *values: float) -> list[float]:
    """Returns the sums over the ranks, so that all ranks choose the same budget."""
    if run.accelerator.num_processes == 1:
        return list(values)
    return reduce(torch.tensor(values, dtype=torch.float32, device=run.device)).tolist()


def _has_room(run: Any, resident: int) -> bool:
    """Returns whether twice the memory growth of the trials so far fits. resident: resident bytes before the trials."""
    if run.device.type != "cpu":  # a GPU allocator raises an error
        return True
    growth = max(0, most_resident() - resident)
    needed = resident + 2 * growth - psutil.Process().memory_info().rss
    return needed <= min(available_per_process(), available_total() // run.accelerator.num_processes)


def _recover(run: Any, budget: TokenBudget, update: int) -> None:
    """After an update that ran out of memory: halves the budget, or frees the copy of a pending save in host memory."""
    before = budget.tokens
    is_freed = budget.is_host_short and free_copy(run.checkpoints.writer)
    if not is_freed:
        budget.set_from(update, max(budget.longest, before // 2))
        _set_tokens(run, budget.tokens)
    if run.accelerator.is_main_process:
        change = f"{budget.tokens:,} tokens at once, not {before:,}"
        if is_freed:
            change = "without a copy of the state to save"
        failure = f"memory ran out on {budget.failed_ranks} in update {update}"
        run.progress.print(f"{failure}, which is retried: {change}")
        write_run(run.output_dir, read_earlier(run.output_dir) | budget.to_record(run.args))
