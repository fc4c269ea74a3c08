"""Runs the README's first command on a CPU and draws the end of what it prints.

.venv/bin/python benchmarks/first_run.py            # runs it, some minutes; writes results/first-run-cpu.json and .svg
.venv/bin/python benchmarks/first_run.py --draw     # only draws, from the JSON file that is there
"""

import argparse
import json
import subprocess
import sys
import tempfile
import textwrap
import time
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from flags import output_dir
from machine import describe_machine

from common.report.tracking import versions

COMMAND = "accelerate launch --config_file accelerate_configs/cpu_bf16.yaml recipes/lm.py"
COMMAND += " --optimizer muon --num_updates 950"
COLUMNS, LINE_HEIGHT, CHARACTER = 110, 18, 7.8  # of the picture's text: characters, pixels, pixels
SAMPLE_LINES = 12  # of what the model writes


def last_lines(printed: str, output_dir: Path) -> list[str]:
    """What a run prints after its last update, without the name of its directory."""
    lines = printed[printed.index("trained in ") :].rstrip().splitlines()
    return [line.replace(str(output_dir), "OUTPUT_DIR").rstrip() for line in lines]


def measure() -> dict:
    with tempfile.TemporaryDirectory() as directory:
        output_dir = Path(directory, "run")
        command = [Path(sys.executable).parent / "accelerate", *COMMAND.split()[1:], "--output_dir", output_dir]
        finished = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return record(finished.stdout, output_dir)


def record(printed: str, output_dir: Path) -> dict:
    return {
        "command": COMMAND,
        "date": time.strftime("%Y-%m-%d"),
        "machine": describe_machine(),
        "versions": versions(),
        "printed": last_lines(printed, output_dir),
    }


def draw(result: dict) -> str:
    """The command and its last lines as SVG; long lines are wrapped, a long sample is cut."""
    printed = result["printed"]
    start = printed.index("the model writes:") + 1
    end = next(number for number, line in enumerate(printed) if line.startswith("model "))
    sample = printed[start:end]
    if len(sample) > SAMPLE_LINES:
        sample = [*sample[: SAMPLE_LINES - 1], "...", ""]
    lines = [f"$ {result['command']}", "...", *printed[:start], *sample, *printed[end:]]
    lines = [part for line in lines for part in textwrap.wrap(line, COLUMNS, drop_whitespace=False) or [""]]
    width, height = round(COLUMNS * CHARACTER + 40), len(lines) * LINE_HEIGHT + 32
    rows = "\n".join(
        f'<text x="20" y="{28 + number * LINE_HEIGHT}">{escape(line)}</text>' for number, line in enumerate(lines)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">\n'
        f'<rect width="{width}" height="{height}" rx="8" fill="#1e1e2e"/>\n'
        '<g font-family="ui-monospace, Menlo, Consolas, DejaVu Sans Mono, monospace" font-size="13" fill="#e4e4ef" '
        f'xml:space="preserve">\n{rows}\n</g>\n</svg>\n'
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw", action="store_true", help="draw what was recorded, without a run")
    parser.add_argument("--output_dir", type=output_dir, default=ROOT / "benchmarks/results")
    args = parser.parse_args()
    path = args.output_dir / "first-run-cpu.json"
    if not args.draw:
        path.write_text(json.dumps(measure(), indent=1) + "\n")
    path.with_suffix(".svg").write_text(draw(json.loads(path.read_text())))
    print(path.with_suffix(".svg"))


if __name__ == "__main__":
    main()
