"""Command-line flags shared by all recipes, in groups.

Hardware settings (processes, mode, precision, offload) are in the files of accelerate_configs/, training settings are
flags. No setting is in both.
"""

import argparse
import difflib
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from accelerate.tracking import LOGGER_TYPE_TO_CLASS

from common.checkpoint.identity import CHANGEABLE
from common.internals.python import HelpFormatter, flags_of
from common.models.adapters import QUANTIZED
from common.models.saved_model import EXPORT_DTYPES
from common.training.activation_checkpointing import ACTIVATION_CHECKPOINTING
from common.training.optimizers import OPTIMIZERS, SCHEDULES, optimizers_help
from common.training.recipe_traits import Arguments

if TYPE_CHECKING:
    from common.data.source_types import Source


ABOUT_METRIC = "modules of the package evaluate, for the end: .py files, directories, hub names; or f1:average=macro"
METRIC = {"nargs": "+", "default": [], "metavar": "NAME_OR_PATH", "help": ABOUT_METRIC}  # argparse keywords


class ArgumentParser(argparse.ArgumentParser):
    """Parser that reports a user error in one line, suggests the nearest flag, and rejects abbreviations."""

    def __init__(self, **kwargs: Any):
        super().__init__(allow_abbrev=False, formatter_class=HelpFormatter, **kwargs)
        self.shared_flags: set[str] = set()

    def add_group(self, title: str) -> Callable[..., None]:
        """Returns a function that adds a shared flag to a new group: add(flag, help text, **options)."""
        group = self.add_argument_group(title)

        def add(flag: str, help: str | None = None, **options: Any) -> None:
            self.shared_flags.add(group.add_argument(flag, help=help, **options).dest)

        return add

    def parse_args(self, args: Sequence[str] | None = None) -> Arguments:  # type: ignore[override]  # no namespace
        """Parses the flags. Sets the default of --output_dir: runs/, the recipe's name and the time."""
        parsed, unknown = self.parse_known_args(args)
        if unknown:
            from common.flag_translation import explain_unknown
            from common.parallel.failures import exit_with_errors

            exit_with_errors(explain_unknown(unknown, sys.argv[1:] if args is None else args, flags_of(self)))
        if any("://" in word or len(os.fsencode(word)) > 255 for word in (sys.argv if args is None else args)):
            from common.rare_arguments import check_paths

            check_paths(parsed)
        parsed.output_dir = parsed.output_dir or time.strftime(f"runs/{Path(self.prog).stem}-%Y%m%d-%H%M%S")
        return Arguments(frozenset(self.shared_flags), **vars(parsed))

    def error(self, message: str) -> NoReturn:
        from common.parallel.failures import exit_with_parser_error

        exit_with_parser_error(message)


def _number(description: str, convert: Callable[[str], Any], is_valid: Callable[[Any], bool]) -> Callable[[str], Any]:
    """Returns an argparse type: a number that `is_valid` accepts. description: for the error message."""

    def parse(text: str) -> Any:
        with suppress(ValueError):
            if is_valid(value := convert(text)):
                return value
        raise argparse.ArgumentTypeError(f"{text!r} is not {description}")

    return parse


def _digits(text: str) -> int:
    """Returns an integer >= 0. Unlike int(), accepts only digits."""
    if not text.isdigit():
        raise ValueError
    return int(text)


def _updates_or_epochs(text: str) -> int | str:
    """Returns an integer >= 0, or whole epochs, such as "1epoch", or "auto", as text for `epochs.resolve`."""
    from common.training.epochs import EPOCHS

    return text if EPOCHS.fullmatch(text) else _digits(text)


positive = _number("an integer > 0", _digits, lambda number: number > 0)
not_negative = _number("an integer >= 0", _digits, lambda number: True)
updates_or_epochs = _number("an integer >= 0, nor epochs such as 1epoch", _updates_or_epochs, lambda number: True)
positive_float = _number("a finite number > 0", float, lambda number: 0 < number < float("inf"))
not_negative_float = _number("a finite number >= 0", float, lambda number: 0 <= number < float("inf"))
# Each rank adds its index to the seed, and numpy's limit is 2**32 - 1.
seed = _number(f"an integer from 0 to {2**31}", _digits, lambda number: number <= 2**31)


