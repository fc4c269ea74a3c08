"""Opens text sources (files, datasets, the standard library's code) and selects the columns for samples.

    corpus = open_source(Source(files=("books/*.txt.gz",)))
    for row in corpus.rows(("text",), True): ...

JSON Lines and CSV are not read with `datasets.load_dataset`, which guesses types (the string "2020-01-01" becomes a
datetime, the CSV field "003" becomes 3) and does not report the location of an error.
"""

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from common.data.source_types import FILE_TYPES, Corpus, Row, Source, expand, file_type
from common.errors import UserError, raise_errors

PAIR = ("prompt", "completion")
TABLES = (".jsonl", ".csv", ".tsv")


def check_sources(*sources: Source | None) -> None:
    """Raises one UserError, one line per problem, with all problems that can be found without reading a file."""
    given = [part for source in sources if source for part in source.parts or (source,)]
    paths = [Path(pattern) for source in given for pattern in source.files]
    if not all(path.suffix.lower() in FILE_TYPES and path.is_file() and path.stat().st_size for path in paths):
        from common.data.source_problems import find_problems

        raise_errors(problem for source in given for problem in find_problems(source))


def open_source(source: Source) -> Corpus:
    """Opens a source and reads its first row; raises UserError if it cannot be read."""
    if source.dataset_name:
        from common.data.dataset_source import list_folder, open_dataset

        if (files := list_folder(source)) is None:
            return open_dataset(source)
        source = replace(source, files=files)
    check_sources(source)
    if source.embedded:
        from common.data.standard_library import open_embedded

        return open_embedded(source)
    paths = list(dict.fromkeys(path for pattern in source.files for path in expand(pattern)))  # globs may overlap
    # Path, size and modification time instead of the contents: hashing 1 TB takes longer than many training runs.
    identity = [[str(path.resolve()), (s := path.stat()).st_size, s.st_mtime_ns] for path in map(Path, paths)]
    name = paths[0] if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"
    unused: Counter[str] = Counter()
    opened: Any = nullcontext(), None, {}
    if any(file_type(path)[0] == ".parquet" for path in paths):
        from common.data.parquet_files import open_files

        opened = open_files(paths, source)
    process, columns, classes = opened

    def columns_of(path: str) -> tuple[str, tuple[str, ...]]:
        return path, tuple(next(_read_file(path, source, (), True, unused, process)).values)

    def rows(wanted: tuple[str, ...], whole_files: bool) -> Iterator[Row]:
        with process:
            for path in paths:
                for row in _read_file(path, source, wanted, whole_files, unused, process):
                    for column in row.values.keys() - wanted:
                        unused[column] += row.values[column] not in (None, "", [], {})
                    yield row

    num_bytes = sum(map(os.path.getsize, paths)) if all(path.endswith(FILE_TYPES) for path in paths) else 0
    others, columns = [path for path in paths[1:] if file_type(path)[0] in TABLES], columns or columns_of(paths[0])[1]
    return Corpus(name, identity, columns, rows, classes, unused, num_bytes, lambda: map(columns_of, others))


def _read_file(
    path: str, source: Source, wanted: tuple[str, ...], whole_files: bool, unused: Counter[str], process: Any
) -> Iterator[Row]:
    """Yields the rows of a file; raises UserError if it has no readable rows. process: decodes Parquet files."""
    if file_type(path)[0] == ".jsonl":
        from common.data.readers import read_json_lines

        reader = read_json_lines(path, source.max_row_bytes)
    else:
        from common.data.other_readers import read_other

        reader = read_other(path, source, wanted, whole_files, unused, process)
    row = None
    try:
        for row in reader:
            yield row
    except Exception as error:  # the type depends on the library and on the damage
        from common.reading import as_user_error, location_after

        raise as_user_error(error, location_after(path, row and row.where), "replace the file") from error
    if row is None:
        raise UserError(f"{path}: the file holds no row; leave it out or fill it")


def names_decide(source: Source, shape: str | None) -> bool:
    """Returns whether the column names determine the kind of sample: neither blocks nor a column were requested."""
    return shape != "blocks" and source.text_column == "text" and not (source.prompt_column or source.completion_column)


def choose_columns(corpus: Corpus, source: Source, shape: str | None) -> tuple[str, tuple[str, ...]]:
    """Returns (shape, columns): those requested, else messages, else a pair, else text. Raises UserError: none."""
    pair = (source.prompt_column or PAIR[0], source.completion_column or PAIR[1])
    if source.prompt_column or source.completion_column:
        check_columns(corpus, pair, "--prompt_column, --completion_column")
        return "examples", pair
    if names_decide(source, shape):
        for columns in (("messages",), pair):
            if set(columns) <= set(corpus.columns):
                check_columns(corpus, columns)
                return "examples", columns
    check_columns(corpus, (source.text_column,), "--text_column{hint}")
    return shape or "blocks", (source.text_column,)


def check_columns(corpus: Corpus, wanted: tuple[str, ...], flags: str = "") -> None:
    """Raises UserError, which names the `flags`: a file's first row lacks a required column, or one has two uses."""
    for name, columns in chain([(corpus.name, corpus.columns)], corpus.other_columns()):
        if len(set(wanted) & set(columns)) < len(wanted):
            from common.data.column_errors import pair_hint, wrong_columns

            raise UserError(wrong_columns(name, wanted, columns, flags.replace("{hint}", pair_hint(columns))))
