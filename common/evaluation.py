"""The evaluations of a run: when one is due, how a request to stop ends one, and how a resumed run repeats it.

A request to stop is answered between the micro-batches of an evaluation, because an evaluation may take minutes and a
launcher kills its processes 30 seconds after a SIGTERM. The checkpoint that is then saved is that of the last update;
it has no validation loss, by which the resumed run sees that it begins with this evaluation.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from common.errors import UserError, with_location
from common.parallel import liveness, shutdown
from common.report import tracking
from common.report.totals import EVALUATION, pause
from common.training import token_budget
from common.training.stop_signals import STOPPED, StopRequests, StopVotes

if TYPE_CHECKING:
    from common.report.evaluate_metrics import Metrics

Evaluate = Callable[[Any, torch.nn.Module], dict[str, Any]]  # a recipe's `evaluate(run, model)`


class EvaluationStopped(Exception):
    """An evaluation was broken off, on all ranks together, because the run is to stop."""


class Evaluations:
    """Those of a `common.run.Run`; every method is called by all ranks together."""

    def __init__(self, run: Any):
        self.run, self.is_of_update = run, False
        self.votes: StopVotes | None = None  # while requests to stop count
        self.hearing = ExitStack()
        self.metrics: Metrics | None = None
        self.lines: list[str] = []  # on the metrics

    @contextmanager
    def hear(self) -> Iterator[StopRequests]:
        """Around the loop: requests to stop count from here until `close`, after the evaluation at the end."""
        run = self.run
        with ExitStack() as hearing:
            requests = hearing.enter_context(StopRequests())
            self.votes = StopVotes(requests, run.checkpoints.ranks.sum, run.accelerator.num_processes)
            yield requests
            self.hearing = hearing.pop_all()

    def close(self) -> tuple[str, ...]:
        """After the last evaluation: a request that came in it or after it still stops the run.

        Returns lines on the results of --metric, to print.
        """
        if self.votes.are_for_stop(now=True):
            self._stop()
        self.votes = None
        self.hearing.close()
        return tuple(self.lines)

    def is_due(self) -> bool:
        """Whether the held-out samples are to be measured after this update."""
        args, done = self.run.args, self.run.state.update
        if not (self.run.held_out and args.eval_every) or token_budget.is_repeated():
            return False
        return done % args.eval_every == 0 or (args.keep_best and done == args.num_updates)  # the last may be the best

    def after_update(self, evaluate: Evaluate, model: torch.nn.Module) -> dict[str, Any]:
        """Returns the figures of an evaluation if one is due; none if a request to stop ended it, which saves now."""
        if token_budget.is_trial():
            token_budget.evaluate_longest(self.run, evaluate, model)
            return {}
        self.is_of_update = self.is_due()
        try:
            return self._evaluate(evaluate, model) if self.is_of_update else {}
        except EvaluationStopped:
            self.run.news["asked"] = 1.0  # on all ranks; `Run.end_update` then saves
            return {}
        finally:
            self.is_of_update = False

    def repeat(self, evaluate: Evaluate, model: torch.nn.Module) -> None:
        """Before the first update of a resumed run: the evaluation that a request to stop has ended, if there is one.

        Its figures go where they would have gone: into the last line of metrics.jsonl, and into the checkpoint.
        """
        run, state = self.run, self.run.state
        if run.args.dry_run or state.validation_loss is not None or not self.is_due():
            return
        if state.update in (0, state.validation_since):  # nothing to evaluate yet; other held-out data from here
            return
        figures = self._evaluate(evaluate, model)
        state.measured(figures["validation_loss"])
        run.progress.add_evaluation(figures)
        run.checkpoints.last_saved = -1  # that one has no figures
        run.checkpoints.update_done(state, run.model, run.optimizer, {"asked": 0.0, "failed": 0.0, "written": 0.0})
        if state.end(run.args) < run.args.num_updates:
            run.progress.end_early(run.args.patience)
            run.loader = run.load(range(0))

    def load_metrics(self, held_out: Any, kind: type, num_labels: int = 0) -> None:
        """Loads the modules of --metric, before a model is built or a file is written.

        held_out: the held-out samples, or None. kind: int if the recipe predicts labels, of which there are
        `num_labels`; float if it predicts numbers; str if it generates texts.

        Raises UserError: there is nothing to compute them on, or a line for each module that cannot be used.
        """
        if not self.run.args.metric or self.run.args.plan is not None:
            return
        from common.report.evaluate_metrics import Metrics  # here because few runs need it

        if held_out is None:
            raise UserError("--metric has nothing to measure: there are no held-out data; name some, or take it out")
        self.metrics = Metrics(self.run.args, kind, num_labels)

    def compute_metrics(self, predictions: Any, references: Any) -> dict[str, Any]:
        """Returns the results of --metric on all ranks, and none without it; `close` returns their lines.

        predictions, references: numbers or texts of all held-out samples, (N,), alike on all ranks.
        """
        if self.metrics is None:
            return {}
        results, self.lines = self.metrics.compute(predictions, references)
        return results

    def _evaluate(self, evaluate: Evaluate, model: torch.nn.Module) -> dict[str, Any]:
        with pause(self.run.state.training, EVALUATION):
            return evaluate(self.run, model)

    def stop_if_asked(self) -> None:
        """Between two micro-batches of an evaluation.

        Raises EvaluationStopped: after an update, which is yet to be recorded. Any other evaluation ends the run.
        """
        if self.votes is None or not self.votes.are_for_stop():
            return
        if self.is_of_update:
            raise EvaluationStopped
        self._stop()

    def _stop(self) -> NoReturn:
        run = self.run
        if not run.args.load_best_at_end:  # with it the weights may be those of another update, and all is saved
            run.checkpoints.save(run.state, run.model, run.optimizer, in_place=True)
        run.checkpoints.writer.finish()
        self.end_stopped()

    def end_stopped(self) -> NoReturn:
        """Ends a run that has saved because it was asked to stop, with status 75."""
        run = self.run
        self.hearing.close()
        tracking.end_early(run.accelerator, run.output_dir, run.state)
        shutdown.end_run(run.accelerator, STOPPED)
        sys.exit(STOPPED)


@contextmanager
def optional_steps(run: Any) -> Iterator[None]:
    """Around the metrics and samples of the end: an error inside is one line, and the run still finishes.

    The line also goes into the results, as `error_after_training`. run: a `common.run.Run`.
    """

    def report(error: Exception) -> None:
        line = f"missing    a figure or sample of the end: {with_location(error)}; model/ and the rest are complete"
        run.results["error_after_training"] = line
        if not run.accelerator.is_main_process:  # else it is among the last lines
            print(line, file=sys.stderr, flush=True)

    with liveness.optional(report):
        yield
