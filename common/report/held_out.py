"""Metrics of the held-out set: printed after an evaluation, added to metrics.jsonl, and described in the results."""

import argparse
import json
from typing import Any

from common.files import open_to_append, replace_text
from common.report import trackers
from common.report.records import to_json_line
from common.report.terminal_bar import TerminalBar


def print_evaluation(progress: Any, record: dict[str, Any]) -> None:
    """Prints the metrics of an evaluation, and draws the curves. record: a line of metrics.jsonl."""
    loss = record["validation_loss"]
    if isinstance(progress.display, TerminalBar):
        progress.display.held_out = f"held out {loss:.3f}, "
    line = f"update {progress.state.update}: validation loss {loss:.4f}"
    line += f", accuracy {record['accuracy']:.2%}" if "accuracy" in record else ""
    sources = {name.partition("/")[2]: value for name, value in record.items() if name.startswith("validation_loss/")}
    line += f" ({', '.join(f'{value:.4f} of {source}' for source, value in sources.items())})" if sources else ""
    progress.print(line + (", the lowest so far" if progress.state.is_best else ""))
    progress.draw()


def add_evaluation(progress: Any, metrics: dict[str, float]) -> None:
    """Adds an evaluation to the last line of metrics.jsonl, if a request to stop had interrupted the evaluation."""
    if not progress.is_main:
        return
    path = progress.output_dir / "metrics.jsonl"
    *lines, last = path.read_text().splitlines(keepends=True) or [""]
    record = json.loads(last) if last else {}
    if record.get("update") != progress.state.update - 1:
        return  # the line of the last update was corrupted, and removed
    names = list(record)
    position = names.index("target_tokens")
    first, others = ({name: record[name] for name in part} for part in (names[:position], names[position:]))
    record = first | metrics | others
    replace_text(path, "".join([*lines, to_json_line(record)]))
    progress.file.close()
    progress.file = open_to_append(path)
    trackers.log(progress, metrics, record["update"])
    print_evaluation(progress, record)


def print_end_of_patience(progress: Any, patience: int) -> None:
    """Prints that the training ends, because `patience` consecutive evaluations had no lower loss than the best."""
    best = progress.state.best_validation_loss
    lower = "a finite validation loss" if best is None else f"a lower validation loss than {best:.4f}"
    if progress.is_main:
        progress.print(
            f"update {progress.state.update}: {patience} evaluation{'s' * (patience > 1)} in a row without {lower}: "
            "the training ends here (--patience)"
        )


def describe_patience(state: Any, args: argparse.Namespace) -> dict[str, str]:
    """Returns the state of --patience, for the run summary of a resumed run. state: its `TrainingState`."""
    count = state.evaluations_since_best
    text = f"{count} of {args.patience} evaluations in a row without a lower validation loss"
    text += "; nothing is left to train" if state.end(args) < args.num_updates else ""
    return {"patience": text} if args.patience and count else {}
