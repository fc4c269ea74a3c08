"""Messages for malformed rows, with their file and line."""

from collections import Counter
from collections.abc import Iterable, Sequence
from json import JSONDecodeError
from typing import Any

from common.errors import UserError, one_line

MAX_COLUMNS = 100_000  # also in `readers`, which imports this module only for an error
MAX_BLANK = 1 << 20  # characters between two rows; a small compressed file can contain terabytes of blank lines
CR = "lines end with CR (old Mac); convert the file to LF line ends"


def too_large(where: str, max_row_bytes: int, raw: bytes | str = b"") -> str:
    """Returns the message for a row above the limit; `raw` is its beginning."""
    cr = b"\r" if isinstance(raw, bytes) else "\r"
    if raw[:4096].count(cr) > 1:  # type: ignore[arg-type]
        return f"{where}: more than {max_row_bytes:,} bytes without LF, because {CR}"
    return f"{where}: the row has more than {max_row_bytes:,} bytes; split it, or raise --max_row_bytes"


def describe_line(path: str, number: int, max_row_bytes: int, raw: bytes, position: int, error: Exception) -> str:
    """Returns the message for a line above the limit, or that is not UTF-8; `position` is its end in the file."""
    if not isinstance(error, UnicodeDecodeError):
        return too_large(f"{path}, line {number}", max_row_bytes, raw)
    # error.object: the rest of the previous piece, and this piece
    offset = position - len(error.object) + error.start
    location = f"{offset} (0x{error.object[error.start]:02x}, {error.reason})"
    return f"{path}: not UTF-8 at byte offset {location}; save the file as UTF-8"


def count_blank(where: str, count: int, text: str) -> int:
    """Returns the number of blank characters since the previous row; raises UserError if there are too many."""
    if count + len(text) > MAX_BLANK:
        raise UserError(f"{where}: more than 1 MiB of blank lines; remove them")
    return count + len(text)


def repeated(names: Iterable[str]) -> list[str]:
    """Returns the names that occur more than once."""
    return [name for name, count in Counter(names).items() if count > 1]


def describe_json_error(error: Exception) -> str:
    """Returns the reason for which text is not JSON."""
    if "integer string conversion" in str(error):  # Python's limit against slow conversions
        return "an integer of more than 4,300 digits, which must be a string"
    if isinstance(error, RecursionError):
        return "nested too deeply"
    return one_line(error)


def count_blank_or_raise(where: str, count: int, line: str, error: Exception) -> int:
    """Returns `count_blank` of a blank line; raises UserError with the reason why a different line is not JSON."""
    if not line.strip():
        return count_blank(where, count, line)
    fix = "each line is one object"
    if isinstance(error, JSONDecodeError):
        if "\r" in line.strip():
            fix = CR
        elif error.pos >= len(line.rstrip()):
            fix = "the object does not end on its line; write each object on one line"
    raise UserError(f"{where}: malformed JSON ({describe_json_error(error)}); {fix}") from error


def no_row(where: str, values: Any) -> str:
    """Returns the message for JSON that is not an object, or has too many keys."""
    if isinstance(values, dict):
        return too_many(where, values)
    return f'{where}: is a {type(values).__name__}, not an object; write {{"column": value, ...}}'


def too_many(where: str, columns: Sequence[str] | dict[str, Any]) -> str:
    """Returns the message for too many columns."""
    return f"{where} has {len(columns):,} columns, more than {MAX_COLUMNS:,}; keep only those that are used"
