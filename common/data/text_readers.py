"""Reads the rows of .txt files: a document per file, or a row per line."""

from collections.abc import Iterator

from common.data.readers import PIECE_BYTES, decode
from common.data.source_types import Row


def read_pieces(path: str, text_column: str) -> Iterator[Row]:
    """Yields the file as one document, in several rows if it is large."""
    previous = None
    for text in decode(path, PIECE_BYTES):
        if previous is not None:
            yield Row(path, {text_column: previous}, continues=True)
        previous = text
    if previous is not None:
        yield Row(path, {text_column: previous})


def read_lines(path: str, text_column: str) -> Iterator[Row]:
    for number, line in enumerate(decode(path), 1):
        if line.strip():
            yield Row(f"{path}, line {number}", {text_column: line.rstrip("\r\n")})