def one_of(table: dict, first: str = "") -> dict[str, Any]:
    """Returns argparse keywords for a choice from a table. The error message suggests the nearest name.

    first: first line of the help text. If the values of the table are texts, they follow as descriptions of the names.
    """

    def name(text: str) -> str:
        if text not in table:
            nearest = difflib.get_close_matches(text, table, n=1)
            hint = f", did you mean {nearest[0]}?" if nearest else ""
            raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(table)}{hint}")
        return text

    meanings = [f"{name}: {text}" for name, text in table.items() if isinstance(text, str)]
    help_text = "\n".join([first, *meanings]).lstrip() + "\n" * bool(meanings)
    return {"type": name, "metavar": "|".join(table), "help": help_text or None}


def recipe_parser(description: str, lengths_vary: bool = True) -> ArgumentParser:
    """Returns a parser with the flags of all recipes. lengths_vary: whether samples differ in length."""
    parser = ArgumentParser(description=description)
    _add_run(parser)
    _add_batch(parser, lengths_vary)
    _add_optimizer(parser)
    return parser


def _add_run(parser: ArgumentParser) -> None:
    add, switch = parser.add_group("run"), {"action": "store_true"}
    add("--output_dir", "output directory of the run (default: runs/RECIPE-DATE-TIME)")
    add("--overwrite", "delete an existing run in --output_dir", **switch)
    add("--dry_run", "check everything, run one forward and backward pass, and exit without writing a run", **switch)
    about = "print predicted memory and time for MACHINE, such as '8 x 80GiB, host 1TiB' (default: this one), and exit"
    add("--plan", about, nargs="?", const="here", metavar="MACHINE")
    add("--seed", "random seed for weight initialisation, sample order and dropout", type=seed, default=0)
    about = "evaluate on the held-out set every N updates, or every N epochs (such as 1epoch), and at the end; "
    add("--eval_every", about + "0: only at the end", type=updates_or_epochs, default=0, metavar="N")
    about = "stop after N consecutive evaluations without a lower validation loss"
    add("--patience", about, type=positive, metavar="N")
    about = "seconds to wait for all processes to connect at startup (default: 60 on CPU, 300 on GPU)"
    add("--connect_timeout", about, type=positive_float, metavar="SECONDS")
    about = f"trackers that also receive the metrics: {', '.join(LOGGER_TYPE_TO_CLASS)}"
    add("--report_to", about, nargs="+", default=[], metavar="TRACKER")

    add = parser.add_group("stop and resume")
    about = "checkpoint every N updates or epochs (1epoch), or auto (docs/elastic.md), and at the end; 0: only on stop"
    add("--save_every", about, type=updates_or_epochs, default=500, metavar="N")
    add("--keep_last", "number of newest checkpoints to keep, at least 2", type=positive, default=2, metavar="K")
    about = "save at each new lowest validation loss, and keep that checkpoint too; requires --eval_every"
    add("--keep_best", about, **switch)
    about = "dtype of the weights in model/ (default: dtype of the trained weights)"
    add("--export_dtype", about, choices=EXPORT_DTYPES)
    add("--load_best_at_end", "write the best checkpoint to model/ instead of the last; requires --keep_best", **switch)
    about = "resume from the newest valid checkpoint in --output_dir; auto: or start, if there is none"
    add("--resume", about, nargs="?", const=True, default=False, choices=["auto"])
    about = f"settings that may differ from the checkpoint; requires --resume; choices: {', '.join(CHANGEABLE)}"
    add("--allow_changed", about, nargs="+", default=[], choices=CHANGEABLE, metavar="NAME")


