"""Decodes files, compressed or not, and reads the rows of JSON Lines."""

import codecs
import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import IO, Any

from common.data.source_types import Row, file_type
from common.errors import UserError, one_line

PIECE_BYTES = 1 << 18  # a document in a .txt file is read in pieces of about this size, split at line ends


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns a JSON object; raises ValueError for a repeated key, because Python would keep only its last value."""
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError(f"an object has the key {', '.join(map(repr, repeated(name for name, _ in pairs)))} twice")
    return values


def repeated(names: Iterable[str]) -> list[str]:
    """Returns the names that occur more than once."""
    return [name for name, count in Counter(names).items() if count > 1]


JSON = json.JSONDecoder(object_pairs_hook=_unique)


def open_binary(path: str) -> AbstractContextManager[IO[bytes]]:
    """Opens a file for reading its bytes, decompressed according to its extension."""
    if file_type(path)[1] is None:
        return open(path, "rb")
    from common.data.compressed import open_compressed

    return open_compressed(path)


def decode(path: str, size: int | None = None) -> Iterator[str]:
    """Yields lines with "\\n", the only separator, or pieces of `size` bytes or more. Raises UserError: not UTF-8."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()  # drops the byte order mark of Windows editors
    position = 0
    with open_binary(path) as file:
        pieces = iter(lambda: file.read(size) + file.readline(size), b"") if size else file
        for raw in itertools.chain(pieces, [b""]):
            position += len(raw)
            try:
                text = decoder.decode(raw, final=not raw)
            except UnicodeDecodeError as error:  # error.object: the rest of the previous piece, and this piece
                offset = position - len(error.object) + error.start
                location = f"{offset} (0x{error.object[error.start]:02x}, {error.reason})"
                raise UserError(f"{path}: not UTF-8 at byte offset {location}; save the file as UTF-8") from error
            if text:
                yield text


def read_json_lines(path: str) -> Iterator[Row]:
    for number, line in enumerate(decode(path), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            values = JSON.decode(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{where}: malformed JSON ({one_line(error)}); each line is one object") from error
        yield Row(where, check_object(values, where))


def check_object(values: Any, where: str) -> dict[str, Any]:
    if not isinstance(values, dict):
        raise UserError(f'{where}: is a {type(values).__name__}, not an object; write {{"column": value, ...}}')
    return values
