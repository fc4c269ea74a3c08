"""Plans a run: prints memory and time of each config, and the launch command of the fastest config that fits.

    python -m tools.plan recipes/lm.py --model_config medium --train_file my.jsonl "8 x 80GiB, host 1TiB"

Without MACHINE (the last argument), it plans for this machine. It runs the recipe without GPUs, until its data is read.
"""

import json
import os
import re
import runpy
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from common.output import guard_output

USAGE = "usage: python -m tools.plan RECIPE [FLAGS ...] [MACHINE]"
# The last word is a machine, not the value of a flag, if it begins with a number of devices or a memory size. The name
# of a GPU alone, such as A100, is a machine unless it follows a flag.
MACHINE, GPU = re.compile(r"\d+ *x\b.*|[\d.]+ *[MGT]i?B\b.*"), re.compile(r"([A-Z]\d+[A-Z]?|[45]0\d0)(,.*)?")


def main() -> None:
    guard_output()
    words = sys.argv[1:]
    machine, predicts = None, words[:1] == ["--predict"]  # options of `common.planner`, not for users
    if predicts:
        words = words[1:]
    elif words[:1] == ["--machine"] and len(words) > 1:
        machine, words = words[1], words[2:]
    if not words or words[0] in ("-h", "--help"):
        print(__doc__.strip() if words else f"error: no recipe; {USAGE}", file=sys.stdout if words else sys.stderr)
        sys.exit(0 if words else 2)
    recipe, *flags = words
    if not Path(recipe).is_file():
        print(f"error: {recipe}: no such recipe; {USAGE}", file=sys.stderr)
        sys.exit(2)
    if not re.search(rb"^\s*(from|import) common\b", Path(recipe).read_bytes(), re.MULTILINE):
        _end_without_plan(recipe)
    question: dict[str, Any] | None = None
    if not predicts:
        if machine is None:
            flags, machine = split_machine(flags)
        question = {"machine": machine} | ({"here": _describe_devices()} if machine == "here" else {})
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    _run(recipe, flags, question)


def split_machine(words: list[str]) -> tuple[list[str], str]:
    """Returns the flags of the recipe, and the machine: the last word, or "here"."""
    before, last = ["", *words][-2:] if words else ("", "")
    if MACHINE.fullmatch(last) or (GPU.fullmatch(last) and not before.startswith("--")):
        return words[:-1], last
    return words, "here"


def _describe_devices() -> dict:
    """Returns the fields of this machine's `hardware.Machine`, measured in a new process, which may use the GPUs."""
    root = str(Path(__file__).resolve().parents[2])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])}
    command = [sys.executable, "-P", "-m", "tools.plan.hardware"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    if result.returncode:
        print(f"error: this machine's devices could not be measured: {result.stderr.strip()[-300:]}", file=sys.stderr)
        sys.exit(2)
    return json.loads(result.stdout.splitlines()[-1])


def _run(recipe: str, flags: list[str], question: dict[str, Any] | None) -> None:
    """Runs the recipe with `PlannedRun` instead of `Run`. question: see `PlannedRun`."""
    sys.argv = [recipe, *flags]
    directory = Path(recipe).resolve().parent
    # A copy of common/ next to the recipe takes precedence, as in a run.
    sys.path[:0] = [str(directory), str(directory.parent)]
    import common.run
    from tools.plan.planned_run import PlannedRun

    common.run.Run = partial(PlannedRun, question)  # type: ignore[assignment, misc]  # replaced on purpose
    runpy.run_path(recipe, run_name="__main__")
    _end_without_plan(recipe)  # reached only if `PlannedRun` did not end the process


def _end_without_plan(recipe: str) -> NoReturn:
    print(f"error: {recipe} is not a recipe: it does not use common.run; {USAGE}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
