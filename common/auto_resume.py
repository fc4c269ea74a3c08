"""--resume auto: resumes the run in --output_dir if it has a checkpoint, or else starts it."""

import sys
from pathlib import Path

from common import argument_checks
from common.checkpoint.read import list_checkpoints
from common.errors import UserError, raise_errors
from common.files import lock_output_dir
from common.parallel.main_decisions import decided_by_main
from common.process import this_process
from common.report.earlier_starts import read_earlier
from common.training.recipe_traits import Arguments, given_flags


def resolve(args: Arguments) -> None:
    """Sets --resume to True or False on all ranks, as rank 0 sees --output_dir; replaces a run without checkpoints.

    Raises UserError: the directory holds something else, or a different or a finished run without checkpoints.
    """
    if "--output_dir" not in given_flags():
        raise UserError("--resume auto needs --output_dir, the directory of the run to continue or to start")
    problems, args.resume, args.overwrite = decided_by_main("resume auto", lambda: _choose(args, Path(args.output_dir)))
    raise_errors(problems)
    if not args.resume:
        raise_errors(argument_checks.check_updates(args))  # sets the default that a checkpoint would have set


def _choose(args: Arguments, path: Path) -> tuple[list[str], bool, bool]:
    """Returns problems, whether to resume, and whether to delete a run that was killed before its first checkpoint."""
    if path.is_dir() and not args.dry_run:
        lock_output_dir(path)  # a stopping run may still be writing its first checkpoint
    if this_process().remote is not None:
        this_process().remote.fetch()
    if any(list_checkpoints(path)):
        return [], True, False
    earlier = read_earlier(path)
    if earlier.get("status") in (None, "finished"):
        return argument_checks.check_output_dir(path, False, is_locked=True), False, False
    if _without_resume(earlier["command"]) != _without_resume(sys.argv):
        line = f"--resume auto: {path} holds a run of other flags that was stopped before its first checkpoint"
        return [f"{line}; delete it with --overwrite instead of --resume, or name another directory"], False, False
    return [], False, True


def _without_resume(command: list[str]) -> list[str]:
    """Returns the flags of a command line without --resume and its value."""
    pairs = zip(command, command[1:], strict=False)
    values = ("--resume", "auto")
    return [word for before, word in pairs if word.partition("=")[0] != "--resume" and (before, word) != values]
