"""Metrics of the held-out set: printed after an evaluation, added to metrics.jsonl, and described in the results."""

import argparse
import json
from fractions import Fraction
from pathlib import Path
from typing import Any

from common.errors import reported_in_one_line
from common.files import open_to_append, replace_text
from common.report import curves, drawing, trackers
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


def describe_results(
    results: dict[str, Any], sources: list[dict[str, Any]] | None, output_dir: Path
) -> tuple[list[str], list[str]]:
    """Returns two lists of lines: losses, perplexity and bits per byte; and the best checkpoint.

    sources: `held_out_sources` of run.json. Draws curves.png again if it lacks the final held-out loss.
    """
    best = [_describe_best(results["best"], output_dir)] if "best" in results else []
    if "validation_loss" not in results:
        return [], best
    if (output_dir / "curves.png").is_file():
        with reported_in_one_line("curves.png could not be drawn"):
            _redraw_curves(results, output_dir)
    perplexity = f", perplexity {results['perplexity']:.2f}" if "perplexity" in results else ""
    lines = [f"held-out loss {results['validation_loss']:.4f}{perplexity}"]
    for source in sources or []:
        if (loss := results.get(f"validation_loss/{source['source']}")) is not None:
            share = float(Fraction(source["share"]))
            lines.append(f"  {loss:.4f} of {source['source']}, which has {share:.1%} of the targets")
    if "bits_per_byte" in results:
        names = [name for name in ("gzip", "xz") if f"{name}_bits_per_byte" in results]
        others = ", ".join(f"{name} -9 {results[f'{name}_bits_per_byte']:.3f}" for name in names)
        lines.append(f"bits per byte of held-out text: this model {results['bits_per_byte']:.3f}, {others}")
    return lines, best


def _describe_best(best: dict[str, Any] | None, output_dir: Path) -> str:
    """Returns a line about `best`, the result of `Checkpoints.best_at_end`, and whether model/ is this checkpoint."""
    if best is None:
        return "best       no checkpoint was measured: model/ is the last one"
    line = f"best       {best['checkpoint']}, validation loss {best['loss']:.4f}: "
    if (lowest := best.get("lowest_measured")) is not None:
        line = line[:-2] + f" (the lowest measured loss, {lowest:.4f}, has no valid checkpoint): "
    if best["is_model"]:
        return line + f"{output_dir / 'model'} is this one"
    return line + (
        f"{output_dir / 'model'} is the last one; for this one: python -m tools.checkpoint export "
        f"{best['checkpoint']} {output_dir / 'best'}, or --load_best_at_end next time"
    )


def _redraw_curves(results: dict[str, Any], output_dir: Path) -> None:
    updates = curves.read(output_dir / "metrics.jsonl")
    if curves.with_end(updates, results) != updates:
        drawing.draw(output_dir, results["unit"])
