"""Command-line flags shared by all recipes, in groups.

The hardware settings (processes, mode, precision, offload) are in the files of accelerate_configs/. The training
settings are the flags. No setting is in both.
"""

import argparse
import difflib
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from accelerate.tracking import LOGGER_TYPE_TO_CLASS

from common.checkpoint.identity import CHANGEABLE
from common.errors import UserError, refuse
from common.internals.python import HelpFormatter, flags_of
from common.models.adapters import QUANTIZED
from common.models.saved_model import EXPORT_DTYPES
from common.training.activation_checkpointing import ACTIVATION_CHECKPOINTING
from common.training.epochs import EPOCHS
from common.training.optimizers import OPTIMIZERS, SCHEDULES, optimizers_help
from common.training.recipe_traits import Arguments

if TYPE_CHECKING:
    from common.data.source_types import Source

# Keywords of --metric, for recipes whose predictions can be compared with held-out targets.
ABOUT_METRIC = "modules of the package evaluate, for the end: .py files, directories, hub names; or f1:average=macro"
METRIC = {"nargs": "+", "default": [], "metavar": "NAME_OR_PATH", "help": ABOUT_METRIC}


class ArgumentParser(argparse.ArgumentParser):
    """Parser that reports a user error in one line, suggests the nearest flag, and rejects abbreviations."""

    def __init__(self, **kwargs):
        super().__init__(allow_abbrev=False, formatter_class=HelpFormatter, **kwargs)
        self.shared_flags: set[str] = set()

    def parse_args(self, args: Sequence[str] | None = None, **kwargs) -> argparse.Namespace:
        """Parses the flags. Sets the default of --output_dir: runs/, the recipe's name and the time."""
        parsed, unknown = self.parse_known_args(args, **kwargs)
        if unknown:
            from common.parallel.failures import exit_with_mistakes

            exit_with_mistakes(self._answers(unknown, sys.argv[1:] if args is None else args))
        parsed.output_dir = parsed.output_dir or time.strftime(f"runs/{Path(self.prog).stem}-%Y%m%d-%H%M%S")
        return Arguments(frozenset(self.shared_flags), **vars(parsed))

    def error(self, message: str) -> None:
        from common.parallel.failures import exit_with_mistakes

        if "ignored explicit argument" in message:
            flag = message.split(":")[0].removeprefix("argument ")
            exit_with_mistakes([f"{flag} is a switch and takes no value: give it alone, or take it out"])
        exit_with_mistakes([f"{message} (--help lists the flags)"])

    def _answers(self, unknown: list[str], asked: Sequence[str]) -> list[str]:
        """Returns one line per unknown flag, with its values. asked: all words of the command line."""
        from common.flag_translation import here

        names = {option.lstrip("-"): option for option in flags_of(self)}
        left, given, lines, follows = list(unknown), [], [], False
        for word in asked:
            is_unknown = left[:1] == [word]
            if is_unknown:
                del left[0]
                if word.startswith("--") or not follows:
                    given.append([word])
                else:
                    given[-1].append(word)
            follows = is_unknown
        for words in given:
            flag, *values = [*words[0].split("=", 1), *words[1:]]
            name, value = flag[2:].replace("-", "_"), " ".join(values)
            if not flag.startswith("--"):
                answer = ": it belongs to no flag (a switch, such as --resume, takes no value)"
            elif told := here(name, "none" if values and not value else value, flags_of(self)):
                answer = f": {told}"
            elif nearest := difflib.get_close_matches(name, names, n=1, cutoff=0.75):
                answer = f": did you mean {names[nearest[0]]}?"
            else:
                answer = " (--help lists the flags)"
            lines.append(f"unrecognized argument {' '.join(words)}{answer}")
        return lines


