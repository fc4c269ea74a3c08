"""Converts text to samples for a language model: tokenised once, cached on disk, and memory-mapped.

    tokenizer = train_tokenizer(Source(embedded="train"), vocab_size=8192)
    samples = tokenize(Source(embedded="train"), tokenizer, sequence_length=512)
    input_ids, targets, target_rows = samples[0]

Tokens that are not targets are stored as their bitwise complement: those of a prompt or of a user's turn, and the first
token of a stream or an example.
"""

from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from common.data.cache import cached
from common.data.source_types import Source, name_and_columns
from common.data.token_store import TokenStore, split_targets
from common.data.tokenizer import no_more_threads, open_text, tokenizer_identity


def tokenize(
    source: Source,
    tokenizer: PreTrainedTokenizerBase,
    sequence_length: int,
    shape: str | None = None,
    cache_dir: str | Path | None = None,
    measure_compression: bool = False,
) -> Any:
    """Tokenises a source once, and opens `Samples` or a `Mixed`; of concurrent processes, one tokenises, others wait.

    Raises UserError, with file and location, if something cannot be read or yields no sample.

    Args:
        sequence_length: maximum number of input tokens per sample.
        shape: "blocks" concatenates the documents and splits the stream: every token except the very first is a target
            once. "examples" makes one sample of each row, truncated to sequence_length; "packed" puts several into a
            block. None: examples if the columns are `messages` or `prompt` and `completion`, otherwise blocks.
        measure_compression: save the size of the text compressed with gzip -9 and xz -9, if it is at most 64 MiB.
    """
    if source.parts:
        from common.data.mixed import Mixed

        options = (tokenizer, sequence_length, shape, cache_dir, measure_compression)
        return Mixed({part.files[0]: tokenize(part, *options) for part in source.parts}, source.weights)
    tokenizer.chat_template = source.chat_template or tokenizer.chat_template
    wrap: Any = None
    corpus, kind, columns = open_text(source, shape, bool(tokenizer.chat_template))
    if source.document_mask or shape == "packed":
        from common.data.documents import choose

        kind, wrap = choose(kind, shape, source.document_mask, corpus.name)
    if source.chat_template or source.on_too_long:
        from common.data.flag_checks import check_flags

        check_flags(source, corpus.name, kind, columns)
    identity = [corpus.identity, kind, columns, tokenizer_identity(tokenizer), measure_compression]
    if kind == "examples":  # blocks are split when they are read
        identity += [sequence_length, source.on_too_long]
    arguments = (corpus, kind, columns, tokenizer, sequence_length, measure_compression, source.on_too_long)
    directory = cached("samples", identity, lambda partial: _write_samples(partial, *arguments), cache_dir)
    no_more_threads()
    samples = Samples(directory, sequence_length)
    return wrap(samples) if wrap else samples


def _write_samples(directory: Path, *arguments: Any) -> None:
    from common.data.sample_writing import write_samples

    write_samples(directory, *arguments)


class Samples(TokenStore):
    """Memory-mapped samples. Item i is (input_ids, targets, target_rows), int64.

    targets[j] is the token to predict after input_ids[target_rows[j]]. Block b reads stream[b*S : (b+1)*S] and predicts
    stream[b*S+1 : (b+1)*S+1]; the last block is shorter.
    """

    unit, note = "tokens", " (no document mask)"

    def __init__(self, directory: str | Path, sequence_length: int) -> None:
        super().__init__(directory, block_length=sequence_length)
        self.sequence_length, meta = sequence_length, self.meta
        self.num_tokens = meta["tokens"] - (1 if self.is_stream else len(self))  # input tokens of all samples
        self.num_target_tokens = meta["targets"]
        self.num_dropped = meta["dropped"]  # rows without a target: empty, or only a prompt within the length
        self.max_length = meta["max_length"] or min(sequence_length, self.num_tokens)  # inputs of the longest sample
        # UTF-8 bytes of the text, to convert a loss to bits per byte; None if the targets do not cover all of it.
        self.num_bytes = meta["bytes"] if meta["whole_text"] else None
        self.gzip_bytes, self.xz_bytes = meta["gzip_bytes"], meta["xz_bytes"]  # None if not measured
        self.end_tokens = meta["end_tokens"]  # targets that end a text or an answer, the most frequent first
        self._target_counts = None if self.is_stream else self.column("target_counts")  # opened once, not per update
        self.fingerprint = f"{meta['content']}-{sequence_length}"  # equal if all samples are equal

    def __reduce__(self) -> tuple[Any, ...]:
        return Samples, (self.directory, self.sequence_length)

    def __getitem__(self, index: int) -> tuple[np.ndarray, ...]:
        ids, targets, target_rows = split_targets(self.row(index)["tokens"])
        return ids[:-1], targets, target_rows

    def dummy_sample(self) -> tuple[np.ndarray, ...]:
        """Returns a sample of one token without a target."""
        return self[0][0][:1], np.zeros(0, np.int64), np.zeros(0, np.int64)

    def lengths(self, ids: np.ndarray) -> np.ndarray:
        """Returns the number of input tokens of each sample, int64; reads only the offsets."""
        return super().lengths(ids)[..., 0] - 1

    def num_targets(self, ids: np.ndarray) -> np.ndarray:
        """Returns the number of targets of each sample, int64; reads no tokens."""
        if self._target_counts is None:
            return self.lengths(ids)
        ids = np.asarray(ids, np.int64)
        return self._target_counts[ids + 1] - self._target_counts[ids]

    def describe(self) -> str:
        """Returns the description of the samples for the run summary."""
        meta = self.meta
        unit = f"examples of {self.num_tokens / len(self):,.0f} tokens on average, at most {self.max_length}"
        if self.is_stream:
            unit = f"blocks of {self.sequence_length} tokens from {meta['documents']:,} documents{self.note}"
        line = f"{name_and_columns(meta)}: {len(self):,} {unit}; "
        line += f"{self.num_target_tokens:,} targets, {meta['bytes']:,} bytes of text{meta['losses']}"
        return f"\n{'':12}".join([line, *meta["notes"]])
