"""Reads the objects of a JSON array, of which only one object at a time is in memory."""

import itertools
import re
from collections.abc import Iterator
from json import JSONDecodeError
from typing import Any

from common.data.readers import JSON, PIECE_BYTES, check_object, decode, read_json_lines
from common.data.row_errors import count_blank, describe_json_error, too_large
from common.data.source_types import Row
from common.errors import UserError

BLANK = re.compile(r"[ \t\n\r]*")
NEAR_END = 16  # characters; a truncated value is reported at most this far from the end of the text


def read_json(path: str, max_row_bytes: int) -> Iterator[Row]:
    """Yields the objects of a single array, or of JSON Lines."""
    text = _Text(path, max_row_bytes)
    if text.next_character(path) != "[":
        yield from read_json_lines(path, max_row_bytes)
        return
    text.at += 1
    is_empty = text.next_character(f"{path}, item 1") == "]"
    for number in itertools.count(1):
        where = f"{path}, item {number}"
        if not is_empty:
            text.next_character(where)
            values, num_bytes = text.value(where)
            yield Row(where, check_object(values, where), num_bytes=num_bytes)
        end = text.next_character(where)
        text.at += 1
        if end == "]":
            break
        if end != ",":
            raise UserError(f"{where}: malformed JSON (no comma follows the object); correct it or write JSON Lines")
    if text.next_character(f"{path}, after the array"):
        raise UserError(f"{path}: malformed JSON (text follows the array); correct it or write JSON Lines")


class _Text:
    """The text of a file from the current position, as far as it was needed."""

    def __init__(self, path: str, max_row_bytes: int) -> None:
        self.pieces, self.most = decode(path, max_row_bytes, PIECE_BYTES), max_row_bytes
        self.text, self.at = "", 0

    def next_character(self, where: str) -> str:
        """Returns the next character that is not blank, or "" at the end of the file."""
        num_blank = 0
        while True:
            end = BLANK.match(self.text, self.at).end()  # type: ignore[union-attr]  # it matches any text
            num_blank = count_blank(where, num_blank, self.text[self.at : end])
            self.at = end
            if end < len(self.text) or not self._read_more():
                return self.text[end : end + 1]

    def value(self, where: str) -> tuple[Any, int]:
        """Returns the next value and its bytes in the file; raises UserError if it is malformed or too large."""
        while True:
            try:
                value, end = JSON.raw_decode(self.text, self.at)
                if end - self.at > self.most:
                    raise UserError(too_large(where, self.most))
                num_bytes, self.at = len(self.text[self.at : end].encode()), end
                return value, num_bytes
            except (ValueError, RecursionError) as error:
                is_cut = isinstance(error, JSONDecodeError) and (
                    error.msg.startswith("Unterminated string") or error.pos >= len(self.text) - NEAR_END
                )
                if is_cut and len(self.text) - self.at > self.most:
                    raise UserError(too_large(where, self.most)) from error
                if not (is_cut and self._read_more()):
                    reason = error.msg if isinstance(error, JSONDecodeError) else describe_json_error(error)
                    raise UserError(f"{where}: malformed JSON ({reason}); correct it or write JSON Lines") from error

    def _read_more(self) -> bool:
        """Doubles the text, so that the time for a large value is linear in its size; returns False at the end."""
        parts, size = [self.text[self.at :]], 0
        while size <= len(parts[0]) and (piece := next(self.pieces, "")):
            parts.append(piece)
            size += len(piece)
        self.text, self.at = "".join(parts), 0
        return size > 0
