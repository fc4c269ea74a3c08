"""Tokenises a corpus and writes its samples, which `text.Samples` reads."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from common.data.source_types import Corpus
from common.data.token_store import TokenWriter
from common.data.tokenizer import encoded_batches, special_tokens_around, with_end_of_text
from common.errors import UserError

Pieces = Iterator[tuple[Any, str]]  # tokens and their text


def write_samples(
    directory: Path,
    corpus: Corpus,
    shape: str,
    columns: tuple[str, ...],
    tokenizer: PreTrainedTokenizerBase,
    sequence_length: int,
    measure_compression: bool,
    on_too_long: str | None,
) -> None:
    """Writes a token store: a stream for blocks and documents; for examples, also the running sum target_counts."""
    is_blocks, is_text = shape == "blocks", len(columns) == 1 and columns != ("messages",)
    counts = Counter(dict.fromkeys(("documents", "targets", "bytes", "truncated", "dropped", "empty", "max_length"), 0))
    samples: Pieces
    if shape == "examples":
        from common.data.examples import encode_examples

        samples = encode_examples(corpus, columns, tokenizer, sequence_length, counts, on_too_long)
    else:
        samples = _encode_stream(corpus, columns, tokenizer, counts)
    if shape == "documents":
        from common.data.documents import mark_documents

        samples = mark_documents(samples, directory, tokenizer, counts)
    sizes: dict[str, int | None] = {"gzip_bytes": None, "xz_bytes": None}
    if measure_compression and is_text:
        from common.data.compressed_size import measure_sizes

        samples = measure_sizes(samples, sizes)
    with TokenWriter(directory, shape != "examples", target_counts=[0]) as writer:
        for tokens, _ in samples:
            if is_blocks and not writer.num_tokens:
                tokens[0] = ~tokens[0]
            writer.append(tokens, target_counts=[counts["targets"]])
        if shape != "examples" and counts["documents"]:
            counts["targets"] = writer.num_tokens - (counts["starts"] or 1)
        losses = f"; {counts['dropped']:,} empty documents left out" if counts["dropped"] else ""
        if shape == "examples":
            from common.data.too_long import describe_losses

            losses = describe_losses(counts, sequence_length)
        if counts["targets"] == 0:
            problem = f"no sample with a target in it{losses}; give more text, or raise --sequence_length"
            raise UserError(f"{corpus.name}: {problem}")
        # Whether each byte of the text belongs to exactly one target, which the loss in bits per byte requires.
        is_whole = is_text and not counts["truncated"] and (is_blocks or bool(special_tokens_around(tokenizer)[0]))
        facts = corpus_facts(corpus, columns, counts, tokenizer) | sizes
        writer.finish(counts, **facts, shape=shape, whole_text=is_whole, losses=losses)


def _encode_stream(corpus: Corpus, columns: tuple[str, ...], tokenizer: Any, counts: Counter) -> Pieces:
    """Yields (tokens, text) pieces of the document stream: each document encoded as by `tokenizer(document)`, then eos.

    If the tokenizer adds nothing or eos before a document, the stream begins with eos, and one eos separates documents.
    """
    begin, end = special_tokens_around(tokenizer)
    end = with_end_of_text(end, tokenizer.eos_token_id)
    inside = False  # whether the document of the previous row continues in this row
    if begin[:1] in ([], [tokenizer.eos_token_id]):
        begin = begin[1:]
        yield [tokenizer.eos_token_id], ""
    for batch, (texts,), (encoded,) in encoded_batches(corpus, columns, tokenizer, whole_files=True):
        for row, text, ids in zip(batch, texts, encoded, strict=True):
            if not text and not inside and not row.continues:
                counts["dropped"] += 1
                continue
            yield (ids if inside else begin + ids) + ([] if row.continues else end), text
            inside = row.continues
            counts["bytes"] += len(text.encode())
            counts["documents"] += not row.continues


def corpus_facts(
    corpus: Corpus, columns: tuple[str, ...], counts: Counter, tokenizer: PreTrainedTokenizerBase, *notes: str
) -> dict[str, Any]:
    """Returns the metadata of a corpus, with all notes that are not empty. Raises UserError: no answer has a target."""
    end_tokens, lines = [tokenizer.eos_token_id], list(filter(None, notes))
    if counts["chats"]:
        from common.data.chat_notes import chat_notes

        end_tokens = [token for token, _ in counts.most_common() if isinstance(token, int)]
        lines = chat_notes(corpus.name, counts) + lines
    if any(corpus.unused.values()):
        from common.data.column_checks import unused_columns

        lines.append(unused_columns(corpus))
    return {"name": corpus.name, "columns": columns, "notes": lines, "end_tokens": end_tokens}
