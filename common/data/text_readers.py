"""Reads the rows of .txt files: a document per file, or a row per line."""

from collections.abc import Iterator

from common.data.readers import PIECE_BYTES, decode
from common.data.row_errors import CR, count_blank
from common.data.source_types import Row, Source
from common.errors import UserError


def read_pieces(path: str, text_column: str) -> Iterator[Row]:
    """Yields the file as one document, in several rows if it is large."""
    previous = None
    for text in decode(path, PIECE_BYTES, PIECE_BYTES):
        if previous is not None:
            yield Row(path, {text_column: previous}, continues=True, num_bytes=len(previous.encode()))
        previous = text
    if previous is not None:
        yield Row(path, {text_column: previous}, num_bytes=len(previous.encode()))


def read_lines(path: str, source: Source) -> Iterator[Row]:
    num_blank = 0
    for number, line in enumerate(decode(path, source.max_row_bytes), 1):
        where, text = f"{path}, line {number}", line.rstrip("\r\n")
        if not text.strip():
            num_blank = count_blank(where, num_blank, line)
            continue
        if number == 1 and "\r" in text and not line.endswith("\n"):  # the file has no LF
            raise UserError(f"{where}: {CR}")
        num_blank = 0
        yield Row(where, {source.text_column: text}, num_bytes=len(line.encode()))
