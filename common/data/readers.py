"""Decodes files, compressed or not, and reads the rows of JSON Lines."""

import codecs
import itertools
import json
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import IO, Any

from common.data.source_types import Row, file_type
from common.errors import UserError

PIECE_BYTES = 1 << 18  # a document in a .txt file is read in pieces of about this size, split at line ends


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns a JSON object; raises ValueError for a repeated key, because Python would keep only its last value."""
    values = dict(pairs)
    if len(values) < len(pairs):
        from common.data.row_errors import repeated

        raise ValueError(f"an object has the key {', '.join(map(repr, repeated(name for name, _ in pairs)))} twice")
    return values


JSON = json.JSONDecoder(object_pairs_hook=_unique)


def open_binary(path: str) -> AbstractContextManager[IO[bytes]]:
    """Opens a file for reading its bytes, decompressed according to its extension."""
    if file_type(path)[1] is None:
        return open(path, "rb")
    from common.data.compressed import open_compressed

    return open_compressed(path)


def decode(path: str, max_row_bytes: int, size: int | None = None) -> Iterator[str]:
    """Yields lines with "\\n", or pieces of `size` to 2 * `size` bytes. Raises UserError: not UTF-8, line too large."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()  # drops the byte order mark of Windows editors
    position = 0
    with open_binary(path) as file:
        read = (lambda: file.read(size) + file.readline(size)) if size else (lambda: file.readline(max_row_bytes + 1))
        for number, raw in enumerate(itertools.chain(iter(read, b""), [b""]), 1):
            position += len(raw)
            try:
                if len(raw) > max_row_bytes and not size:
                    raise OverflowError
                text = decoder.decode(raw, final=not raw)
            except (UnicodeDecodeError, OverflowError) as error:
                from common.data.row_errors import describe_line

                raise UserError(describe_line(path, number, max_row_bytes, raw, position, error)) from error
            if text:
                yield text


def read_json_lines(path: str, max_row_bytes: int) -> Iterator[Row]:
    num_blank = 0  # characters since the previous row
    for number, line in enumerate(decode(path, max_row_bytes), 1):
        where = f"{path}, line {number}"
        try:
            values = JSON.decode(line)
        except (ValueError, RecursionError) as error:
            from common.data.row_errors import count_blank_or_raise

            num_blank = count_blank_or_raise(where, num_blank, line, error)
            continue
        num_blank = 0
        yield Row(where, check_object(values, where), num_bytes=len(line.encode()))


def check_object(values: Any, where: str) -> dict[str, Any]:
    if not isinstance(values, dict) or len(values) > 100_000:
        from common.data.row_errors import no_row

        raise UserError(no_row(where, values))
    return values
