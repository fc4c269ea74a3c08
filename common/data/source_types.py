"""Types for text sources and opened sources (rows with named columns), and the supported file extensions."""

import glob
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

FILE_TYPES = (".txt", ".jsonl", ".json", ".parquet", ".csv", ".tsv")
LARGE_BYTES = 4_000_000  # of a corpus whose tokenisation takes a second or more
COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".xz": "xz", ".zst": "zstd"}


@dataclass(frozen=True)
class Source:
    """A text source, not yet opened; exactly one of `files`, `dataset_name`, `embedded` and `parts` is set.

    Attributes:
        files: paths or globs of FILE_TYPES; all types except .parquet can also have the extensions of COMPRESSIONS.
        dataset_name: a name on the hub, a directory that `save_to_disk` wrote, or a folder of files.
        embedded: "train" or "validation": the source files of the running Python's standard library.
        parts, weights: sources that are tokenised separately; their mixing weights in training, in lowest terms.
        text_column: the column with the text (.txt files and the embedded corpus have only this column).
        prompt_column, completion_column: columns of prompts and completions, if they do not have the default names.
        chat_template: Jinja template that replaces the tokenizer's own.
        document_mask: whether documents in a block do not attend to each other, so that each is encoded by itself.
        max_row_bytes: a larger row is an error; a .txt file that is one document has no limit.
        on_too_long: what happens to rows above the maximum length, of `too_long.CHOICES`; None: they are truncated.
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
    document_mask: bool | None = None
    max_row_bytes: int = 64 << 20
    on_too_long: str | None = None


class Row(NamedTuple):
    """A row of named values; `where` is its location for messages ("a.jsonl, line 3")."""

    where: str
    values: dict[str, Any]
    continues: bool = False  # the document continues in the next row
    num_bytes: int | None = None  # size of the row in its file; None: not known


@dataclass(frozen=True)
class Corpus:
    """An opened source.

    Attributes:
        identity: JSON values that identify the contents.
        columns: the names of all columns.
        rows: a function (wanted, whole_files) that yields Rows. A row may lack wanted columns; the caller must check.
            With `whole_files`, a .txt file or a file of the embedded corpus is one document; otherwise each line that
            is not blank, or each function, is a row.
        classes: class names of each ClassLabel column of `datasets`; a row contains the name, None for a hidden label.
        num_bytes: size of the files if their rows have a `num_bytes`, otherwise 0.
        other_columns: a function without arguments that yields (path, columns of its first row) of further files.
        unused: per unwanted column, the number of rows with a value so far; 1 or more if the column is not read.
    """

    name: str
    identity: list[Any]
    columns: tuple[str, ...]
    rows: Callable[[tuple[str, ...], bool], Iterator[Row]]
    classes: dict[str, list[str]] = field(default_factory=dict)
    unused: Counter[str] = field(default_factory=Counter)
    num_bytes: int = 0
    other_columns: Callable[[], Iterable[tuple[str, tuple[str, ...]]]] = tuple

    @property
    def may_be_large(self) -> bool:
        """Whether tokenisation may take a second or more; also if the size is not known."""
        return not 0 < self.num_bytes <= LARGE_BYTES


def name_and_columns(meta: dict[str, Any]) -> str:
    """Returns the name and the columns of preprocessed data, for the run summary."""
    return f"{meta['name']}, column{'s' * (len(meta['columns']) > 1)} {', '.join(meta['columns'])}"


def file_type(path: str) -> tuple[str, str | None]:
    """Returns (extension, compression): "a.txt.gz" -> (".txt", "gzip")."""
    *_, inner, last = "", "", *(suffix.lower() for suffix in Path(path).suffixes)
    return (inner, COMPRESSIONS[last]) if last in COMPRESSIONS else (last, None)


def expand(pattern: str) -> list[str]:
    """Returns an existing path, or the files that match a glob, sorted: their order is the same on all file systems."""
    path = Path(os.path.expanduser(pattern))  # Path.expanduser raises RuntimeError for an unknown user
    if path.exists():  # before globbing, because a name may contain brackets
        return [str(path)]
    return sorted(name for name in glob.glob(str(path), recursive=True) if Path(name).is_file())
