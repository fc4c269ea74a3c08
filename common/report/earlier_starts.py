"""Continues the records of a resumed run: run.json, metrics.jsonl, and the totals of repeated updates."""

import json
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.files import replace_text
from common.report.killed_runs import describe_killed
from common.report.records import read_run
from common.report.totals import PAUSES, Totals


def read_earlier(output_dir: Path) -> dict[str, Any]:
    """Returns run.json of the previous start; {} if it is missing, or corrupted by a power failure.

    `commands` has one command per start. Older versions stored only `command`: the last start's, without the launcher.
    """
    try:
        run = read_run(output_dir)
        return {"commands": [run["command"]]} | run
    except (OSError, ValueError, TypeError, LookupError):
        return {}


def continued(run: Any, metadata: dict[str, Any]) -> dict[str, Any]:
    """Returns the entries of run.json for this start, merged with those of earlier starts. run: a `common.run.Run`.

    Removes the metrics after the checkpoint, and adds their time to the totals, as time of repeated updates.
    """
    args, state, batches = run.args, run.state, run.loader.dataset
    before = read_earlier(run.output_dir)
    if before and (outcome := describe_killed(run.output_dir, is_over=True)):
        print(f"{run.output_dir}: the run before this start: {outcome}", flush=True)
    totals = Totals(state.training)
    add_repeated(totals, cut_metrics(run.output_dir / "metrics.jsonl", state.update), before.get("repeated", {}))
    earlier = before.get("earlier_data", [])
    if "dataset" in args.allow_changed:
        earlier = _earlier_data(before, metadata["data"], state.update)
    metadata = metadata | {
        "commands": [*before.get("commands", []), *metadata["commands"]],
        "repeated": repeated(totals),
        "earlier_data": earlier,
    }
    if earlier and metadata["sources"] is not None:
        ends = [(batches.global_batch_size * entry["until"], entry["sources"] or []) for entry in earlier]
        metadata["sources"] = batches.samples.facts(args.num_updates * args.global_batch_size, ends)
    if before and state.update == state.end(args):  # a finished run keeps its results
        metadata["results"] = before.get("results", {})
        metadata |= {name: before[name] for name in ("data", "sources", "earlier_data") if name in before}
    return metadata


def _earlier_data(before: dict[str, Any], data: str, update: int) -> list[dict[str, Any]]:
    """Returns an entry per earlier dataset of the first `update` updates; its use ended before update `until`."""
    earlier = before.get("earlier_data", [])
    kept = [entry for entry in earlier if entry["until"] < update]
    last = earlier[len(kept)] if kept != earlier else before  # the data in use at that time
    if update and last.get("data") not in (None, data):
        kept.append({"until": update, "data": last["data"], "sources": last.get("sources")})
    return kept


def cut_metrics(path: Path, num_updates: int) -> list[dict[str, Any]]:
    """Keeps the lines of the first `num_updates` updates in metrics.jsonl; removes and returns all later lines."""
    if path.exists() and not path.is_file():
        raise UserError(f"disk: {path} is not a file; move it away, then start again with --resume")
    kept: dict[int, str] = {}
    removed: list[dict[str, Any]] = []
    text = path.read_text(errors="replace") if path.is_file() else ""
    for line in text.splitlines(keepends=True):
        try:
            record = json.loads(line)
            update = record["update"]
        except (ValueError, TypeError, KeyError):  # incomplete or corrupted, after a power failure
            continue
        if line.endswith("\n") and update in range(num_updates):
            kept.setdefault(update, line)
        else:
            removed.append(record)
    if lost := [update for update in range(num_updates) if update not in kept]:
        lines = f"line of update {lost[0]}" + (f" and {len(lost) - 1} more" if len(lost) > 1 else "")
        print(f"{path}: the {lines} before update {num_updates} are lost or damaged", flush=True)
    replace_text(path, "".join(kept[update] for update in sorted(kept)))
    return removed


def repeated(totals: Totals) -> dict[str, float]:
    """Returns the repeated_* totals for run.json, because a start killed before its first save leaves no totals."""
    return {name: value for name, value in totals.saved.items() if name.startswith("repeated_")}


def add_repeated(totals: Totals, lines: list[dict[str, Any]], known: dict[str, float]) -> None:
    """Adds time, tokens and number of the removed lines to the totals. Lines of older versions have no seconds.

    lines: removed from metrics.jsonl. known: the totals of repeated updates over earlier starts, from run.json.
    """
    sums = {name: max(totals.get(name), value) for name, value in known.items()}
    totals.saved |= sums
    for line in lines:
        values = {name: line.get(name) for name in PAUSES}
        if isinstance(seconds := line.get("seconds"), int | float):
            values |= {"seconds": seconds, "tokens": seconds * (line.get("tokens_per_second") or 0), "updates": 1}
        for name, value in values.items():
            if isinstance(value, int | float):
                totals.saved[f"repeated_{name}"] = totals.get(f"repeated_{name}") + value


def recorded_results(output_dir: Path, results: dict[str, Any]) -> dict[str, Any]:
    """Returns the results of a start that trained nothing: the values recorded in run.json, if present, or the new."""
    before = read_run(output_dir).get("results", {})
    return {name: before.get(name, value) for name, value in results.items()}