def _add_batch(parser: ArgumentParser, lengths_vary: bool) -> None:
    add = parser.add_group("batch (without dropout, the update is the same for any split of a global batch)")
    add("--num_updates", "total number of optimizer updates", type=positive, default=1000)
    about = "number of passes over the training data, such as 3 or 0.5; replaces --num_updates"
    add("--num_epochs", about, type=positive_float, metavar="E")
    add("--global_batch_size", "samples per update, over all ranks", type=positive, default=8)
    add("--micro_batch_size", "samples per micro-batch and device", type=positive, metavar="M")
    if lengths_vary:
        about = "maximum tokens per micro-batch, padding included; replaces --micro_batch_size\n"
        about += "(default: 1024 on CPU, 8192 on GPU, at least one sample);\n"
        about += "auto: the largest budget that fits and improves throughput, halved if memory runs out"
        add("--micro_batch_tokens", about, type=lambda text: text if text == "auto" else positive(text), metavar="T")
    add("--drop_last_window", "drop the incomplete last batch of an epoch", action="store_true")
    about = "data-loading processes per rank (default: 2 with a GPU, 0 without)"
    add("--num_workers", about, type=not_negative, metavar="W")


def _add_optimizer(parser: ArgumentParser) -> None:
    add = parser.add_group("optimizer")
    add("--optimizer", default="adamw", **one_of(OPTIMIZERS, optimizers_help()))
    add("--learning_rate", "peak learning rate (default: by model)", type=positive_float)
    add("--weight_decay", "weight decay of matrices and embeddings", type=not_negative_float, default=0.1)
    add("--warmup_updates", "number of warm-up updates (default: a twentieth of the run)", type=not_negative)
    add("--lr_schedule", default="cosine", **one_of(SCHEDULES))
    add("--max_grad_norm", "maximum gradient norm for clipping; 0: no clipping", type=not_negative_float, default=1.0)
    about = "updates with a non-finite loss or gradient are skipped; fail after N consecutive skips"
    add("--max_skipped_updates", about, type=positive, default=20)

    add = parser.add_group("memory and speed")
    add("--activation_checkpointing", default="none", **one_of(ACTIVATION_CHECKPOINTING))
    about = "compile the layers: faster updates after a slow first one; auto: in a long run with samples of one length"
    add("--compile", about, nargs="?", const=True, choices=["auto"])
    add("--no-compile", "compile no layers", dest="compile", action="store_false", default=None)
    about = "profile updates 3 to 5: print the time per part, write a trace to OUTPUT_DIR/profile for ui.perfetto.dev"
    add("--profile", about, action="store_true")


def add_language_arguments(
    parser: ArgumentParser,
    one_text: bool = True,
    examples: bool = False,
    chats: bool = False,
    longest: str | None = None,
    adapters: bool = False,
    answers: bool = False,
) -> None:
    """Adds the flags of the recipes that read text.

    one_text: a row has one text, in `--text_column`. examples: a row may have a prompt and a completion instead.
    chats: a row may have messages. adapters: the recipe can train an adapter of a pretrained model.
    answers: the recipe can answer held-out prompts.
    longest: description of the default of --sequence_length, if the recipe chooses it.
    """
    add = parser.add_group("data (default: the source code of Python's standard library)")
    about = "training text: .txt .jsonl .json .parquet .csv .tsv files, also compressed, or globs of them;\n"
    about += "to mix files, append weights: code.jsonl:0.7 books.txt:0.3"
    if examples:
        about += "\na row has a text, a prompt and a completion, messages, ShareGPT's conversations, or Alpaca's"
        about += "\ninstruction, input and output"
    add("--train_file", about, nargs="+", default=[], metavar="FILE")
    add("--validation_file", "held-out text, in the same formats", nargs="+", default=[], metavar="FILE")
    about = "dataset: hub name or local directory; its validation or test split is held out; replaces --train_file"
    add("--dataset_name", about)
    add("--dataset_config", "dataset configuration, if there are several")
    add("--max_row_bytes", "largest row of a file, unpacked (default: 64 MiB)", type=positive, default=64 << 20)
    if one_text:
        add("--text_column", "column with the text" + ", of rows without prompt or messages" * examples, default="text")
    if examples:
        add("--prompt_column", "column with the prompt (default: prompt)")
        add("--completion_column", "column with the target (default: completion)")
        about = "concatenated texts in blocks, each row as a sample, or whole rows packed (default: depends on columns)"
        add("--shape", about, choices=("blocks", "examples", "packed"))
        about = "whether a token attends only to its own document (default: only with --shape packed)"
        add("--document_mask", about, action=argparse.BooleanOptionalAction)
    if examples or chats:
        about = "Jinja file with a chat template, or chatml; replaces the template of the tokenizer"
        add("--chat_template", about, metavar="FILE")
    if not longest:
        add("--on_too_long", "for longer rows (default: truncate)", choices=("truncate", "drop", "error"))
    about = "maximum tokens per sample" + (f" (default: {longest})" if longest else "")
    add("--sequence_length", about, type=positive, default=None if longest else 256)
    if answers:
        about = "answer N held-out prompts before and after training, in OUTPUT_DIR/samples.md"
        add("--generate", about, type=positive, metavar="N")
        add("--metric", **METRIC)
    add_model_arguments(parser)
    if adapters:
        _add_adapter(parser)


