"""Turns texts with labels into samples of a classifier: reads and checks labels, and tokenises the texts.

    name, examples, _ = read_examples(Source(files=("reviews.csv",)), None, "label")
    names = label_names(examples)
    samples = LabelledTexts(name, examples, encode_labels(examples, names), tokenizer, sequence_length=256)
    ids, token_types, target = samples[0]

All samples are kept in memory, because a classifier's data is small compared with that of a language model.
"""

import hashlib
import math
from collections import defaultdict
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from common.data.column_checks import unused_columns
from common.data.row_texts import text_of, utf8_length
from common.data.source_types import Source
from common.data.sources import check_columns, open_source
from common.data.tokenizer import no_more_threads
from common.data.too_long import is_left_out
from common.data.truncation import find_truncated
from common.errors import UserError, shorten
from common.training.token_rows import pad_rows

NUM_PACKAGES = 12  # packages of the standard library: those with the most functions
HELD_OUT_SHARE = 1 / 5  # maximum share of a package's functions; whole files are held out
TOKENISED_AT_ONCE = 1024  # texts per tokenizer call


class Example(NamedTuple):
    """A row: its location (for messages), one or two texts, and its label as in the file."""

    where: str
    texts: tuple[str, ...]
    label: str | int | float | bool


def read_examples(
    source: Source, pair_column: str | None, label_column: str
) -> tuple[str, list[Example], list[str] | None]:
    """Returns (name, rows, class names) of a source; class names are None without numbers.

    The name includes the unused columns, and the number of rows with an empty text, which are left out.

    Raises UserError with file and row for a missing column, text or label.
    """
    corpus = open_source(source)
    text_columns = (source.text_column, pair_column) if pair_column else (source.text_column,)
    wanted = (*text_columns, label_column)
    check_columns(corpus, wanted, "--text_column, --pair_column, --label_column")
    examples, num_empty = [], 0
    for row in corpus.rows(wanted, False):
        texts = tuple(text_of(row, column) for column in text_columns)
        if label_column not in row.values:
            from common.data.column_errors import missing_column

            raise UserError(missing_column(row.where, [label_column], tuple(row.values)))
        label, problem = row.values[label_column], None
        if label in (None, ""):
            problem = "null"
        elif not isinstance(label, str | int | float):
            problem = f"of type {type(label).__name__}"
        elif isinstance(label, float) and not math.isfinite(label):
            problem = str(label)
        if problem:
            raise UserError(
                f"{row.where}: column {label_column} is {problem}, not a name or a number; fix or remove the row"
            )
        if isinstance(label, str):
            utf8_length(label, f"{row.where}: column {label_column}")
        if all(map(str.strip, texts)):
            examples.append(Example(row.where, texts, label))
        else:
            num_empty += 1
    if not examples:
        from common.data.empty_rows import no_row_left

        raise no_row_left(corpus, text_columns, {"have an empty text": num_empty})
    empty = f"{num_empty:,} rows with an empty text left out" if num_empty else ""
    notes = "; ".join(filter(None, (empty, unused_columns(corpus))))
    return corpus.name + (f" ({notes})" if notes else ""), examples, corpus.classes.get(label_column)


def _by_number(name: str) -> tuple[bool, float, str]:
    """Returns a sort key for class names: numbers by value, such as "-1" and "2.0", before all other names."""
    try:
        number = int(name) if name.lstrip("-").isdecimal() else float(name)
        return (False, number, name) if math.isfinite(number) else (True, 0, name)
    except (ValueError, OverflowError):  # not a number, or an integer above the range of floats
        return (True, 0, name)


def _number(label: Any) -> float | None:
    """Returns the label as a number that is finite in float32, or None."""
    try:
        number = math.nan if isinstance(label, bool) else float(label)
    except (ValueError, OverflowError):
        return None
    return number if abs(number) <= float(np.finfo(np.float32).max) else None


def is_regression(examples: list[Example]) -> bool:
    """Returns whether the labels are numbers, at least one of them fractional (3.8; 0 and 1 are classes).

    Up to a tenth of the labels may be non-numeric ("n/a", "3,8"); `encode_labels` then reports the first of them.
    """
    numbers = [_number(example.label) for example in examples]
    return numbers.count(None) <= len(numbers) / 10 and any(number is not None and number % 1 for number in numbers)


def _name(label: Any) -> str:
    """Returns the label as text; 1.0 becomes 1, because integer columns with nulls are often stored as floats."""
    return str(int(label)) if isinstance(label, float) and label.is_integer() else str(label)