def positive(text: str) -> int:
    """argparse type: an integer of at least 1."""
    if not (text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def positive_or_auto(text: str) -> int | str:
    """argparse type: an integer of at least 1, or "auto"."""
    return text if text == "auto" else positive(text)


def not_negative(text: str) -> int:
    """argparse type: an integer of at least 0."""
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 on")
    return int(text)


def updates_or_epochs(text: str) -> int | str:
    """argparse type: an integer of at least 0, or whole epochs, such as "1epoch", as text until `epochs.settle`."""
    if EPOCHS.fullmatch(text):
        return text
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 on, nor such as 1epoch")
    return int(text)


def seed(text: str) -> int:
    """argparse type: an integer from 0 to 2**31 (numpy's limit is twice that, and ranks add their number)."""
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
    try:
        value = not_negative_float(text)
    except argparse.ArgumentTypeError:
        value = 0.0
    if value == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a finite number above 0")
    return value


def one_of(table: dict, first: str = "") -> dict:
    """Returns argparse keywords for a choice from a table. The error message suggests the nearest name.

    first: first line of the help text; the descriptions of the names follow, if the table contains them.
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
    """Returns a parser with the flags of all recipes. lengths_vary: whether samples differ in length."""
    parser = ArgumentParser(description=description)
    _add_run(parser)
    _add_batch(parser, lengths_vary)
    _add_optimizer(parser)
    parser.shared_flags |= {action.dest for action in flags_of(parser).values()}
    return parser


def _add_run(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("run")
    group.add_argument("--output_dir", help="output directory of the run (default: runs/RECIPE-DATE-TIME)")
    group.add_argument("--overwrite", action="store_true", help="delete an existing run in --output_dir")
    about = "check everything, run one forward and backward pass, and exit without writing a run"
    group.add_argument("--dry_run", action="store_true", help=about)
    about = "print predicted memory and time for MACHINE, such as '8 x 80GiB, host 1TiB' (default: this one), and exit"
    group.add_argument("--plan", nargs="?", const="here", metavar="MACHINE", help=about)
    about = "random seed for weight initialisation, sample order and dropout"
    group.add_argument("--seed", type=seed, default=0, help=about)
    about = "evaluate on the held-out set every N updates, or every N epochs (such as 1epoch), and at the end; "
    about += "0: only at the end"
    group.add_argument("--eval_every", type=updates_or_epochs, default=0, metavar="N", help=about)
    about = "stop after N consecutive evaluations without a lower validation loss"
    group.add_argument("--patience", type=positive, metavar="N", help=about)
    about = "seconds to wait for all processes to connect at startup"
    group.add_argument("--connect_timeout", type=positive_float, default=60.0, metavar="SECONDS", help=about)
    about = f"trackers that also receive the metrics: {', '.join(LOGGER_TYPE_TO_CLASS)}"
    group.add_argument("--report_to", nargs="+", default=[], metavar="TRACKER", help=about)

    group = parser.add_argument_group("stop and resume")
    about = "write a checkpoint every N updates, or every N epochs (such as 1epoch), and at the end; 0: only on a stop"
    group.add_argument("--save_every", type=updates_or_epochs, default=500, metavar="N", help=about)
    about = "number of newest checkpoints to keep, at least 2"
    group.add_argument("--keep_last", type=positive, default=2, metavar="K", help=about)
    about = "save at each new lowest validation loss, and keep that checkpoint too; requires --eval_every"
    group.add_argument("--keep_best", action="store_true", help=about)
    about = "dtype of the weights in model/ (default: dtype of the trained weights)"
    group.add_argument("--export_dtype", choices=EXPORT_DTYPES, help=about)
    about = "write the best checkpoint to model/ instead of the last; requires --keep_best"
    group.add_argument("--load_best_at_end", action="store_true", help=about)
    about = "resume from the newest valid checkpoint in --output_dir"
    group.add_argument("--resume", action="store_true", help=about)
    about = f"settings that may differ from the checkpoint; requires --resume; choices: {', '.join(CHANGEABLE)}"
    group.add_argument("--allow_changed", nargs="+", default=[], choices=CHANGEABLE, metavar="NAME", help=about)


def _add_batch(parser: ArgumentParser, lengths_vary: bool) -> None:
    group = parser.add_argument_group("batch (without dropout, the update is the same for any split of a global batch)")
    group.add_argument("--num_updates", type=positive, default=1000, help="total number of optimizer updates")
    about = "number of passes over the training data, such as 3 or 0.5; replaces --num_updates"
    group.add_argument("--num_epochs", type=positive_float, metavar="E", help=about)
    group.add_argument("--global_batch_size", type=positive, default=8, help="samples per update, over all ranks")
    group.add_argument("--micro_batch_size", type=positive, metavar="M", help="samples per micro-batch and device")
    if lengths_vary:
        about = "maximum tokens per micro-batch, padding included; replaces --micro_batch_size\n"
        about += "(default: 1024 on CPU, 8192 on GPU, at least one sample);\n"
        about += "auto: the largest budget that fits and gains, halved if memory runs out"
        group.add_argument("--micro_batch_tokens", type=positive_or_auto, metavar="T", help=about)
    group.add_argument("--drop_last_window", action="store_true", help="drop the incomplete last batch of an epoch")
    about = "data-loading processes per rank (default: 2 with a GPU, 0 without)"
    group.add_argument("--num_workers", type=not_negative, metavar="W", help=about)


def _add_optimizer(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("optimizer")
    group.add_argument("--optimizer", default="adamw", help=optimizers_help(), **one_of(OPTIMIZERS))
    group.add_argument("--learning_rate", type=positive_float, help="peak learning rate (default: by model)")
    about = "weight decay of matrices and embeddings"
    group.add_argument("--weight_decay", type=not_negative_float, default=0.1, help=about)
    about = "number of warm-up updates (default: a twentieth of the run)"
    group.add_argument("--warmup_updates", type=not_negative, help=about)
    group.add_argument("--lr_schedule", default="cosine", **one_of(SCHEDULES))
    about = "maximum gradient norm for clipping; 0: no clipping"
    group.add_argument("--max_grad_norm", type=not_negative_float, default=1.0, help=about)
    about = "updates with a non-finite loss or gradient are skipped; fail after N consecutive skips"
    group.add_argument("--max_skipped_updates", type=positive, default=20, help=about)

    group = parser.add_argument_group("memory and speed")
    group.add_argument("--activation_checkpointing", default="none", **one_of(ACTIVATION_CHECKPOINTING))
    group.add_argument("--compile", action="store_true", help="torch.compile the model: first updates are slow")
    about = "profile updates 3 to 5: print the time per part, write a trace to OUTPUT_DIR/profile for ui.perfetto.dev"
    group.add_argument("--profile", action="store_true", help=about)


def add_language_arguments(
    parser: ArgumentParser,
    one_text: bool = True,
    examples: bool = False,
    chats: bool = False,
    longest: str | None = None,
    adapters: bool = False,
) -> None:
    """Adds the flags of the recipes that read text.

    one_text: a row has one text, in `--text_column`. examples: a row may have a prompt and a completion instead.
    chats: a row may have messages.
    adapters: whether the recipe can train an adapter of a pretrained model.
    longest: description of the default of --sequence_length, if the recipe chooses it.
    """
    group = parser.add_argument_group("data (default: the source code of Python's standard library)")
    about = "training text: .txt .jsonl .json .parquet .csv .tsv files, also compressed, or globs of them;\n"
    about += "to mix files, append weights: code.jsonl:0.7 books.txt:0.3"
    if examples:
        about += "\na row has a text, a prompt and a completion, messages, ShareGPT's conversations, or Alpaca's"
        about += "\ninstruction, input and output"
    group.add_argument("--train_file", nargs="+", default=[], metavar="FILE", help=about)
    about = "held-out text, in the same formats"
    group.add_argument("--validation_file", nargs="+", default=[], metavar="FILE", help=about)
    about = "dataset: hub name or local directory; its validation or test split is held out; replaces --train_file"
    group.add_argument("--dataset_name", help=about)
    group.add_argument("--dataset_config", help="dataset configuration, if there are several")
    if one_text:
        about = "column with the text" + ", for rows without prompt or messages" * examples
        group.add_argument("--text_column", default="text", help=about)
    if examples:
        group.add_argument("--prompt_column", help="column with the prompt (default: prompt)")
        group.add_argument("--completion_column", help="column with the target (default: completion)")
        about = "split concatenated texts into blocks, or use each row as a sample (default: depends on the columns)"
        group.add_argument("--shape", choices=("blocks", "examples"), help=about)
    if examples or chats:
        about = "Jinja file with a chat template, or chatml; replaces the template of the tokenizer"
        group.add_argument("--chat_template", metavar="FILE", help=about)
    about = "maximum tokens per sample" + (f" (default: {longest})" if longest else "")
    group.add_argument("--sequence_length", type=positive, default=None if longest else 256, help=about)

    add_model_arguments(parser)
    if adapters:
        _add_adapter(parser)
    parser.shared_flags |= {
        action.dest for action in flags_of(parser).values()
    }  # a recipe adds its own flags after these


def _add_adapter(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("adapter (LoRA: small matrices are trained next to a frozen pretrained model)")
    about = "rank of the adapter matrices, such as 16 (default: no adapter)"
    group.add_argument("--lora_rank", type=positive, metavar="R", help=about)
    about = "the adapter output is scaled by alpha / rank (default: 2 x rank)"
    group.add_argument("--lora_alpha", type=positive, help=about)
    about = "layers to adapt, by name (default: all linear layers except the head, and experts)"
    group.add_argument("--lora_targets", nargs="+", default=[], metavar="NAME", help=about)
    about = "dropout rate on the adapter input"
    group.add_argument("--lora_dropout", type=not_negative_float, default=0.0, help=about)
    about = "scale the adapter output by alpha / sqrt(rank) instead (rsLoRA, arXiv:2312.03732)"
    group.add_argument("--use_rslora", action="store_true", help=about)
    about = "adapt direction and magnitude of the weights separately (DoRA, arXiv:2402.09353)"
    group.add_argument("--use_dora", action="store_true", help=about)
    about = "format of the frozen weights (default: unquantised)"
    group.add_argument("--quantize", **one_of(QUANTIZED, about))


def add_model_arguments(parser: ArgumentParser) -> None:
    """Adds the flags of the recipes that can use a pretrained model."""
    group = parser.add_argument_group("model")
    group.add_argument("--model_name_or_path", help="local directory or hub name of a pretrained model")
    group.add_argument("--trust_remote_code", action="store_true", help="run code from the model, dataset or metrics")


def choose_model(
    parser: argparse.ArgumentParser,
    args: argparse.Namespace,
    model_configs: dict,
    fine_tuning_rate: float | Callable[[argparse.Namespace], float],
) -> None:
    """Sets the defaults of --model_config and --learning_rate.

    Args:
        model_configs: models to train from scratch, the default first; a row ends with AdamW's learning rate.
        fine_tuning_rate: learning rate of a pretrained model, or a function that determines it from the flags;
            `default_rate` derives the rate of an adapter from it.
    """
    if args.model_config and args.model_name_or_path:
        parser.error("--model_config and --model_name_or_path are two answers to one question; give one")
    if not args.model_name_or_path:
        args.model_config = args.model_config or next(iter(model_configs))
    if args.model_config:
        args.learning_rate = args.learning_rate or model_configs[args.model_config][-1]
    if not args.learning_rate:
        from common.training.fine_tuning_rate import default_rate

        args.learning_rate = default_rate(args, fine_tuning_rate)


def text_sources(args: Arguments) -> "tuple[Source, Source | None]":
    """Returns the sources of training and held-out text that the flags select; by default the embedded corpus.

    Raises UserError: one line per missing or unreadable file, or mutually exclusive sources.
    """
    # Imported here because recipes without text do not need these modules.
    from common.data.source_types import Source
    from common.data.sources import check_sources

    names = ("text_column", "prompt_column", "completion_column")
    columns = {name: args.shared(name) for name in names if name in args.shared_flags}
    if args.shared("chat_template"):
        from common.data.chats import read_chat_template

        columns["chat_template"] = read_chat_template(args.chat_template)
    train, validation = Source(files=tuple(args.train_file), **columns), None
    if any(":" in path for path in args.train_file):
        from common.data.mixed_files import find_flag_problems, training_files

        train = training_files(args.train_file, **columns)
        refuse(find_flag_problems(args) if train.weights else [])
    if args.validation_file:
        from common.data.mixed_files import held_out_files

        validation = held_out_files(args.validation_file, bool(train.weights), **columns)
    if args.dataset_name:
        from common.data.mixed_files import needless_weights

        refuse(needless_weights("--dataset_name", [args.dataset_name], "write the data to files to mix them"))
        if args.train_file:
            raise UserError("--train_file and --dataset_name are two answers to one question; give one")
        train = Source(dataset_name=args.dataset_name, dataset_config=args.dataset_config, **columns)
        from common.data.hub import held_out_splits

        if validation is None and (split := next(held_out_splits(args.dataset_name, args.dataset_config), None)):
            validation = replace(train, split=split)
    elif not args.train_file:
        if "chat_template" in columns:
            raise UserError(
                "--chat_template has no effect without --train_file or --dataset_name; name the data, or take it out"
            )
        train = Source(embedded="train")
        validation = validation or Source(embedded="validation")
    check_sources(train, validation)
    if train.text_column != "text":
        from common.data.source_problems import have_no_columns

        if have_no_columns(train, validation):
            raise UserError(
                f"--text_column {train.text_column} has no effect on .txt files, which have no columns; take it out"
            )
    return train, validation
