"""Reads the rows of CSV and Parquet files."""

import csv
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from common.data.readers import MAX_COLUMNS, decode
from common.data.row_errors import CR, repeated, too_large, too_many
from common.data.source_types import Row
from common.errors import UserError, one_line, reading

if TYPE_CHECKING:
    import pyarrow  # at run time imported only for a Parquet file, because its import is slow


def read_csv(path: str, delimiter: str, max_row_bytes: int) -> Iterator[Row]:
    """Yields the rows of a .csv or .tsv file as strings."""
    csv.field_size_limit(max_row_bytes)  # the default of csv, 131,072 characters, is too small
    size = 0

    def lines() -> Iterator[str]:
        """Yields the lines; a row can have several lines in quotes, and quotes may be unclosed."""
        nonlocal size
        for line in decode(path, max_row_bytes):
            size += len(line)
            if size > max_row_bytes:
                where = f"{path}, in the row after line {reader.line_num}"
                raise UserError(f"{too_large(where, max_row_bytes)} (or check the quotes)")
            yield line

    reader = csv.DictReader(lines(), delimiter=delimiter, strict=True)
    try:
        names = reader.fieldnames or ()
        _check_header(path, names)
        size = 0
        for values in reader:
            size = 0
            where = f"{path}, line {reader.line_num}"
            if None in values or None in values.values():
                between = "commas" if delimiter == "," else "tabs"
                raise UserError(
                    f"{where}: the row does not have {len(names)} fields like the header; check {between} and quotes"
                )
            yield Row(where, values)
    except csv.Error as error:
        where = f"{path}, in the row after line {reader.line_num}"
        fix = CR if "new-line character" in str(error) else "check the quotes"
        raise UserError(f"{where}: malformed CSV ({error}); {fix}") from error


def _check_header(path: str, names: Sequence[str]) -> None:
    """Raises UserError if two columns have the same name or a column has no name."""
    if len(names) > MAX_COLUMNS:
        raise UserError(too_many(f"{path}: the header", names))
    if twice := [name for name in repeated(names) if name]:
        raise UserError(f"{path}: the header has the column {', '.join(twice)} twice; rename one or remove it")
    if "" in names[1:]:  # the first name may be empty, for the row numbers that pandas writes
        number = names.index("", 1) + 1
        raise UserError(f"{path}: column {number} has no name in the header; name the column or remove it")


def read_parquet(path: str, wanted: tuple[str, ...] | None, unused: Counter[str]) -> Iterator[Row]:
    """Yields the rows of a .parquet file; `unused` gets a count of 1 for each column that is not read."""
    import pyarrow.parquet

    number = 0
    try:
        # pre_buffer would read ahead by entire row groups, and some writers write a file as a single row group.
        with pyarrow.parquet.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20) as file:
            names = file.schema_arrow.names
            _check_header(path, names)
            columns = names
            if wanted is not None:
                unused.update(dict.fromkeys(set(names) - set(wanted), 1))
                columns = [name for name in wanted if name in names]
            if not columns:
                from common.data.column_errors import missing_column

                raise UserError(missing_column(path, list(wanted or ()), names))
            classes = _classes_of(file.schema_arrow)
            for batch in file.iter_batches(batch_size=64, columns=columns):
                for values in batch.to_pylist():
                    number += 1
                    yield with_class_names(f"{path}, row {number}", values, classes)
    except UnicodeDecodeError as error:
        raise UserError(f"{path}, after row {number}: text that is not UTF-8 ({error.reason}); fix it") from error
    except pyarrow.ArrowException as error:
        raise UserError(f"{path}: cannot be read as Parquet ({one_line(error)}); check the file") from error


def read_classes(path: str) -> dict[str, list[str]]:
    """Returns the class names of each ClassLabel column of a Parquet file."""
    import pyarrow.parquet

    with reading(path, "replace the file"):
        return _classes_of(pyarrow.parquet.read_schema(path))


def _classes_of(schema: "pyarrow.Schema") -> dict[str, list[str]]:
    """Returns the class names of each ClassLabel column, from the metadata that `datasets` adds to a Parquet schema."""
    facts = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
    features = (facts.get("info") or {}).get("features") or {}
    labels = {name: kind for name, kind in features.items() if isinstance(kind, dict)}
    classes = {name: kind["names"] for name, kind in labels.items() if kind.get("_type") == "ClassLabel"}
    for column, names in classes.items():
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ValueError(f"the class names of column {column} are not a list of texts")
    return classes


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
