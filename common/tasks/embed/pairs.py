"""Turns rows of texts that belong together into pairs: an anchor, a positive, and optionally negatives or a score.

    pairs = tokenize_pairs(Source(files=("pairs.jsonl",)), Columns("anchor", "positive"), tokenizer, length=128)
    texts, ids = pairs.of_batch(np.array([3, 1]))  # anchors, then positives, then negatives
    micro_batch = collate_texts([texts[0], texts[2]], tokenizer.pad_token_id, ("attention_mask",))

The ranks and micro-batches share the texts of a global batch, not its pairs: texts of similar length are together.
"""

import hashlib
import itertools
import math
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from common.data.cache import cached
from common.data.column_checks import unused_columns
from common.data.empty_rows import no_row_left, text_batches
from common.data.python_functions import derived_corpus, find_docstring, first_line
from common.data.row_texts import text_of
from common.data.source_types import Corpus, Row, Source, name_and_columns
from common.data.sources import check_columns, open_source
from common.data.token_store import TokenStore, TokenWriter
from common.data.tokenizer import no_more_threads, tokenizer_identity
from common.data.too_long import is_left_out
from common.data.truncation import find_truncated
from common.errors import UserError, raise_errors
from common.training.recipe_traits import Arguments
from common.training.token_rows import pad_rows

# Names of anchor and positive in datasets: usual pairs, the most specific first, then all others.
ANCHORS = ("anchor", "query", "question", "sentence1", "source")
POSITIVES = ("positive", "passage", "document", "answer", "sentence2", "target")
KNOWN = (
    ("anchor", "positive"),
    ("query", "positive"),
    ("query", "passage"),
    ("sentence1", "sentence2"),
    ("question", "answer"),
    *itertools.product(ANCHORS, POSITIVES),
)
FORMAT = 3  # increase this when the meaning of a cached file changes
FLAGS = "--anchor_column, --positive_column, --negative_columns, --score_column"


