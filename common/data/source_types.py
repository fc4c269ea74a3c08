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
    """Where text comes from: exactly one of `files`, `dataset_name`, `embedded` and `parts`.

    files: paths or globs of of FILE_TYPES; all but .parquet also with the extensions of COMPRESSIONS.
    dataset_name: a name on the hub (`dataset_config` is its configuration), or a directory: what `save_to_disk` wrote,
        or a folder of files. `split` is the split of any of these.
    embedded: "train" or "validation": the source files of the running Python's standard library.
    parts: sources that are kept apart; to train on, with their `weights`, whole numbers in lowest terms.
    text_column: the column that holds the text (.txt files and the embedded corpus have only this one).
    prompt_column, completion_column: of rows that have these two in its place, where they are not called so.
    chat_template: Jinja, which writes `messages` in the place of the tokenizer's own.
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
    """One row. `where` is for messages ("a.jsonl, line 3"). `continues`: the document goes on in the next row."""

    where: str
    values: dict[str, Any]
    continues: bool = False


@dataclass(frozen=True)
class Corpus:
    """A source that was found: its name for messages, what identifies its contents, its columns, and its rows.

    classes: by the column that `datasets` calls a ClassLabel, its names in their order. A row holds the name in the
    place of the number, and None in the place of -1, a label that is hidden.

    rows(wanted, whole_files) yields Rows; a wanted column that a row does not hold is for the caller to report.
    unused: by its name, in how many rows a column holds something that nothing reads (`columns.watched`).
    whole_files: a .txt file is one document and so is a file of the embedded corpus; otherwise each line that is not
    blank, or each function, is a row.
    """

    name: str
    identity: list[Any]
    columns: tuple[str, ...]
    rows: Callable[[tuple[str, ...], bool], Iterator[Row]]
    classes: dict[str, list[str]] = field(default_factory=dict)
    unused: Counter[str] = field(default_factory=Counter)


def file_type(path: str) -> tuple[str, str | None]:
    """(extension, compression): "a.txt.gz" -> (".txt", "gzip")."""
    suffixes = [suffix.lower() for suffix in Path(path).suffixes]
    if suffixes and suffixes[-1] in COMPRESSIONS:
        return (suffixes[-2] if len(suffixes) > 1 else "", COMPRESSIONS[suffixes[-1]])
    return (suffixes[-1] if suffixes else "", None)
