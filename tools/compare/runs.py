"""Reads run.json and metrics.jsonl of recorded runs, for the page that compares them."""

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import UserError, raise_errors
from common.reading import reading
from common.redaction import redact
from common.report import curves
from common.report.killed_runs import describe_killed

OMIT = "fix it, or omit this run"


@dataclass
class RecordedRun:
    """A finished, stopped or running run."""

    path: Path
    name: str  # the shortest unique end of its path
    facts: dict[str, Any]  # run.json
    lines: list[dict[str, float]]  # metrics.jsonl, one per update; the last also has the final held-out metrics
    killed: str | None  # description if the run was killed, because a killed run cannot write its status

    @property
    def results(self) -> dict[str, Any]:
        return self.facts.get("results") or {}

    @property
    def recipe(self) -> str:
        return os.path.basename(self.facts["command"][0])

    def status(self) -> str:
        return self.killed or self.facts["status"]


def read_runs(directories: list[Path]) -> list[RecordedRun]:
    """Returns the runs. Raises UserError: one line per directory that is not a run, is unreadable, or occurs twice."""
    runs, problems, paths = [], [], [directory.resolve() for directory in directories if os.path.isdir(directory)]
    for directory in directories:
        try:
            if os.path.isdir(directory) and paths.count(directory.resolve()) > 1:
                raise UserError(f"{directory}: the same run is named twice; name it once")
            runs.append(_read_run(directory, paths))
        except UserError as error:
            problems.append(str(error))
        except OSError as error:
            problems.append(f"{error.filename}: cannot be read: {error.strerror}; fix it, or omit this run")
    raise_errors(dict.fromkeys(problems))
    return runs


def _read_run(directory: Path, paths: list[Path]) -> RecordedRun:
    record, metrics = files = [directory / name for name in ("run.json", "metrics.jsonl")]
    if missing := [path.name for path in files if not path.is_file()]:
        problem = f"has no {' and no '.join(missing)}" if os.path.isdir(directory) else "is not a directory"
        raise UserError(f"{directory}: {problem}; name the --output_dir of a run")
    with reading(f"{record}: not as a run writes it", OMIT):
        facts = redact(json.loads(record.read_bytes()))
        _check_record(facts)
        facts["results"] = _usable(facts.get("results") or {})
        lines = curves.with_end(_read_metrics(metrics), facts["results"])
        return RecordedRun(
            directory, redact(_short_name(directory.resolve(), paths)), facts, lines, describe_killed(directory)
        )


def _check_record(facts: dict[str, Any]) -> None:
    """Raises TypeError or KeyError if an entry that the page needs has a different type than a run writes."""
    kinds: dict[str, Any] = {"arguments": dict, "command": list, "status": str}
    optional = {"results": dict | None, "model": dict | None, "versions": dict | None, "resumed_at": int | None}
    kinds |= {name: kind for name, kind in optional.items() if name in facts}
    for name, kind in kinds.items():
        if not isinstance(facts[name], kind):
            raise TypeError(f"{name} is a {type(facts[name]).__name__}")
    if not facts["command"] or not all(isinstance(word, str) for word in facts["command"]):
        raise TypeError("command is not a list of words")


def _usable(results: dict[str, Any]) -> dict[str, Any]:
    """Returns the texts and the finite numbers of a dictionary, as numbers that a float can represent."""
    return {name: value for name, value in results.items() if isinstance(value, str) or _is_finite(value)}


def _is_finite(value: Any) -> bool:
    try:
        return isinstance(value, int | float) and math.isfinite(value)
    except OverflowError:  # an integer of hundreds of digits
        return False


def _read_metrics(path: Path) -> list[dict[str, float]]:
    """Returns the finite numbers of each line of metrics.jsonl, by name; an incomplete last line is ignored.

    Raises UserError: any other line is corrupted.
    """
    texts, lines = path.read_bytes().splitlines(keepends=True), []
    for number, text in enumerate(texts, start=1):
        try:
            lines.append({name: value for name, value in json.loads(text).items() if _is_finite(value)})
            if not (isinstance(lines[-1]["update"], int) and 0 <= lines[-1]["update"] < 2**53):
                raise ValueError("update")
        except (ValueError, AttributeError, LookupError, RecursionError):
            if number == len(texts) and not text.endswith(b"\n"):
                return lines[: number - 1]
            raise UserError(f"{path}: line {number} is corrupted; remove it, or omit this run") from None
    return lines


def _short_name(path: Path, paths: list[Path]) -> str:
    """Returns the shortest end of a path that no other path ends with; undecodable bytes become question marks."""
    ends = (path.parts[-count:] for count in range(1, len(path.parts) + 1))
    own = next(end for end in ends if sum(other.parts[-len(end) :] == end for other in paths) == 1)
    return str(Path(*own)).encode(errors="replace").decode()
