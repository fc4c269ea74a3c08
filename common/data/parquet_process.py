"""Decodes Parquet files, in a `limited_process`.

The sizes in the file's metadata are checked before the first page is decoded; the limits apply to metadata that lies.
"""

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from common.data.limited_process import serve
from common.data.row_errors import too_large
from common.errors import UserError, one_line
from common.reading import as_user_error

if TYPE_CHECKING:
    import pyarrow
    import pyarrow.parquet

TYPE = "\0type"  # key of the name of a type that JSON does not have
BATCH_BYTES = 16 << 20
ANSWER_BYTES = 1 << 20  # larger rows are sent one by one, because their text can be larger than they are


def answer(request: Any) -> Iterator[Any]:
    """Yields (column names, class names by column, number of rows), then lists of up to 64 rows.

    A request has the path, the columns to read (None: no rows) and the largest size of a row in bytes.
    """
    import pyarrow.parquet

    path, wanted, max_row_bytes = request
    number = 0
    try:
        # pre_buffer would read ahead by entire row groups, and some writers write a file as a single row group.
        with pyarrow.parquet.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20) as file:
            names = file.schema_arrow.names
            yield names, _classes_of(file.schema_arrow), file.metadata.num_rows
            columns = [name for name in wanted or () if name in names]
            if not columns:
                return
            batch_size = _check_sizes(path, file.metadata, columns, max_row_bytes)
            for batch in file.iter_batches(batch_size=batch_size, columns=columns, use_threads=False):
                step = batch.num_rows if batch.nbytes < ANSWER_BYTES else 1
                for start in range(0, batch.num_rows, step):
                    rows = batch.slice(start, step).to_pylist()
                    yield rows
                    number += len(rows)
    except (MemoryError, UserError):
        raise
    except UnicodeDecodeError as error:
        raise UserError(f"{path}, after row {number}: text that is not UTF-8 ({error.reason}); fix it") from error
    except pyarrow.ArrowException as error:
        raise UserError(f"{path}: cannot be read as Parquet ({one_line(error)}); check the file") from error
    except Exception as error:  # the type depends on the damage
        raise as_user_error(error, f"{path}: after row {number}" if number else path, "replace the file") from error


def _check_sizes(path: str, metadata: "pyarrow.parquet.FileMetaData", columns: list[str], max_row_bytes: int) -> int:
    """Returns the number of rows to decode together; raises UserError if the rows of a row group are too large."""
    most = 1
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        chunks = [group.column(index) for index in range(group.num_columns)]
        size = 0
        for chunk in chunks:
            if chunk.path_in_schema.split(".")[0] in {column.split(".")[0] for column in columns}:
                # A null has no bytes, but a text of at least a character in the row.
                size += max(chunk.total_uncompressed_size, chunk.num_values)
        if size > max_row_bytes * group.num_rows:
            where = f"{path}, a row of row group {number + 1} of {group.num_rows:,} rows"
            raise UserError(too_large(where, max_row_bytes))
        most = max(most, size // max(1, group.num_rows))
    return max(1, min(64, BATCH_BYTES // most))


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


if __name__ == "__main__":
    import pyarrow.parquet

    serve(answer, threads=True, default=lambda value: {TYPE: type(value).__name__})
