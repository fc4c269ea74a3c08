"""Reads the rows of Parquet files, which a `limited_process` decodes: a small file can contain gigabytes."""

import itertools
import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

from common.data.limited_process import LimitedProcess, LimitExceeded
from common.data.parquet_process import TYPE
from common.data.source_types import Row, Source, file_type
from common.data.table_readers import check_header, with_class_names
from common.errors import UserError


class Unknown:
    """Base class of values that JSON does not have, such as a time. Only the name of their class is known."""

    def __repr__(self) -> str:
        return f"a {type(self).__name__}"


def open_files(paths: list[str], source: Source) -> tuple[LimitedProcess, tuple[str, ...] | None, dict[str, list[str]]]:
    """Returns the process that decodes the Parquet files, and columns and classes of the first path if it is Parquet.

    Raises UserError if it cannot be read or has no row.
    """
    memory_bytes = (1 << 30) + 8 * source.max_row_bytes
    process = LimitedProcess("common.data.parquet_process", memory_bytes, answer_bytes=source.max_row_bytes)
    if file_type(paths[0])[0] != ".parquet":
        return process, None, {}
    with process:
        ((names, classes, num_rows),) = _ask(process, paths[0], None)
    check_header(paths[0], names)
    if not num_rows:
        raise UserError(f"{paths[0]}: the file holds no row; leave it out or fill it")
    return process, tuple(names), classes


def read_parquet(path: str, wanted: tuple[str, ...], unused: Counter[str], process: LimitedProcess) -> Iterator[Row]:
    """Yields the rows of a .parquet file; `unused` gets a count of 1 for each column that is not read."""
    answers = _ask(process, path, wanted)
    names, classes, num_rows = next(answers)
    check_header(path, names)
    unused.update(dict.fromkeys(set(names) - set(wanted), 1))
    if not set(names) & set(wanted):
        from common.data.column_errors import missing_column

        raise UserError(missing_column(path, list(wanted), names))
    size = os.path.getsize(path)
    for number, values in enumerate(itertools.chain.from_iterable(answers), 1):
        row = with_class_names(f"{path}, row {number}", _without_types(values), classes)
        yield row._replace(num_bytes=size * number // num_rows - size * (number - 1) // num_rows)


def _ask(process: LimitedProcess, path: str, columns: tuple[str, ...] | None) -> Iterator[Any]:
    """Yields the answers of `parquet_process`; raises UserError if a limit is exceeded."""
    number = None
    try:
        for answer in process.ask([path, columns, process.limits[2]]):
            yield answer
            number = 0 if number is None else number + len(answer)
    except LimitExceeded as error:
        place = f"{path}, after row {number}" if number else path
        raise UserError(f"{place}: decoding {error}; split the rows, or raise --max_row_bytes") from error


def _without_types(value: Any) -> Any:
    """Returns a value in which an instance of `Unknown` replaces each object with the key TYPE."""
    if isinstance(value, list):
        return [_without_types(item) for item in value]
    if not isinstance(value, dict):
        return value
    if TYPE in value:
        return type(str(value[TYPE]), (Unknown,), {})()
    return {key: _without_types(item) for key, item in value.items()}
