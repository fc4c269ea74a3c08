"""Evaluations of a run: when they are due, and their interruption by a request to stop.

A request to stop interrupts an evaluation between two micro-batches, because an evaluation may take minutes, but a
launcher kills its processes 30 seconds after a SIGTERM. The run then saves the state after the last update, without its
validation loss; the resumed run first repeats this evaluation.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from common.report.totals import EVALUATION, pause
from common.training.stop_signals import StopRequests

Evaluate = Callable[[Any, torch.nn.Module], dict[str, Any]]  # signature of a recipe's `evaluate(run, model)`


class EvaluationStopped(Exception):
    """Raised on all ranks together to interrupt an evaluation after an update, because the run must stop."""


class Evaluations:
    """The evaluations of a `common.run.Run`. All ranks call each method together."""

    def __init__(self, run: Any):
        self.run, self.is_of_update = run, False
        self.requests: StopRequests | None = None  # None while requests to stop are ignored
        self.votes: Any = None  # a `stop_votes.StopVotes`, from the first evaluation on
        self.signal_handling = ExitStack()
        self.metrics: Any = None  # those of --metric, set by `report.metric_flag`
        self.lines: list[str] = []  # lines to print about them
        self.answers: Any = None  # those of --generate: `report.answers.Answers`

    @contextmanager
    def accept_requests(self) -> Iterator[StopRequests]:
        """Context manager around the loop: accepts requests to stop until `close`, after the final evaluation."""
        with ExitStack() as signal_handling:
            self.requests = signal_handling.enter_context(StopRequests())
            yield self.requests
            self.signal_handling = signal_handling.pop_all()

    def close(self) -> tuple[str, ...]:
        """Ends the handling of requests to stop after the last evaluation; returns printable results of --metric."""
        self.stop_if_requested(now=True)
        self.requests = None
        self.signal_handling.close()
        return tuple(self.lines)

    def is_due(self) -> bool:
        """Returns whether an evaluation is due after this update."""
        run, update = self.run, self.run.state.update
        if not (run.held_out and run.args.eval_every) or (run.budget and run.budget.drops_update):
            return False
        # The last update may be the best.
        return update % run.args.eval_every == 0 or (run.args.keep_best and update == run.args.num_updates)

    def after_update(self, evaluate: Evaluate, model: torch.nn.Module) -> dict[str, Any]:
        """Evaluates if due and returns the metrics; {} if not due, or interrupted by a request to stop."""
        if self.run.budget and self.run.budget.is_trial:
            self.run.budget.evaluate_longest(self.run, evaluate, model)
            return {}
        self.is_of_update = self.is_due()
        try:
            return self.evaluate(evaluate, model) if self.is_of_update else {}
        except EvaluationStopped:
            self.run.reduced["stop_requested"] = 1.0  # on all ranks, so that `Run.end_update` saves
            return {}
        finally:
            self.is_of_update = False

    def evaluate(self, evaluate: Evaluate, model: torch.nn.Module) -> dict[str, Any]:
        """Returns the metrics of an evaluation; its duration is not counted as training time."""
        with pause(self.run.state.training, EVALUATION):
            return evaluate(self.run, model)

    def answer_prompts(self, model: torch.nn.Module, when: str) -> None:
        """Answers the prompts of --generate, if any, "before" or "after" training."""
        if self.answers is not None and not self.run.args.dry_run:
            with pause(self.run.state.training, EVALUATION):
                self.answers.answer(model, when)

    def repeat(self, evaluate: Evaluate, model: torch.nn.Module) -> None:
        """Repeats the evaluation that a request to stop interrupted, if any, when a run is resumed."""
        if self.run.resumed is not None and not self.run.args.dry_run:
            from common.run_endings import repeat_evaluation

            repeat_evaluation(self.run, evaluate, model)

    def stop_if_requested(self, now: bool = False) -> None:
        """Saves and ends the run if a stop is requested. now: synchronises the ranks first.

        Raises EvaluationStopped: during the evaluation of an update, so that the update is recorded before the save.
        """
        if self.requests is None or not self._stop_is_requested(self.requests, now):
            return
        if self.is_of_update:
            raise EvaluationStopped
        from common.run_endings import save_and_stop

        save_and_stop(self.run)

    def _stop_is_requested(self, requests: StopRequests, now: bool) -> bool:
        ranks = self.run.checkpoints.ranks
        if now:
            return ranks.sum(requests.is_requested)[0] > 0
        if self.votes is None:
            from common.training.stop_votes import StopVotes

            self.votes = StopVotes(requests, ranks.sum, ranks.world)
        return self.votes.stop_is_requested()
