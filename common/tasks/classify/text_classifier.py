"""Prepares data, labels and model of a text classifier according to the flags."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForSequenceClassification, BertConfig, PreTrainedConfig, PreTrainedTokenizerBase

from common.data.source_types import Source
from common.data.tokenizer import load_tokenizer, train_tokenizer
from common.errors import raise_errors, shorten
from common.models.classifiers import (
    check_new_head,
    choose_labels,
    describe_new_weights,
    needs_new_head,
    resolve_head_rate,
    set_labels,
)
from common.models.load import check_model, load_config
from common.tasks.classify.labels import (
    Example,
    LabelledTexts,
    check_length,
    encode_labels,
    is_regression,
    label_names,
    read_examples,
    read_packages,
)
from common.training.batching import Samples
from common.training.fine_tuning_rate import default_rate
from common.training.recipe_traits import Arguments

if TYPE_CHECKING:
    from common.data.mixed import Mixed

# BERT of base and large size is fine-tuned at 2e-5 to 5e-5 (arXiv:1810.04805, appendix A.3), its smallest versions and
# ELECTRA-small at up to 3e-4 (github.com/google-research/bert; arXiv:2003.10555). For sizes in between, the rate is
# inversely proportional to the parameters per layer, which grow with the square of the width. Measurements are in
# benchmarks/results/fine-tuning-rates-cpu.md.
BASE_RATE, BASE_WIDTH, LOWEST_RATE, HIGHEST_RATE = 5e-5, 768, 2e-5, 3e-4
RATE_RULE = (
    f"{BASE_RATE:g} x ({BASE_WIDTH} / width)^2, from {LOWEST_RATE:g} to {HIGHEST_RATE:g}, as in the papers of BERT and "
    "ELECTRA; 10 times as much for an adapter"
)
ABOUT_RATE = f"Default of --learning_rate for a pretrained model: {RATE_RULE}."
SHAPE = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size")


class Rows(NamedTuple):
    """Rows by source name; the weights of mixed sources, as in `Source`; the titles of the sources, for messages."""

    sources: dict[str, list[Example]]
    weights: tuple[int, ...] = ()
    titles: tuple[str, ...] = ()

    def all(self) -> list[Example]:
        """Returns the rows of all sources."""
        return [row for rows in self.sources.values() for row in rows]


def _read(args: Arguments, source: Source) -> tuple[Rows, list[str] | None]:
    """Returns the rows of a source, and its class names; None if classes have no numbers, or mixed sources differ."""
    parts = [read_examples(part, args.pair_column, args.label_column) for part in source.parts or (source,)]
    titles, examples, classes = zip(*parts, strict=True)
    names = [part.files[0] for part in source.parts] or titles
    rows = Rows(dict(zip(names, examples, strict=True)), source.weights, titles)
    return rows, classes[0] if all(names == classes[0] for names in classes) else None


def fine_tuning_rate(args: Arguments) -> float:
    """Returns the learning rate for full fine-tuning of --model_name_or_path; it is lower for a wider model.

    Raises UserError if the model does not exist.
    """
    config = load_config(args.model_name_or_path, args.trust_remote_code, AutoModelForSequenceClassification)
    width = getattr(config.get_text_config(), "hidden_size", BASE_WIDTH)
    rate = min(max(BASE_RATE * (BASE_WIDTH / width) ** 2, LOWEST_RATE), HIGHEST_RATE)
    return float(f"{rate:.1g}")


def describe_rate(args: Arguments) -> dict[str, str]:
    """Returns a line for the run summary on the default learning rate of a pretrained model; {} for other rates."""
    if not args.model_name_or_path:
        return {}
    default = default_rate(args, fine_tuning_rate)
    return {"rate": f"{default:g} by default: {RATE_RULE}"} if args.learning_rate == default else {}


def check_arguments(args: Arguments) -> Iterator[str]:
    """Yields one line for each flag that needs a different flag, which is not set."""
    yield from check_new_head(args)
    if args.validation_file and not (args.train_file or args.dataset_name):
        yield "--validation_file needs --train_file or --dataset_name; name the training data"


def read_rows(
    args: Arguments, source: Source, held_out_source: Source | None
) -> tuple[Rows, Rows | None, list[str] | None, list[str] | None]:
    """Returns the training rows, the held-out rows or None, the labels, and the class names by number.

    The labels are None for a regression. The class names are None if the data does not number its classes.
    """
    held_out: Rows | None
    if source.embedded:
        examples, others = read_packages()
        train, classes = Rows({"functions of the standard library": examples}), None
        held_out = Rows({"functions of other files": others})
    else:
        train, classes = _read(args, source)
        held_out = _read(args, held_out_source)[0] if held_out_source else None
    rows = train.all()
    task = args.task or ("regression" if not classes and is_regression(rows) else "classification")
    return train, held_out, label_names(rows) if task == "classification" else None, classes


def choose_model(
    args: Arguments,
    sizes: dict[str, tuple],
    source: Source,
    names: list[str] | None,
    classes: list[str] | None,
) -> tuple[PreTrainedConfig, PreTrainedTokenizerBase, list[str] | None]:
    """Returns configuration, tokenizer and labels of a pretrained model, or of a BERT model from scratch.

    Args:
        sizes: models from scratch by name: layers, width, heads, MLP width, vocabulary, ...
        source: the training text, on which a new tokenizer is trained.
        names, classes: the labels and class names that `read_rows` returns.

    Raises UserError if the model's head has different labels, or the texts do not fit the model.
    """
    if args.model_name_or_path:
        config = load_config(args.model_name_or_path, args.trust_remote_code, AutoModelForSequenceClassification)
        tokenizer = load_tokenizer(args.model_name_or_path, args.trust_remote_code, needs_end_of_text=False)
        is_new = needs_new_head(config, args.new_head)
        names = choose_labels(config, names, is_new, classes)
        resolve_head_rate(args, is_new)
    else:
        resolve_head_rate(args, is_new=False)
        *numbers, vocabulary = sizes[args.model_config][:5]
        tokenizer = train_tokenizer(source, vocabulary)
        tokenizer.add_special_tokens({"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]"})
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="[CLS] $A [SEP]",
            pair="[CLS] $A [SEP] $B:1 [SEP]:1",
            special_tokens=[("[CLS]", tokenizer.cls_token_id), ("[SEP]", tokenizer.sep_token_id)],
        )
        shape = dict(zip(SHAPE, numbers, strict=True), vocab_size=len(tokenizer))
        config = BertConfig(**shape, max_position_embeddings=max(512, args.sequence_length))
    set_labels(config, names, args.label_column, tokenizer.pad_token_id)
    problems = check_model(config, tokenizer, args.sequence_length)
    raise_errors([*problems, *check_length(config, tokenizer, args.sequence_length, args.pair_column is not None)])
    return config, tokenizer, names


def label(
    rows: Rows, names: list[str] | None, tokenizer: PreTrainedTokenizerBase, args: Arguments
) -> "Samples | Mixed":
    """Returns rows as tokenised samples; targets are indices into `names`, or the labels themselves without names."""
    limit = args.sequence_length, args.on_too_long
    parts: dict[str, Samples] = {
        name: LabelledTexts(title, examples, encode_labels(examples, names), tokenizer, *limit)
        for (name, examples), title in zip(rows.sources.items(), rows.titles or rows.sources, strict=True)
    }
    if not rows.weights and len(parts) == 1:
        return next(iter(parts.values()))
    from common.data.mixed import Mixed

    return Mixed(parts, rows.weights)


def describe_task(
    args: Arguments, names: list[str] | None, head: list[str], head_learning_rate: float | None
) -> dict[str, str]:
    """Returns the lines on loss, labels, rate and head for the run summary."""
    lines = {"loss": "squared error", "labels": "numbers"}
    if names is not None:
        lines = {"loss": "cross-entropy", "labels": f"{len(names)}: {shorten(names)}"}
    return lines | describe_rate(args) | describe_new_weights(head, head_learning_rate)
