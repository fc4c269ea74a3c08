"""Compares runs: `python -m tools.compare runs/a runs/b` writes an HTML page with curves, settings and results."""

import os
import sys
from pathlib import Path

from common.command_parser import CommandParser
from common.disk_errors import disk_line
from common.errors import UserError, raise_errors
from common.files import PARTIAL, open_new
from common.output import guard_output
from common.packages import find_missing
from tools.compare.runs import read_runs

MARK = b"<!-- A report of python -m tools.compare -->"  # second line of page.jinja; only files with it are replaced


def main() -> None:
    guard_output()
    parser = CommandParser(
        prog="python -m tools.compare",
        description="Writes an HTML page, which needs no network: curves, settings that differ, results of runs.",
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="the --output_dir of a run")
    about = "file to write; replaces an older report (default: report.html)"
    parser.add_argument("--output", type=Path, default=Path("report.html"), metavar="FILE", help=about)
    try:
        args = parser.parse_args()
        raise_errors(find_missing("the report", "plotly"))
        from tools.compare.page import write_page

        raise_errors(check_output(args.output))
        text = write_page(read_runs(args.runs)).encode(errors="replace")  # a path may contain bytes that are not UTF-8
        write(args.output, text)
        print(f"{args.output} ({len(text) / 1e6:.1f} MB; open it in a browser)")
    except UserError as error:
        print("\n".join(f"error: {line}" for line in str(error).splitlines()), file=sys.stderr)
        sys.exit(2)


def check_output(path: Path) -> list[str]:
    """Returns a list with the first problem of an output path, or []."""
    if path.is_dir():
        return [f"--output {path}: is a directory; name a file"]
    if not path.parent.is_dir():
        return [f"--output {path}: there is no directory {path.parent}; create it first"]
    try:
        is_report = not path.exists() or (path.is_file() and MARK in path.read_bytes()[:1000])
    except OSError as error:
        return [f"--output {path}: {error.strerror}; name a different file, or change its permissions"]
    return [] if is_report else [f"--output {path}: exists and is not a report; name a different file, or move it away"]


def write(path: Path, text: bytes) -> None:
    """Writes a file completely or not at all. Raises UserError: the file could not be written."""
    unfinished = path.with_name(path.name + PARTIAL)
    try:
        with open_new(unfinished) as file:
            file.write(text)
        os.replace(unfinished, path)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        advice = "write the report again"
        raise UserError(disk_line(error, f"{path} could not be written", path.parent, len(text), advice)) from error


if __name__ == "__main__":
    main()
