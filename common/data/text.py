"""How does text become the samples of a language model? Tokenised once into a cache, and memory-mapped from there.

    tokenizer = train_tokenizer(Source(embedded="train"), vocab_size=8192)
    samples = tokenize(Source(embedded="train"), tokenizer, sequence_length=512)
    input_ids, targets, target_rows = samples[0]

Not targets, and stored as their complement, are the tokens of a prompt or of a user's turn, and the first of all.
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
COMPRESSED_BYTES = 64 << 20  # xz takes a minute for this; more held-out text than that is not compressed


def _encode_stream(
    rows: Iterator[list[Row]], column: str, tokenizer: PreTrainedTokenizerBase, counts: Counter
) -> Iterator[tuple[list[int], str]]:
    """(tokens, text) pieces of the stream of documents, each as `tokenizer(document)` makes it, and eos.

    Where nothing else stands before a document, or eos, it is the eos of the one before. Every token is a target but
    the first of all.
    """
    begin, end = special_tokens_around(tokenizer)
    end = with_end_of_text(end, tokenizer.eos_token_id)
    inside = False  # a document has begun
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
    """Text and eos, all targets; with two columns prompt, completion and eos, the completion and eos targets.

    The text, or the prompt, as `tokenizer(text)` makes it: what this puts before a text is no target. Prompt and
    completion are tokenised apart: when the model is used, the prompt is tokenised without the completion, so a token
    that reaches over the boundary would never be seen there. Before a completion without a prompt comes eos, if nothing
    else does.
    """
    before, behind = special_tokens_around(tokenizer)
    texts = [[text_of(row, column) for row in batch] for column in columns]
    ids = [encode_plain(tokenizer, column)["input_ids"] for column in texts]
    for number in range(len(batch)):
        text = "".join(column[number] for column in texts)
        given, learned = before, ids[0][number] + behind
        if len(columns) == 2:
            # Nothing comes before a first token, so that it could not be learned.
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
    """Tokenises a source once and opens the result; of many processes that call this one works and the others wait.

    sequence_length: input tokens of a sample at most.
    shape: "blocks" joins the documents and cuts the stream: every token but the very first is a target once; "examples"
        makes one sample of each row, cut at sequence_length; None is examples for the columns `messages` or `prompt`
        and `completion`, else blocks.
    measure_compression: for held-out text: what gzip -9 and xz -9 make of it, if it is at most 64 MiB.

    A chat template of the source becomes the tokenizer's.

    Raises UserError that names file and place for whatever cannot be read or makes no sample.
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
        + ([sequence_length] if shape == "examples" else []),  # blocks are cut when they are read
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
    """Fills a store: for blocks a stream, for examples also the column target_counts, a running sum."""
    is_chat, is_blocks = columns == ("messages",), shape == "blocks"
    is_text = len(columns) == 1 and not is_chat
    counts = Counter(dict.fromkeys(("documents", "targets", "bytes", "truncated", "dropped", "empty", "max_length"), 0))
    whole_text = bytearray()  # in memory, but for what is beyond COMPRESSED_BYTES
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
            # Is each byte of the text paid for by exactly one target? Then a loss can be told in bits per byte.
            whole_text=is_text and not counts["truncated"] and (is_blocks or bool(special_tokens_around(tokenizer)[0])),
            gzip_bytes=len(gzip.compress(whole_text, 9)) if is_compressed else None,
            xz_bytes=len(lzma.compress(whole_text, preset=9)) if is_compressed else None,
        )


def _stored_examples(
    encoded: Iterator[Encoded], sequence_length: int, counts: Counter
) -> Iterator[tuple[np.ndarray, str]]:
    """(tokens as they are stored, text) of the examples that have a target."""
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
    """Memory-mapped samples. Item i is (input_ids, targets, target_rows), int64; after input_ids[target_rows[j]] comes
    targets[j], which is learned.

    Block b reads stream[b*S : (b+1)*S] and predicts stream[b*S+1 : (b+1)*S+1]; the last one is shorter.
    """

    unit = "tokens"

    def __init__(self, directory: str | Path, sequence_length: int) -> None:
        super().__init__(directory, block_length=sequence_length)
        self.sequence_length, self.is_blocks, meta = sequence_length, self.is_stream, self.meta
        self._target_counts = None if self.is_blocks else self.column("target_counts")
        self.num_tokens = meta["tokens"] - (1 if self.is_blocks else len(self))  # inputs of all samples
        self.num_target_tokens = meta["targets"]
        self.num_dropped = meta["dropped"]  # rows, which were empty or all prompt within the length
        self.max_length = meta["max_length"] or min(sequence_length, self.num_tokens)  # inputs of the longest sample
        # UTF-8 bytes of the text, by which a loss becomes bits per byte; None where not all of it is predicted.
        self.num_bytes = meta["bytes"] if meta["whole_text"] else None
        self.gzip_bytes, self.xz_bytes = meta["gzip_bytes"], meta["xz_bytes"]  # None if not measured
        self.end_tokens = meta["end_tokens"]  # that were taught to end a text or an answer, the most frequent first
        self.fingerprint = f"{meta['content']}-{sequence_length}"  # equal where every sample is equal

    def __reduce__(self) -> tuple[Any, ...]:
        return Samples, (self.directory, self.sequence_length)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        ids, targets, target_rows = split_targets(self.row(index)["tokens"])
        return ids[:-1], targets, target_rows

    def dummy_sample(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """A sample of one token that has no target."""
        return self[0][0][:1], np.zeros(0, np.int64), np.zeros(0, np.int64)

    def lengths(self, ids: np.ndarray) -> np.ndarray:
        """Input tokens of each sample, int64, without reading a token."""
        return super().lengths(ids)[..., 0] - 1

    def num_targets(self, ids: np.ndarray) -> np.ndarray:
        """Targets of each sample, int64, without reading a token."""
        if self.is_blocks:
            return self.lengths(ids)
        ids = np.asarray(ids, np.int64)
        return self._target_counts[ids + 1] - self._target_counts[ids]

    def describe(self) -> str:
        """One line for people."""
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
