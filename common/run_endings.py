"""Dry runs, stops on request, missing final metrics, evaluations repeated on resume. `run`: a `common.run.Run`."""

import sys
from collections.abc import Iterator
from itertools import islice
from typing import Any, NoReturn

import torch

from common.errors import with_location
from common.parallel import shutdown
from common.report import held_out, settings
from common.report.records import end_unfinished
from common.training.stop_signals import STOPPED


def dry_run(run: Any) -> Iterator[Iterator[Any]]:
    """Yields an iterator over the first global batch; then prints settings and predicted memory, and ends the run.

    On a CPU, the planner gets one of the cores. Otherwise it would delay one thread, and the others would wait for this
    thread in every operator.
    """
    batches, num_threads = (batch for batch in islice(run.loader, 1)), torch.get_num_threads()
    if run.accelerator.is_main_process and run.device.type == "cpu":
        torch.set_num_threads(max(1, num_threads - 1))
    yield batches
    torch.set_num_threads(num_threads)
    batches.close()  # also ends the data-loading processes
    num_left = run.state.end(run.args) - run.state.update
    memory = run.prediction.describe() if run.accelerator.is_main_process else ""
    settings.print_dry_run(run.args, run.launch_config, run.accelerator, num_left, memory)
    shutdown.end_run(run.accelerator)
    sys.exit()


def save_and_stop(run: Any) -> NoReturn:
    """Saves a checkpoint because of a request to stop after the last update, and ends the run."""
    # With --load_best_at_end, the model may contain the best weights by now, and the last state is already saved.
    if not run.args.load_best_at_end:
        run.checkpoints.save(run.state, run.model, run.optimizer, in_place=True)
    run.checkpoints.writer.finish()
    end_stopped(run)


def end_stopped(run: Any) -> NoReturn:
    """Ends a run that has saved because of a request to stop, with status 75."""
    run.evaluations.signal_handling.close()
    if run.accelerator.is_main_process:
        update = run.state.update
        end_unfinished(run.output_dir, f"stopped after update {update}")
        print(f"stopped after update {update}, checkpoint written; the same command with --resume continues it")
    shutdown.end_run(run.accelerator, STOPPED)
    sys.exit(STOPPED)


def repeat_evaluation(run: Any, evaluate: Any, model: torch.nn.Module) -> None:
    """Evaluates a resumed run, if a request to stop interrupted the evaluation after its last update.

    The metrics are written to the last line of metrics.jsonl and to the checkpoint, as without the interruption.
    """
    state = run.state
    if state.validation_loss is not None or not run.evaluations.is_due():
        return
    if state.update in (0, state.validation_since):  # the run has just begun, or the held-out set has just changed
        return
    metrics = run.evaluations.evaluate(evaluate, model)
    state.record_loss(metrics["validation_loss"])
    held_out.add_evaluation(run.progress, metrics)
    run.checkpoints.last_saved = -1  # because the last checkpoint has no metrics
    sums = dict.fromkeys(("stop_requested", "failed", "written", "save_due"), 0.0)
    run.checkpoints.update_done(state, run.model, run.optimizer, sums)
    if state.end(run.args) < run.args.num_updates:
        held_out.print_end_of_patience(run.progress, run.args.patience)
        run.loader = run.load(range(0))


def report_missing(run: Any, error: Exception) -> None:
    """Reports an error in the final metrics or samples as one line, and adds this line to the results."""
    line = f"missing    a figure or sample of the end: {with_location(error)}; model/ and the rest are complete"
    run.results["error_after_training"] = line
    if not run.accelerator.is_main_process:  # the main process prints it among the last lines
        print(line, file=sys.stderr, flush=True)
