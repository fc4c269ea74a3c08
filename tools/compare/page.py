"""Builds the page that compares runs: a single HTML file with curves, settings and results, which needs no network."""

from collections.abc import Iterator
from datetime import datetime
from html import escape
from itertools import accumulate, cycle, pairwise, product
from pathlib import Path
from typing import Any

import jinja2
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from common.reading import reading
from common.report import curves
from tools.compare.runs import OMIT, RecordedRun

STRETCHES = 1000  # number of parts of a long curve; of each part, only the lowest and the highest point are drawn
COLOURS = ("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#b07aa1", "#2a9d9d", "#d37295", "#9c755f")
DASHES = {"solid": "solid", "dash": "dashed", "dot": "dotted"}  # names in plotly, and in CSS
ROW = 200  # pixels per panel; the panel of the losses has twice this height
BUTTONS = ["toImage", "zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"]
# Further metrics of an evaluation, and the titles of their panels, which are drawn if a run has the metric.
MORE_PANELS = {"accuracy": "accuracy", "macro_f1": "macro-F1", "r2": "R²", "chrf": "chrF"}
# Results: label and format, in the order in which a run prints them. Other results follow with their own names.
FIGURES = {
    "validation_loss": ("held-out loss", "{:.4f}"),
    "perplexity": ("perplexity", "{:,.2f}"),
    "bits_per_byte": ("bits per byte of held-out text", "{:.3f}"),
    "gzip_bits_per_byte": ("bits per byte, gzip -9", "{:.3f}"),
    "xz_bits_per_byte": ("bits per byte, xz -9", "{:.3f}"),
    "accuracy": ("accuracy", "{:.2%}"),
    "macro_f1": ("macro-F1", "{:.4f}"),
    "r2": ("R²", "{:.4f}"),
    "chrf": ("chrF", "{:.1f}"),
    "exact": ("exact matches", "{:.1%}"),
    "training_seconds": ("trained in, seconds", "{:,.1f}"),
    "tokens_per_second": ("{unit} per second, without padding", "{:,.0f}"),
    "evaluation_seconds": ("evaluations between updates, seconds", "{:,.1f}"),
    "saving_seconds": ("saving checkpoints between updates, seconds", "{:,.1f}"),
    "padding_share": ("padding, of what was computed", "{:.1%}"),
    "work_difference": ("load imbalance of the processes", "{:.1%}"),
    "waiting_for_data": ("data-loading time", "{:.1%}"),
    "model_flops_per_second": ("model FLOPs, GFLOP/s", "{:,.1f}"),
    "share_of_rate": ("share of the measured matmul throughput", "{:.0%}"),
    "peak_memory_bytes": ("peak memory of a process, GiB", "{:.2f}"),
    "memory_growth_bytes": ("growth since the model was loaded, GiB", "{:.2f}"),
    "skipped_updates": ("skipped updates", "{:,.0f}"),
}
UNITS = {"model_flops_per_second": 1e9, "peak_memory_bytes": 2**30, "memory_growth_bytes": 2**30}
# FACTS: entries of run.json that are settings in addition to the flags. OWN: settings that identify a run, and are not
# listed as differences.
FACTS = ("mode", "world_size", "mixed_precision", "device", "data", "held_out")
OWN = ("--output_dir", "--resume", "command")


def write_page(runs: list[RecordedRun]) -> str:
    """Returns the page as HTML. Names, settings and texts of the runs are escaped."""
    figure = draw(runs)
    plot = figure.to_html(
        full_html=False,
        include_plotlyjs=True,
        div_id="curves",
        default_height=f"{figure.layout.height}px",
        config={"displaylogo": False, "typesetMath": False, "modeBarButtons": [BUTTONS]},
    )
    settings, figures = tables(runs)
    page = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    return page.from_string(Path(__file__).with_name("page.jinja").read_text(encoding="utf-8")).render(
        runs=[(run, colour, DASHES[dash]) for run, (colour, dash) in zip(runs, _looks(), strict=False)],
        plot=plot,
        figures=figures,
        differing={name: cells for name, cells in settings.items() if name not in OWN and len(set(cells)) > 1},
        settings=settings,
        samples=[(run, text) for run in runs if (text := run.results.get("sample"))],
        now=datetime.now().astimezone(),
    )


