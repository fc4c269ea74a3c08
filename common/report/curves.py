"""Draws curves.png, an overview of a run, from its metrics.jsonl and its results, in a separate process.

    python common/report/curves.py runs/books tokens

matplotlib needs about 60 MB and a second. Therefore a run starts this module as a separate process and continues, and
the module imports no other module of this repository.
"""

import json
import math
import sys
from pathlib import Path
from typing import Any

SMOOTH = 50  # the bold line of a noisy metric is the mean over 1 / SMOOTH of the run
COLOURS = ("#4c72b0", "#dd8452")
NOISY = {"loss", "grad_norm", "tokens_per_second"}
HELD_OUT = ("validation_loss", "accuracy", "macro_f1", "r2")  # metrics of an evaluation
FROM_ZERO = {"tokens_per_second", "peak_memory_bytes"}  # their axis includes 0


def read(path: Path) -> list[dict[str, Any]]:
    """Returns the lines of metrics.jsonl, without a line that is still being written."""
    lines = []
    for line in path.read_text().splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:
            continue
    return lines


def with_end(lines: list[dict[str, Any]], results: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the lines; adds the final held-out metrics to the last line, unless it has an evaluation.

    results: from run.json. With --keep_best, the last line already has an evaluation, and the results may belong to an
    earlier update.
    """
    *others, last = lines or [{"validation_loss": None}]
    if "validation_loss" in last or "best" in results or results.get("updates") != last["update"] + 1:
        return lines
    return [*others, last | {name: results[name] for name in HELD_OUT if math.isfinite(results.get(name, math.nan))}]


def panels(unit: str) -> dict[str, dict[str, str]]:
    """Returns, by title of the panel, the names in metrics.jsonl that the panel shows, with their labels."""
    return {
        "loss": {"loss": "training", "validation_loss": "held out"},
        "learning rate": {"learning_rate": ""},
        "gradient norm, before clipping": {"grad_norm": ""},
        f"{unit} a second": {"tokens_per_second": ""},
        "most memory of a process, GiB": {"peak_memory_bytes": ""},
    }


def column(lines: list[dict[str, Any]], name: str) -> tuple[list[float], list[float]]:
    """Returns the numbers of completed updates, and the values of a metric after them; memory in GiB.

    Lines without the metric, or with a non-finite value (null in the file), are skipped.
    """
    scale = 2**30 if name == "peak_memory_bytes" else 1
    lines = [line for line in lines if line.get(name) is not None]
    return [line["update"] + 1 for line in lines], [line[name] / scale for line in lines]


def smoothed(values: list[float]) -> list[float]:
    """Returns the centred moving average of the values, over a window of 1 / SMOOTH of them."""
    reach, sums = max(1, len(values) // SMOOTH) // 2, [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    spans = [(max(0, index - reach), min(len(values), index + reach + 1)) for index in range(len(values))]
    return [(sums[end] - sums[start]) / (end - start) for start, end in spans]


def has_spike(values: list[float]) -> bool:
    """Returns whether the largest value is over 100 times the median, so that a linear axis would hide the others."""
    above = sorted(value for value in values if value > 0)
    return bool(above) and above[-1] > 100 * above[len(above) // 2]


def draw(output_dir: Path, unit: str) -> None:
    """Writes curves.png next to metrics.jsonl: losses, learning rate, gradient norm, throughput, memory."""
    from matplotlib import rcParams
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # not pyplot, which may need a display
    from matplotlib.figure import Figure

    rcParams["text.parse_math"] = False  # a name with $ is not a formula

    lines, run = read(output_dir / "metrics.jsonl"), output_dir / "run.json"
    if run.is_file():
        lines = with_end(lines, json.loads(run.read_text()).get("results", {}))
    figure = Figure(figsize=(12, 7), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2, 4)
    cells = [grid[:, :2], grid[0, 2], grid[0, 3], grid[1, 2], grid[1, 3]]
    for cell, (title, names) in zip(cells, panels(unit).items(), strict=True):
        axes = figure.add_subplot(cell)
        for colour, (name, label) in zip(COLOURS, names.items(), strict=False):
            updates, values = column(lines, name)
            if not values:
                continue
            if is_noisy := name in NOISY and len(values) > SMOOTH:
                axes.plot(updates, values, color=colour, alpha=0.25, linewidth=0.8)
            style: dict[str, Any] = {"marker": "o", "markersize": 4} if name == "validation_loss" else {}
            axes.plot(updates, smoothed(values) if is_noisy else values, color=colour, label=label, **style)
            if name == "validation_loss":
                best = min(values)
                axes.set_title(f"lowest held-out loss {best:.4f}, update {updates[values.index(best)]:,}", loc="right")
        axes.set_title(title, loc="left")
        axes.set_xlabel("updates")
        axes.grid(alpha=0.3)
        if len(names) > 1:
            axes.legend()
        if "grad_norm" in names and has_spike(values):
            axes.set_yscale("log")
        if names.keys() & FROM_ZERO and values:
            axes.set_ylim(0, 1.1 * max(values))
    skipped = max((line.get("skipped_updates") or 0 for line in lines), default=0)
    more = f", {skipped} skipped" if skipped else ""
    name = output_dir.resolve().name.encode(errors="backslashreplace").decode()
    figure.suptitle(f"{name}: {len(lines):,} updates{more}")
    unfinished = output_dir / "curves.png.partial"
    unfinished.unlink(missing_ok=True)  # a link there must not be followed
    with open(unfinished, "xb") as file:
        figure.savefig(file, format="png", dpi=100)
    unfinished.replace(output_dir / "curves.png")


if __name__ == "__main__":
    draw(Path(sys.argv[1]), sys.argv[2])