def label_names(examples: list[Example]) -> list[str]:
    """Returns the distinct labels, sorted: numbers by value, before all other labels.

    Raises UserError if all labels are equal, if all differ (in more than two rows), or if nan or inf occurs among
    numbers. Among names, nan and inf are ordinary names.
    """
    names = {_name(example.label) for example in examples}
    # CSV files store a missing or infinite number as one of these texts.
    missing = {name for name in names if name.strip().lstrip("+-").lower() in ("nan", "inf", "infinity")}
    if missing < names and missing and all(_number(name) is not None for name in names - missing):
        example = next(example for example in examples if example.label in missing)
        raise UserError(
            f"{example.where}: the label {example.label!r} is not a finite number, as the others are; fix or remove "
            "the row"
        )
    if len(names) == 1:
        raise UserError(
            f"all {len(examples)} rows have the label {names.pop()!r}; a classifier needs at least two: pass a "
            "different --label_column, or all the data"
        )
    if len(names) == len(examples) > 2:
        raise UserError(
            f"each of the {len(examples)} rows has a different label, such as {examples[0].label!r}; pass a different "
            "--label_column, or --task regression"
        )
    return sorted(names, key=_by_number)


def encode_labels(examples: list[Example], names: list[str] | None) -> np.ndarray:
    """Returns the targets (N,): int64 indices into `names`, or float32 numbers without names.

    Raises UserError with file and row if a label is not in `names` or, without names, is not a finite number.
    """
    if names is None:
        numbers = [_number(example.label) for example in examples]
        if None in numbers:
            example = examples[numbers.index(None)]
            raise UserError(
                f"{example.where}: the label {example.label!r} is not a finite number; fix the row, or pass "
                "--task classification"
            )
        return np.array(numbers, np.float32)
    index = {name: number for number, name in enumerate(names)}
    targets = []
    for example in examples:
        if (name := _name(example.label)) not in index:
            raise UserError(
                f"{example.where}: the label {example.label!r} does not occur in the training data ({shorten(names)}); "
                "fix or remove the row, or add such rows to the training data"
            )
        targets.append(index[name])
    return np.array(targets, np.int64)


def read_packages() -> tuple[list[Example], list[Example]]:
    """Returns (training, held-out) examples: functions of the standard library, each labelled with its package.

    Functions of the same file are often similar, so whole files are held out.
    """
    packages: dict[str, dict[str, list[Example]]] = defaultdict(lambda: defaultdict(list))
    for part in ("train", "validation"):
        for row in open_source(Source(embedded=part)).rows(("text",), False):
            package, inside, _ = row.where.partition("/")
            if inside:
                packages[package][row.where].append(Example(row.where, (row.values["text"],), package))
    sizes = {name: sum(map(len, files.values())) for name, files in packages.items() if len(files) >= 5}
    train: list[Example] = []
    held_out: list[Example] = []
    for package in sorted(sizes, key=lambda name: (-sizes[name], name))[:NUM_PACKAGES]:
        left = sizes[package] * HELD_OUT_SHARE
        for file in sorted(packages[package], key=lambda name: hashlib.blake2b(name.encode()).digest()):
            functions = packages[package][file]
            if len(functions) <= left:
                held_out += functions
                left -= len(functions)
            else:
                train += functions
    return train, held_out


