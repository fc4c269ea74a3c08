"""Turns preference pairs into samples of a reward model: prompt with chosen answer, and prompt with rejected answer.

pairs = tokenize_pairs(Source(files=("train.jsonl",)), tokenizer, length=512)
micro_batch = collate_pairs([pairs[0], pairs[1]], tokenizer.pad_token_id, ("attention_mask",))
"""

import math
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from common.data.cache import cached
from common.data.chats import start_rendering
from common.data.preference_rows import ANSWERS
from common.data.preferences import columns_of, encode_pairs, open_preferences
from common.data.sample_writing import corpus_facts
from common.data.source_types import Corpus, Row, Source, name_and_columns
from common.data.token_store import TokenStore, TokenWriter
from common.data.tokenizer import no_more_threads, tokenizer_identity
from common.data.too_long import describe_losses, is_left_out
from common.errors import UserError
from common.training.token_rows import pad_rows

MARGIN = "margin"  # name of the optional column


def tokenize_pairs(
    source: Source, tokenizer: PreTrainedTokenizerBase, length: int, cache_dir: str | Path | None = None
) -> "RewardPairs":
    """Tokenises the rows of a source once into the cache and opens the result.

    A row is a pair as in `data.preferences`, and may have a number in the column `margin`. Pairs whose sequences are
    equal within `length` are skipped.

    Args:
        length: maximum number of tokens of a prompt with an answer; longer sequences are truncated at the end, except
            with another `Source.on_too_long`.

    Raises UserError with file and location if something cannot be read or yields no sample.
    """
    corpus = open_preferences(source, tokenizer)
    columns = columns_of(corpus)
    has_margin = MARGIN in corpus.columns
    directory = cached(
        "reward-pairs",
        [corpus.identity, columns, has_margin, tokenizer_identity(tokenizer), length, source.on_too_long],
        lambda partial: _write(partial, corpus, columns, has_margin, tokenizer, length, source.on_too_long),
        cache_dir,
    )
    no_more_threads()
    return RewardPairs(directory, length)


def _read_margin(row: Row, has_margin: bool) -> float:
    """Returns the margin of a row, which must be a number that is finite in float32; 0 if the data has no margins."""
    margin = row.values.get(MARGIN)
    if not has_margin:
        if margin not in (None, ""):
            raise UserError(
                f"{row.where}: has a {MARGIN}, but the first row has none; give all rows a {MARGIN}, or none"
            )
        return 0.0
    if margin in (None, ""):
        raise UserError(f"{row.where}: column {MARGIN} is null; give all rows a {MARGIN}, or none")
    try:
        number = math.nan if isinstance(margin, bool) else float(margin)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not abs(number) <= float(np.finfo(np.float32).max):
        text = f"{margin!r}"[:100]
        raise UserError(f"{row.where}: column {MARGIN} is {text}, not a finite number; fix or remove the row")
    return number


def _write(
    directory: Path,
    corpus: Corpus,
    columns: tuple[str, ...],
    has_margin: bool,
    tokenizer: PreTrainedTokenizerBase,
    sequence_length: int,
    on_too_long: str | None,
) -> None:
    """Fills a store with rows of (chosen, rejected); the column `margin` has the bits of each margin in float64."""
    counts = Counter(dict.fromkeys(("pairs", "truncated", "equal", "max_length"), 0))
    with TokenWriter(directory, margin=[]) as writer, start_rendering() as process:
        for row, chosen, rejected in encode_pairs(corpus, columns, tokenizer, counts, process, others=(MARGIN,)):
            margin, answers = _read_margin(row, has_margin), (chosen[0], rejected[0])
            lengths = list(map(len, answers))
            longest = ANSWERS[lengths[1] > lengths[0]]
            limits = longest, max(lengths), "sequence_length", sequence_length
            if max(lengths) > sequence_length and is_left_out(on_too_long, row.where, *limits):
                counts["too_long"] += 1
                continue
            pair = [ids[:sequence_length] for ids in answers]
            if pair[0] == pair[1]:
                counts["equal"] += 1
                continue
            writer.append(*(ids or [tokenizer.eos_token_id] for ids in pair), margin=[_as_bits(margin)])
            counts["pairs"] += 1
            counts["truncated"] += sum(length > sequence_length for length in lengths)
            counts["max_length"] = max(counts["max_length"], *map(len, pair))
        losses = describe_losses(Counter({**counts, "empty": 0, "chats": 0}), sequence_length, "answers")
        if counts["equal"]:
            losses += f"; {counts['equal']:,} left out, because both answers are equal within {sequence_length} tokens"
        if not counts["pairs"]:
            raise UserError(
                f"{corpus.name}: no pair of answers that differ within --sequence_length {sequence_length}{losses}; "
                "use different data, or raise it"
            )
        used = (*columns, *[MARGIN] * has_margin)
        writer.finish(counts, **corpus_facts(corpus, used, counts, tokenizer), losses=losses)


