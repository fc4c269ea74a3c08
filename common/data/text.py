"""Turns text into samples of a language model: tokenised once into a cache, then memory-mapped from it.

    tokenizer = train_tokenizer(Source(embedded="train"), vocab_size=8192)
    samples = tokenize(Source(embedded="train"), tokenizer, sequence_length=512)
    input_ids, targets, target_rows = samples[0]

Tokens that are not targets are stored as their bitwise complement: those of a prompt or of a user's turn, and the first
token of a stream or an example.
"""

import gzip
import lzma
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from common.data.cache import cached
from common.data.column_selection import batches, choose_columns, text_of, watched
from common.data.corpus_facts import Encoded, corpus_facts, with_end_of_text
from common.data.source_types import Corpus, Row, Source
from common.data.sources import open_source
from common.data.token_store import TokenStore, TokenWriter, mark_targets, split_targets
from common.data.tokenizer import (
    check_end_of_text,
    encode_plain,
    no_more_threads,
    special_tokens_around,
    tokenizer_identity,
    with_messages,
)
from common.errors import UserError, main_logger

if TYPE_CHECKING:
    from common.data.mixed import Mixed

logger = main_logger(__name__)
COMPRESSED_BYTES = 64 << 20  # xz needs a minute for this size; larger held-out texts are not compressed


def _encode_stream(
    rows: Iterator[list[Row]], column: str, tokenizer: PreTrainedTokenizerBase, counts: Counter
) -> Iterator[tuple[list[int], str]]:
    """Yields (tokens, text) pieces of the document stream, each encoded as by `tokenizer(document)`, then eos.

    If the tokenizer adds nothing or eos before a document, the eos of the previous document takes this role. Every
    token except the first of the stream is a target.
    """
    begin, end = special_tokens_around(tokenizer)
    end = with_end_of_text(end, tokenizer.eos_token_id)
    inside = False  # the previous row's document continues in this row
    if begin[:1] in ([], [tokenizer.eos_token_id]):
        begin = begin[1:]
        yield [tokenizer.eos_token_id], ""
    for batch in rows:
        texts = [text_of(row, column) for row in batch]
        counts["bytes"] += sum(len(text.encode()) for text in texts)
        for row, text, ids in zip(batch, texts, encode_plain(tokenizer, texts)["input_ids"], strict=True):
            if not text and not inside and not row.continues:
                counts["dropped"] += 1
                continue
            yield (ids if inside else begin + ids) + ([] if row.continues else end), text
            inside = row.continues
            counts["documents"] += not row.continues


def encode_texts(
    batch: list[Row], columns: tuple[str, ...], tokenizer: PreTrainedTokenizerBase, counts: Counter
) -> Iterator[Encoded]:
    """Yields (ids, target mask, text) per row: a text and eos, or with two columns a prompt, a completion and eos.

    Targets are all tokens of the text and eos, or the completion and eos. The text or the prompt is encoded as
    `tokenizer(text)` does; special tokens before a text are not targets. Prompt and completion are tokenised
    separately. At inference, the prompt is tokenised without the completion, so the model would never see a token
    across the boundary. A completion without a prompt follows eos, unless the tokenizer adds other tokens before it.
    """
    before, behind = special_tokens_around(tokenizer)
    texts = [[text_of(row, column) for row in batch] for column in columns]
    ids = [encode_plain(tokenizer, column)["input_ids"] for column in texts]
    for number in range(len(batch)):
        text = "".join(column[number] for column in texts)
        given, learned = before, ids[0][number] + behind
        if len(columns) == 2:
            # A first token cannot be a target, because no token precedes it.
            given, learned = before + ids[0][number] + behind or [tokenizer.eos_token_id], ids[1][number]
            counts["empty"] += bool(text) and not learned
        learned = with_end_of_text(learned, tokenizer.eos_token_id) if text else []
        yield given + learned, [False] * len(given) + [True] * len(learned), text


