"""Turns rows with a label into samples of KTO: a prompt with its answer, and with the answer of a different row.

rows = tokenize_unpaired(Source(files=("train.jsonl",)), tokenizer, length=512)
samples, ids = rows.of_batch(np.array([4, 1, 3]))  # the answer of row 4 is the mismatched answer of row 1
micro_batch = collate_unpaired([samples[0], samples[2]], tokenizer.pad_token_id, objective)
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from common.data.cache import cached
from common.data.chats import encode_chats, start_rendering
from common.data.examples import encode_texts, token_ids
from common.data.messages import history_of, messages_of, with_system
from common.data.preference_rows import ANSWERS, CONTEXT, check_row
from common.data.preferences import as_context, encode_answers, open_preferences
from common.data.row_texts import batches
from common.data.sample_writing import corpus_facts
from common.data.source_types import Corpus, Row, Source, name_and_columns
from common.data.sources import check_columns
from common.data.token_store import TokenStore, TokenWriter
from common.data.tokenizer import Encoded, no_more_threads, tokenizer_identity
from common.errors import UserError
from common.reading import reading
from common.tasks.dpo.losses import Objective
from common.tasks.dpo.preferences import pad_rows, view_of

COMPLETIONS = ("completion", "response", "answer")  # names of the answer's column; the first present is used
LABELS = {"true": 1, "false": 0, "1": 1, "0": 0}  # texts in files without other types, such as .csv
SEQUENCES = ("prompt", "completion")


def columns_of(corpus: Corpus) -> tuple[str, ...]:
    """Returns the columns with text: of rows with a label, or of pairs, which become two rows each."""
    completion = next((name for name in COMPLETIONS if name in corpus.columns), COMPLETIONS[0])
    if set(ANSWERS) <= set(corpus.columns) and not {"label", completion} <= set(corpus.columns):
        return tuple(name for name in ("prompt", *ANSWERS) if name in corpus.columns)
    check_columns(corpus, ("prompt", completion, "label"))
    return "prompt", completion


def tokenize_unpaired(
    source: Source,
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    reference: str = "",
    cache_dir: str | Path | None = None,
    is_held_out: bool = False,
) -> "Unpaired":
    """Tokenises the rows of a source once into the cache and opens the result.

    A row has a `prompt`, a `completion` and a `label`: true if the answer is desirable. Prompt and completion are two
    texts, or two lists of messages. A pair of `preferences.tokenize_preferences` becomes two rows. Rows whose answer
    does not begin within `length` are skipped.

    Args:
        length: maximum number of input tokens of a prompt with an answer; longer sequences are truncated at the end.
        reference: identity of the reference model.
        is_held_out: whether mismatched answers are those of the rows before in the data, not in the global batch.

    Raises UserError with file and location if something cannot be read or yields no sample.
    """
    corpus = open_preferences(source, tokenizer)
    columns = columns_of(corpus)
    if source.on_too_long:
        raise UserError("--on_too_long is not supported with --loss kto, which truncates answers; remove it")
    directory = cached(
        "unpaired",
        [corpus.identity, columns, tokenizer_identity(tokenizer), length],
        lambda partial: _write(partial, corpus, columns, tokenizer, length),
        cache_dir,
    )
    no_more_threads()
    return Unpaired(directory, length, reference, is_held_out=is_held_out)


def _label_of(row: Row) -> int:
    label = row.values.get("label")
    label = LABELS.get(label.lower(), label) if isinstance(label, str) else label
    if label not in (0, 1):  # also True and False
        raise UserError(f"{row.where}: column label is {label!r}; write true (desirable) or false (undesirable)")
    return int(label)


def _encode(
    batch: list[Row], columns: tuple[str, ...], tokenizer: PreTrainedTokenizerBase, counts: Counter, process: Any
) -> Iterator[tuple[Encoded, int]]:
    """Yields each encoded prompt and completion, whose targets are the completion's, and its label."""
    if columns[-1] in ANSWERS:
        for row in batch:
            with reading(row.where):
                check_row(row, columns)
            if "prompt" not in columns and not isinstance(row.values[ANSWERS[0]], list):
                raise UserError(f"{row.where}: --loss kto needs the prompt of texts; add a column prompt")
        both = [encode_answers(batch, columns, answer, tokenizer, counts, process, True) for answer in ANSWERS]
        for answers in zip(*both, strict=True):
            yield from zip(answers, (1, 0), strict=True)
        return
    labels = [_label_of(row) for row in batch]
    if not isinstance(batch[0].values.get(columns[1]), list):
        yield from zip(encode_texts(batch, columns, tokenizer, counts), labels, strict=True)
        return
    rows = []
    for row in batch:
        with reading(row.where):
            prompt, completion = (messages_of(row, name) for name in columns)
            if not completion or completion[-1]["role"] != "assistant":
                raise UserError(f"{row.where}: {columns[1]} does not end with a message of the assistant; fix the row")
            first = prompt[:1] if prompt and prompt[0]["role"] in ("system", "developer") else []
            context = with_system(row, [*first, *history_of(row), *prompt[len(first) :]])
            values = {columns[1]: [*map(as_context, context), *completion], "tools": row.values.get("tools")}
            rows.append(row._replace(values=values))
    yield from zip(encode_chats(rows, tokenizer, counts, process, columns[1]), labels, strict=True)


