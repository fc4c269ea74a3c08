"""Types for text sources and opened sources (rows of named columns), and the names of their files."""

import glob
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

FILE_TYPES = (".txt", ".jsonl", ".json", ".parquet", ".csv", ".tsv")
COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".xz": "xz", ".zst": "zstd"}


@dataclass(frozen=True)
class Source:
    """The location of text; exactly one of `files`, `dataset_name`, `embedded` and `parts` is set.

    Attributes:
        files: paths or globs of FILE_TYPES; all types except .parquet can also have the extensions of COMPRESSIONS.
        dataset_name: a name on the hub, a directory that `save_to_disk` wrote, or a folder of files.
        embedded: "train" or "validation": the source files of the running Python's standard library.
        parts: sources that are kept separate; for training with their `weights`, integers in lowest terms.
        text_column: the column with the text (.txt files and the embedded corpus have only this column).
        prompt_column, completion_column: columns to use instead of the text, if they do not have the default names.
        chat_template: Jinja template that replaces the tokenizer's own.
    """

    files: tuple[str, ...] = ()
    dataset_name: str | None = None
    dataset_config: str | None = None
    split: str = "train"
    embedded: str | None = None
    parts: tuple["Source", ...] = ()
    weights: tuple[int, ...] = ()
    text_column: str = "text"
    prompt_column: str | None = None
    completion_column: str | None = None
    chat_template: str | None = None


class Row(NamedTuple):
    """A row of named values; `where` is its location for messages ("a.jsonl, line 3")."""

    where: str
    values: dict[str, Any]
    continues: bool = False  # the document continues in the next row


@dataclass(frozen=True)
class Corpus:
    """An opened source.

    Attributes:
        identity: JSON values that identify the contents.
        columns: the names of all columns.
        rows: a function (wanted, whole_files) that yields Rows. The caller reports wanted columns that a row lacks.
            With `whole_files`, a .txt file or a file of the embedded corpus is one document; otherwise each line that
            is not blank, or each function, is a row.
        classes: the class names of each ClassLabel column (`datasets`). A row contains the name instead of the number,
            and None for a hidden label.
        unused: the number of rows read with a value in a column that is not wanted; 1 for a column that is not read.
    """

    name: str
    identity: list[Any]
    columns: tuple[str, ...]
    rows: Callable[[tuple[str, ...], bool], Iterator[Row]]
    classes: dict[str, list[str]] = field(default_factory=dict)
    unused: Counter[str] = field(default_factory=Counter)


def file_type(path: str) -> tuple[str, str | None]:
    """Returns (extension, compression): "a.txt.gz" -> (".txt", "gzip")."""
    *_, inner, last = "", "", *(suffix.lower() for suffix in Path(path).suffixes)
    return (inner, COMPRESSIONS[last]) if last in COMPRESSIONS else (last, None)


def expand(pattern: str) -> list[str]:
    """Returns the files of a path or glob, sorted, so that their order does not depend on the file system."""
    path = Path(pattern).expanduser()
    if path.exists():  # before globbing, because a name may contain brackets
        return [str(path)]
    return sorted(name for name in glob.glob(str(path), recursive=True) if Path(name).is_file())
