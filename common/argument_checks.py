"""Checks of the flags that need no model, before anything is written; creation of the output directory."""

import argparse
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

from common.errors import UserError, main_logger, refuse
from common.files import LOCK, PARTIAL, lock_output_dir, make_new_directory, remove, why_not_writable
from common.models import adapters
from common.training import epochs
from common.training.batching import Samples, updates_per_epoch
from common.training.process_grid import Degrees
from common.training.recipe_traits import Arguments, Traits, given_flags

logger = main_logger(__name__)
MICRO_BATCHES_PER_STAGE = 4  # so that the pipeline bubble is at most a fifth of the time


def check_arguments(args: Arguments, on_cpu: bool, traits: Traits, degrees: Degrees) -> list[str]:
    """Returns one line per mistake in the shared flags that can be found without data and model.

    Sets the defaults that depend on the machine (micro-batch, workers); no update depends on these.
    """
    problems = _settle_batch(args, on_cpu, traits, degrees)
    if args.num_workers is None:
        args.num_workers = 0 if on_cpu else 2
    if args.num_epochs is not None:
        if "--num_updates" in given_flags():
            problems.append("--num_epochs and --num_updates are two answers to one question; give one")
        args.num_updates = None  # until the size of the dataset is known
    problems += _check_updates(args)
    # On a CPU, `offload` is the same as `full`.
    if not on_cpu and args.compile and args.activation_checkpointing == "offload":
        problems.append(
            "--compile has no effect on layers whose inputs --activation_checkpointing offload moves; take one out"
        )
    for tracker in args.report_to:
        problems += _check_tracker(tracker)
    problems += adapters.check(args, degrees)
    return [*problems, *_check_data(args), *_check_checkpoints(args)]


def _check_updates(args: argparse.Namespace) -> Iterator[str]:
    """Yields a line for each number of updates that contradicts the others, if it is already known.

    Sets the default number of warm-up updates.
    """
    if args.num_updates is not None:
        if args.warmup_updates is None:
            if not args.resume:  # a resumed run uses the value of the checkpoint
                args.warmup_updates = args.num_updates // 20
        elif args.warmup_updates >= args.num_updates:
            yield f"--warmup_updates {args.warmup_updates} leaves nothing of {_how_long(args)}; lower it"
        yield from check_profile(args)


