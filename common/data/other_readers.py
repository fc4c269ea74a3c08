"""Selects the reader of a file that is not JSON Lines."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

from common.data.source_types import Row, Source, file_type


def read_other(
    path: str, source: Source, wanted: tuple[str, ...], whole_files: bool, unused: Counter[str], process: Any
) -> Iterator[Row]:
    """Yields the rows of a file; the arguments are those of `sources._read_file`."""
    extension = file_type(path)[0]
    if extension == ".txt":
        from common.data.text_readers import read_lines, read_pieces

        return read_pieces(path, source.text_column) if whole_files else read_lines(path, source)
    if extension == ".json":
        from common.data.json_arrays import read_json

        return read_json(path, source.max_row_bytes)
    if extension == ".parquet":
        from common.data.parquet_files import read_parquet

        return read_parquet(path, wanted, unused, process)
    from common.data.table_readers import read_csv

    return read_csv(path, "," if extension == ".csv" else "\t", source.max_row_bytes)
