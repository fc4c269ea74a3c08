"""Starts the planner, `python -m tools.plan`, in its own process: for --plan, and for the prediction of --dry_run.

Imports nothing heavy, because a dry run starts the planner before its own imports, so that the two run in parallel.
"""

import argparse
import atexit
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from common.errors import UserError, raise_errors
from common.host_memory import available_per_process, available_total

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 300  # time limit of a prediction
# Flags that only matter if a run is started; a prediction ignores them.
LEFT_OUT = ("--output_dir", "--resume", "--overwrite", "--dry_run", "--profile", "--plan")
LAUNCHER_VARIABLES = tuple(
    "ACCELERATE_ FSDP_ TORCHELASTIC_ PARALLELISM_ LOCAL_ GROUP_ ROLE_ RANK WORLD_SIZE MASTER_ADDR MASTER_PORT".split()
)


def repeated_flags(words: list[str], left_out: tuple[str, ...] = LEFT_OUT) -> Iterator[str]:
    """Yields the flags of the recipe with their values, except those in `left_out`."""
    is_left_out = False
    for word in words:
        if word.startswith("--"):
            is_left_out = word.partition("=")[0] in left_out
        if not is_left_out:
            yield word


def _start(*options: str, left_out: tuple[str, ...] = LEFT_OUT) -> dict[str, Any]:
    """Returns the `args` and `env` of a planner process that does not belong to this process's launch."""
    if not (ROOT / "tools/plan").is_dir():
        raise UserError(f"the planner is not in {ROOT}; copy tools/ from the repository to it, next to common/")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER_VARIABLES)}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    # -P, because the current directory may contain a different tools/.
    command = [sys.executable, "-P", "-m", "tools.plan", *options, sys.argv[0], *repeated_flags(sys.argv[1:], left_out)]
    return {"args": command, "env": environment}


def _problems(args: argparse.Namespace) -> Iterator[str]:
    """Yields one line per mistake in a command with --plan."""
    from common.parallel.launch import started_world_size

    if started_world_size() > 1:
        yield "--plan is for one process, whatever it plans for: use python instead of accelerate launch"
    for name in ("dry_run", "resume", "overwrite"):
        if getattr(args, name):
            yield f"--plan trains nothing; remove --{name}"


def hand_over(args: argparse.Namespace) -> NoReturn:
    """Replaces this process with the planner, which prints the plan for the machine of --plan.

    Raises UserError: one line per mistake in the command, or the planner is missing.
    """
    raise_errors(_problems(args))
    # Only --plan is left out, because the launch command that the planner recommends repeats the other flags.
    planner = _start("--machine", args.plan, left_out=("--plan",))
    sys.stdout.flush()
    os.execve(sys.executable, planner["args"], planner["env"])


@cache
def start_predictor() -> subprocess.Popen[str]:
    """Starts the planner process of a dry run. After its imports it waits for the question of the next `Prediction`.

    Raises UserError: the planner is missing; OSError or MemoryError: the process cannot be started.
    """
    pipe = subprocess.PIPE
    process = subprocess.Popen(**_start("--predict"), stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    atexit.register(process.kill)  # for runs that end before their question
    return process


def start_early() -> None:
    """Starts the planner process; if that is not possible, `Prediction` tries again and gives the reason."""
    with suppress(UserError, OSError, MemoryError):
        start_predictor()


class Prediction:
    """The memory prediction of a dry run, computed by a planner process in parallel to the dry run.

    run: a `common.run.Run`, before its model is built.
    """

    def __init__(self, run: Any):
        launch = run.launch_config
        question = {
            "words": launch.command[2:],  # after `accelerate launch`
            "mode": launch.mode,
            "num_processes": launch.num_processes,
            "mixed_precision": launch.mixed_precision,
            "device": run.device.type,
            "available": [available_per_process(), available_total()],
        }
        if run.device.type == "cuda":
            import torch

            question["available"] = [torch.cuda.mem_get_info(run.device)[1]]
        self.reason = ""
        try:
            self.process = start_predictor()
        except (UserError, OSError, MemoryError) as error:
            self.reason = str(error)
            return
        start_predictor.cache_clear()  # a later dry run of this process asks its own planner
        with suppress(BrokenPipeError):  # the planner has ended with an error, which `describe` returns
            print(json.dumps(question), file=self.process.stdin, flush=True)

    def describe(self) -> str:
        """Waits for the planner; returns the predicted peak memory per process, or why there is no prediction."""
        if self.reason:
            return f"not predicted: {self.reason}"
        try:
            printed, errors = self.process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()
            return f"not predicted: the planner took more than {SECONDS} s"
        if self.process.returncode:
            lines = errors.strip().splitlines() or [_describe_status(self.process.returncode)]
            return f"not predicted: {lines[-1].removeprefix('error: ')}"
        return printed.strip().splitlines()[-1]


def _describe_status(status: int) -> str:
    if status > 0:
        return f"the planner ended with exit status {status}"
    return f"the planner was ended by {signal.Signals(-status).name}, which a machine also sends when memory runs out"