def _settle_batch(args: Arguments, on_cpu: bool, traits: Traits, degrees: Degrees) -> list[str]:
    """Sets the default micro-batch size or token budget; returns one line per mistake."""
    problems, world = [], degrees.data
    tokens, longest = args.micro_batch_tokens if traits.lengths_vary else None, traits.longest_sample(args)
    default_tokens = max(1024 if on_cpu else 8192, -(-longest // degrees.sequence))
    if not args.micro_batch_size and not tokens and (degrees.pipeline > 1 or not traits.lengths_vary):
        # The largest divisor up to the size that saturates a device, or that fills a pipeline.
        share, most = max(1, args.global_batch_size // world), 64 if on_cpu else 256
        if degrees.pipeline > 1:
            most = max(1, min(share // (MICRO_BATCHES_PER_STAGE * degrees.pipeline), default_tokens // max(1, longest)))
        args.micro_batch_size = max(size for size in range(1, min(share, most) + 1) if share % size == 0)
    if args.micro_batch_size and tokens:
        problems.append("--micro_batch_size and --micro_batch_tokens are two answers to one question; give one")
    elif args.micro_batch_size:
        if args.global_batch_size % (args.micro_batch_size * world):
            problems.append(
                f"--global_batch_size {args.global_batch_size} does not divide: {args.global_batch_size} / "
                f"({args.micro_batch_size} micro x {degrees.describe()}) = "
                f"{args.global_batch_size / (args.micro_batch_size * world):.4g} accumulation steps; "
                f"{_nearest_batch_sizes(args.global_batch_size, args.micro_batch_size * world)}"
            )
        elif (steps := args.global_batch_size // (args.micro_batch_size * world)) < degrees.pipeline:
            lower = "lower --micro_batch_size, or " if args.micro_batch_size > 1 else ""
            problems.append(
                f"--global_batch_size {args.global_batch_size} / ({args.micro_batch_size} micro x "
                f"{degrees.describe()}) = {steps} micro-batch{'es' * (steps > 1)}, fewer than the {degrees.pipeline} "
                f"stages, which would wait for each other; {lower}use --global_batch_size "
                f"{MICRO_BATCHES_PER_STAGE * degrees.pipeline * args.micro_batch_size * world}"
            )
    elif not tokens:
        args.micro_batch_tokens = default_tokens
    return problems


def _how_long(args: argparse.Namespace) -> str:
    """Returns the flag that sets the length of the run, with its value."""
    if args.num_epochs is None:
        return f"--num_updates {args.num_updates}"
    return f"--num_epochs {args.num_epochs:g}, which is {args.num_updates} updates"


def check_profile(args: argparse.Namespace, num_done: int = 0) -> Iterator[str]:
    """Yields a line if --profile would record nothing. num_done: number of completed updates."""
    if not args.profile:
        return
    from common.report import profiling

    needed, left = profiling.WARMUP + profiling.RECORDED, args.num_updates - num_done
    if args.dry_run:
        yield "--profile has no effect with --dry_run, which makes no update; take one of them out"
    elif left < needed:
        yield (
            f"--profile needs {needed} updates, the last {profiling.RECORDED} of which it records, and "
            f"{_how_long(args)} leaves {left}; raise it, or take --profile out"
        )


def _check_data(args: Arguments) -> Iterator[str]:
    if args.shared("dataset_config") and not args.dataset_name:
        yield "--dataset_config has no effect without --dataset_name; take it out, or name the data set"
    reads_text = "train_file" in args.shared_flags
    if reads_text and not (args.train_file or args.validation_file or args.dataset_name):
        for flag in sorted(given_flags()):
            if flag.endswith("_column"):
                yield f"{flag} has no effect without --train_file or --dataset_name; name the data, or take it out"
    if pair := [f"--{name}" for name in ("prompt_column", "completion_column") if args.shared(name)]:
        if args.text_column != "text" or args.shape == "blocks":
            other = "--shape blocks" if args.text_column == "text" else f"--text_column {args.text_column}"
            yield f"{pair[0]} and {other} are two answers to what a sample is; give one"


def _check_checkpoints(args: argparse.Namespace) -> Iterator[str]:
    if args.keep_last < 2:
        yield "--keep_last 1: were the only checkpoint damaged, nothing would be left; use at least 2"
    if args.patience and not args.eval_every:
        yield "--patience needs --eval_every N, which makes the evaluations that it counts"
    if args.keep_best and not args.eval_every:
        yield "--keep_best needs --eval_every N, which measures the validation loss that it compares"
    if args.load_best_at_end and not args.keep_best:
        yield "--load_best_at_end needs --keep_best, which keeps that checkpoint; give both"
    if args.allow_changed and not args.resume:
        yield "--allow_changed has no effect without --resume; take it out"
    if args.resume and args.overwrite:
        yield "--resume continues the run that --overwrite deletes; give one"
    elif args.resume:
        # A running process may still write its first checkpoint: `Checkpoints.find` waits for it.
        is_main = os.environ.get("RANK", "0") == "0"  # the other ranks use its result
        if is_main and not any((Path(args.output_dir) / name).exists() for name in ("checkpoints", LOCK)):
            yield (
                f"--resume: {args.output_dir} has no checkpoints; name the --output_dir of the run to continue, "
                "or start anew without --resume"
            )
    elif "--output_dir" in given_flags():
        yield from _check_output_dir(Path(args.output_dir), args.overwrite)
    elif not args.dry_run:  # if the default name exists, it gets a suffix
        yield from _check_writable(Path(args.output_dir))


def _nearest_batch_sizes(size: int, unit: int) -> str:
    below, above = size // unit * unit, (size // unit + 1) * unit
    return f"use --global_batch_size {above}" if below == 0 else f"use --global_batch_size {below} or {above}"


def _check_tracker(name: str) -> list[str]:
    if name == "none":
        return ["--report_to none: take it out; without it no tracker gets the metrics"]
    if name not in LOGGER_TYPE_TO_CLASS:
        return [f"--report_to {name}: not one of {', '.join(LOGGER_TYPE_TO_CLASS)}"]
    if name not in [str(tracker) for tracker in get_available_trackers()]:
        return [f"--report_to {name}: its package is not installed; pip install {name}"]
    return []


def _check_output_dir(path: Path, overwrite: bool, is_locked: bool = False) -> list[str]:
    """Returns one line if the run cannot use this output directory.

    is_locked: whether this process holds the lock, so that no other process writes there.
    """
    if path.exists() and not path.is_dir():
        return [f"--output_dir {path} is a file; name a directory"]
    if path.is_dir() and any(one.name != LOCK and not one.name.endswith(PARTIAL) for one in path.iterdir()):
        if not (path / "run.json").is_file():
            return [f"--output_dir {path} is not empty and holds no run; name another directory"]
        if not overwrite:
            from common.report.killed_runs import describe_killed

            killed = describe_killed(path, is_over=is_locked)
            return [
                f"--output_dir {path} holds a run{f', {killed}' if killed else ''}; continue it with --resume, delete "
                "it with --overwrite, or name another directory"
            ]
    return _check_writable(path)


def _check_writable(path: Path) -> list[str]:
    parent = path
    while not parent.exists():
        parent = parent.absolute().parent
    if reason := why_not_writable(parent):
        return [f"--output_dir {path} cannot be written: {reason} in {parent}; name another directory"]
    return []


def check_samples(
    args: Arguments, traits: Traits, train: Samples, validation: Samples | None, degrees: Degrees
) -> None:
    """Checks that the data fills a global batch and each sample fits a micro-batch; converts epochs to updates.

    Raises UserError: one line per problem.
    """
    problems = []
    if validation is None:
        for name in ("keep_best", "patience"):
            if getattr(args, name):
                problems.append(
                    f"--{name} has nothing to measure: there are no held-out data; name some, or take it out"
                )
        for name in ("eval_every", *traits.held_out_flags):
            if f"--{name}" in given_flags() and getattr(args, name):
                logger.warning("--%s has no effect: there are no held-out data; name some, or take it out", name)
    if len(train) < args.global_batch_size:
        remedy = "lower it,"
        if getattr(train, "is_stream", False):  # shorter blocks give more samples
            remedy = "lower it, or --sequence_length,"
        elif dropped := getattr(train, "num_dropped", 0):
            remedy = f"lower it, raise --sequence_length ({dropped} rows have no target within it),"
        problems.append(
            f"the training data make {len(train)} samples, fewer than --global_batch_size {args.global_batch_size}; "
            f"{remedy} or give more data"
        )
    longest = max(train.max_length, validation.max_length if validation else 0)
    tokens = args.micro_batch_tokens if traits.lengths_vary else None
    num_parts = degrees.sequence
    if tokens not in (None, "auto") and tokens * num_parts < longest:
        shared = f" in {num_parts} parts" if num_parts > 1 else ""
        problems.append(
            f"--micro_batch_tokens {tokens} does not hold the longest sample of {longest} tokens{shared}; "
            f"use at least {-(-longest // num_parts)}, or a lower --sequence_length"
        )
    refuse(problems)
    if epochs.are_asked(args):
        epochs.settle(args, updates_per_epoch(len(train), args.global_batch_size, args.drop_last_window))
        refuse(_check_updates(args))
    for name in ("eval_every", "save_every"):
        if f"--{name}" in given_flags() and getattr(args, name) > args.num_updates:
            much = f"{getattr(args, name)} updates, and {_how_long(args)} is the whole run"
            logger.warning("--%s has no effect: it is %s; lower it, or take it out", name, much)
    if args.patience and args.eval_every and args.patience >= (most := args.num_updates // args.eval_every):
        logger.warning("--patience %s has no effect on a run of %s evaluations; lower it", args.patience, most)
    if mixing := getattr(train, "mixing", None):
        number = args.num_updates * args.global_batch_size
        for name, taken in zip(train.parts, mixing.counts(number), strict=True):
            if not taken:
                why = "its weight is too small for one; raise it, or take the file out"
                logger.warning("--train_file %s: none of the %s samples of this run is of it: %s", name, number, why)


def make_output_dir(args: argparse.Namespace, accelerator: Accelerator, share: Callable[[str], str]) -> Path:
    """Creates the output directory and locks it for this run; with `--overwrite`, empties it. Call it after all checks.

    If a different run has meanwhile created the default directory, the name gets a suffix. Without --overwrite, files
    that a different run has written since the flags were checked are not deleted either.

    Args:
        share: returns on all ranks the value that the main process passes.

    Raises UserError: the directory cannot be created, holds a run, or is in use by a different run; nothing is deleted.
    """
    path = Path(args.output_dir)
    try:
        if "--output_dir" not in given_flags() and not args.resume:
            path = Path(share(str(make_new_directory(path)) if accelerator.is_main_process else ""))
            if str(path) != args.output_dir:
                accelerator.print(f"output directory {path}: another run has {args.output_dir}", flush=True)
            args.output_dir = str(path)
            accelerator.project_configuration.project_dir = accelerator.project_configuration.logging_dir = str(path)
        if not accelerator.is_main_process:
            return path
        path.mkdir(parents=True, exist_ok=True)
        lock_output_dir(path)
        if not args.resume:
            refuse(_check_output_dir(path, args.overwrite, is_locked=True))
        if args.overwrite and (path / "run.json").is_file():
            # run.json is removed last, so that an interrupted removal can be repeated. The lock of this run stays.
            for one in sorted(path.iterdir(), key=lambda one: one.name == "run.json"):
                if one.name != LOCK:
                    remove(one)
    except OSError as error:
        raise UserError(f"--output_dir {path} cannot be written ({error.strerror}); name another directory") from error
    return path
