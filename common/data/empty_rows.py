"""Rows with an empty text, which are left out: there is nothing to learn from them."""

from collections import Counter
from collections.abc import Iterator

from common.data.row_texts import batches, text_of
from common.data.source_types import Corpus, Row
from common.errors import UserError


def text_batches(
    corpus: Corpus, columns: tuple[str, ...], texts: tuple[str, ...], counts: Counter
) -> Iterator[list[Row]]:
    """Yields `batches`, without the rows of which one of the columns `texts` is empty: `counts["empty"]`."""
    for batch in batches(corpus, columns):
        rows = [row for row in batch if all([text_of(row, column).strip() for column in texts])]
        counts["empty"] += len(batch) - len(rows)
        if rows:
            yield rows


def no_row_left(corpus: Corpus, columns: tuple[str, ...], reasons: dict[str, int]) -> UserError:
    """Returns the error for data without a usable row. reasons: what is wrong with rows, and the number of them."""
    left_out = ", ".join(f"{number:,} {why}" for why, number in reasons.items() if number) or "no rows"
    return UserError(f"{corpus.name}: no row with {' and '.join(columns)} ({left_out}); use different data")
