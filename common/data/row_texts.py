"""Reads the texts of rows in batches, and checks that they are texts."""

from collections.abc import Iterator

from common.data.source_types import Corpus, Row
from common.errors import UserError

# Each batch is (rows, texts, token ids); the latter two are lists by column, then row.
Batches = Iterator[tuple[list[Row], list[list[str]], list[list[list[int]]]]]
BATCH_CHARACTERS = 1 << 18  # per tokenizer call, which temporarily uses about 100 bytes per token


def text_of(row: Row, column: str) -> str:
    """Returns a row's text; raises UserError: no such column, or no valid string."""
    text = row.values.get(column)
    if not isinstance(text, str):
        from common.data.column_errors import no_text

        raise UserError(no_text(row, column))
    utf8_length(text, row.where)
    return text


def utf8_length(text: str, where: str) -> int:
    """Returns the length in UTF-8 bytes; raises UserError for half a surrogate pair, which JSON escapes can contain."""
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        half = f"U+{ord(text[error.start]):04X}"
        raise UserError(f"{where}: half a surrogate pair ({half}) is not text; fix or remove the row") from error


def batches(corpus: Corpus, columns: tuple[str, ...], whole_files: bool = False) -> Iterator[list[Row]]:
    """Yields rows in batches of bounded text size, so that memory use does not depend on their length or number."""
    rows, batch, size = corpus.rows(columns, whole_files), [], 0
    if corpus.may_be_large:
        from common.data.reading_progress import with_progress

        rows = with_progress(rows, corpus)
    for row in rows:
        batch.append(row)
        size += sum(len(value) if isinstance(value, str) else len(str(value)) for value in row.values.values())
        if size >= BATCH_CHARACTERS or len(batch) == 4096:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
