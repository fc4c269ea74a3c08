"""Flags that only some runs use: their checks, the messages about them, and the sources of text that they select."""

import argparse
import errno
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

from common.errors import UserError, main_logger, raise_errors
from common.files import LOCK, remove
from common.process import this_process
from common.training.process_grid import ProcessGrid
from common.training.recipe_traits import Arguments, Traits, given_flags

if TYPE_CHECKING:
    from common.data.source_types import Source

logger = main_logger(__name__)
WORKERS_PER_CORE = 16  # more would spend their time on waiting for each other
MICRO_BATCHES_PER_STAGE = 4  # so that the pipeline bubble is at most a fifth of the time


def resolve_micro_batch_size(
    args: Arguments, on_cpu: bool, longest: int, default_tokens: int, grid: ProcessGrid, traits: Traits
) -> Iterator[str]:
    """Sets the default micro-batch size, if none is passed; yields one line per mistake.

    longest: tokens of the longest possible sample. default_tokens: default of --micro_batch_tokens.
    """
    if traits.shares_texts:
        return  # each global batch has its own number of texts, so any micro-batch size fits
    world, batch_size = grid.data_parallel, args.global_batch_size
    if not args.micro_batch_size:
        # The largest divisor of `share` up to `most`: it saturates a device, or leaves a pipeline enough micro-batches.
        share, most = max(1, batch_size // world), 64 if on_cpu else 256
        if grid.pipeline > 1:
            most = max(1, min(share // (MICRO_BATCHES_PER_STAGE * grid.pipeline), default_tokens // max(1, longest)))
        args.micro_batch_size = max(size for size in range(1, min(share, most) + 1) if share % size == 0)
    unit = args.micro_batch_size * world
    steps, rest = divmod(batch_size, unit)
    product = f"({args.micro_batch_size} micro x {grid.describe()})"
    if rest:
        sizes = f"{steps * unit} or {(steps + 1) * unit}" if steps else f"{unit}"
        yield (
            f"--global_batch_size {batch_size} does not divide: {batch_size} / {product} = "
            f"{batch_size / unit:.4g} accumulation steps; use --global_batch_size {sizes}"
        )
    elif steps < grid.pipeline:
        lower = "lower --micro_batch_size, or " if args.micro_batch_size > 1 else ""
        yield (
            f"--global_batch_size {batch_size} / {product} = {steps} micro-batch{'es' * (steps > 1)}, fewer than the "
            f"{grid.pipeline} stages, which would wait for each other; {lower}use --global_batch_size "
            f"{MICRO_BATCHES_PER_STAGE * grid.pipeline * unit}"
        )


def check_paths(args: argparse.Namespace) -> None:
    """Uses URLs (see `remote_output.use_urls`). Raises UserError: the value of a flag for files is too long."""
    flags = "output_dir train_file validation_file train_dir validation_dir dataset_name model_name_or_path teacher"
    flags += " chat_template"
    values = {name: vars(args).get(name) or [] for name in flags.split()}
    problems = []
    for name, value in values.items():
        for path in value if isinstance(value, list) else [value]:
            try:
                os.lstat(path)
            except OSError as error:
                if error.errno == errno.ENAMETOOLONG:
                    problems.append(f"--{name} {path[:60]}...: {os.strerror(error.errno).lower()}; name a shorter path")
    raise_errors(problems)
    if "://" in " ".join([args.output_dir or "", *(values["train_file"]), *values["validation_file"]]):
        from common.remote_output import use_urls

        use_urls(args)


def describe_length(args: argparse.Namespace) -> str:
    """Returns the flag that sets the length of the run, with its value."""
    if args.num_epochs is None:
        return f"--num_updates {args.num_updates}"
    return f"--num_epochs {args.num_epochs:g}, which is {args.num_updates} updates"


def check_profile(args: argparse.Namespace, num_done: int) -> Iterator[str]:
    """Yields a line if --profile would record nothing. num_done: number of completed updates."""
    from common.report import profiling

    needed, left = profiling.WARMUP + profiling.RECORDED, args.num_updates - num_done
    if args.dry_run:
        yield "--profile has no effect with --dry_run, which makes no update; remove one of them"
    elif left < needed:
        yield (
            f"--profile needs {needed} updates, the last {profiling.RECORDED} of which it records, and "
            f"{describe_length(args)} leaves {left}; raise it, or remove --profile"
        )


def check_combinations(args: Arguments, on_cpu: bool) -> Iterator[str]:
    """Yields one line per mistake in flags that are off by default."""
    if args.num_epochs is not None and "--num_updates" in given_flags():
        yield "--num_epochs and --num_updates are mutually exclusive; pass only one"
    # On a CPU, `offload` is the same as `full`.
    if not on_cpu and args.compile is True and args.activation_checkpointing == "offload":
        yield "--compile has no effect on layers whose inputs --activation_checkpointing offload moves; remove one"
    if args.optimizer == "adamw8bit":
        from common.packages import find_missing

        yield from find_missing("--optimizer adamw8bit", "bitsandbytes")
    for name in args.report_to:
        yield from _check_tracker(name)
    yield from _check_data(args)
    if args.num_workers > (most := WORKERS_PER_CORE * (os.cpu_count() or 1)):
        yield f"--num_workers {args.num_workers}: more than {WORKERS_PER_CORE} per CPU core; use at most {most}"
    if args.keep_last < 2:
        yield "--keep_last 1: a single checkpoint leaves no fallback if it is damaged; use at least 2"
    if args.patience and not args.eval_every:
        yield "--patience needs --eval_every N, which makes the evaluations that it counts"
    if args.keep_best and not args.eval_every:
        yield "--keep_best needs --eval_every N, which measures the validation loss that it compares"
    if args.load_best_at_end and not args.keep_best:
        yield "--load_best_at_end needs --keep_best, which keeps that checkpoint; pass both"
    if args.allow_changed and not args.resume:
        yield "--allow_changed has no effect without --resume; remove it"
    if args.resume and args.overwrite:
        yield "--resume continues the run that --overwrite deletes; pass only one"
    elif args.resume is True and os.environ.get("RANK", "0") == "0":  # the other ranks use the result of the first
        # A running process may still write its first checkpoint: `Checkpoints.find` waits for it.
        is_here = any((Path(args.output_dir) / name).exists() for name in ("checkpoints", LOCK))
        if not is_here and this_process().remote is None:
            yield (
                f"--resume: {args.output_dir} has no checkpoints; name the --output_dir of the run to continue, "
                "or start anew without --resume"
            )


def _check_tracker(name: str) -> Iterator[str]:
    if name == "none":
        yield "--report_to none: remove it; without it no tracker gets the metrics"
    elif name not in LOGGER_TYPE_TO_CLASS:
        yield f"--report_to {name}: not one of {', '.join(LOGGER_TYPE_TO_CLASS)}"
    elif name not in [str(tracker) for tracker in get_available_trackers()]:
        yield f"--report_to {name}: its package is not installed; pip install {name}"


def _check_data(args: Arguments) -> Iterator[str]:
    if args.shared("dataset_config") and not args.dataset_name:
        yield "--dataset_config has no effect without --dataset_name; remove it, or name the dataset"
    reads_text = "train_file" in args.shared_flags
    if reads_text and not (args.train_file or args.validation_file or args.dataset_name):
        for flag in sorted(given_flags()):
            if flag.endswith("_column"):
                yield f"{flag} has no effect without --train_file or --dataset_name; name the data, or remove it"
    if pair := [f"--{name}" for name in ("prompt_column", "completion_column") if args.shared(name)]:
        if args.text_column != "text" or args.shape == "blocks":
            other = "--shape blocks" if args.text_column == "text" else f"--text_column {args.text_column}"
            yield f"{pair[0]} and {other} are mutually exclusive; pass only one"


def describe_occupied(path: Path, overwrite: bool, is_locked: bool) -> str | None:
    """Returns a line if a non-empty directory cannot be used for output. is_locked: whether this process locked it."""
    if not path.is_dir():
        return f"--output_dir {path} is a file; name a directory"
    if not (path / "run.json").is_file():
        return f"--output_dir {path} is not empty and holds no run; name another directory"
    if overwrite:
        return None
    from common.report.killed_runs import describe_killed

    killed = describe_killed(path, is_over=is_locked)
    return (
        f"--output_dir {path} holds a run{f', {killed}' if killed else ''}; continue it with --resume, delete "
        "it with --overwrite, or name another directory"
    )


def explain_samples(
    args: Arguments, traits: Traits, train: Any, validation: Any, too_long: int, num_parts: int
) -> Iterator[str]:
    """Yields one line per problem of the samples: no held-out set, too few samples, or a sample that is too long.

    Warns of flags that have no effect without a held-out set.
    too_long: tokens of a sample that does not fit a micro-batch, or 0. num_parts: ranks that share a sample.
    """
    if validation is None:
        advice = "there are no held-out data; pass some, or remove it"
        for name in ("keep_best", "patience"):
            if getattr(args, name):
                yield f"--{name} has nothing to measure: {advice}"
        for name in ("eval_every", *traits.held_out_flags):
            if f"--{name}" in given_flags() and getattr(args, name):
                logger.warning("--%s has no effect: %s", name, advice)
    if len(train) < args.global_batch_size:
        remedy = "lower it,"
        if getattr(train, "is_stream", False):  # shorter blocks give more samples
            remedy = "lower it, or --sequence_length,"
        elif dropped := getattr(train, "num_dropped", 0):
            remedy = f"lower it, raise --sequence_length ({dropped} rows have no target within it),"
        samples = f"{len(train)} sample{'s' * (len(train) > 1)}"
        yield (
            f"the training data has {samples}, fewer than --global_batch_size {args.global_batch_size}; "
            f"{remedy} or pass more data"
        )
    if too_long:
        parts = f" in {num_parts} parts" if num_parts > 1 else ""
        yield (
            f"--micro_batch_tokens {args.micro_batch_tokens} does not hold the longest sample of {too_long} tokens"
            f"{parts}; use at least {-(-too_long // num_parts)}, or a lower --sequence_length"
        )


def warn_without_effect(args: Arguments, train: Any) -> None:
    """Warns of intervals longer than the run, and of mixed files of which the run uses no sample."""
    for name in ("eval_every", "save_every"):
        every = getattr(args, name)
        if f"--{name}" in given_flags() and every != "auto" and every > args.num_updates:
            much = f"{every} updates, and {describe_length(args)} is the whole run"
            logger.warning("--%s has no effect: it is %s; lower it, or remove it", name, much)
    if args.patience and args.eval_every and args.patience >= (most := args.num_updates // args.eval_every):
        logger.warning("--patience %s has no effect on a run of %s evaluations; lower it", args.patience, most)
    if mixing := getattr(train, "mixing", None):
        number = args.num_updates * args.global_batch_size
        for name, count in zip(train.parts, mixing.counts(number), strict=True):
            if not count:
                why = "its weight is too small for one; raise it, or remove the file"
                logger.warning("--train_file %s: none of the %s samples of this run is of it: %s", name, number, why)


def select_sources(args: Arguments, columns: dict[str, Any]) -> "tuple[Source | None, Source | None]":
    """Returns the sources of training and held-out text for --dataset_name, --chat_template or files with weights.

    A source that no flag selects is None. Raises UserError: missing files, unused weights or conflicting flags.
    """
    from common.data.mixed_files import find_flag_problems, held_out_files, needless_weights, training_files
    from common.data.source_types import Source

    if args.shared("chat_template"):
        from common.data.chats import read_chat_template

        columns["chat_template"] = read_chat_template(args.chat_template)
    given = args.train_file, args.validation_file
    if "://" in " ".join([*given[0], *given[1]]):
        from common.remote import local_files

        given = local_files("--train_file", given[0]), local_files("--validation_file", given[1])
    train = training_files(given[0], **columns) if given[0] else None
    is_mixed = train is not None and bool(train.weights)
    raise_errors(find_flag_problems(args) if is_mixed else [])
    validation = held_out_files(given[1], is_mixed, **columns) if given[1] else None
    if args.dataset_name:
        from common.data.hub import held_out_splits
        from common.packages import find_missing

        raise_errors(find_missing("--dataset_name", "datasets"))
        raise_errors(needless_weights("--dataset_name", [args.dataset_name], "write the data to files to mix them"))
        if args.train_file:
            raise UserError("--train_file and --dataset_name are mutually exclusive; pass only one")
        train = Source(dataset_name=args.dataset_name, dataset_config=args.dataset_config, **columns)
        if validation is None and (split := next(held_out_splits(args.dataset_name, args.dataset_config), None)):
            validation = replace(train, split=split)
    elif not args.train_file and "chat_template" in columns:
        raise UserError(
            "--chat_template has no effect without --train_file or --dataset_name; name the data, or remove it"
        )
    return train, validation


def check_text_column(train: "Source", validation: "Source | None") -> None:
    """Raises UserError if --text_column is passed for data without columns."""
    from common.data.source_problems import have_no_columns

    if have_no_columns(train, validation):
        raise UserError(
            f"--text_column {train.text_column} has no effect on .txt files, which have no columns; remove it"
        )


def empty(directory: Path) -> None:
    """Removes a run from its directory, run.json last, so that an interrupted removal can be repeated.

    The lock of this run stays.
    """
    for entry in sorted(directory.iterdir(), key=lambda entry: entry.name == "run.json"):
        if entry.name != LOCK:
            remove(entry)
