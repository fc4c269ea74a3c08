"""The flags that every recipe shares, declared once, in groups.

Machine facts (processes, mode, precision, offload) live in the config files of accelerate_configs/; training facts
live here. Nothing is in both.
"""

import argparse
import difflib
import re
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

from common.checkpoint.identity import CHANGEABLE
from common.data.hub import held_out_splits
from common.errors import UserError
from common.files import LOCK, lock_output_dir, remove
from common.parallel.ending import exit_with_mistakes
from common.parallel.launch import started_world_size
from common.training.activation_checkpointing import ACTIVATION_CHECKPOINTING
from common.training.batching import Samples
from common.training.optimizers import OPTIMIZERS, SCHEDULES, optimizers_help

if TYPE_CHECKING:
    from common.data.rows import Source


# What flags that other training scripts have are called here.
ELSEWHERE = {
    "num_train_epochs": "--num_updates (an epoch has as many as there are samples / --global_batch_size)",
    "max_steps": "--num_updates",
    "max_train_steps": "--num_updates",
    "per_device_train_batch_size": "--micro_batch_size, beside --global_batch_size",
    "gradient_accumulation_steps": "--global_batch_size / (--micro_batch_size x processes)",
    "lr": "--learning_rate",
    "lr_scheduler_type": "--lr_schedule",
    "warmup_steps": "--warmup_updates",
    "bf16": "--mixed_precision bf16 of accelerate launch",
    "fp16": "--mixed_precision fp16 of accelerate launch",
    "eval_steps": "--eval_every",
    "save_steps": "--save_every",
    "save_total_limit": "--keep_last",
    "resume_from_checkpoint": "--resume, with the run's --output_dir",
    "gradient_checkpointing": "--activation_checkpointing full",
    "max_length": "--sequence_length",
}


class ArgumentParser(argparse.ArgumentParser):
    """argparse that tells a user's mistake in one line, suggests the nearest flag, and accepts no abbreviations."""

    def __init__(self, **kwargs):
        super().__init__(allow_abbrev=False, formatter_class=_HelpFormatter, **kwargs)

    def parse_args(self, *args, **kwargs) -> argparse.Namespace:
        """Without --output_dir it is runs/, the recipe's name and the time."""
        parsed = super().parse_args(*args, **kwargs)
        parsed.output_dir = parsed.output_dir or time.strftime(f"runs/{Path(self.prog).stem}-%Y%m%d-%H%M%S")
        return parsed

    def error(self, message: str) -> None:
        if match := re.match(r"unrecognized arguments: (.*)", message):
            flags = {option.lstrip("-"): option for action in self._actions for option in action.option_strings}
            for word in [word.split("=")[0].lstrip("-") for word in match[1].split() if word.startswith("--")]:
                if word in ELSEWHERE:
                    message += f"; --{word} is {ELSEWHERE[word]} here"
                elif nearest := difflib.get_close_matches(word, flags, n=1, cutoff=0.75):
                    message += f"; did you mean {flags[nearest[0]]}?"
        exit_with_mistakes([f"{message} (--help lists the flags)"])


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Keeps line breaks that a help text has, and shows defaults except where there is none."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return [line for part in text.splitlines() for line in super(_HelpFormatter, self)._split_lines(part, width)]

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default in (None, False) else super()._get_help_string(action)


