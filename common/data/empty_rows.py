"""Rows with an empty text, which are left out: there is nothing to learn from them."""

from collections import Counter
from collections.abc import Iterator

from common.data.row_texts import batches, text_of
from common.data.source_types import Corpus, Row
from common.errors import UserError


def text_batches(
    corpus: Corpus, columns: tuple[str, ...], text_columns: tuple[str, ...], counts: Counter
) -> Iterator[list[tuple[Row, list[str]]]]:
    """Yields `batches` of (row, its texts); rows with an empty text are left out and counted as `empty`."""
    for batch in batches(corpus, columns):
        rows = [(row, [text_of(row, column) for column in text_columns]) for row in batch]
        filled = [(row, texts) for row, texts in rows if all(map(str.strip, texts))]
        counts["empty"] += len(batch) - len(filled)
        if filled:
            yield filled


def no_row_left(corpus: Corpus, columns: tuple[str, ...], reasons: dict[str, int]) -> UserError:
    """Returns the error for data without a usable row. reasons: what is wrong with rows, and the number of them."""
    left_out = ", ".join(f"{number:,} {why}" for why, number in reasons.items() if number) or "no rows"
    return UserError(f"{corpus.name}: no row with {' and '.join(columns)} ({left_out}); use different data")
