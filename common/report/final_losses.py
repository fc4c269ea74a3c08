"""The lines about held-out losses and the best checkpoint at the end of a run."""

from fractions import Fraction
from pathlib import Path
from typing import Any

from common.errors import reported_in_one_line
from common.report import curves, drawing


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