def _write(
    directory: Path, corpus: Corpus, columns: tuple[str, ...], tokenizer: PreTrainedTokenizerBase, length: int
) -> None:
    """Fills a store with rows of (prompt, completion) and the column `label`."""
    counts = Counter(dict.fromkeys(("rows", "desirable", "truncated", "dropped", "empty"), 0))
    longest = Counter(dict.fromkeys(SEQUENCES, 0))
    with TokenWriter(directory, label=[]) as writer, start_rendering() as process:
        for batch in batches(corpus, (*columns, "label", *CONTEXT)):
            for (ids, is_target, _), label in _encode(batch, columns, tokenizer, counts, process):
                if is_target[:1] == [True]:  # a first token cannot be a target
                    ids, is_target = [tokenizer.eos_token_id, *ids], [False, *is_target]
                stored = np.where(is_target, np.array(ids, np.int32), ~np.array(ids, np.int32))[: 2 * (length + 1)]
                start = int(np.argmax(stored >= 0)) if (stored >= 0).any() else len(stored)
                if start > length:
                    counts["dropped"] += 1
                    continue
                sequences = stored[:start], stored[start : start + length]
                writer.append(*sequences, label=[label])
                counts["rows"] += 1
                counts["desirable"] += label
                counts["truncated"] += len(ids) > length + 1
                for name, sequence in zip(SEQUENCES, sequences, strict=True):
                    longest[name] = max(longest[name], len(sequence))
        if not counts["rows"]:
            raise UserError(
                f"{corpus.name}: no answer begins within --sequence_length {length} ({counts['dropped']} rows); "
                "use different data, or raise it"
            )
        max_length = min(sum(longest.values()) - 1, length)
        writer.finish(counts, max_length=max_length, **corpus_facts(corpus, columns, counts, tokenizer))


class Labelled(NamedTuple):
    """A sample of KTO. Sequences are stored as in `preferences.Pair`; a dummy sample's have one token."""

    answers: tuple[np.ndarray, ...]  # the prompt with its own answer, and with the mismatched answer
    number: int | None  # epoch * rows + index of the row; None for a dummy sample
    reference: np.ndarray  # (2,), reference log-probabilities of both answers; zeros until computed
    label: int = 1  # 1: desirable, 0: undesirable


