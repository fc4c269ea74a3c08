"""Reads the rows of a file: .txt, .jsonl, .json, .csv, .tsv (all also compressed) and .parquet."""

import codecs
import csv
import itertools
import json
import lzma
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from common.data.compressed import open_binary
from common.data.source_types import Row, file_type
from common.errors import UserError, missing_column, one_line

if TYPE_CHECKING:
    import pyarrow  # at run time imported only for a Parquet file, because few runs need it and its import is slow

PIECE_BYTES = 1 << 18  # a document in a .txt file is read in pieces of about this size, split at line ends
DELIMITERS = {".csv": ",", ".tsv": "\t"}
MAX_CSV_FIELD_BYTES = 64 << 20  # csv's 128 KiB is too small for a document; the limit still stops an unclosed quote


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns a JSON object from its pairs.

    Raises ValueError for a repeated key, because Python would silently keep only the last value.
    """
    values = dict(pairs)
    if len(values) < len(pairs):
        names = repeated(name for name, _ in pairs)
        raise ValueError(f"an object has the key {', '.join(map(repr, names))} twice")
    return values


JSON = json.JSONDecoder(object_pairs_hook=_unique)


def repeated(names: Iterable[str]) -> list[str]:
    """Returns the names that occur more than once."""
    return [name for name, count in Counter(names).items() if count > 1]


def read_file(path: str, text_column: str, wanted: tuple[str, ...] | None, whole_files: bool) -> Iterator[Row]:
    """Yields the rows of a file.

    Args:
        wanted: the columns to read; None: all columns.
        whole_files: a .txt file is one document, in several rows if it is large; otherwise each line is a row.

    Raises UserError if the file cannot be read or has no rows.
    """
    extension, _ = file_type(path)
    if extension == ".txt":
        reader = _read_pieces(path, text_column) if whole_files else _read_lines(path, text_column)
    elif extension == ".parquet":
        reader = _read_parquet(path, wanted)
    elif extension in DELIMITERS:
        reader = _read_csv(path, DELIMITERS[extension])
    else:
        reader = _read_json(path)
    row = None
    try:
        for row in reader:
            yield row
    except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
        raise UserError(f"{path}: cannot be read or unpacked ({one_line(error)}); replace it") from error
    if row is None:
        raise UserError(f"{path}: the file holds no row; leave it out or fill it")


def _decoded(path: str, size: int | None = None) -> Iterator[str]:
    """Yields the text of a file by lines with line ends, or in pieces of about `size` bytes that end at a line end.

    A line ends only at b"\\n": str.splitlines would also split at U+2028 or a form feed.

    Raises UserError if the file is not UTF-8.
    """
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
                byte = f"0x{error.object[error.start]:02x}, {error.reason}"
                raise UserError(
                    f"{path}: not UTF-8 at byte offset {offset} ({byte}); save the file as UTF-8"
                ) from error
            if text:
                yield text


def _read_pieces(path: str, text_column: str) -> Iterator[Row]:
    previous = None
    for text in _decoded(path, PIECE_BYTES):
        if previous is not None:
            yield Row(path, {text_column: previous}, continues=True)
        previous = text
    if previous is not None:
        yield Row(path, {text_column: previous})


def _read_lines(path: str, text_column: str) -> Iterator[Row]:
    for number, line in enumerate(_decoded(path), 1):
        if line.strip():
            yield Row(f"{path}, line {number}", {text_column: line.rstrip("\r\n")})


def _read_json(path: str) -> Iterator[Row]:
    """Yields the rows of JSON Lines, or of a single array of objects."""
    with open_binary(path) as file:
        is_array = file.read(4096).removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"["
    if is_array and file_type(path)[0] == ".json":
        yield from _read_json_array(path)
        return
    for number, line in enumerate(_decoded(path), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            values = JSON.decode(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{where}: malformed JSON ({one_line(error)}); each line is one object") from error
        yield Row(where, _object(values, where))


def _read_json_array(path: str) -> Iterator[Row]:
    try:
        items = JSON.decode("".join(_decoded(path, PIECE_BYTES)))  # in memory: Python cannot stream an array
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: malformed JSON ({one_line(error)}); correct it or write JSON Lines") from error
    for number, values in enumerate(items, 1):
        where = f"{path}, item {number}"
        yield Row(where, _object(values, where))


def _object(values: Any, where: str) -> dict[str, Any]:
    """Returns the values if they are an object; otherwise raises UserError."""
    if not isinstance(values, dict):
        raise UserError(f'{where}: is a {type(values).__name__}, not an object; write {{"column": value, ...}}')
    return values


def _read_csv(path: str, delimiter: str) -> Iterator[Row]:
    csv.field_size_limit(MAX_CSV_FIELD_BYTES)
    reader = csv.DictReader(_decoded(path), delimiter=delimiter, strict=True)
    try:
        _check_header(path, reader.fieldnames or ())
        for values in reader:
            where = f"{path}, line {reader.line_num}"
            if None in values or None in values.values():
                fields = len(reader.fieldnames or ())
                between = "commas" if delimiter == "," else "tabs"
                raise UserError(
                    f"{where}: the row has not {fields} fields as the header has; check {between} and quotes"
                )
            yield Row(where, values)
    except csv.Error as error:
        where = f"{path}, in the row after line {reader.line_num}"
        raise UserError(f"{where}: malformed CSV ({error}); check the quotes") from error


def _check_header(path: str, names: Sequence[str]) -> None:
    """Raises UserError if two columns have the same name or a column has no name."""
    if twice := [name for name in repeated(names) if name]:
        raise UserError(f"{path}: the header has the column {', '.join(twice)} twice; rename one or remove it")
    if "" in names[1:]:  # the first name may be empty, for the row numbers that pandas writes
        number = names.index("", 1) + 1
        raise UserError(f"{path}: column {number} has no name in the header; name the column or remove it")


def _read_parquet(path: str, wanted: tuple[str, ...] | None) -> Iterator[Row]:
    import pyarrow.parquet

    number = 0
    try:
        # pre_buffer would read ahead by entire row groups, and some writers write a file as a single row group.
        with pyarrow.parquet.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20) as file:
            names = file.schema_arrow.names
            _check_header(path, names)
            if missing := [name for name in wanted or () if name not in names]:
                raise UserError(missing_column(path, missing, names))
            classes = parquet_classes(file.schema_arrow)
            for batch in file.iter_batches(batch_size=64, columns=list(wanted or names)):
                for values in batch.to_pylist():
                    number += 1
                    yield Row(f"{path}, row {number}", with_class_names(values, classes))
    except UnicodeDecodeError as error:
        raise UserError(f"{path}, after row {number}: text that is not UTF-8 ({error.reason}); mend it") from error
    except pyarrow.ArrowException as error:
        raise UserError(f"{path}: cannot be read as Parquet ({one_line(error)}); check the file") from error


def file_classes(path: str) -> dict[str, list[str]]:
    """Returns the class names of each ClassLabel column of a Parquet file; empty for other files."""
    if file_type(path)[0] != ".parquet":
        return {}
    import pyarrow.parquet

    return parquet_classes(pyarrow.parquet.read_schema(path))


def parquet_classes(schema: "pyarrow.Schema") -> dict[str, list[str]]:
    """Returns the class names of each ClassLabel column, from the metadata that `datasets` adds to a Parquet schema."""
    facts = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
    features = (facts.get("info") or {}).get("features") or {}
    return {
        column: feature["names"]
        for column, feature in features.items()
        if isinstance(feature, dict) and feature.get("_type") == "ClassLabel"
    }


def with_class_names(values: dict[str, Any], classes: dict[str, list[str]]) -> dict[str, Any]:
    """Returns the values with class names instead of class numbers; None for hidden labels, which are negative."""
    named = {column: values[column] for column in classes.keys() & values.keys()}
    return values | {
        column: None if number is None or number < 0 else classes[column][number] for column, number in named.items()
    }
