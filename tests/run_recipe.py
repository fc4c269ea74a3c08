"""Runs a recipe several times in one process, each time unchanged but for the named changes around it.

    accelerate launch ... tests/run_recipe.py SPEC.json

SPEC.json is a list of {"recipe": PATH, "flags": [...], "changes": {NAME: VALUE}}; the recipe is recipes/lm.py if none
is named. A change is a function in tests/changes/: it observes (gradients, live tensors), sets a condition, or takes
out what a test guards, to show that the test would notice. Counting a model's FLOPs takes as long as several updates of
a small model: only runs with the change "flops" do it.
"""

import inspect
import json
import os
import runpy
import sys
from pathlib import Path

from accelerate.state import AcceleratorState, GradientState

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from changes import UNDO, change, checkpoints, failures, made, numbers, observations, waits, work  # noqa: E402

from common.parallel import shutdown  # noqa: E402
from common.process import this_process  # noqa: E402
from common.report import flops  # noqa: E402
from common.training.stop_signals import STOPPED  # noqa: E402

SUBJECTS = (checkpoints, failures, made, numbers, observations, waits, work)
CHANGES = dict(pair for subject in SUBJECTS for pair in inspect.getmembers(subject, inspect.isfunction))


def main():
    specs = json.loads(Path(sys.argv[1]).read_text())
    counts_flops = [spec.get("changes", {}).pop("flops", False) for spec in specs]
    if unknown := {name for spec in specs for name in spec.get("changes", {})} - CHANGES.keys():
        sys.exit(f"error: {sys.argv[1]}: no such change: {', '.join(sorted(unknown))}")
    for spec, is_counted in zip(specs, counts_flops, strict=True):
        recipe = str(ROOT / spec.get("recipe", "recipes/lm.py"))
        with UNDO:
            UNDO.callback(GradientState._reset_state)
            UNDO.callback(AcceleratorState._reset_state, reset_partial_state=False)
            # A second process group on the launcher's store can meet the keys of the first: one serves all runs.
            change(shutdown, "end_run", lambda accelerator, status=0: accelerator.wait_for_everyone())
            change(this_process(), "has_document_mask", False)
            change(sys, "argv", [recipe, *spec["flags"]])
            if not is_counted:
                change(flops, "of_run", lambda *_: None)
            for name, value in spec.get("changes", {}).items():
                CHANGES[name](value)
            if error_file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
                Path(error_file).unlink(missing_ok=True)  # that of an earlier run
            try:
                runpy.run_path(recipe, run_name="__main__")
            except SystemExit as error:  # a dry run, or a run that was asked to stop
                if error.code not in (None, 0, STOPPED):
                    raise
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # as the recipe ends where it has several processes


if __name__ == "__main__":
    main()
