"""Reads the rows of CSV files, and checks headers and class numbers of tables."""

import csv
from collections.abc import Iterator, Sequence
from typing import Any

from common.data.readers import decode
from common.data.row_errors import CR, MAX_COLUMNS, repeated, too_large, too_many
from common.data.source_types import Row
from common.errors import UserError


def read_csv(path: str, delimiter: str, max_row_bytes: int) -> Iterator[Row]:
    """Yields the rows of a .csv or .tsv file as strings."""
    csv.field_size_limit(max_row_bytes)  # the default of csv, 131,072 characters, is too small
    size = 0

    def lines() -> Iterator[str]:
        """Yields the lines; a row can have several lines in quotes, and quotes may be unclosed."""
        nonlocal size
        for line in decode(path, max_row_bytes):
            size += len(line.encode())
            if size > max_row_bytes:
                where = f"{path}, in the row after line {reader.line_num}"
                raise UserError(f"{too_large(where, max_row_bytes)} (or check the quotes)")
            yield line

    reader = csv.DictReader(lines(), delimiter=delimiter, strict=True)
    try:
        names = reader.fieldnames or ()
        check_header(path, names)
        size = 0
        for values in reader:
            num_bytes, size = size, 0
            where = f"{path}, line {reader.line_num}"
            if None in values or None in values.values():
                between = "commas" if delimiter == "," else "tabs"
                raise UserError(
                    f"{where}: the row does not have {len(names)} fields like the header; check {between} and quotes"
                )
            yield Row(where, values, num_bytes=num_bytes)
    except csv.Error as error:
        where = f"{path}, in the row after line {reader.line_num}"
        fix = CR if "new-line character" in str(error) else "check the quotes"
        raise UserError(f"{where}: malformed CSV ({error}); {fix}") from error


def check_header(path: str, names: Sequence[str]) -> None:
    """Raises UserError if two columns have the same name or a column has no name."""
    if len(names) > MAX_COLUMNS:
        raise UserError(too_many(f"{path}: the header", names))
    if twice := [name for name in repeated(names) if name]:
        raise UserError(f"{path}: the header has the column {', '.join(twice)} twice; rename one or remove it")
    if "" in names[1:]:  # the first name may be empty, for the row numbers that pandas writes
        number = names.index("", 1) + 1
        raise UserError(f"{path}: column {number} has no name in the header; name the column or remove it")


def with_class_names(where: str, values: dict[str, Any], classes: dict[str, list[str]]) -> Row:
    """Returns the row with class names instead of class numbers; None for hidden labels, which are negative.

    Raises UserError if a value is not the number of a class.
    """
    named = {}
    for column in classes.keys() & values.keys():
        number, names = values[column], classes[column]
        if number is not None and not (isinstance(number, int) and number < len(names)):
            raise UserError(f"{where}: column {column} is {number!r}, not a class number < {len(names)}; fix the row")
        named[column] = None if number is None or number < 0 else names[number]
    return Row(where, values | named)