def _as_bits(number: float) -> int:
    """Returns the float64 as the int64 with the same bits, because a token store has columns of integers."""
    return int(np.float64(number).view(np.int64))


class Pair(NamedTuple):
    """A sample: the ids of the prompt with each answer, int64, and the margin. A dummy sample has one answer."""

    answers: tuple[np.ndarray, ...]  # chosen, rejected
    margin: float | None  # None for a dummy sample


class RewardPairs(TokenStore):
    """Memory-mapped pairs: a `batching.Samples`. A pair counts as one target, because the loss is a mean over pairs."""

    unit = "tokens"

    def __init__(self, directory: str | Path, sequence_length: int) -> None:
        super().__init__(directory, ANSWERS)
        self.sequence_length, meta = sequence_length, self.meta
        self._margins = self.column(MARGIN).view(np.float64)
        self.num_target_tokens, self.max_length = meta["pairs"], 2 * meta["max_length"]
        self.fingerprint = f"{meta['content']}-{sequence_length}"  # equal if all pairs are equal

    def __reduce__(self) -> tuple[Any, ...]:
        return RewardPairs, (self.directory, self.sequence_length)

    def __getitem__(self, index: int) -> Pair:
        answers = tuple(ids.astype(np.int64) for ids in self.row(index).values())
        return Pair(answers, float(self._margins[index]))

    def dummy_sample(self) -> Pair:
        """Returns a sample of one token, which belongs to no pair."""
        return Pair((self[0].answers[0][:1],), None)

    def sequence_lengths(self, ids: np.ndarray) -> np.ndarray:
        """Returns the number of tokens of each of the two sequences of these pairs, int64 (2 n,)."""
        return super().lengths(ids).ravel()

    def lengths(self, ids: np.ndarray) -> np.ndarray:
        """Returns the number of tokens of each pair, with both sequences padded to equal length, int64 (n,)."""
        return 2 * super().lengths(ids).max(1)

    def num_targets(self, ids: np.ndarray) -> np.ndarray:
        """Returns 1 for each pair, int64."""
        return np.ones(len(ids), np.int64)

    def describe(self) -> str:
        """Returns the description of the pairs for the run summary."""
        meta = self.meta
        line = f"{name_and_columns(meta)}: {len(self):,} pairs, a prompt with an answer "
        line += f"{meta['tokens'] / len(self) / 2:,.0f} tokens on average, at most {meta['max_length']}"
        return f"\n{'':12}".join([line + meta["losses"], *meta["notes"]])


def collate_pairs(
    samples: list[Pair],
    pad_token_id: int,
    inputs: tuple[str, ...],
    center_rewards: float = 0.0,
    multiple_of: int = 1,
) -> dict[str, torch.Tensor]:
    """Pads P pairs on the right into one micro-batch; chosen and rejected answers alternate in adjacent rows.

    The two rows of a pair together have a multiple of `multiple_of` tokens.

    Returns:
        `input_ids` (B, L), int64; `attention_mask` (B, L) if it is in `inputs` and there is padding. B is 2 P, plus 1
            for each dummy sample.
        `targets` (P,): the margins, float32. `target_rows` (P, 2), int64: the rows of chosen and rejected answers.
        `target_center`: `center_rewards`, a scalar.
    """
    rows = [torch.from_numpy(ids) for sample in samples for ids in sample.answers]
    pad = partial(pad_rows, multiple_of=max(1, multiple_of // 2))
    tensors = {"input_ids": pad(rows, padding_value=pad_token_id)}
    if "attention_mask" in inputs and not (mask := pad([torch.ones_like(ids) for ids in rows])).all():
        tensors["attention_mask"] = mask
    starts = np.cumsum([0, *(len(sample.answers) for sample in samples)])
    real = [number for number, sample in enumerate(samples) if sample.margin is not None]
    return tensors | {
        "targets": torch.tensor([samples[number].margin for number in real], dtype=torch.float32),
        "target_rows": torch.from_numpy(starts[real][:, None] + np.arange(2)),
        "target_center": torch.tensor(center_rewards),
    }