def tokenize(
    source: Source,
    tokenizer: PreTrainedTokenizerBase,
    sequence_length: int,
    shape: str | None = None,
    cache_dir: str | Path | None = None,
    measure_compression: bool = False,
) -> "Samples | Mixed":
    """Tokenises a source once and opens the result; if many processes call this, one works and the others wait.

    A chat template of the source replaces the tokenizer's.

    Args:
        sequence_length: maximum number of input tokens per sample.
        shape: "blocks" concatenates the documents and splits the stream: every token except the very first is a target
            once. "examples" makes one sample of each row, truncated to sequence_length. None means examples if the
            columns are `messages` or `prompt` and `completion`, otherwise blocks.
        measure_compression: for held-out text: save its size after gzip -9 and xz -9, if it is at most 64 MiB.

    Raises UserError with file and location if something cannot be read or yields no sample.
    """
    if source.parts:
        from common.data.mixed import Mixed

        how = (tokenizer, sequence_length, shape, cache_dir, measure_compression)
        return Mixed({part.files[0]: tokenize(part, *how) for part in source.parts}, source.weights)
    check_end_of_text(tokenizer)
    tokenizer.chat_template = source.chat_template or tokenizer.chat_template
    opened = open_source(source)
    corpus = with_messages(opened, source, shape, bool(tokenizer.chat_template))
    shape, columns = choose_columns(corpus, source, shape)
    corpus = watched(corpus, columns) if corpus is opened else corpus
    if source.chat_template and columns != ("messages",):
        logger.warning("%s: --chat_template has no effect on it, for its rows hold no messages", corpus.name)
    how = (corpus, shape, columns, tokenizer, sequence_length, measure_compression)
    directory = cached(
        "samples",
        [corpus.identity, shape, columns, tokenizer_identity(tokenizer), measure_compression]
        + ([sequence_length] if shape == "examples" else []),  # blocks are split when they are read
        lambda partial: _write_samples(partial, *how),
        cache_dir,
    )
    no_more_threads()
    return Samples(directory, sequence_length)


def _write_samples(
    directory: Path,
    corpus: Corpus,
    shape: str,
    columns: tuple[str, ...],
    tokenizer: PreTrainedTokenizerBase,
    sequence_length: int,
    measure_compression: bool,
) -> None:
    """Fills a store: a stream for blocks; for examples also the column target_counts, a running sum.

    Raises UserError if no sample has a target.
    """
    is_chat, is_blocks = columns == ("messages",), shape == "blocks"
    is_text = len(columns) == 1 and not is_chat
    counts = Counter(dict.fromkeys(("documents", "targets", "bytes", "truncated", "dropped", "empty", "max_length"), 0))
    whole_text = bytearray()  # kept in memory, up to about COMPRESSED_BYTES
    rows = batches(corpus, columns, is_blocks)
    if is_blocks:
        samples = _encode_stream(rows, columns[0], tokenizer, counts)
    else:
        if is_chat:
            from common.data.chats import encode_chats

            encoded = (encode_chats(batch, tokenizer, counts) for batch in rows)
        else:
            encoded = (encode_texts(batch, columns, tokenizer, counts) for batch in rows)
        samples = _stored_examples(chain.from_iterable(encoded), sequence_length, counts)
    with TokenWriter(directory, is_blocks, **({} if is_blocks else {"target_counts": [0]})) as writer:
        for tokens, text in samples:
            if is_blocks and not writer.num_tokens:
                tokens[0] = ~tokens[0]
            writer.append(tokens, **({} if is_blocks else {"target_counts": [counts["targets"]]}))
            if measure_compression and is_text and len(whole_text) <= COMPRESSED_BYTES:
                whole_text.extend(text.encode())
        if is_blocks and counts["documents"]:
            counts["targets"] = writer.num_tokens - 1
        if counts["targets"] == 0:
            raise UserError(
                f"{corpus.name}: no sample with a target in it ({counts['dropped']} rows were empty or all prompt); "
                "give more text, or raise --sequence_length"
            )
        is_compressed = measure_compression and is_text and len(whole_text) <= COMPRESSED_BYTES
        writer.finish(
            counts,
            **corpus_facts(corpus, columns, counts, tokenizer),
            shape=shape,
            # True if each byte of the text belongs to exactly one target, so that the loss can be given in bits per
            # byte.
            whole_text=is_text and not counts["truncated"] and (is_blocks or bool(special_tokens_around(tokenizer)[0])),
            gzip_bytes=len(gzip.compress(whole_text, 9)) if is_compressed else None,
            xz_bytes=len(lzma.compress(whole_text, preset=9)) if is_compressed else None,
        )


