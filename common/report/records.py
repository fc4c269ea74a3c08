"""Reads and writes run.json, and formats lines of metrics.jsonl."""

import json
from pathlib import Path
from typing import Any

from common.files import replace_text
from common.redaction import redact


def to_json_line(record: dict[str, Any]) -> str:
    """Returns a line of JSON; floats have 17 significant digits (exact for a double), and are null if non-finite."""

    def value(item: Any) -> str:
        if isinstance(item, float):
            return format(item, ".17g") if abs(item) < float("inf") else "null"
        return json.dumps(item)

    return "{" + ", ".join(f"{json.dumps(key)}: {value(item)}" for key, item in redact(record).items()) + "}\n"


def write_run(output_dir: Path, metadata: dict[str, Any]) -> None:
    """Writes run.json, without secrets."""
    text = json.dumps(redact(metadata), indent=2, default=lambda item: redact(str(item))) + "\n"
    replace_text(output_dir / "run.json", text)


def read_run(output_dir: Path) -> dict[str, Any]:
    """Returns the contents of run.json."""
    return json.loads((output_dir / "run.json").read_text())


def end_unfinished(output_dir: Path, status: str) -> None:
    """Sets the status in run.json, if it is "running"; no effect if the file is not visible on this host."""
    if (output_dir / "run.json").is_file() and (run := read_run(output_dir))["status"] == "running":
        write_run(output_dir, run | {"status": status})