def tables(runs: list[RecordedRun]) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Returns the table of settings and that of results; raises UserError if a value of run.json cannot be shown."""
    settings, figures = [], []
    for run in runs:
        with reading(run.path / "run.json", OMIT):
            settings.append(list_settings(run))
            figures.append(list_figures(run))
    return _table(settings), _table(figures)


def _looks() -> Iterator[tuple[str, str]]:
    """Yields a colour and a dash style for each run."""
    return cycle((colour, dash) for dash, colour in product(DASHES, COLOURS))


def draw(runs: list[RecordedRun]) -> go.Figure:
    """Returns a figure with a row of curves per metric.

    For page.jinja, a trace has the index of its run as `meta`, and (updates, targets so far) per point as `customdata`.
    """
    units = sorted({escape(str(run.results["unit"])) for run in runs if "unit" in run.results})
    panels = curves.panels(" or ".join(units) or "tokens or samples")
    has = {name for run in runs for line in run.lines for name in line}
    panels |= {title: {name: ""} for name, title in MORE_PANELS.items() if name in has}
    if apart := {name: name.partition("/")[2] for name in sorted(has) if name.startswith("validation_loss/")}:
        panels["held-out loss of each source"] = apart
    height = ROW * (len(panels) + 1)
    figure = make_subplots(
        rows=len(panels),
        shared_xaxes=True,
        row_heights=[2] + [1] * (len(panels) - 1),
        vertical_spacing=60 / height,
        subplot_titles=list(panels),
    )
    pale = 0.5 / (1 + len(runs))
    for row, names in enumerate(panels.values(), start=1):
        for number, (run, look) in enumerate(zip(runs, _looks(), strict=False)):
            for name, label in names.items():
                figure.add_traces(list(_traces(run, name, label, number, look, pale)), rows=row, cols=1)
        if "grad_norm" in names and any(curves.has_spike(curves.column(run.lines, "grad_norm")[1]) for run in runs):
            figure.update_yaxes(type="log", row=row)
        if names.keys() & curves.FROM_ZERO:
            figure.update_yaxes(rangemode="tozero", row=row)
    figure.update_annotations(x=0, xanchor="left")
    figure.update_xaxes(showticklabels=True, hoverformat=",")
    figure.update_yaxes(automargin=True)
    margin = {"l": 50, "r": 10, "t": 30, "b": 50}
    return figure.update_layout(template={}, height=height, margin=margin, showlegend=False, hovermode="x unified")


def _traces(
    run: RecordedRun, name: str, label: str, number: int, look: tuple[str, str], pale: float
) -> Iterator[go.Scatter]:
    """Yields the curves of a metric of a run: a noisy metric with many updates as a pale line and a bold moving mean.

    number: index of the run. look: colour and dash style. pale: opacity of the pale line.
    """
    updates, values = curves.column(run.lines, name)
    if not values:
        return
    targets = accumulate(line.get("target_tokens", 0) for line in run.lines)
    seen = dict(zip((line["update"] + 1 for line in run.lines), targets, strict=True))
    lines = [(values, label, 2, 1.0)]
    if name in curves.NOISY and len(values) > curves.SMOOTH:
        lines = [(values, label, 1, pale), (curves.smoothed(values), f"{label} mean".strip(), 2, 1.0)]
    for drawn, words, width, opacity in lines:
        kept = thin(drawn)
        yield go.Scatter(
            x=[updates[place] for place in kept],
            y=[float(f"{drawn[place]:.9g}") for place in kept],
            customdata=[(updates[place], seen[updates[place]]) for place in kept],
            meta=number,
            name=escape(_shortened(run.name), quote=False),  # escaped because plotly interprets tags
            mode="lines+markers" if name.startswith("validation_loss") or len(kept) == 1 else "lines",
            line={"color": look[0], "dash": look[1], "width": width},
            marker={"size": 5},
            opacity=opacity,
            zorder=width,  # all pale lines are behind all bold lines
            hovertemplate=f"%{{fullData.name}}, update %{{customdata[0]:,}}: {words} <b>%{{y:.5~g}}</b><extra></extra>",
        )


def _shortened(name: str) -> str:
    """Shortens a name to 24 characters, for the hover box on a small screen."""
    return name if len(name) <= 24 else f"{name[:11]}…{name[-12:]}"


def thin(values: list[float]) -> list[int]:
    """Returns the indices to draw: all; of a long curve, its ends, and minimum and maximum of STRETCHES equal parts."""
    if len(values) <= 2 * STRETCHES:
        return list(range(len(values)))
    edges = [len(values) * part // STRETCHES for part in range(STRETCHES + 1)]
    parts = [range(start, end) for start, end in pairwise(edges)]
    kept = {choose(part, key=values.__getitem__) for part in parts for choose in (min, max)}
    return sorted(kept | {0, len(values) - 1})


def _table(columns: list[dict[str, str]]) -> dict[str, list[str]]:
    """Returns a row per name that any run has, with a cell per run."""
    names = dict.fromkeys(name for column in columns for name in column)
    return {name: [column.get(name, "–") for column in columns] for name in names}


def list_settings(run: RecordedRun) -> dict[str, str]:
    """Returns settings by name as text: flags, FACTS, the command, the model's configuration, and versions."""
    facts = run.facts
    settings = {"recipe": run.recipe} | {f"--{name}": value for name, value in facts["arguments"].items()}
    settings |= {name.replace("_", " "): facts.get(name) for name in FACTS}
    settings |= {"command": facts["command"]}
    settings |= {f"model: {name}": value for name, value in (facts.get("model") or {}).items()}
    settings |= {f"version of {name}": value for name, value in (facts.get("versions") or {}).items()}
    return {name: _words(value) for name, value in settings.items()}