class Unpaired(TokenStore):
    """Memory-mapped rows: a `batching.Samples`. A row counts as one target, because the loss is a mean over rows.

    `of_epoch` and `of_batch` return a view, in which the mismatched answers are those of the global batch.
    """

    unit = "tokens"

    def __init__(
        self, directory: str | Path, length: int, reference: str, values: Path | None = None, is_held_out: bool = False
    ) -> None:
        super().__init__(directory, SEQUENCES)
        self.sequence_length, self.is_held_out, meta = length, is_held_out, self.meta
        self._labels = self.column("label")
        self.num_target_tokens, self.max_length, self.end_tokens = (
            meta["rows"],
            2 * meta["max_length"],
            meta["end_tokens"],
        )
        self.fingerprint = f"{meta['content']}-{length}"  # equal if all rows are equal
        self.identity = {"reference": reference}  # identifies a run, in addition to its data
        self.epoch, self.row_ids = 0, np.arange(len(self))
        self.other_ids = np.roll(self.row_ids, 1)
        self.set_reference(values)

    def set_reference(self, path: Path | None) -> None:
        """Sets the .npy file with the reference log-probabilities, (epochs * rows, 2); None: zeros."""
        self._values = path
        self._reference = None if path is None else np.load(path, mmap_mode="r")

    def __reduce__(self) -> tuple[Any, ...]:
        options = self.sequence_length, self.identity["reference"], self._values, self.is_held_out
        return Unpaired, (self.directory, *options)

    def of_epoch(self, epoch: int) -> "Unpaired":
        """Returns the rows of an epoch, in which each row has a different mismatched answer."""
        return view_of(self, epoch=epoch)

    def of_batch(self, ids: np.ndarray) -> tuple["Unpaired", np.ndarray]:
        """Returns the rows of a global batch as a dataset, and its ids. The row before the first is the last.

        The only row of a batch has the mismatched answer of the row before it in the data.
        """
        others = self.other_ids[ids] if self.is_held_out or len(ids) == 1 else np.roll(ids, 1)
        return view_of(self, row_ids=ids, other_ids=others), np.arange(len(ids))

    def __getitem__(self, index: int) -> Labelled:
        own, other = int(self.row_ids[index]), int(self.other_ids[index])
        prompt, end = self.row(own)["prompt"], self.sequence_length + 1
        answers = tuple(np.concatenate([prompt, self.row(n)["completion"]])[:end] for n in (own, other))
        number = self.epoch * len(self) + own
        reference = np.zeros(2, np.float32) if self._reference is None else np.array(self._reference[number])
        return Labelled(answers, number, reference, int(self._labels[own]))

    @property
    def num_prompts(self) -> int:
        return int(self._labels.sum()) or len(self)

    def prompt(self, index: int) -> tuple[list[int], list[int] | None]:
        """Returns the token ids of a prompt, and of its desirable answer; only if there is none, of no answer."""
        row = self.row(np.flatnonzero(self._labels)[index] if self._labels.any() else index)
        prompt, answer = (token_ids(stored).tolist() for stored in row.values())
        return prompt, answer[: self.sequence_length + 1 - len(prompt)] if self._labels.any() else None

    def dummy_sample(self) -> Labelled:
        """Returns a sample of one token, which belongs to no row."""
        sample = self[0]
        return Labelled(tuple(answer[:1] for answer in sample.answers), None, sample.reference)

    def sequence_lengths(self, ids: np.ndarray) -> np.ndarray:
        """Returns the number of input tokens of both sequences of these rows, int64 (2 n,)."""
        own, other = self.row_ids[ids], self.other_ids[ids]
        prompts, answers = super().lengths(own)[:, 0], [super(Unpaired, self).lengths(n)[:, 1] for n in (own, other)]
        return np.minimum(np.stack([prompts + n - 1 for n in answers], 1), self.sequence_length).ravel()

    def lengths(self, ids: np.ndarray) -> np.ndarray:
        """Returns the number of input tokens of each row, with both sequences padded to equal length, int64 (n,)."""
        return 2 * self.sequence_lengths(ids).reshape(-1, 2).max(1)

    def num_targets(self, ids: np.ndarray) -> np.ndarray:
        """Returns 1 for each row, int64."""
        return np.ones(len(ids), np.int64)

    def num_predicted(self, ids: np.ndarray) -> np.ndarray:
        """Returns the number of predicted tokens of each row, in both sequences together, int64."""
        prompts = super().lengths(self.row_ids[ids])[:, 0]
        return (self.sequence_lengths(ids).reshape(-1, 2) + 1 - prompts[:, None]).sum(1)

    def describe(self) -> str:
        """Returns the description of the rows for the run summary."""
        meta, number = self.meta, len(self)
        line = f"{name_and_columns(meta)}: {number:,} answers, {meta['desirable']:,} desirable and "
        line += f"{number - meta['desirable']:,} not, a prompt with an answer at most {meta['max_length']} tokens"
        line += f"; {meta['truncated']:,} truncated at {self.sequence_length}" if meta["truncated"] else ""
        line += f"; {meta['dropped']:,} skipped, whose answer begins after that length" if meta["dropped"] else ""
        line += f"; {meta['empty']:,} answers are empty: only their end counts" if meta["empty"] else ""
        return f"\n{'':12}".join([line, *meta["notes"]])


def collate_unpaired(
    samples: list[Labelled], pad_token_id: int, objective: Objective, multiple_of: int = 1
) -> dict[str, torch.Tensor]:
    """Pads P rows on the right into one micro-batch, each with its own and with the mismatched answer.

    Returns (integers are int64):
        `input_ids` (P, L), `target_tokens` (N,), `target_rows` (N,) and `target_places` (P, T) of the own answers, as
        in `preferences.collate_preferences`; and of the mismatched answers, with the prefix `target_mismatched_`.
        `targets` (P,): the labels; `target_pairs` (P,): the numbers; `target_reference` (P, 2); and `target_loss_kto`.
    """
    real = [sample for sample in samples if sample.number is not None]
    own, mismatched = (
        pad_rows([sample.answers[n] for sample in samples], pad_token_id, max(1, multiple_of // 2))[0] for n in (0, 1)
    )
    for padded in (own, mismatched):
        padded["target_places"] = padded["target_places"][: len(real)]
    micro_batch = own | {f"target_mismatched_{name}": array for name, array in mismatched.items()}
    micro_batch |= {
        "targets": np.array([sample.label for sample in real], np.float32),
        "target_pairs": np.array([sample.number for sample in real], np.int64),
        "target_reference": np.array([sample.reference for sample in real], samples[0].reference.dtype).reshape(-1, 2),
    }
    tensors = {name: torch.from_numpy(array) for name, array in micro_batch.items()}
    return tensors | {"target_loss_kto": torch.tensor(objective.options)}