def positive(text: str) -> int:
    """argparse type: an integer of at least 1."""
    if not (text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def not_negative(text: str) -> int:
    """argparse type: an integer of at least 0."""
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 on")
    return int(text)


def seed(text: str) -> int:
    """argparse type: a whole number from 0 to 2**31 (numpy's limit is twice that, and ranks add their number)."""
    if not_negative(text) > 2**31:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 to {2**31}")
    return int(text)


def not_negative_float(text: str) -> float:
    """argparse type: a finite number of at least 0."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a finite number from 0 on")
    return value


def positive_float(text: str) -> float:
    """argparse type: a finite number above 0."""
    value = not_negative_float(text)
    if value == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a finite number above 0")
    return value


def one_of(table: dict, first: str = "") -> dict:
    """argparse keywords for a choice from a table, whose error suggests the nearest name.

    Args:
        first: of the help text; where the table tells what each name means, that follows.
    """

    def name(text: str) -> str:
        if text not in table:
            nearest = difflib.get_close_matches(text, table, n=1)
            hint = f", did you mean {nearest[0]}?" if nearest else ""
            raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(table)}{hint}")
        return text

    meanings = [f"{name}: {text}" for name, text in table.items() if isinstance(text, str)]
    help = {"help": "\n".join([first, *meanings]).lstrip() + "\n" * bool(meanings)} if first or meanings else {}
    return {"type": name, "metavar": "|".join(table)} | help


def recipe_parser(description: str, lengths_vary: bool = True) -> ArgumentParser:
    """With the flags of every recipe; `lengths_vary` says whether its samples are of different lengths."""
    parser = ArgumentParser(description=description)
    group = parser.add_argument_group("run")
    group.add_argument("--output_dir", help="everything the run writes (default: runs/ and the time)")
    group.add_argument("--overwrite", action="store_true", help="delete the run that --output_dir holds")
    group.add_argument("--dry_run", action="store_true", help="all up to the first update, checked; writes no run")
    group.add_argument("--seed", type=seed, default=0, help="of weights, order of samples and dropout")
    group.add_argument(
        "--eval_every", type=not_negative, default=0, metavar="N", help="updates, and after the last one; 0: only then"
    )
    group.add_argument(
        "--connect_timeout",
        type=positive_float,
        default=60.0,
        metavar="SECONDS",
        help="that processes wait for each other",
    )
    group.add_argument(
        "--report_to", nargs="+", default=[], metavar="TRACKER", help=f"also: {', '.join(LOGGER_TYPE_TO_CLASS)}"
    )

    group = parser.add_argument_group("stop and resume")
    group.add_argument("--save_every", type=not_negative, default=500, metavar="N", help="updates; 0: only on a stop")
    group.add_argument("--keep_last", type=positive, default=2, metavar="K", help="newest checkpoints kept, at least 2")
    group.add_argument("--keep_best", action="store_true", help="and the one of the lowest validation loss")
    group.add_argument(
        "--load_best_at_end", action="store_true", help="with --keep_best: model/ is that one, not the last"
    )
    group.add_argument(
        "--resume", action="store_true", help="continue from the newest sound checkpoint in --output_dir"
    )
    group.add_argument(
        "--allow_changed",
        nargs="+",
        default=[],
        choices=CHANGEABLE,
        metavar="NAME",
        help=f"with --resume: another value than the checkpoint's is meant; of {', '.join(CHANGEABLE)}",
    )

    group = parser.add_argument_group("batch (the update is the same however it is cut; only dropout differs)")
    group.add_argument("--num_updates", type=positive, default=1000, help="optimizer updates in all")
    group.add_argument("--global_batch_size", type=positive, default=8, help="samples an update, over all ranks")
    group.add_argument("--micro_batch_size", type=positive, metavar="M", help="samples a device computes at once")
    if lengths_vary:
        group.add_argument(
            "--micro_batch_tokens",
            type=positive,
            metavar="T",
            help="instead: as many samples at once as fit T tokens with their padding\n"
            "(default: 1024 on a CPU, 8192 on a GPU, at least one sample; lower it if memory runs out)",
        )
    else:
        parser.set_defaults(micro_batch_tokens=None)
    group.add_argument("--drop_last_window", action="store_true", help="drop the short last global batch of an epoch")
    group.add_argument("--num_workers", type=not_negative, metavar="W", help="data processes (default: GPU 2, CPU 0)")

    group = parser.add_argument_group("optimizer")
    group.add_argument("--optimizer", default="adamw", help=optimizers_help(), **one_of(OPTIMIZERS))
    group.add_argument("--learning_rate", type=positive_float, help="at its peak (default: the model's)")
    group.add_argument("--weight_decay", type=not_negative_float, default=0.1, help="of matrices and embeddings")
    group.add_argument(
        "--warmup_updates", type=not_negative, help="(default: a twentieth of --num_updates as the run began)"
    )
    group.add_argument("--lr_schedule", default="cosine", **one_of(SCHEDULES))
    group.add_argument("--max_grad_norm", type=not_negative_float, default=1.0, help="0: no clipping")
    group.add_argument(
        "--max_skipped_updates", type=positive, default=20, help="in a row, for a loss or gradient not finite"
    )

    group = parser.add_argument_group("memory and speed")
    group.add_argument("--activation_checkpointing", default="none", **one_of(ACTIVATION_CHECKPOINTING))
    group.add_argument("--compile", action="store_true", help="torch.compile the model: slow first updates, then fast")
    return parser


def add_language_arguments(parser: argparse.ArgumentParser, one_text: bool = True, examples: bool = False) -> None:
    """The flags of the recipes that read text.

    Args:
        one_text: a row has one, in `--text_column`. examples: or a prompt and a completion.
    """
    group = parser.add_argument_group("data (default: the source code of Python's standard library)")
    formats = ".txt .jsonl .parquet .csv, also compressed; several, or a glob"
    group.add_argument("--train_file", nargs="+", default=[], metavar="FILE", help=formats)
    group.add_argument("--validation_file", nargs="+", default=[], metavar="FILE", help="held-out text, likewise")
    group.add_argument("--dataset_name", help="of the hub, or a local directory; validation, else test, is held out")
    group.add_argument("--dataset_config", help="the data set's configuration, where it has several")
    if one_text:
        group.add_argument("--text_column", default="text", help="of a row, where it has no prompt or messages")
    else:
        parser.set_defaults(text_column="text")
    if examples:
        group.add_argument("--prompt_column", help="of a row: what is given (default: prompt)")
        group.add_argument("--completion_column", help="of a row: what is learned (default: completion)")
    else:
        parser.set_defaults(prompt_column=None, completion_column=None)
    group.add_argument("--sequence_length", type=positive, default=256, help="most tokens of a sample")

    add_model_arguments(parser)


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the recipes that take a pretrained model."""
    group = parser.add_argument_group("model")
    group.add_argument("--model_name_or_path", help="a pretrained model: a local directory or a hub name")
    group.add_argument("--trust_remote_code", action="store_true", help="run code that the model or data set brings")


def choose_model(
    parser: argparse.ArgumentParser, args: argparse.Namespace, model_configs: dict, fine_tuning_rate: float
) -> None:
    """Fills in --model_config and --learning_rate, where they were not given.

    Args:
        model_configs: models to train from scratch, the default first; a row ends with AdamW's learning rate.
        fine_tuning_rate: of a pretrained model.
    """
    if args.model_config and args.model_name_or_path:
        parser.error("--model_config and --model_name_or_path are two answers to one question; give one")
    if not args.model_name_or_path:
        args.model_config = args.model_config or next(iter(model_configs))
    row = model_configs[args.model_config] if args.model_config else (fine_tuning_rate,)
    args.learning_rate = args.learning_rate or row[-1]


def check_arguments(args: argparse.Namespace, on_cpu: bool, lengths_vary: bool = True) -> list[str]:
    """One line for each mistake in the shared flags that can be seen before data or model are touched.

    Fills in the defaults that depend on the machine (micro-batch, workers), which no update depends on.
    """
    problems = []
    world = started_world_size()
    if not lengths_vary and not args.micro_batch_size:  # the largest that divides, up to what a device needs to be busy
        share, most = max(1, args.global_batch_size // world), 64 if on_cpu else 256
        args.micro_batch_size = max(size for size in range(1, min(share, most) + 1) if share % size == 0)
    if args.micro_batch_size and args.micro_batch_tokens:
        problems.append("--micro_batch_size and --micro_batch_tokens are two answers to one question; give one")
    elif args.micro_batch_size:
        if args.global_batch_size % (args.micro_batch_size * world):
            problems.append(
                f"--global_batch_size {args.global_batch_size} does not divide: {args.global_batch_size} / "
                f"({args.micro_batch_size} micro x {world} processes) = "
                f"{args.global_batch_size / (args.micro_batch_size * world):.4g} accumulation steps; "
                f"{_nearest_batch_sizes(args.global_batch_size, args.micro_batch_size * world)}"
            )
    elif not args.micro_batch_tokens:
        longest = getattr(args, "sequence_length", 0) + getattr(args, "target_length", 0)
        args.micro_batch_tokens = max(1024 if on_cpu else 8192, longest)
    if args.num_workers is None:
        args.num_workers = 0 if on_cpu else 2
    if args.warmup_updates is None:
        if not args.resume:  # which takes it from the checkpoint
            args.warmup_updates = args.num_updates // 20
    elif args.warmup_updates >= args.num_updates:
        problems.append(
            f"--warmup_updates {args.warmup_updates} leaves nothing of --num_updates {args.num_updates}; lower it"
        )
    if not on_cpu and args.compile and args.activation_checkpointing == "offload":  # on a CPU it is `full`
        problems.append(
            "--compile has no effect on layers whose inputs --activation_checkpointing offload moves; take one out"
        )
    if getattr(args, "dataset_config", None) and not args.dataset_name:
        problems.append("--dataset_config has no effect without --dataset_name; take it out, or name the data set")
    for tracker in args.report_to:
        problems += _check_tracker(tracker)
    if args.keep_last < 2:
        problems.append("--keep_last 1: were the only checkpoint damaged, nothing would be left; use at least 2")
    if args.keep_best and not (args.eval_every and args.save_every and args.save_every % args.eval_every == 0):
        problems.append(
            f"--keep_best compares evaluated checkpoints: --save_every {args.save_every} must be a multiple of "
            f"--eval_every {args.eval_every}, and neither 0"
        )
    if pair := [f"--{name}" for name in ("prompt_column", "completion_column") if getattr(args, name, None)]:
        if not (args.train_file or args.dataset_name):
            problems.append(f"{pair[0]} has no effect without --train_file or --dataset_name; name the data")
        if args.text_column != "text" or getattr(args, "shape", None) == "blocks":
            other = "--shape blocks" if args.text_column == "text" else f"--text_column {args.text_column}"
            problems.append(f"{pair[0]} and {other} are two answers to what a sample is; give one")
    if args.load_best_at_end and not args.keep_best:
        problems.append("--load_best_at_end needs --keep_best, which keeps that checkpoint; give both")
    if args.allow_changed and not args.resume:
        problems.append("--allow_changed has no effect without --resume; take it out")
    if args.resume and args.overwrite:
        problems.append("--resume continues the run that --overwrite deletes; give one")
    elif args.resume:
        # A run that has not ended may yet write its first one: `Checkpoints.find` waits for it.
        if not any((Path(args.output_dir) / name).exists() for name in ("checkpoints", LOCK)):
            problems.append(
                f"--resume: {args.output_dir} has no checkpoints; name the --output_dir of the run to continue, "
                "or start anew without --resume"
            )
    elif args.output_dir and not args.dry_run:
        problems += _check_output_dir(Path(args.output_dir), args.overwrite)
    return problems


def _nearest_batch_sizes(size: int, unit: int) -> str:
    below, above = size // unit * unit, (size // unit + 1) * unit
    return f"use --global_batch_size {above}" if below == 0 else f"use --global_batch_size {below} or {above}"


def _check_tracker(name: str) -> list[str]:
    if name not in LOGGER_TYPE_TO_CLASS:
        return [f"--report_to {name}: not one of {', '.join(LOGGER_TYPE_TO_CLASS)}"]
    if name not in [str(tracker) for tracker in get_available_trackers()]:
        return [f"--report_to {name}: its package is not installed; pip install {name}"]
    return []


def _check_output_dir(path: Path, overwrite: bool) -> list[str]:
    if path.exists() and not path.is_dir():
        return [f"--output_dir {path} is a file; name a directory"]
    if path.is_dir() and any(one.name != LOCK for one in path.iterdir()):
        if not (path / "run.json").is_file():
            return [f"--output_dir {path} is not empty and holds no run; name another directory"]
        if not overwrite:
            return [
                f"--output_dir {path} holds a run; continue it with --resume, delete it with --overwrite, or name "
                "another directory"
            ]
    parent = path
    while not parent.exists():
        parent = parent.absolute().parent
    try:
        tempfile.TemporaryFile(dir=parent).close()  # os.access says yes to root even where nothing can be made
    except OSError as error:
        return [f"--output_dir {path} cannot be written: {error.strerror} in {parent}; name another directory"]
    return []


def text_sources(args: argparse.Namespace) -> "tuple[Source, Source | None]":
    """Where training and held-out text come from, as the language flags say; without any, the embedded corpus.

    Raises:
        UserError: a line for each file that is not there or cannot be read, or two answers to where the text is.
    """
    from common.data.rows import Source  # here because recipes without text do not need it
    from common.data.sources import check_sources  # here because recipes without text do not need it

    names = ("text_column", "prompt_column", "completion_column")
    columns = {name: getattr(args, name) for name in names}
    validation = Source(files=tuple(args.validation_file), **columns) if args.validation_file else None
    if args.dataset_name:
        if args.train_file:
            raise UserError("--train_file and --dataset_name are two answers to one question; give one")
        train = Source(dataset_name=args.dataset_name, dataset_config=args.dataset_config, **columns)
        if validation is None and (split := next(held_out_splits(args.dataset_name, args.dataset_config), None)):
            validation = replace(train, split=split)
    elif args.train_file:
        train = Source(files=tuple(args.train_file), **columns)
    else:
        train = Source(embedded="train")
        validation = validation or Source(embedded="validation")
    check_sources(train, validation)
    return train, validation


def check_samples(args: argparse.Namespace, train: Samples, validation: Samples | None) -> None:
    """Whether the data make a global batch, and whether every sample fits a micro-batch.

    Raises:
        UserError: a line for each way in which they do not.
    """
    problems = []
    if args.keep_best and validation is None:
        problems.append("--keep_best has nothing to measure: there are no held-out data; name some, or take it out")
    if len(train) < args.global_batch_size:
        remedy = "lower it, or --sequence_length," if hasattr(args, "sequence_length") else "lower it,"
        problems.append(
            f"the training data make {len(train)} samples, fewer than --global_batch_size {args.global_batch_size}; "
            f"{remedy} or give more data"
        )
    longest = max(train.max_length, validation.max_length if validation else 0)
    if args.micro_batch_tokens and args.micro_batch_tokens < longest:
        problems.append(
            f"--micro_batch_tokens {args.micro_batch_tokens} does not hold the longest sample of {longest} tokens; "
            f"use at least {longest}, or a lower --sequence_length"
        )
    if problems:
        raise UserError("\n".join(problems))


def make_output_dir(args: argparse.Namespace, accelerator: Accelerator) -> Path:
    """Creates the output directory and takes it for this run, emptied if `--overwrite`; call it after all checks.

    Raises:
        UserError: it cannot be created, or another run writes there, of which nothing is deleted.
    """
    path = Path(args.output_dir)
    if not accelerator.is_main_process:
        return path
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock_output_dir(path)
        if args.overwrite and (path / "run.json").is_file():
            # What makes it a run goes last: a killed removal can be done again. The lock stays, it is this run's.
            for one in sorted(path.iterdir(), key=lambda one: one.name == "run.json"):
                if one.name != LOCK:
                    remove(one)
    except OSError as error:
        raise UserError(f"--output_dir {path} cannot be written ({error.strerror}); name another directory") from error
    return path