def _stored_examples(
    encoded: Iterator[Encoded], sequence_length: int, counts: Counter
) -> Iterator[tuple[np.ndarray, str]]:
    """Yields (tokens as stored, text) of the examples that have a target."""
    for ids, is_target, text in encoded:
        stored = mark_targets(ids, is_target, sequence_length)
        num_targets = int((stored >= 0).sum())
        if not num_targets:
            counts["dropped"] += 1
            continue
        counts["documents"] += 1
        counts["targets"] += num_targets
        counts["bytes"] += len(text.encode())
        counts["truncated"] += len(ids) > len(stored)
        counts["max_length"] = max(counts["max_length"], len(stored) - 1)
        yield stored, text


class Samples(TokenStore):
    """Memory-mapped samples. Item i is (input_ids, targets, target_rows), int64.

    targets[j] is the token to predict after input_ids[target_rows[j]]. Block b reads stream[b*S : (b+1)*S] and predicts
    stream[b*S+1 : (b+1)*S+1]; the last block is shorter.
    """

    unit = "tokens"

    def __init__(self, directory: str | Path, sequence_length: int) -> None:
        super().__init__(directory, block_length=sequence_length)
        self.sequence_length, self.is_blocks, meta = sequence_length, self.is_stream, self.meta
        self._target_counts = None if self.is_blocks else self.column("target_counts")
        self.num_tokens = meta["tokens"] - (1 if self.is_blocks else len(self))  # input tokens of all samples
        self.num_target_tokens = meta["targets"]
        self.num_dropped = meta["dropped"]  # rows that were empty or contained only a prompt within the length
        self.max_length = meta["max_length"] or min(sequence_length, self.num_tokens)  # inputs of the longest sample
        # UTF-8 bytes of the text, to convert a loss to bits per byte; None if the targets do not cover all of it.
        self.num_bytes = meta["bytes"] if meta["whole_text"] else None
        self.gzip_bytes, self.xz_bytes = meta["gzip_bytes"], meta["xz_bytes"]  # None if not measured
        self.end_tokens = meta["end_tokens"]  # targets that end a text or an answer, the most frequent first
        self.fingerprint = f"{meta['content']}-{sequence_length}"  # equal if all samples are equal

    def __reduce__(self) -> tuple[Any, ...]:
        return Samples, (self.directory, self.sequence_length)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        ids, targets, target_rows = split_targets(self.row(index)["tokens"])
        return ids[:-1], targets, target_rows

    def dummy_sample(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns a sample of one token without a target."""
        return self[0][0][:1], np.zeros(0, np.int64), np.zeros(0, np.int64)

    def lengths(self, ids: np.ndarray) -> np.ndarray:
        """Returns the input tokens of each sample, int64, without reading a token."""
        return super().lengths(ids)[..., 0] - 1

    def num_targets(self, ids: np.ndarray) -> np.ndarray:
        """Returns the targets of each sample, int64, without reading a token."""
        if self.is_blocks:
            return self.lengths(ids)
        ids = np.asarray(ids, np.int64)
        return self._target_counts[ids + 1] - self._target_counts[ids]

    def describe(self) -> str:
        """Returns the description of the samples for the run summary."""
        meta = self.meta
        what = f"examples of {self.num_tokens / len(self):,.0f} tokens on average, at most {self.max_length}"
        if self.is_blocks:
            what = f"blocks of {self.sequence_length} tokens from {meta['documents']:,} documents"
        losses = [f"{meta['truncated']:,} cut at {self.sequence_length}"] if meta["truncated"] else []
        losses += [f"{meta['dropped']:,} empty or without a target left out"] if meta["dropped"] else []
        line = f"{meta['name']} ({', '.join(meta['columns'])}): {len(self):,} {what}; "
        line += f"{self.num_target_tokens:,} targets, {self.meta['bytes']:,} bytes of text"
        lines = ["; ".join([line, *losses])]
        if meta["empty"]:
            lines.append(f"{meta['empty']:,} rows have an empty completion: nothing but its end is learned of it")
        if not meta["end_tokens"]:
            lines.append("no answer ends with a token of its own: the model will not know where to stop")
        lines += meta["notes"]
        return f"\n{'':12}".join(lines)
