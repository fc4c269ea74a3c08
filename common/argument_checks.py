"""Checks of the flags and the data before anything is written; creation of the output directory."""

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path

from accelerate import Accelerator

from common.errors import UserError, raise_errors
from common.files import LOCK, PARTIAL, lock_output_dir, nearest_existing, why_not_writable
from common.models import adapters
from common.training.batching import Samples, updates_per_epoch
from common.training.process_grid import ProcessGrid
from common.training.recipe_traits import Arguments, Traits, given_flags

# Flags that are off by default; if one is set, `rare_arguments.check_combinations` checks it.
OFF_BY_DEFAULT = "allow_changed compile keep_best load_best_at_end num_epochs patience report_to".split()


def check_arguments(args: Arguments, on_cpu: bool, traits: Traits, grid: ProcessGrid) -> list[str]:
    """Checks the shared flags as far as possible without data and model; returns one line per mistake.

    Sets defaults: the number of warm-up updates, and the micro-batch size and workers, which do not change an update.
    """
    problems = _resolve_batch(args, on_cpu, traits, grid)
    if args.num_workers is None:
        args.num_workers = 0 if on_cpu else 2
    if args.num_epochs is not None:
        args.num_updates = None  # until the size of the dataset is known
    problems += [*check_updates(args), *adapters.check(args, grid)]
    is_rare = any(flag.endswith(("_column", "dataset_config", "optimizer", "workers")) for flag in given_flags())
    if is_rare or args.resume or args.keep_last < 2 or any(getattr(args, name) for name in OFF_BY_DEFAULT):
        from common.rare_arguments import check_combinations

        problems += check_combinations(args, on_cpu)
    if not args.resume:
        path, is_given = Path(args.output_dir), "--output_dir" in given_flags()  # an existing default gets a suffix
        problems += check_output_dir(path, args.overwrite) if is_given else _check_writable(path)
    return problems


def check_updates(args: argparse.Namespace, num_done: int = 0) -> Iterator[str]:
    """Sets the default number of warm-up updates; yields a line for each flag that needs a longer run."""
    if args.num_updates is None:
        return
    if args.warmup_updates is None:
        if not args.resume:  # a resumed run uses the value of the checkpoint
            args.warmup_updates = args.num_updates // 20
    elif args.warmup_updates >= args.num_updates:
        from common.rare_arguments import describe_length

        yield f"--warmup_updates {args.warmup_updates} leaves nothing of {describe_length(args)}; lower it"
    if args.profile:
        from common.rare_arguments import check_profile

        yield from check_profile(args, num_done)


def _resolve_batch(args: Arguments, on_cpu: bool, traits: Traits, grid: ProcessGrid) -> list[str]:
    """Sets the default of --micro_batch_size or --micro_batch_tokens; returns one line per mistake."""
    tokens, longest = args.micro_batch_tokens if traits.lengths_vary else None, traits.longest_sample(args)
    default_tokens = max(1024 if on_cpu else 8192, -(-longest // grid.sequence))
    if args.micro_batch_size and tokens:
        return ["--micro_batch_size and --micro_batch_tokens are mutually exclusive; pass only one"]
    if args.micro_batch_size or not tokens and (grid.pipeline > 1 or not traits.lengths_vary):
        from common.rare_arguments import resolve_micro_batch_size

        return list(resolve_micro_batch_size(args, on_cpu, longest, default_tokens, grid, traits))
    args.micro_batch_tokens = tokens or default_tokens
    return []


def check_output_dir(path: Path, overwrite: bool, is_locked: bool = False) -> list[str]:
    """Returns one line if the run cannot use this directory, or []. is_locked: whether this process holds its lock."""
    entries = path.iterdir() if path.is_dir() else [path] * path.exists()
    if any(entry.name != LOCK and not entry.name.endswith(PARTIAL) for entry in entries):
        from common.rare_arguments import describe_occupied

        if problem := describe_occupied(path, overwrite, is_locked):
            return [problem]
    return _check_writable(path)


def _check_writable(path: Path) -> list[str]:
    parent = nearest_existing(path)
    if reason := why_not_writable(parent):
        return [f"--output_dir {path} cannot be written: {reason} in {parent}; name another directory"]
    return []


def check_samples(
    args: Arguments, traits: Traits, train: Samples, validation: Samples | None, grid: ProcessGrid
) -> None:
    """Converts epochs to updates. Raises UserError: too few samples, or one that does not fit a micro-batch."""
    longest = max(train.max_length, validation.max_length if validation else 0)
    tokens = args.micro_batch_tokens if traits.lengths_vary else None
    is_too_long = tokens not in (None, "auto") and tokens * grid.sequence < longest
    lacks_held_out = validation is None and any(getattr(args, name) for name in ("eval_every", *traits.held_out_flags))
    if is_too_long or lacks_held_out or len(train) < args.global_batch_size:
        from common.rare_arguments import explain_samples

        raise_errors(explain_samples(args, traits, train, validation, longest if is_too_long else 0, grid.sequence))
    if args.num_epochs is not None or any(isinstance(every, str) for every in (args.eval_every, args.save_every)):
        from common.training import epochs

        epochs.resolve(args, updates_per_epoch(len(train), args.global_batch_size, args.drop_last_window))
        raise_errors(check_updates(args))
    if args.eval_every or "--save_every" in given_flags() or getattr(train, "mixing", None):
        from common.rare_arguments import warn_without_effect

        warn_without_effect(args, train)


def make_output_dir(args: argparse.Namespace, accelerator: Accelerator, share: Callable[[str], str]) -> Path:
    """Creates the output directory and locks it for this run; with `--overwrite`, empties it. Call it after all checks.

    share: broadcasts the main process's argument, and returns it on all ranks.

    Raises UserError: the directory cannot be created, holds a run, or is in use by a different run; nothing is deleted.
    """
    path = Path(args.output_dir)
    try:
        if "--output_dir" not in given_flags() and not args.resume:
            from common.default_output_dir import make_default

            path = make_default(args, accelerator, share)
        if not accelerator.is_main_process:
            return path
        path.mkdir(parents=True, exist_ok=True)
        lock_output_dir(path)
        if not args.resume:  # a different run may have written files since the flags were checked
            raise_errors(check_output_dir(path, args.overwrite, is_locked=True))
        if args.overwrite and (path / "run.json").is_file():
            from common.rare_arguments import empty

            empty(path)
    except OSError as error:
        raise UserError(f"--output_dir {path} cannot be written ({error.strerror}); name another directory") from error
    return path
