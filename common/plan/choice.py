"""`--micro_batch_tokens auto`: the plan's choice, tried on the longest samples at the start, and what a run learns."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list

from common.host_memory import left_to_all, left_to_one
from common.parallel.liveness import wait_for_all
from common.plan.forecast import Forecast, Forecaster, NotPlayed, Played, Player, in_bytes
from common.plan.machines import Machine
from common.plan.memory import mode_of, needs, peak, shape_of
from common.plan.plan import BUSY, held_on_cpu, lacks
from common.plan.profile import Parts, Profile
from common.report.tracking import read_earlier, write_run
from common.training import token_budget
from common.training.batching import GlobalBatch, Samples
from common.training.optimizers import OPTIMIZERS
from common.training.token_budget import TokenBudget


@dataclass
class Choice(Forecast):
    """The forecast of a run that is to choose how many tokens it computes at once."""

    run: Any = None
    samples: Samples | None = None
    rows: tuple[int, int] = (1, 2)  # of the micro-batches that are played
    left: tuple[int, int] = (0, 0)  # bytes of the host, before the model: to this process, and to all
    profiles: tuple[Profile, Profile] | None = None  # of them, where they could be played
    history: list[list[int]] | None = None  # of the run that goes on

    @property
    def state_bytes(self) -> float:
        """Of the optimizer."""
        return OPTIMIZERS[self.run.args.optimizer].state_bytes * self.forecaster.shape.trained

    def line(self) -> dict[str, str]:
        """Settles `args.micro_batch_tokens` on all ranks; for the printed block: the choice and its predicted peak."""
        run, told = self.run, [None]
        if run.accelerator.is_main_process:
            how = self._choose()
            told = [(self.history, how)]
        wait_for_all()  # however long the main process played
        self.history, how = broadcast_object_list(told)[0] if run.accelerator.num_processes > 1 else told[0]
        longest = self.samples.max_length
        budget = TokenBudget(
            run.accelerator, self.history, longest, can_free_more=lambda: run.checkpoints.writer.copies
        )
        run.args.micro_batch_tokens = budget.tokens = budget.at(run.state.update)
        if not run.args.dry_run:
            token_budget.start(budget)
        return {"tokens": f"{budget.tokens:,} at once: {how}"} | (super().line() if self.found or self.reason else {})

    def _choose(self) -> str:
        """Finds the budget; says how. Where the update cannot be played, it is that of the longest sample."""
        start, half, learned = self.run.state.update, len(self.playing) // 2, self.history
        self.history = learned or [[start, self.samples.max_length]]
        try:
            few, more = (
                self.forecaster.profile([one.recording() for one in some])
                for some in (self.playing[:half], self.playing[half:])
            )
            self.profiles = few, more
        except NotPlayed as reason:
            self.reason = f"not predicted: {reason}"
            return "as the run before has learned" if learned else "one sample, since memory is not predicted"
        if learned:
            self.found = self.at([tokens for first, tokens in learned if first <= start][-1])
            return "as the run before has learned"
        rows, share = 1, math.ceil(self.run.args.global_batch_size / self.mode.processes)
        while True:
            segment, parts = self.at(rows * self.samples.max_length)
            lacking = self._lacks(parts)
            if lacking and self.found:
                return f"twice as many would lack {in_bytes(lacking)}"
            self.found, self.history = (segment, parts), [[start, rows * self.samples.max_length]]
            if lacking:
                return f"one sample, and even that lacks {in_bytes(lacking)} by prediction"
            if rows == share:
                return "all of a process's share"
            if rows * self.samples.max_length >= BUSY[self.forecaster.device]:
                return "more would fit, but not gain"
            rows = min(share, 2 * rows)

    def at(self, tokens: int) -> tuple[str, Parts]:
        """The peak with so many tokens at once, on the main process: when it is, and what it takes."""
        few, more = self.profiles
        share = math.ceil(self.run.args.global_batch_size / self.mode.processes)
        rows = max(1, min(share, tokens // self.samples.max_length))
        profile = few.scaled(more, (rows - self.rows[0]) / (self.rows[1] - self.rows[0]))
        return peak(needs(profile, self.forecaster.shape, self.mode, math.ceil(share / rows)))

    def _lacks(self, parts: Parts) -> float:
        """Bytes that are missing for this; what the processes and their launcher have themselves is no longer left."""
        if self.forecaster.device == "cuda":
            memory = torch.cuda.mem_get_info(self.run.device)[1]
            return lacks(Machine(1, float(memory)), self.mode, parts, 0.0, 0.0)
        held, (for_one, for_all) = held_on_cpu(parts), self.left
        return max(0.0, held - for_one, self.mode.processes * held - for_all)

    def facts(self) -> dict[str, Any]:
        """For run.json."""
        asked = vars(self.run.args) | {"micro_batch_tokens": "auto"}
        return super().facts() | {"arguments": asked, "micro_batch_tokens": self.history}


def choose(
    run: Any, config: Any, make_empty: Callable[[], torch.nn.Module], samples: Samples, held_out: Samples | None
) -> Choice | None:
    """Begins to play the updates of two sizes, on the main process; None in a process that plays."""
    args, asked = run.args, run.asked
    shape, device = shape_of(make_empty()), "cpu" if run.device.type == "cpu" else "cuda"
    # Gradients are not kept in DDP's buckets.
    mode = replace(mode_of(asked, asked.source, args), kind="plain")
    forecaster = Forecaster(Player(run, config, samples, held_out), shape, device)
    few = max(1, 1024 // samples.max_length)
    choice = Choice(
        forecaster, [], mode, 2, run=run, samples=samples, rows=(few, 3 * few), left=(left_to_one(), left_to_all())
    )
    if not run.accelerator.is_main_process:
        return choice
    if args.resume and (learned := read_earlier(Path(args.output_dir)).get("micro_batch_tokens")):
        choice.history = learned
    try:
        for rows in choice.rows:
            cases = forecaster.cases(mode, rows, args.activation_checkpointing, args.optimizer)
            choice.playing += [forecaster.player.start(case) for case in cases]
    except Played:
        return None
    return choice


def batches_within_memory(run: Any) -> Iterator[GlobalBatch]:
    """The run's global batches; with a budget, one of the longest samples first, and those that are made again."""
    budget, update, end = token_budget.adjusting(), run.state.update, run.state.end(run.args)
    if budget is None:
        yield from run.progress.batches(run.loader)
        return
    budget.is_trial = update < end
    # As large as what the first step makes, for as long as the trial takes.
    state = 0 if run.optimizer.state else run.forecast.state_bytes
    place = torch.empty(int(state), dtype=torch.uint8, device=run.device)
    while budget.is_trial:
        run.loader.dataset.micro_batch_tokens = budget.tokens
        yield from _attempt(run, budget, run.loader.dataset.of_longest(), update)
        budget.is_trial = bool(budget.where)
    del place
    while update < end:
        run.args.micro_batch_tokens = budget.tokens = budget.at(update)
        until = min([end, *(first for first, _ in budget.history if first > update)])
        for batch in run.progress.batches(run.load(range(update, until))):
            yield from _attempt(run, budget, batch, batch.update)
            if budget.where:
                break
            update = batch.update + 1


def _attempt(run: Any, budget: TokenBudget, batch: GlobalBatch, update: int) -> Iterator[GlobalBatch]:
    """Yields it once; where memory ran out, the budget is then halved, which is told and kept in run.json."""
    yield from budget.attempt(batch)
    if not budget.where:
        return
    before = budget.tokens
    is_freed = run.checkpoints.writer.free_copy()
    if not is_freed:
        budget.halve(update)
        if run.held_out:
            run.held_out.dataset.micro_batch_tokens = run.held_out.dataset.micro_batch_tokens * budget.tokens // before
    if run.accelerator.is_main_process:
        what = "on the longest samples" if budget.is_trial else f"in update {update}, which is made again"
        how = "without a copy of the state to save" if is_freed else f"{budget.tokens:,} tokens at once, not {before:,}"
        if not is_freed and run.forecast.profiles:
            run.forecast.found = run.forecast.at(budget.tokens)
            how += f", predicted peak {in_bytes(run.forecast.peak())}"
        run.progress.bar.write(f"memory ran out on {budget.where} {what}: {how}")
        write_run(run.output_dir, read_earlier(run.output_dir) | run.forecast.facts())