class LabelledTexts:
    """Tokenised texts with one target each: `common.training.batching.Samples`.

    Item i is (ids, token_types, target): two int64 arrays (length,), and an int, or a float in a regression. The
    tokenizer adds special tokens and truncates texts longer than `sequence_length`, except with another `on_too_long`.
    """

    unit = "tokens"

    def __init__(
        self,
        name: str,
        examples: list[Example],
        targets: np.ndarray,
        tokenizer: PreTrainedTokenizerBase,
        sequence_length: int,
        on_too_long: str | None = None,
    ) -> None:
        self.name, self.sequence_length = name, sequence_length
        ids, types, lengths, self.num_truncated = [], [], [0], 0
        kept = np.ones(len(examples), bool)
        limit = {"truncation": True, "max_length": sequence_length}
        for start in range(0, len(examples), TOKENISED_AT_ONCE):
            texts = zip(*(example.texts for example in examples[start : start + TOKENISED_AT_ONCE]), strict=True)
            columns = list(map(list, texts))
            encoded = tokenizer(*columns, **limit, return_token_type_ids=True, return_attention_mask=False)
            truncated = find_truncated(tokenizer, encoded, sequence_length, *columns)
            for number, text_ids in enumerate(encoded["input_ids"]):
                if number in truncated:
                    limits = ("", truncated[number], "sequence_length", sequence_length)
                    if is_left_out(on_too_long, examples[start + number].where, *limits):
                        kept[start + number] = False
                        continue
                    self.num_truncated += 1
                text_types = encoded["token_type_ids"][number]
                # Some tokenizers, without an unknown token, return no token for a text of unknown characters.
                ids.append(np.array(text_ids or [tokenizer.pad_token_id], np.int32))
                types.append(np.array(text_types or [0], np.int8))
                lengths.append(len(ids[-1]))
        if not ids:
            raise UserError(f"{name}: all texts have more than --sequence_length {sequence_length} tokens; raise it")
        self.labels = targets = targets[kept]  # class indices, or the numbers of a regression
        self.num_left_out = len(kept) - len(targets)
        self._ids, self._types = np.concatenate(ids), np.concatenate(types)
        self._offsets = np.cumsum(lengths)
        digest = hashlib.blake2b(digest_size=10)
        for array in (self._ids, self._types, self._offsets, targets):
            digest.update(array.tobytes())
        self.fingerprint = digest.hexdigest()  # equal if all samples are equal
        self.num_target_tokens, self.max_length = len(targets), max(lengths)
        no_more_threads()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray, int | float]:
        part = slice(self._offsets[index], self._offsets[index + 1])
        return self._ids[part].astype(np.int64), self._types[part].astype(np.int64), self.labels[index].item()

    def dummy_sample(self) -> tuple[np.ndarray, np.ndarray, None]:
        """Returns the shortest text without a target; not truncated, because some models require special tokens."""
        return *self[int(self.lengths(np.arange(len(self))).argmin())][:2], None

    def lengths(self, ids: np.ndarray) -> np.ndarray:
        """Returns the number of input tokens of each sample, int64."""
        return self._offsets[np.asarray(ids) + 1] - self._offsets[ids]

    def num_targets(self, ids: np.ndarray) -> np.ndarray:
        """Returns 1 for each text, int64."""
        return np.ones(len(ids), np.int64)

    def describe(self) -> str:
        """Returns the description of the samples for the run summary, on one line."""
        line = f"{self.name}: {len(self):,} texts of {len(self._ids) / len(self):,.0f} tokens on average"
        line += f", at most {self.max_length}"
        line += f"; {self.num_truncated:,} truncated at {self.sequence_length}" if self.num_truncated else ""
        long = f"; {self.num_left_out:,} of more than {self.sequence_length} tokens left out"
        return line + (long if self.num_left_out else "")


def check_length(
    config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, sequence_length: int, is_pair: bool
) -> list[str]:
    """Returns one line if the tokenizer cannot truncate texts to this length, or reports a shorter maximum."""
    num_special = tokenizer.num_special_tokens_to_add(pair=is_pair)
    if sequence_length <= num_special:
        return [f"--sequence_length {sequence_length} is too short for text and {num_special} special tokens; raise it"]
    longest = tokenizer.model_max_length
    positions = getattr(config.get_text_config(), "max_position_embeddings", None) or 0
    # RoBERTa's tokenizer reports two tokens less than the model has positions: a hard limit. If a tokenizer reports far
    # fewer tokens, this is only the length that the model was trained with, and longer texts are allowed.
    if positions - 8 <= longest < min(sequence_length, positions):
        return [f"--sequence_length {sequence_length} exceeds the tokenizer's {longest} tokens; lower it"]
    return []


def collate_texts(
    samples: list[tuple],
    pad_token_id: int,
    inputs: tuple[str, ...],
    target_dtype: torch.dtype,
    multiple_of: int = 1,
) -> dict[str, torch.Tensor]:
    """Pads texts on the right into one micro-batch.

    Returns:
        `input_ids` (B, L); `attention_mask` and `token_type_ids` (B, L) if they are in `inputs`. Without padding,
            there is no mask.
        `targets` (N,), and `target_rows` (N,), the row of each target; dummy samples have no target.
    """
    ids, types, targets = zip(*samples, strict=True)
    pad = partial(pad_rows, multiple_of=multiple_of)
    tensors = {
        "input_ids": pad(list(map(torch.from_numpy, ids)), padding_value=pad_token_id),
        "token_type_ids": pad(list(map(torch.from_numpy, types))),
        "attention_mask": pad([torch.ones(len(row), dtype=torch.int64) for row in ids]),
    }
    if tensors["attention_mask"].all():
        del tensors["attention_mask"]
    rows = [row for row, target in enumerate(targets) if target is not None]
    return {name: tensors[name] for name in ("input_ids", *inputs) if name in tensors} | {
        "targets": torch.tensor([targets[row] for row in rows], dtype=target_dtype),
        "target_rows": torch.tensor(rows, dtype=torch.int64),
    }