def _add_adapter(parser: ArgumentParser) -> None:
    add = parser.add_group("adapter (LoRA: small matrices are trained next to a frozen pretrained model)")
    add("--lora_rank", "rank of the adapter matrices, such as 16 (default: no adapter)", type=positive, metavar="R")
    add("--lora_alpha", "the adapter output is scaled by alpha / rank (default: 2 x rank)", type=positive)
    about = "layers to adapt, by name (default: all linear layers except the head, and experts)"
    add("--lora_targets", about, nargs="+", default=[], metavar="NAME")
    add("--lora_dropout", "dropout rate on the adapter input", type=not_negative_float, default=0.0)
    about = "scale the adapter output by alpha / sqrt(rank) instead (rsLoRA, arXiv:2312.03732)"
    add("--use_rslora", about, action="store_true")
    about = "adapt direction and magnitude of the weights separately (DoRA, arXiv:2402.09353)"
    add("--use_dora", about, action="store_true")
    add("--quantize", **one_of(QUANTIZED, "format of the frozen weights (default: unquantised)"))


def add_model_arguments(parser: ArgumentParser) -> None:
    """Adds the flags of the recipes that can use a pretrained model."""
    add = parser.add_group("model")
    add("--model_name_or_path", "local directory or hub name of a pretrained model")
    add("--trust_remote_code", "run code from the model, dataset or metrics", action="store_true")


def choose_model(
    parser: ArgumentParser,
    args: Arguments,
    model_configs: dict[str, tuple],
    fine_tuning_rate: float | Callable[[Arguments], float],
) -> None:
    """Sets the defaults of --model_config and --learning_rate; exits if the flags select two models.

    model_configs: models to train from scratch, the default first; the last value of each is AdamW's learning rate.
    fine_tuning_rate: learning rate of a pretrained model (see `default_rate`).
    """
    if args.model_config and args.model_name_or_path:
        parser.error("--model_config and --model_name_or_path are mutually exclusive; pass only one")
    if not args.model_name_or_path:
        args.model_config = args.model_config or next(iter(model_configs))
        args.learning_rate = args.learning_rate or model_configs[args.model_config][-1]
    if not args.learning_rate:
        from common.training.fine_tuning_rate import default_rate

        args.learning_rate = default_rate(args, fine_tuning_rate)


def text_sources(args: Arguments) -> "tuple[Source, Source | None]":
    """Returns the sources of training and held-out text. Raises UserError: flags or files that cannot be used."""
    # Imported here because recipes without text do not need these modules.
    from common.data.source_types import Source
    from common.data.sources import check_sources

    names = ("text_column", "prompt_column", "completion_column", "document_mask", "max_row_bytes", "on_too_long")
    columns = {name: args.shared(name) for name in names if name in args.shared_flags}
    files = [args.train_file, args.validation_file]
    if args.dataset_name or args.shared("chat_template") or any(":" in path for path in [*files[0], *files[1]]):
        from common.rare_arguments import select_sources

        train, validation = select_sources(args, columns)
    else:
        train, validation = [Source(files=tuple(paths), **columns) if paths else None for paths in files]
    if train is None:
        train, validation = Source(embedded="train", **columns), validation or Source(embedded="validation", **columns)
    check_sources(train, validation)
    if train.text_column != "text":
        from common.rare_arguments import check_text_column

        check_text_column(train, validation)
    return train, validation