class Columns(NamedTuple):
    """Names of the columns. negatives: each has a text or a list of texts; score: a number, higher if more similar."""

    anchor: str
    positive: str
    negatives: tuple[str, ...] = ()
    score: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Returns all columns."""
        return (self.anchor, self.positive, *self.negatives, *([self.score] if self.score else []))


def choose_columns(args: Arguments, source: Source, trained: Columns | None = None) -> Columns:
    """Returns the columns that the flags name, or those with a known name. Raises UserError: a column is missing.

    trained: those of the training data, if these are held-out data, which need a score if the training data have one.
    """
    if source.parts:
        raise UserError("files of pairs cannot be mixed by weights; remove the weights from --train_file")
    if source.embedded:
        return Columns(*KNOWN[0])
    corpus = open_source(source)
    known = [(args.anchor_column or anchor, args.positive_column or positive) for anchor, positive in KNOWN]
    pair = max(known, key=lambda pair: len(set(pair) & set(corpus.columns)))
    numbered = [name for name in corpus.columns if name.startswith("negative_") and name[9:].isdigit()]
    found = [*(["negative"] * ("negative" in corpus.columns)), *sorted(numbered, key=lambda name: int(name[9:]))]
    score = args.score_column or ("score" if "score" in corpus.columns and args.loss != "contrastive" else None)
    if trained is not None:
        score, found = trained.score, [] if trained.score else found
    negatives = tuple(args.negative_columns or found)
    if args.loss == "cosent" and not score:
        raise UserError(f"{corpus.name}: --loss cosent needs a score for each pair; name its --score_column")
    columns = Columns(*pair, negatives, score)
    check_columns(corpus, columns.names, FLAGS)
    if score and negatives:
        raise UserError(
            f"{corpus.name}: has negatives ({', '.join(negatives)}) and a {score}, but a loss uses only one of them; "
            "remove one of these columns, or pass --loss contrastive"
        )
    return columns


def tokenize_pairs(
    source: Source,
    columns: Columns,
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    prompts: tuple[str, str] = ("", ""),
    cache_dir: str | Path | None = None,
) -> "Pairs":
    """Tokenises the rows of a source once into the cache and opens the result.

    In the embedded corpus, the anchor is the first line of a function's docstring, and the positive is its body.
    A pair with an empty anchor or positive is left out, and an empty negative is none.

    Args:
        length: maximum number of tokens of a text, including special tokens; longer texts are truncated.
        prompts: texts before each anchor, and before each positive and negative.

    Raises UserError with file and location if something cannot be read or is no text.
    """
    corpus = open_source(source)
    if source.embedded:
        corpus = derived_corpus(corpus, source.text_column, columns.names, split_function)
    check_columns(corpus, columns.names, FLAGS)
    directory = cached(
        "embedding-pairs",
        [FORMAT, corpus.identity, columns, tokenizer_identity(tokenizer), length, prompts, source.on_too_long],
        lambda partial: _write_pairs(partial, corpus, columns, tokenizer, length, prompts, source.on_too_long),
        cache_dir,
    )
    no_more_threads()
    return Pairs(directory)


def tokenize_held_out(args: Arguments, source: Source, trained: Columns, *options: Any) -> "Pairs":
    """Returns `tokenize_pairs` of held-out data, which may have no negatives, and other known names of columns."""
    return tokenize_pairs(source, choose_columns(args, source, trained), *options)


def split_function(function: str) -> tuple[str, str] | None:
    """Returns (first line of a function's docstring, the lines after it), or None if it has no docstring."""
    docstring, _, end = find_docstring(function) or ("", 0, 0)
    first = first_line(docstring)
    return (first, "\n".join(function.split("\n")[end:])) if first else None


def _negatives_of(row: Row, columns: tuple[str, ...]) -> list[str]:
    """Returns the negatives in all columns; null, an empty text and an empty list are none."""
    texts = []
    for column in columns:
        value = row.values.get(column)
        for item in value if isinstance(value, list) else [] if value is None else [value]:
            texts.append(text_of(row._replace(values={column: item}), column))
    return [text for text in texts if text.strip()]


def _score_of(row: Row, column: str) -> float:
    value = row.values.get(column)
    try:
        score = math.nan if isinstance(value, bool) else float(value)  # type: ignore[arg-type]  # None raises
    except (TypeError, ValueError, OverflowError):
        score = math.nan
    if not math.isfinite(score):
        raise UserError(f"{row.where}: column {column} is {value!r}, not a finite number; fix or remove the row")
    return score


def _write_pairs(
    directory: Path,
    corpus: Corpus,
    columns: Columns,
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    prompts: tuple[str, str],
    on_too_long: str | None,
) -> None:
    """Fills a store with the texts of each pair, and columns: hash of each text, end and score of each pair."""
    counts = Counter(dict.fromkeys(("pairs", "negatives", "truncated", "too_long", "empty", "max_length"), 0))
    seen: dict[str, set] = {"anchors": set(), "positives": set(), "scores": set()}
    with TokenWriter(directory, hashes=[], ends=[0], scores=[]) as writer:
        for batch in text_batches(corpus, columns.names, columns[:2], counts):
            groups = []
            for row, (anchor, *others) in batch:  # others: the positive, then the negatives
                others += _negatives_of(row, columns.negatives)
                groups.append([prompts[0] + anchor, *(prompts[1] + text for text in others)])
            limit = {"truncation": True, "max_length": length, "return_token_type_ids": False}
            every = list(itertools.chain(*groups))
            encoded = tokenizer(every, return_attention_mask=False, **limit)
            truncated = find_truncated(tokenizer, encoded, length, every)
            # Some tokenizers return no token for a text of unknown characters.
            tokens = (np.array(ids or [tokenizer.pad_token_id], np.int32) for ids in encoded["input_ids"])
            start = 0  # number of the row's first text
            for (row, _), group in zip(batch, groups, strict=True):
                texts, numbers = list(itertools.islice(tokens, len(group))), range(start, start + len(group))
                start, full = numbers.stop, [truncated[number] for number in numbers if number in truncated]
                if full and is_left_out(on_too_long, row.where, "a text", max(full), "sequence_length", length):
                    counts["too_long"] += 1
                    continue
                counts["truncated"] += len(full)
                hashes = [hashlib.blake2b(ids.tobytes(), digest_size=8).digest() for ids in texts]
                score = _score_of(row, columns.score) if columns.score else 0.0
                counts["pairs"] += 1
                counts["negatives"] += len(group) - 2
                counts["max_length"] = max(counts["max_length"], *map(len, texts))
                writer.append(
                    *texts,
                    hashes=[int.from_bytes(digest, "little", signed=True) for digest in hashes],
                    ends=[2 * counts["pairs"] + counts["negatives"]],
                    scores=[int(np.float64(score).view(np.int64))],
                )
                for values, item in zip(seen.values(), (*hashes[:2], score), strict=True):
                    if len(values) < 2:  # two are enough to know that they differ
                        values.add(item)
        if not counts["pairs"]:
            reasons = {f"have more than {length} tokens": counts["too_long"], "have an empty text": counts["empty"]}
            raise no_row_left(corpus, columns[:2], reasons)
        differ = {name: len(values) > 1 for name, values in seen.items()}
        facts = {"columns": columns.names, "scored": columns.score is not None, "length": length, "differ": differ}
        writer.finish(counts, name=corpus.name, **facts, unused=unused_columns(corpus))


def _ranges(starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Returns the concatenated integers from each start up to its end, int64."""
    counts = ends - starts
    return np.repeat(ends - np.cumsum(counts), counts) + np.arange(counts.sum())


class Text(NamedTuple):
    """A text of a global batch. A dummy text has no position."""

    ids: np.ndarray  # int64 (length,)
    position: int | None  # among the texts of the global batch: anchors, then positives, then negatives
    number: int = 0  # equal texts of the global batch have equal numbers
    score: float = 0.0  # of the pair
    is_anchor: bool = True


class Pairs:
    """Memory-mapped pairs: a `batching.Samples`. A pair counts as one target, because the loss is a mean over pairs."""

    unit = "tokens"

    def __init__(self, directory: str | Path) -> None:
        self.directory, self._texts = Path(directory), TokenStore(directory)
        self.meta = self._texts.meta
        self._hashes, self._ends = self._texts.column("hashes"), self._texts.column("ends")
        self._scores = self._texts.column("scores").view(np.float64)
        self.num_target_tokens, self.max_length = self.meta["pairs"], self.meta["max_length"]
        self.is_scored, self.differ = self.meta["scored"], self.meta["differ"]
        self.num_negatives = self.meta["negatives"]
        self.fingerprint = self.meta["content"]  # equal if all pairs are equal, independent of the file location

    def __reduce__(self) -> tuple[Any, ...]:
        return Pairs, (self.directory,)  # each data worker maps the files itself

    def __len__(self) -> int:
        return len(self._ends) - 1

    def texts_of(self, ids: np.ndarray) -> np.ndarray:
        """Returns the stored numbers of these pairs' texts, int64: anchors, then positives, then negatives by pair."""
        starts, ends = self._ends[ids], self._ends[np.asarray(ids) + 1]
        return np.concatenate([starts, starts + 1, _ranges(starts + 2, ends)])

    def texts_per_pair(self) -> np.ndarray:
        """Returns the number of texts of each pair, int64 (pairs,)."""
        return np.diff(self._ends)

    def text_lengths(self, texts: np.ndarray) -> np.ndarray:
        """Returns the number of tokens of texts, int64. texts: stored numbers."""
        return self._texts.lengths(texts)[:, 0]

    def of_batch(self, ids: np.ndarray) -> tuple["BatchTexts", np.ndarray]:
        """Returns the texts of these pairs as a dataset, and its ids."""
        texts = BatchTexts(self, ids)
        return texts, np.arange(len(texts))

    def __getitem__(self, index: int) -> Text:
        """Returns the longest text of a pair, as an anchor, for predictions of memory."""
        texts = self.texts_of(np.array([index]))
        return Text(self.tokens(texts[self.text_lengths(texts).argmax()]), 0)

    def tokens(self, text: int) -> np.ndarray:
        """Returns the tokens of a text, int64 (length,). text: stored number."""
        return self._texts.row(text)["tokens"].astype(np.int64)

    def dummy_sample(self) -> Text:
        """Returns a text of one token, which has no vector."""
        return Text(self.tokens(0)[:1], None, is_anchor=False)

    def lengths(self, ids: np.ndarray) -> np.ndarray:
        """Returns the number of tokens of the longest text of each pair, int64."""
        starts, ends = self._ends[ids], self._ends[np.asarray(ids) + 1]
        firsts = np.cumsum(ends - starts) - (ends - starts)
        return np.maximum.reduceat(self.text_lengths(_ranges(starts, ends)), firsts)

    def sequence_lengths(self, ids: np.ndarray) -> np.ndarray:
        """Returns the number of tokens of each text of these pairs, int64."""
        return self.text_lengths(self.texts_of(ids))

    def num_targets(self, ids: np.ndarray) -> np.ndarray:
        """Returns 1 for each pair, int64."""
        return np.ones(len(ids), np.int64)

    def describe(self) -> str:
        """Returns the description of the pairs for the run summary."""
        meta = self.meta
        number = 2 * len(self) + meta["negatives"]
        line = f"{name_and_columns(meta)}: {len(self):,} pairs"
        line += f" with {meta['negatives']:,} negatives" if meta["negatives"] else ""
        line += f", texts of {meta['tokens'] / number:,.0f} tokens on average, at most {self.max_length}"
        line += f"; {meta['truncated']:,} truncated at {meta['length']}" if meta["truncated"] else ""
        line += f"; {meta['too_long']:,} pairs with longer texts left out" if meta["too_long"] else ""
        line += f"; {meta['empty']:,} pairs with an empty text left out" if meta["empty"] else ""
        return line + (f"\n{'':12}{meta['unused']}" if meta["unused"] else "")


class BatchTexts:
    """The texts of a global batch, in the order of `Pairs.texts_of`: a `batching.Samples` of a single batch."""

    def __init__(self, pairs: Pairs, ids: np.ndarray) -> None:
        self.pairs, self.num_pairs, self._texts = pairs, len(ids), pairs.texts_of(ids)
        self.numbers = np.unique(pairs._hashes[self._texts], return_inverse=True)[1]
        self.scores = pairs._scores[ids]
        self.dummy_sample = pairs.dummy_sample

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, index: int) -> Text:
        position = int(index)
        is_anchor = position < self.num_pairs
        score = float(self.scores[position]) if is_anchor else 0.0
        tokens = self.pairs.tokens(self._texts[position])
        return Text(tokens, position, int(self.numbers[position]), score, is_anchor)

    def lengths(self, ids: np.ndarray) -> np.ndarray:
        """Returns the number of tokens of texts, int64."""
        return self.pairs.text_lengths(self._texts[ids])

    def num_targets(self, ids: np.ndarray) -> np.ndarray:
        """Returns 1 for each anchor and 0 for other texts, int64."""
        return (np.asarray(ids) < self.num_pairs).astype(np.int64)


def collate_texts(
    samples: list[Text], pad_token_id: int, inputs: tuple[str, ...], multiple_of: int = 1
) -> dict[str, torch.Tensor]:
    """Pads B texts on the right into one micro-batch; R of them are not dummies.

    Returns (integers are int64):
        `input_ids` (B, L), and `attention_mask` (B, L) if it is in `inputs` and there is padding.
        `target_lengths` (B,): tokens of each text. `target_rows` (R,): rows that are not dummies.
        `target_positions` (R,) in the global batch. `target_facts` (R, 2), float32: number and score of each text.
        `targets`: ones, for the anchors among the texts.
    """
    pad, real = partial(pad_rows, multiple_of=multiple_of), [text for text in samples if text.position is not None]
    tensors = {
        "input_ids": pad([torch.from_numpy(text.ids) for text in samples], padding_value=pad_token_id),
        "attention_mask": pad([torch.ones(len(text.ids), dtype=torch.int64) for text in samples]),
    }
    if "attention_mask" not in inputs or tensors["attention_mask"].all():
        del tensors["attention_mask"]
    return tensors | {
        "target_lengths": torch.tensor([len(text.ids) for text in samples]),
        "target_rows": torch.tensor([row for row, text in enumerate(samples) if text.position is not None]).long(),
        "target_positions": torch.tensor([text.position for text in real]).long(),
        "target_facts": torch.tensor([[text.number, text.score] for text in real]).float().view(-1, 2),
        "targets": torch.ones(sum(text.is_anchor for text in real), dtype=torch.int64),
    }


def check_loss(args: Arguments) -> Iterator[str]:
    """Yields one line for each flag that does not fit --loss."""
    if args.loss == "contrastive" and args.score_column:
        yield f"--score_column {args.score_column} has no effect with --loss contrastive; remove one of them"
    if args.loss == "cosent" and args.symmetric:
        yield "--symmetric has no effect with CoSENT, the loss of pairs with a score; remove it"
    if args.loss == "cosent" and not args.normalize:
        yield "--no-normalize: CoSENT, the loss of pairs with a score, compares cosines; remove it"


def check_pairs(args: Arguments, pairs: Pairs) -> None:
    """Sets the default of --loss. Raises UserError: a flag does not fit it, or nothing can be learned from pairs."""
    args.loss, location = "cosent" if pairs.is_scored else "contrastive", pairs.meta["name"]
    raise_errors(check_loss(args))
    if pairs.is_scored and not pairs.differ["scores"]:
        raise UserError(f"{location}: all scores are equal, so no order can be learned; use pairs of different scores")
    if not pairs.is_scored and not pairs.num_negatives and not pairs.differ["positives"]:
        raise UserError(f"{location}: all positives are equal, so nothing can be learned; use others, or add negatives")
    if not pairs.is_scored and not pairs.num_negatives and not pairs.differ["anchors"]:
        raise UserError(f"{location}: all anchors are equal, so nothing can be learned; use others, or add negatives")
    if args.global_batch_size == 1 and not pairs.num_negatives:
        raise UserError("--global_batch_size 1: the loss compares the pairs of a global batch; use at least 2")
