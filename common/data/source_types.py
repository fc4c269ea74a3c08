"""Types for text sources and opened sources: rows of named columns, each row with its location for messages."""

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
        dataset_name: a name on the hub, or a directory that `save_to_disk` wrote, or a folder of files.
            `dataset_config` is the configuration on the hub, `split` the split in all three cases.
        embedded: "train" or "validation": the source files of the running Python's standard library.
        parts: sources that are kept separate; for training with their `weights`, integers in lowest terms.
        text_column: the column with the text (.txt files and the embedded corpus have only this column).
        prompt_column, completion_column: columns to use instead of the text, if they have names other than the default.
        chat_template: Jinja template that writes `messages` instead of the tokenizer's own template.
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
    """A row of named values; `where` is its location for messages ("a.jsonl, line 3").

    If `continues` is set, the document continues in the next row.
    """

    where: str
    values: dict[str, Any]
    continues: bool = False


@dataclass(frozen=True)
class Corpus:
    """An opened source.

    Attributes:
        name: the name for messages.
        identity: JSON values that identify the contents.
        columns: the names of all columns.
        rows: a function (wanted, whole_files) that yields Rows. The caller reports wanted columns that a row lacks.
            With `whole_files`, a .txt file or a file of the embedded corpus is one document; otherwise each line that
            is not blank, or each function, is a row.
        classes: the class names of each column of type ClassLabel (`datasets`), in their order. A row contains the name
            instead of the number, and None instead of -1, a hidden label.
        unused: the number of rows with a value in each ignored column (`column_selection.watched`); 1 if the column is
            not read at all.
    """

    name: str
    identity: list[Any]
    columns: tuple[str, ...]
    rows: Callable[[tuple[str, ...], bool], Iterator[Row]]
    classes: dict[str, list[str]] = field(default_factory=dict)
    unused: Counter[str] = field(default_factory=Counter)


def file_type(path: str) -> tuple[str, str | None]:
    """Returns (extension, compression): "a.txt.gz" -> (".txt", "gzip")."""
    suffixes = [suffix.lower() for suffix in Path(path).suffixes]
    if suffixes and suffixes[-1] in COMPRESSIONS:
        return (suffixes[-2] if len(suffixes) > 1 else "", COMPRESSIONS[suffixes[-1]])
    return (suffixes[-1] if suffixes else "", None)