def _words(value: Any) -> str:
    if value is None or value == [] or value == {}:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{name}: {_words(item)}" for name, item in value.items())
    if isinstance(value, list):
        return " ".join(map(_words, value))
    return "; ".join(line.strip() for line in str(value).splitlines())


def list_figures(run: RecordedRun) -> dict[str, str]:
    """Returns the progress and the results of a run by label, as text."""
    asked, figures = run.facts["arguments"].get("num_updates"), {"status": run.status()}
    done = run.lines[-1]["update"] + 1 if run.lines else 0
    figures["updates"] = f"{done:,}" + (f" of {asked:,}" if isinstance(asked, int) else "")
    if run.facts.get("resumed_at"):  # time and throughput cover only the later updates
        figures["resumed at update"] = f"{run.facts['resumed_at']:,}"
    if "loss" in (run.lines or [{}])[-1]:
        figures["loss of the last update"] = f"{run.lines[-1]['loss']:.4f}"
    updates, losses = curves.column(run.lines, "validation_loss")
    if losses:
        figures["lowest held-out loss"] = f"{min(losses):.4f} (update {updates[losses.index(min(losses))]:,})"
    results = {name: value for name, value in run.results.items() if isinstance(value, int | float)}
    known = {name: words for name, words in FIGURES.items() if name in results}
    for name, (label, form) in known.items():
        figures[label.format(unit=run.results.get("unit", "tokens"))] = form.format(results[name] / UNITS.get(name, 1))
    return figures | {name: f"{value:,.6g}" for name, value in results.items() if name not in {*known, "updates"}}
