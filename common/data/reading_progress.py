"""Shows the progress of reading a large corpus."""

import io
import math
import sys
from collections.abc import Iterator
from typing import Any

from tqdm import tqdm

from common.data.source_types import Corpus, Row

LOG_SECONDS = 30.0  # between two lines in a log


def with_progress(
    rows: Iterator[Row], corpus: Corpus, doing: str = "tokenising", limit: float = math.inf
) -> Iterator[Row]:
    """Yields the rows, and shows the bytes read and, for files of known size, the time left.

    In a terminal it is a bar; a log gets a line every LOG_SECONDS. limit: bytes of text after which the caller stops.
    """
    options: dict[str, Any] = {"total": min(corpus.num_bytes, limit) or None, "unit": "B", "unit_scale": True}
    if not sys.stderr.isatty():
        options |= {"file": _Lines(), "delay": LOG_SECONDS, "mininterval": LOG_SECONDS, "ncols": 0, "leave": False}
        options["maxinterval"] = 2 * LOG_SECONDS  # tqdm refreshes a bar after this time, by default after 10 s
    with tqdm(desc=f"{doing} {corpus.name}", **options) as bar:
        for row in rows:
            yield row
            size = row.num_bytes if limit >= corpus.num_bytes else None  # the limit is one of text, not of file bytes
            bar.update(sum(len(str(value)) for value in row.values.values()) if size is None else size)


class _Lines(io.StringIO):
    """Prints each state of a bar as a line of stderr."""

    def write(self, text: str) -> int:
        if line := text.strip():
            print(line, file=sys.stderr, flush=True)
        return len(text)
