"""Evaluations of a run: when they are due, their end on a request to stop, and their repetition after --resume.

A request to stop is handled between the micro-batches of an evaluation. An evaluation may take minutes, but a launcher
kills its processes 30 seconds after a SIGTERM. The checkpoint saved then is the checkpoint of the last update. It has
no validation loss; therefore the resumed run starts with this evaluation.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from common.errors import UserError, with_location
from common.parallel import liveness, shutdown
from common.report.records import end_unfinished
from common.report.totals import EVALUATION, pause
from common.training import token_budget
from common.training.stop_signals import STOPPED, StopRequests, StopVotes

if TYPE_CHECKING:
    from common.report.evaluate_metrics import Metrics

Evaluate = Callable[[Any, torch.nn.Module], dict[str, Any]]  # signature of a recipe's `evaluate(run, model)`


class EvaluationStopped(Exception):
    """Interruption of an evaluation on all ranks together, because the run must stop."""


class Evaluations:
    """The evaluations of a `common.run.Run`. All ranks call each method together."""

    def __init__(self, run: Any):
        self.run, self.is_of_update = run, False
        self.votes: StopVotes | None = None  # None while requests to stop are ignored
        self.hearing = ExitStack()
        self.metrics: Metrics | None = None
        self.lines: list[str] = []  # lines to print about the metrics

    @contextmanager
    def hear(self) -> Iterator[StopRequests]:
        """Context manager around the loop: accepts requests to stop until `close`, after the final evaluation."""
        run = self.run
        with ExitStack() as hearing:
            requests = hearing.enter_context(StopRequests())
            self.votes = StopVotes(requests, run.checkpoints.ranks.sum, run.accelerator.num_processes)
            yield requests
            self.hearing = hearing.pop_all()

    def close(self) -> tuple[str, ...]:
        """Ends the handling of requests to stop; call it after the last evaluation. A request up to now stops the run.

        Returns lines about the results of --metric, to print.
        """
        if self.votes.are_for_stop(now=True):
            self._stop()
        self.votes = None
        self.hearing.close()
        return tuple(self.lines)

    def is_due(self) -> bool:
        """Returns whether an evaluation is due after this update."""
        args, done = self.run.args, self.run.state.update
        if not (self.run.held_out and args.eval_every) or token_budget.is_repeated():
            return False
        # The last update may be the best.
        return done % args.eval_every == 0 or (args.keep_best and done == args.num_updates)

    def after_update(self, evaluate: Evaluate, model: torch.nn.Module) -> dict[str, Any]:
        """Returns the metrics of an evaluation if due; {} if a request to stop ended it, and then the run saves."""
        if token_budget.is_trial():
            token_budget.evaluate_longest(self.run, evaluate, model)
            return {}
        self.is_of_update = self.is_due()
        try:
            return self._evaluate(evaluate, model) if self.is_of_update else {}
        except EvaluationStopped:
            self.run.news["asked"] = 1.0  # on all ranks, so that `Run.end_update` saves
            return {}
        finally:
            self.is_of_update = False

    def repeat(self, evaluate: Evaluate, model: torch.nn.Module) -> None:
        """Repeats the evaluation that a request to stop interrupted, if any, before the first update of a resumed run.

        Its metrics are written to the last line of metrics.jsonl and to the checkpoint, as without the interruption.
        """
        run, state = self.run, self.run.state
        if run.args.dry_run or state.validation_loss is not None or not self.is_due():
            return
        if state.update in (0, state.validation_since):  # the run has just begun, or the held-out set has just changed
            return
        from common.report import held_out

        figures = self._evaluate(evaluate, model)
        state.measured(figures["validation_loss"])
        held_out.add_evaluation(run.progress, figures)
        run.checkpoints.last_saved = -1  # because the last checkpoint has no metrics
        run.checkpoints.update_done(state, run.model, run.optimizer, {"asked": 0.0, "failed": 0.0, "written": 0.0})
        if state.end(run.args) < run.args.num_updates:
            run.progress.end_early(run.args.patience)
            run.loader = run.load(range(0))

    def load_metrics(self, held_out: Any, kind: type, num_labels: int = 0) -> None:
        """Loads the modules of --metric, before a model is built or a file is written.

        held_out: the held-out samples, or None. kind: int if the recipe predicts one of `num_labels` labels, float if
        it predicts numbers, str if it generates texts.

        Raises UserError: there are no held-out samples, or one line per unusable module.
        """
        if not self.run.args.metric:
            return
        from common.report.evaluate_metrics import Metrics  # here because few runs need it

        if held_out is None:
            raise UserError("--metric has nothing to measure: there are no held-out data; name some, or take it out")
        self.metrics = Metrics(self.run.args, kind, num_labels)

    def compute_metrics(self, predictions: Any, references: Any) -> dict[str, Any]:
        """Returns the results of --metric on all ranks, {} without --metric; `close` returns their lines.

        predictions, references: numbers or texts of all held-out samples, (N,), the same on all ranks.
        """
        if self.metrics is None:
            return {}
        results, self.lines = self.metrics.compute(predictions, references)
        return results

    def _evaluate(self, evaluate: Evaluate, model: torch.nn.Module) -> dict[str, Any]:
        with pause(self.run.state.training, EVALUATION):
            return evaluate(self.run, model)

    def stop_if_asked(self) -> None:
        """Handles a request to stop between two micro-batches of an evaluation.

        Raises EvaluationStopped: in an evaluation after an update, which must still be recorded. In any other
        evaluation, the run ends.
        """
        if self.votes is None or not self.votes.are_for_stop():
            return
        if self.is_of_update:
            raise EvaluationStopped
        self._stop()

    def _stop(self) -> NoReturn:
        run = self.run
        # With it, the weights may be from a different update, and everything is saved already.
        if not run.args.load_best_at_end:
            run.checkpoints.save(run.state, run.model, run.optimizer, in_place=True)
        run.checkpoints.writer.finish()
        self.end_stopped()

    def end_stopped(self) -> NoReturn:
        """Ends a run that has saved because of a request to stop, with status 75."""
        run = self.run
        self.hearing.close()
        if run.accelerator.is_main_process:
            end_unfinished(run.output_dir, f"stopped after update {run.state.update}")
            print(
                f"stopped after update {run.state.update}, checkpoint written; the same command with --resume goes on"
            )
        shutdown.end_run(run.accelerator, STOPPED)
        sys.exit(STOPPED)


@contextmanager
def optional_steps(run: Any) -> Iterator[None]:
    """Context manager for the final metrics and samples: an error inside prints one line, and the run still finishes.

    The line is also added to the results, as `error_after_training`. run: a `common.run.Run`.
    """

    def report(error: Exception) -> None:
        line = f"missing    a figure or sample of the end: {with_location(error)}; model/ and the rest are complete"
        run.results["error_after_training"] = line
        if not run.accelerator.is_main_process:  # the main process prints it among the last lines
            print(line, file=sys.stderr, flush=True)

    with liveness.optional(report):
        yield
